"""Copies that transpose: through tiles in workgroup memory on GPUs, where strided reads would waste most of a line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.graph.codegen import STORED
from nn.graph.expr import Expr, Load, Value, coalesce
from nn.graph.ir import Strided

if TYPE_CHECKING:
    from gpu import Capabilities, Recorder

TILE = 32
WORTH = 1 << 16  # elements from which a tiled copy is faster than a plain one


def transpose_step(caps: Capabilities, expr: Expr, value: Value, at: Strided) -> TransposeStep | None:
    """The step, if the expression is a copy that transposes, large enough, on a GPU; else None."""
    if caps.kind != "gpu" or not isinstance(expr, Load) or math.prod(at.shape) < WORTH:
        return None
    if any(v.spec.nbytes > caps.max_binding - 512 for v in (expr.value, value)):
        return None
    step = TransposeStep.of(expr, value, at)
    return step if step is not None and min(step.rows, step.cols) >= TILE // 2 else None


@dataclass
class TransposeStep:
    """One dispatch of shaders/movement/transpose.wgsl; names as there."""

    load: Load
    value: Value
    batches: int
    rows: int
    cols: int
    x_batch: int
    x_col: int
    out_batch: int
    out_row: int
    out_offset: int

    def __post_init__(self) -> None:
        self.reads, self.writes = (self.load.value,), (self.value,)

    @classmethod
    def of(cls, load: Load, value: Value, at: Strided) -> TransposeStep | None:
        """Read a copy as a batch of transpositions; None where it is none."""
        shape, (x, out) = coalesce(at.shape, [load.at.strides, at.strides])
        if len(shape) not in (2, 3) or 1 not in x[:-1] or out[-1] != 1 or min(*x, *out) < 0:
            return None
        row, col = x.index(1), len(shape) - 1
        batch = next((a for a in range(len(shape)) if a not in (row, col)), None)
        batches, x_batch, out_batch = (1, 0, 0) if batch is None else (shape[batch], x[batch], out[batch])
        return cls(
            load, value, batches, shape[row], shape[col], x_batch, x[col], out_batch, out[row], at.offset
        )  # fmt: skip

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        kernel = record.device.kernel("movement/transpose.wgsl", "transpose", types={"Elem": STORED[self.load.dtype]})
        record(
            kernel,
            grid=self.batches * -(-self.rows // TILE) * -(-self.cols // TILE),
            x=array_of(self.load.value).buffer,
            out=array_of(self.value).buffer,
            batches=self.batches,
            rows=self.rows,
            cols=self.cols,
            x_offset=self.load.at.offset,
            x_batch=self.x_batch,
            x_col=self.x_col,
            out_offset=self.out_offset,
            out_batch=self.out_batch,
            out_row=self.out_row,
        )
