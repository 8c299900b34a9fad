"""Copies that transpose: through tiles in workgroup memory on GPUs, where strided reads would waste most of a line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.graph.codegen import STORED
from nn.graph.expr import Expr, Load, Value, coalesce
from nn.graph.ir import Pack, Strided

if TYPE_CHECKING:
    from gpu import Capabilities, Recorder

LEAST = 16  # rows and columns from which a tile is worth it
WORTH = 1 << 16  # elements from which a tiled copy is faster than a plain one


def transpose_step(caps: Capabilities, expr: Expr, value: Value, at: Strided) -> TransposeStep | None:
    """The step, if the expression is a copy that transposes, large enough, on a GPU; else None."""
    if caps.kind != "gpu" or not isinstance(expr, Load) or math.prod(at.shape) < WORTH:
        return None
    if any(v.spec.nbytes > caps.max_binding - 512 for v in (expr.value, value)):
        return None
    step = TransposeStep.of(expr, value, at)
    return step if step is not None and min(step.rows, step.cols) >= LEAST else None


@dataclass
class TransposeStep:
    """One dispatch of shaders/movement/transpose.wgsl or, four elements at a time, transpose4.wgsl; names as there.

    sizes: of the two batch axes; batch: their strides in x and in out. four: None takes vectors where they fit.
    """

    load: Load
    value: Value
    rows: int
    cols: int
    sizes: tuple[int, int]
    x_batch: tuple[int, int]
    x_col: int
    out_batch: tuple[int, int]
    out_row: int
    out_offset: int
    four: bool | None = None

    def __post_init__(self) -> None:
        self.reads, self.writes = (self.load.value,), (self.value,)

    @classmethod
    def of(cls, load: Load, value: Value, at: Strided) -> TransposeStep | None:
        """Read a copy as a batch of transpositions; None where it is none."""
        shape, (x, out) = coalesce(at.shape, [load.at.strides, at.strides])
        if not 2 <= len(shape) <= 4 or 1 not in x[:-1] or out[-1] != 1 or min(*x, *out) < 0:
            return None
        row, col = x.index(1), len(shape) - 1
        batch = [a for a in range(len(shape)) if a not in (row, col)]
        sizes, x_batch, out_batch = (
            (default,) * (2 - len(batch)) + tuple(values[a] for a in batch)
            for values, default in ((shape, 1), (x, 0), (out, 0))
        )
        return cls(load, value, shape[row], shape[col], sizes, x_batch, x[col], out_batch, out[row], at.offset)  # pyright: ignore[reportArgumentType]

    @property
    def batches(self) -> int:
        """Matrices to transpose."""
        return math.prod(self.sizes)

    @property
    def fours(self) -> bool:
        """Whether all that is counted comes in fours."""
        steps = (*self.x_batch, self.x_col, *self.out_batch, self.out_row, self.load.at.offset, self.out_offset)
        return all(n % 4 == 0 for n in (self.rows, self.cols, *steps))

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        four = self.fours if self.four is None else self.four
        unit, tile = (4, 64) if four else (1, 32)
        entry = "transpose4" if four else "transpose"
        kernel = record.device.kernel(f"movement/{entry}.wgsl", entry, types={"Elem": STORED[self.load.dtype]})
        record(
            kernel,
            grid=self.batches * -(-self.rows // tile) * -(-self.cols // tile),
            x=array_of(self.load.value).buffer,
            out=array_of(self.value).buffer,
            batches=self.batches,
            size_1=self.sizes[1],
            rows=self.rows,
            cols=self.cols,
            x_offset=self.load.at.offset // unit,
            x_batch_0=self.x_batch[0] // unit,
            x_batch_1=self.x_batch[1] // unit,
            x_col=self.x_col // unit,
            out_offset=self.out_offset // unit,
            out_batch_0=self.out_batch[0] // unit,
            out_batch_1=self.out_batch[1] // unit,
            out_row=self.out_row // unit,
        )


@dataclass
class GapsStep:
    """One dispatch of shaders/movement/gaps.wgsl: zeros between the operands of a Pack. gaps: (start, words) each."""

    value: Value
    gaps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        self.reads, self.writes = (), (self.value,)

    @classmethod
    def of(cls, value: Value, op: Pack, sizes: Sequence[int]) -> GapsStep:
        """The gaps behind operands of these sizes."""
        ends = (offset + size for offset, size in zip(op.offsets, sizes))
        return cls(value, tuple((a, b - a) for a, b in zip(ends, (*op.offsets[1:], op.size)) if b > a))

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        pieces = [(a + i, min(64, n - i)) for a, n in self.gaps for i in range(0, n, 64)]
        table = record.device.upload(np.fromiter(itertools.chain.from_iterable(pieces), np.uint32))
        kernel = record.device.kernel("movement/gaps.wgsl", "clear_gaps")
        record(kernel, grid=len(pieces), table=table, out=array_of(self.value).buffer, gaps=len(pieces))
