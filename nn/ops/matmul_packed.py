"""The matrix product of software drivers: operands are first laid out in panels, in the order it reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu import Buffer, Kernel, Recorder
    from nn.ops.matmul_variants import Variant

PIECE = 256  # of k, a workgroup of shaders/matmul/pack.wgsl


def panel_bytes(lines: int, k: int, tile: int) -> int:
    """Of the panels of one matrix, `tile` lines each."""
    return -(-lines // tile) * tile * -(-k // 4) * 16


def record_packed(
    record: Recorder,
    kernel: Kernel,
    chosen: Variant,
    dtype: str,
    sizes: dict[str, int],
    buffers: dict[str, Buffer],
    more: dict[str, Any],
) -> None:
    """Three dispatches: panels of a, panels of b, the product. sizes: the Params of shaders/matmul/dense_params.wgsl.
    more: Params and buffers of an epilogue.

    An operand that all batches share is laid out once. Panels live in scratch memory that a recording's products share.
    """
    k, panels, counts = sizes["k"], {}, {}
    for name, entry, lines, tile in (
        ("a", "pack_rows", sizes["m"], chosen.rows), ("b", "pack_columns", sizes["n"], chosen.cols)
    ):  # fmt: skip
        shared = not sizes[f"{name}_batch_0"] and not sizes[f"{name}_batch_1"]
        count = counts[f"{name}_batches"] = 1 if shared else sizes["batches"]
        panels[name] = record.scratch(f"matmul {name}", max(count * panel_bytes(lines, k, tile), 16))
        pack = record.device.kernel("matmul/pack.wgsl", entry, types={"Elem": dtype}, constants={"LINES": tile})
        line, step = ("row", "col") if name == "a" else ("col", "row")
        record(
            pack,
            grid=count * -(-lines // tile) * -(-k // PIECE),
            x=buffers[name], out=panels[name], lines=lines, k=k, batches=count, size_1=sizes["size_1"],
            offset=sizes[f"{name}_offset"], step_line=sizes[f"{name}_{line}"], step_k=sizes[f"{name}_{step}"],
            batch_0=sizes[f"{name}_batch_0"], batch_1=sizes[f"{name}_batch_1"],
        )  # fmt: skip
    m, n, batches = sizes["m"], sizes["n"], sizes["batches"]
    record(
        kernel,
        grid=batches * -(-m // chosen.rows) * -(-n // chosen.cols),
        m=m, n=n, fours=-(-k // 4), batches=batches, out_offset=sizes["out_offset"],
        **counts,
        **{**buffers, **panels, **more},
    )  # fmt: skip
