"""Embedding lookup: one table row for each id; and its gradient, a scatter-add in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn.ops.base import FLOATS, Array, Op, Progress, ShapeError, Spec, stored_bytes
from nn.ops.parts import record_parts
from nn.quant.formats import FORMATS
from nn.quant.repack import BLOCK
from nn.quant.weight import Weight
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder
    from gpu.device import Capabilities


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

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[None, Tensor]:
        """dweight[v] = scale * sum of dy[t] over the tokens with ids[t] = v."""
        ids, table, _ = tensors
        if table.dtype not in FLOATS:
            raise TypeError(
                f"embedding: no gradient to a {table.dtype} table; keep the table that is trained in f32 or f16"
            )
        return None, apply(EmbeddingGrad(table.shape[0], self.scale), ids, dy).to(table.dtype)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        ids, table = operands
        rows = Spec((ids.size, table.shape[1]), table.dtype)  # those that are looked up
        read = stored_bytes(ids) + stored_bytes(rows)
        return Cost(results[0].size * (self.scale != 1.0), read, stored_bytes(results[0]))

    def lower(self, record: Recorder, ids: Array, table: Weight | Array, out: Array) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        record_embedding(record, ids, table if isinstance(table, Weight) else Weight.of(table), out, scale=self.scale)


@dataclass(frozen=True)
class EmbeddingGrad(Op):
    """Operands ids (...) and dy (..., K); the result (vocab, K) f32 has the sums of dy's rows by id."""

    vocab: int
    scale: float = 1.0
    group = "embedding"

    def infer(self, ids: Spec, dy: Spec) -> Spec:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Spec((self.vocab, dy.shape[-1]), "f32")

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[None, Tensor]:
        """Linear in its operand: the gradient of a sum by id is a lookup by id."""
        ids, before, _ = tensors
        return None, _looked_up(ids, dy, self.scale).to(before.dtype)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        moved = super().cost(operands, results)
        return Cost(operands[1].size * (1 + (self.scale != 1.0)), moved.read, moved.written)

    def lower(self, record: Recorder, ids: Array, dy: Array, out: Array) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        record_embedding_grad(record, ids, dy, out, scale=self.scale)


def _looked_up(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Rows of any table: embedding wants rows of a multiple of 32 numbers."""
    cols = table.shape[-1]
    if cols % BLOCK:
        table = table.pad([0, BLOCK - cols % BLOCK])
    return embedding(ids, table, scale=scale)[..., :cols]


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


@dataclass(frozen=True)
class GradVariant:
    """How the scatter-add is cut up. rows: table rows a workgroup; chunk: tokens a pass over them; serial: the entry of
    software drivers."""

    rows: int
    chunk: int
    wg: int = 64
    serial: bool = False


def grad_variant(caps: Capabilities, tokens: int, vocab: int, cols: int) -> GradVariant:
    """Many rows a workgroup where the table is long (every workgroup looks at all ids of its chunk), short chunks where
    it is not (most ids are matches then, and they are added one after another)."""
    packs = cols // 4 if cols % 4 == 0 else cols
    wg = min(-(-packs // 32) * 32, 192)
    if caps.kind == "cpu":
        return GradVariant(-(-vocab // 4), max(tokens, 1), 8, True)
    rows = min(max(vocab // 1024, 4), 16)
    across = -(-packs // wg) * -(-vocab // rows)
    chunks = min(-(-tokens // 256), max(1024 // across, 1))
    return GradVariant(rows, max(-(-tokens // max(chunks, 1)), 1), wg)


def record_embedding_grad(
    record: Recorder, ids: Array, dy: Array, out: Array, *, scale: float, variant: GradVariant | None = None
) -> None:
    """One dispatch of shaders/embedding/embedding_grad.wgsl, and one of shaders/reduce/parts.wgsl where tokens are cut
    into chunks. variant: None takes the device's default."""
    (vocab, cols), device = out.shape, record.device
    if out.size == 0:
        return
    chosen = variant or grad_variant(device.caps, ids.size, vocab, cols)
    pack = 4 if cols % 4 == 0 and ids.size else 1  # nothing is too small to be bound as a vector
    chunks = max(-(-ids.size // chosen.chunk), 1)
    blocks = -(-vocab // chosen.rows)
    parts = record.temp(chunks * vocab * cols * 4) if chunks > 1 else out.buffer
    record(
        device.kernel(
            "embedding/embedding_grad.wgsl",
            f"embedding_grad{'_serial' * chosen.serial}",
            types={"Elem": dy.dtype},
            constants={"WG": chosen.wg},
            parts={"pack": f"lib/pack{pack}.wgsl"},
        ),
        -(-cols // pack // chosen.wg) * blocks * chunks,
        ids=ids.buffer,
        dy=dy.buffer,
        parts=parts,
        tokens=ids.size,
        vocab=vocab,
        rows=chosen.rows,
        chunk=chosen.chunk,
        chunks=chunks,
        packs=cols // pack,
        blocks=blocks,
        scale=scale,
    )
    if chunks > 1:
        record_parts(record, parts, out, rows=chunks)


__all__ = ["embedding"]
