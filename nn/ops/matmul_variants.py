"""The kernels that make a dense matrix product, and which of them a device and a size get.

`variants` lists all that are valid for a device and a product, `default` the one taken without tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.ops import matmul_matrix
from nn.ops.matmul_matrix import MATRIX
from nn.ops.matmul_packed import panel_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.device import Capabilities

_FILL = 128  # workgroups that keep a large GPU busy

TILED, SERIAL, PACKED = "matmul/gemm.wgsl", "matmul/gemm_serial.wgsl", "matmul/gemm_packed.wgsl"


@dataclass(frozen=True)
class Shape:
    """out (batches, m, n) = a (m, k), stored (k, m) if trans_a, times b (k, n), stored (n, k) if trans_b."""

    m: int
    n: int
    k: int
    batches: int = 1
    dtype: str = "f32"
    trans_a: bool = False
    trans_b: bool = False


@dataclass(frozen=True)
class Variant:
    """A kernel file with its constants; a workgroup makes `rows` x `cols` of the result."""

    name: str
    path: str
    rows: int
    cols: int
    constants: tuple[tuple[str, int], ...] = ()

    def fits(self, caps: Capabilities, shape: Shape) -> bool:
        """Whether the device and the product allow it."""
        if self.path == MATRIX:
            return matmul_matrix.fits(dict(self.constants), caps, shape)
        if self.path == PACKED:
            sizes = (panel_bytes(shape.m, shape.k, self.rows), panel_bytes(shape.n, shape.k, self.cols))
            return caps.wide_subgroups and shape.batches * max(sizes) <= caps.max_binding - 512
        return True

    def kernel_options(self, shape: Shape) -> dict[str, Any]:
        """types, constants and parts for Device.kernel."""
        constants = dict(self.constants)
        if self.path == MATRIX:
            return matmul_matrix.options(constants, shape)
        if self.path == TILED:
            constants |= {"A_ROWS": int(shape.trans_a), "B_COLS": int(not shape.trans_b)}
        return {"types": {"Elem": shape.dtype}, "constants": constants}

    def workgroups(self, shape: Shape) -> int:
        return shape.batches * -(-shape.m // self.rows) * -(-shape.n // self.cols)


def tiled_variant(rows: int, cols: int, depth: int = 8) -> Variant:
    """PM rows and PN columns an invocation, 4 * depth values of k at a time."""
    constants = (("DEPTH", depth), ("PM", rows), ("PN", cols))
    return Variant(f"tile {16 * rows}x{16 * cols}x{4 * depth}", TILED, 16 * rows, 16 * cols, constants)


def serial_variant(rows: int, cols: int, group: int = 8) -> Variant:
    """For software drivers: no workgroup memory."""
    constants = (("PM", rows), ("PN", cols), ("WG", group))
    return Variant(f"serial {rows}x{group * cols}", SERIAL, rows, group * cols, constants)


def packed_variant(eights: int, fours: int = 1) -> Variant:
    """For software drivers with subgroups of eight: operands in panels, eights of rows by fours of 8 columns."""
    rows, cols = 8 * eights, 32 * fours
    return Variant(f"packed {rows}x{cols}", PACKED, rows, cols, (("P", eights), ("Q", 4 * fours)))


def matrix_variant(rows: int, cols: int, depth: int, sub_rows: int, sub_cols: int) -> Variant:
    """On matrix units: a subgroup makes sub_rows x sub_cols of a tile, `depth` values of k at a time."""
    constants = {"TILE_M": rows, "TILE_N": cols, "TILE_K": depth, "SUB_M": sub_rows, "SUB_N": sub_cols}
    name = f"matrix {rows}x{cols}x{depth} of {sub_rows}x{sub_cols}"
    return Variant(name, MATRIX, rows, cols, tuple(constants.items()))


EVERY = (
    tiled_variant(4, 4),
    tiled_variant(4, 8, 4),
    tiled_variant(2, 2),
    tiled_variant(1, 4),
    serial_variant(4, 4),
    serial_variant(8, 8),
    serial_variant(1, 8),
    packed_variant(1),
    packed_variant(2),
)


MATRICES = (  # f16 only, on devices with matrix units
    matrix_variant(128, 128, 32, 64, 64),
    matrix_variant(128, 64, 32, 64, 32),
    matrix_variant(64, 64, 32, 32, 32),
)


def variants(caps: Capabilities, shape: Shape) -> Sequence[Variant]:
    """All that are valid, in a fixed order."""
    return [variant for variant in (*EVERY, *MATRICES) if variant.fits(caps, shape)]


def default(caps: Capabilities, shape: Shape) -> Variant:
    """The kernel for this device and size: large tiles where enough of them are left to fill a GPU."""
    m, n = shape.m, shape.n
    if caps.kind == "cpu":
        if m == 1:
            return serial_variant(1, 8)
        packed = packed_variant(2 if m > 8 else 1)
        if m >= 12 and n >= 24 and m * n * shape.k >= 1 << 16 and packed.fits(caps, shape):
            return packed
        return serial_variant(8, 8) if m >= 32 and n >= 128 else serial_variant(4, 4)
    if m <= 16:
        return tiled_variant(1, 4)
    for wide in MATRICES:
        if m > 32 and wide.fits(caps, shape) and (wide is MATRICES[-1] or wide.workgroups(shape) >= _FILL):
            return wide
    large = tiled_variant(4, 4)
    return large if large.workgroups(shape) >= _FILL else tiled_variant(2, 2)
