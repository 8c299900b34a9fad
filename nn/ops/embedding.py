"""Embedding lookup: one table row for each id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn.ops.base import Array, Op, Progress, ShapeError, Spec, stored_bytes
from nn.quant.formats import FORMATS
from nn.quant.weight import Weight
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder


def embedding(input: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """Look up a row of the table `weight` for each id. Shapes: input (...), weight (V, K) -> (..., K) f32.

    out[..., k] = scale * weight[input[...], k]. Name and arguments: torch.nn.functional.embedding.

    Args:
        input: ids, i32 or u32, 0 to V - 1. An id outside reads the last row: the shader clamps it, nothing is reported.
        weight: a Weight in any storage format, or a dense f32, f16 or bf16 tensor with K a multiple of 32.
        scale: factor on every value; Gemma's is sqrt(K).
    Raises: ShapeError for a table that is not a matrix or ids that are not integers.
    """
    return apply(Embedding(float(scale)), input, weight)


@dataclass(frozen=True)
class Embedding(Op):
    scale: float = 1.0
    group = "embedding"

    def infer(self, ids: Spec, table: Spec) -> Spec:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ids.dtype not in ("i32", "u32"):
            raise ShapeError(f"embedding: ids are {ids.dtype}, expected i32 or u32; convert them first")
        if len(table.shape) != 2 or 0 in table.shape or table.dtype not in FORMATS:
            raise ShapeError(
                f"embedding: the table is {table.dtype} of shape {table.shape}; expected a matrix (V, K) in one of "
                f"{', '.join(FORMATS)}"
            )
        return Spec((*ids.shape, table.shape[1]), "f32")

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        ids, table = operands
        rows = Spec((ids.size, table.shape[1]), table.dtype)  # those that are looked up
        read = stored_bytes(ids) + stored_bytes(rows)
        return Cost(results[0].size * (self.scale != 1.0), read, stored_bytes(results[0]))

    def lower(self, record: Recorder, ids: Array, table: Weight | Array, out: Array) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        record_embedding(record, ids, table if isinstance(table, Weight) else Weight.of(table), out, scale=self.scale)


def record_embedding(
    record: Recorder, ids: Array, table: Weight, out: Array, *, scale: float, four: bool | None = None
) -> None:
    """A dispatch a window of shaders/embedding/embedding.wgsl or embedding4.wgsl (four: None: where it fits)."""
    vocab, cols = table.shape
    four = cols % 4 == 0 if four is None else four
    entry, each = ("embedding4", 4 * 256) if four else ("embedding", 64)  # vectors a workgroup writes
    kernel = record.device.kernel(f"embedding/{entry}.wgsl", entry, parts={"format": table.shader})
    for window in table.windows:
        record(
            kernel,
            grid=-(-ids.size * -(-cols // 4) // each),
            ids=ids.buffer,
            w=window.buffer,
            out=out.buffer,
            tokens=ids.size,
            vocab=vocab,
            row0=window.row0,
            w_rows=window.rows,
            cols=cols,
            scale=scale,
        )


__all__ = ["embedding"]
