"""The matrix product on matrix units (shaders/matmul/gemm_matrix.wgsl): where it is valid, and how it is set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu.device import Capabilities
    from nn.ops.matmul_variants import Shape

MATRIX = "matmul/gemm_matrix.wgsl"
_SUBGROUP = 32  # invocations; other sizes are not tried


def fits(constants: Mapping[str, int], caps: Capabilities, shape: Shape) -> bool:
    """f16 products where matrix units gave right results, within the limits of a workgroup."""
    if not (caps.matrix_f16 and caps.subgroup_size == _SUBGROUP and shape.dtype == "f16"):
        return False
    subgroups, nbytes = _workgroup(constants, shape)
    return subgroups * _SUBGROUP <= caps.max_invocations and nbytes <= caps.max_workgroup_bytes


def _workgroup(constants: Mapping[str, int], shape: Shape) -> tuple[int, int]:
    """Subgroups, and bytes of workgroup memory: both tiles with 8 halves behind each line, and the results' strip."""
    m, n, k = (constants[f"TILE_{name}"] for name in "MNK")
    subgroups = (m // constants["SUB_M"]) * (n // constants["SUB_N"])
    a = k * (m + 8) if shape.trans_a else m * (k + 8)
    b = n * (k + 8) if shape.trans_b else k * (n + 8)
    return subgroups, 2 * (a + b) + 4 * subgroups * 16 * 20


def options(constants: Mapping[str, int], shape: Shape) -> dict[str, Any]:
    """types, constants and parts for Device.kernel. Rows of odd length are copied half by half."""
    rows = (shape.m if shape.trans_a else shape.k, shape.k if shape.trans_b else shape.n, shape.n)
    halves = "single" if any(length % 2 for length in rows) else "pairs"
    return {
        "types": {"Elem": "f16"},
        "constants": {**constants, "A_COLUMNS": shape.trans_a, "B_COLUMNS": shape.trans_b},
        "parts": {"halves": f"matmul/halves_{halves}.wgsl"},
    }
