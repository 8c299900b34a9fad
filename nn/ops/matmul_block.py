"""The matrix product of blocks in registers (shaders/matmul/gemm_block.wgsl): its files and its dispatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu import Buffer, Kernel, Recorder
    from gpu.device import Capabilities
    from nn.ops.matmul_variants import Shape, Variant

SUM = "matmul/gemm_sum.wgsl"
SCRATCH = 64 << 20  # most bytes of partial sums


def block_fits(caps: Capabilities, variant: Variant, shape: Shape) -> bool:
    """Whether a workgroup fits the device, and the partial sums, if there are any, are worth their memory."""
    sizes = dict(variant.constants)
    row = variant.rows + variant.cols  # f32 in a row of the tile
    partial = 4 * variant.split * shape.batches * shape.m * shape.n
    return (
        32 * sizes["WY"] * sizes["WX"] <= caps.max_invocations
        and 4 * sizes["STAGES"] * sizes["BK"] * row <= caps.max_workgroup_bytes
        and (variant.split == 1 or (partial <= min(SCRATCH, caps.max_binding) and k_part(variant, shape.k) < shape.k))
    )


def block_options(variant: Variant, shape: Shape) -> dict[str, Any]:
    """types, constants and parts for Device.kernel. Operands whose lines are whole vectors of four are read as such."""
    lines = {"a": shape.m if shape.trans_a else shape.k, "b": shape.k if shape.trans_b else shape.n, "out": shape.n}
    return {
        "types": {"Elem": shape.dtype, "Out": shape.dtype if variant.split == 1 else "f32"},
        "constants": dict(variant.constants) | {"A_ROWS": int(shape.trans_a), "B_COLS": int(not shape.trans_b)},
        "parts": _parts(lines, shape.k),
    }


def k_part(variant: Variant, k: int) -> int:
    """Values of k in one of `split` parts: whole steps."""
    step = dict(variant.constants)["BK"]
    return -(-k // (variant.split * step)) * step


def record_block(
    record: Recorder,
    kernels: tuple[Kernel, Kernel | None],
    chosen: Variant,
    shape: Shape,
    sizes: dict[str, int],
    buffers: dict[str, Buffer],
    more: dict[str, Any],
) -> None:
    """One dispatch, or two where the k axis is cut: the parts, and their sum with bias and epilogue.

    kernels: the product's, and the one that adds up parts. sizes: the Params of shaders/matmul/dense_params.wgsl. more:
    Params and buffers of an epilogue. Parts lie in scratch memory that a recording's products share.
    """
    taken = ("m", "n", "k", "batches", "size_1", "out_offset")
    taken += tuple(f"{name}_{what}" for name in "ab" for what in ("offset", "batch_0", "batch_1"))
    params = {name: sizes[name] for name in taken}
    params |= {"a_step": shape.m if shape.trans_a else shape.k, "b_step": shape.k if shape.trans_b else shape.n}
    m, n, batches, split = shape.m, shape.n, sizes["batches"], chosen.split
    product, total = kernels
    grid = batches * split * -(-m // chosen.rows) * -(-n // chosen.cols)
    if total is None:
        record(product, grid=grid, **params, split=1, k_part=shape.k, **buffers, **more)
        return
    params |= {"split": split, "k_part": k_part(chosen, shape.k)}
    parts = record.scratch("matmul parts", max(4 * split * batches * m * n, 16))
    a, b = buffers["a"], buffers["b"]
    record(product, grid=grid, **(params | {"out_offset": 0}), a=a, b=b, out=parts)
    rest = {name: buffer for name, buffer in buffers.items() if name not in ("a", "b")}
    record(total, grid=-(-batches * m * -(-n // 4) // 256), **params, parts=parts, **rest, **more)


def sum_options(shape: Shape) -> dict[str, Any]:
    """types and parts of the kernel that adds up parts."""
    parts = _parts({"parts": shape.n, "out": shape.n}, shape.k)
    return {"types": {"Elem": shape.dtype, "Out": shape.dtype}, "parts": parts}


def _parts(lines: dict[str, int], k: int) -> dict[str, str]:
    """By operand, the file that goes value by value, where lines are no whole vectors or k = 0 leaves none to bind."""
    return {name: f"matmul/block_{name}_any.wgsl" for name, length in lines.items() if length % 4 or not k}
