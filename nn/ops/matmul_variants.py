"""The kernels that make a dense matrix product, and which of them a device and a size get.

`variants` lists all that are valid for a device and a product, `default` the one taken without tuning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nn.ops import matmul_matrix
from nn.ops.matmul_block import block_fits, block_options
from nn.ops.matmul_matrix import MATRIX
from nn.ops.matmul_packed import panel_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.device import Capabilities

_FILL = 128  # workgroups that keep a large GPU busy

TILED, SERIAL, PACKED = "matmul/gemm.wgsl", "matmul/gemm_serial.wgsl", "matmul/gemm_packed.wgsl"
BLOCK = "matmul/gemm_block.wgsl"


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
    """A kernel file with its constants; a workgroup makes `rows` x `cols` of the result.

    split: the k axis is cut into so many parts, which a second dispatch adds up (BLOCK alone can do that).
    """

    name: str
    path: str
    rows: int
    cols: int
    constants: tuple[tuple[str, int], ...] = ()
    split: int = 1

    def fits(self, caps: Capabilities, shape: Shape) -> bool:
        """Whether the device and the product allow it."""
        if self.path == MATRIX:
            return matmul_matrix.fits(dict(self.constants), caps, shape)
        if self.path == PACKED:
            sizes = (panel_bytes(shape.m, shape.k, self.rows), panel_bytes(shape.n, shape.k, self.cols))
            return caps.wide_subgroups and shape.batches * max(sizes) <= caps.max_binding - 512
        return self.path != BLOCK or block_fits(caps, self, shape)

    def kernel_options(self, shape: Shape) -> dict[str, Any]:
        """types, constants and parts for Device.kernel."""
        if self.path == BLOCK:
            return block_options(self, shape)
        constants = dict(self.constants)
        if self.path == MATRIX:
            return matmul_matrix.options(constants, shape)
        if self.path == TILED:
            constants |= {"A_ROWS": int(shape.trans_a), "B_COLS": int(not shape.trans_b)}
        return {"types": {"Elem": shape.dtype}, "constants": constants}

    def workgroups(self, shape: Shape) -> int:
        """Of the product's own dispatch."""
        return shape.batches * self.split * -(-shape.m // self.rows) * -(-shape.n // self.cols)


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


def block_variant(
    *, tile: tuple[int, int], lanes: tuple[int, int] = (4, 8), groups: tuple[int, int], depth: int = 16
) -> Variant:
    """For GPUs. tile: rows and columns an invocation; lanes: of a group of 32; groups: of a workgroup."""
    (tm, tn), (ly, lx), (wy, wx) = tile, lanes, groups
    rows, cols = wy * ly * tm, wx * lx * tn
    constants = (("TM", tm), ("TN", tn), ("LY", ly), ("LX", lx), ("WY", wy), ("WX", wx), ("BK", depth), ("STAGES", 1))
    return Variant(f"block {rows}x{cols}x{depth} of {tm}x{tn}", BLOCK, rows, cols, constants)


SPLITS = (2, 4, 8, 16, 32)
LARGE = block_variant(tile=(16, 8), groups=(2, 2))
SQUARE = block_variant(tile=(8, 8), groups=(4, 2))
MEDIUM = block_variant(tile=(4, 4), groups=(4, 2))

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
    LARGE,
    SQUARE,
    MEDIUM,
    *(replace(v, name=f"{v.name} split {n}", split=n) for v in (LARGE, SQUARE, MEDIUM) for n in SPLITS),
)


MATRICES = (  # f16 only, on devices with matrix units
    matrix_variant(256, 128, 32, 64, 64),
    matrix_variant(128, 128, 32, 64, 64),
    matrix_variant(128, 64, 32, 64, 32),
    matrix_variant(64, 64, 32, 32, 32),
)


def variants(caps: Capabilities, shape: Shape) -> Sequence[Variant]:
    """All that are valid, in a fixed order, but for those that are right and never fast: blocks on software drivers,
    and on GPUs operands packed for software drivers."""
    slow = BLOCK if caps.kind == "cpu" else PACKED
    return [v for v in (*EVERY, *MATRICES) if v.fits(caps, shape) and v.path != slow]


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
    if m <= 16:  # narrow tiles where wide ones leave a GPU idle: 174 against 256 us at 4096 columns (H200, the tuner)
        if shape.k >= 1024 and n > 32 and (block := _cut(caps, shape, MEDIUM)) is not None:
            return block  # 75 against 176 us for 8 x 4096 x 4096 (H200, the tuner)
        return tiled_variant(1, 4) if tiled_variant(1, 4).workgroups(shape) >= _FILL else tiled_variant(2, 2)
    # Both operands in lines of k fill the registers of 128x128 tiles: 104 TFLOP/s, 168 with 256x128; else 200 and 173.
    skipped = MATRICES[1] if shape.trans_b and not shape.trans_a else MATRICES[0]
    for wide in MATRICES:
        filled = wide is MATRICES[-1] or (wide is not skipped and wide.workgroups(shape) >= _FILL)
        if m > 32 and wide.fits(caps, shape) and filled:
            return wide
    # Read value by value, operands cost 16x8 blocks too much where naga translates: 29.6 against 26.9 TFLOP/s (H200).
    lines = (m if shape.trans_a else shape.k, shape.k if shape.trans_b else n)
    tiles = SQUARE if caps.backend == "wgpu" and any(length % 4 for length in lines) else LARGE
    if m > 64 and n > 32 and (block := _cut(caps, shape, tiles)) is not None:
        return block
    if shape.k >= 512 and n > 32 and (block := _cut(caps, shape, MEDIUM)) is not None:
        return block
    large = tiled_variant(4, 4)
    return large if large.workgroups(shape) >= _FILL else tiled_variant(2, 2)


def _cut(caps: Capabilities, shape: Shape, base: Variant) -> Variant | None:
    """This block kernel, with k cut until there are workgroups for several rounds of a large GPU.

    A part of k has to be worth its start. None: too few workgroups either way, or a device too small for it.
    """
    found = base
    if base.workgroups(shape) < 2 * _FILL:
        for cut in (v for v in EVERY if v.split > 1 and v.constants == base.constants):
            if shape.k < (128 if base is MEDIUM else 256) * cut.split or not cut.fits(caps, shape):
                break
            found = cut
            if cut.workgroups(shape) >= 3 * _FILL:
                break
    return found if found.workgroups(shape) >= _FILL and found.fits(caps, shape) else None
