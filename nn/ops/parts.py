"""Adding up partial sums that several workgroups have left, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu import Buffer, Recorder
    from nn.ops.base import Array


def record_parts(
    record: Recorder, parts: Buffer, out: Array, other: Array | None = None, *, rows: int, deep: int | None = None
) -> None:
    """out = sum over the rows of parts (rows, out.size) f32; one dispatch of shaders/reduce/parts.wgsl.

    other: rows are twice as long then, and their second half goes there. deep: invocations that share a column, a power
    of two; None: as many as help on this device.
    """
    if out.size == 0:
        return
    if deep is None:
        deep = 1 if record.device.caps.kind == "cpu" or rows < 16 else 8 if rows < 256 else 32
    columns = 32 if deep < 32 else 8
    entry, cols = ("sum_parts", out.size) if other is None else ("sum_two_parts", 2 * out.size)
    kernel = record.device.kernel(
        "reduce/parts.wgsl", entry, types={"Elem": out.dtype}, constants={"COLS": columns, "DEEP": deep}
    )
    buffers = {"out": out.buffer} if other is None else {"out": out.buffer, "other": other.buffer}
    record(kernel, -(-cols // columns), parts=parts, rows=rows, cols=cols, **buffers)
