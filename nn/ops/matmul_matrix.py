"""The matrix product on matrix units (shaders/matmul/gemm_matrix.wgsl): where it is valid, and how it is set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu.work import Cost, Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu import Buffer, Recorder
    from gpu.device import Capabilities
    from nn.ops.matmul_variants import Shape

MATRIX = "matmul/gemm_matrix.wgsl"
_SUBGROUP = 32  # invocations; other sizes are not tried
_LARGE = 1 << 27  # products of numbers


def fits(constants: Mapping[str, int], caps: Capabilities, shape: Shape) -> bool:
    """f16 products where matrix units gave right results, within the limits of a workgroup."""
    if not (caps.matrix_f16 and caps.subgroup_size == _SUBGROUP and shape.dtype == "f16"):
        return False
    subgroups, nbytes = _workgroup(constants, shape)
    each = [constants[f"TILE_{line}"] * constants["TILE_K"] // (8 * _SUBGROUP * subgroups) for line in "MN"]
    if any(n not in (1, 2, 4) for n in each):  # times that a lane copies four pairs of halves
        return False
    return subgroups * _SUBGROUP <= caps.max_invocations and nbytes <= caps.max_workgroup_bytes


def _workgroup(constants: Mapping[str, int], shape: Shape) -> tuple[int, int]:
    """Subgroups, and bytes of workgroup memory: both tiles with 8 halves behind each line, and the results' strip."""
    m, n, k = (constants[f"TILE_{name}"] for name in "MNK")
    subgroups = (m // constants["SUB_M"]) * (n // constants["SUB_N"])
    a = k * (m + 8) if shape.trans_a else m * (k + 8)
    b = n * (k + 8) if shape.trans_b else k * (n + 8)
    return subgroups, 2 * (a + b) + 4 * subgroups * 16 * 20


def evened(shape: Shape) -> bool:
    """Whether operands with lines of odd length are first copied to even ones: large products are worth it."""
    return shape.m * shape.n * shape.k >= _LARGE


def lines(shape: Shape) -> tuple[int, int]:
    """Lengths of the lines that a and b are stored in."""
    return shape.m if shape.trans_a else shape.k, shape.k if shape.trans_b else shape.n


def even_lines(record: Recorder, x: Buffer, count: int, length: int) -> Buffer:
    """`count` lines of halves, each one longer and ending in a zero."""
    out = record.temp(2 * count * (length + 1))
    moved = Cost(0, 2 * count * length, 2 * count * (length + 1))
    with record.scope(Scope("even_lines", kind="movement", cost=moved)):
        pairs = count * (length // 2 + 1)
        kernel = record.device.kernel("movement/even_lines.wgsl", "even_lines")
        record(kernel, -(-pairs // 256), x=x, out=out, lines=count, length=length)
    return out


def options(constants: Mapping[str, int], shape: Shape) -> dict[str, Any]:
    """types, constants and parts for Device.kernel."""
    odd = any(length % 2 for length in (*lines(shape), shape.n))
    halves = "pairs" if not odd else "odd" if evened(shape) else "single"
    return {
        "types": {"Elem": "f16"},
        "constants": {**constants, "A_COLUMNS": shape.trans_a, "B_COLUMNS": shape.trans_b},
        "parts": {"halves": f"matmul/halves_{halves}.wgsl"},
    }
