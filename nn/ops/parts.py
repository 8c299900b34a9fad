"""Adding up partial sums that several workgroups have left, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu import Buffer, Recorder
    from nn.ops.base import Array


def record_parts(record: Recorder, parts: Buffer, out: Array, *, rows: int, deep: int | None = None) -> None:
    """out = sum over the rows of parts (rows, out.size) f32; one dispatch of shaders/reduce/parts.wgsl.

    deep: invocations that share a column, a power of two; None: as many as help on this device.
    """
    if out.size == 0:
        return
    if deep is None:
        deep = 1 if record.device.caps.kind == "cpu" or rows < 16 else 8
    kernel = record.device.kernel(
        "reduce/parts.wgsl", "sum_parts", types={"Elem": out.dtype}, constants={"COLS": 32, "DEEP": deep}
    )
    record(kernel, -(-out.size // 32), parts=parts, out=out.buffer, rows=rows, cols=out.size)
