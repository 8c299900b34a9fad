"""Rotary position embedding of any tensor of heads, from a table of angles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nn.ops.base import Array, Op, ShapeError, Spec
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from gpu import Recorder

HEADS = 4  # heads an invocation of rope4.wgsl takes


def rope(x: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate feature pairs of queries or keys by an angle that depends on the position.

    (a, b) -> (a cos - b sin, a sin + b cos) for each of R/2 pairs; features from R on pass through.

    Args:
        x: (B, T, N, H) f32 or f16. B batch, T tokens, N heads, H features a head.
        table: (context, R/2, 2) f32, cos and sin of each position and pair (nn.models.rope makes it); R <= H.
        positions: (T,) or (B, T) i32, row of the table for each token; values outside take the nearest row.
        interleaved: False pairs feature i with i + R/2 (GPT-NeoX, Llama in Hugging Face's layout); True 2i with 2i + 1.
    Returns: (B, T, N, H), dtype of x.
    Raises: ShapeError, TypeError for other dtypes.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    return apply(RopeHeads(interleaved=interleaved), x, table, positions)


@dataclass(frozen=True)
class RopeHeads(Op):
    """Operands x, table, positions."""

    interleaved: bool
    group = "rope"

    def infer(self, x: Spec, table: Spec, positions: Spec) -> Spec:
        if len(x.shape) != 4:
            raise ShapeError(
                f"rope: x has shape {x.shape}; expected (B, T, N, H): batch, tokens, heads, features a head"
            )
        if len(table.shape) != 3 or table.shape[2] != 2 or table.shape[0] == 0 or 2 * table.shape[1] > x.shape[3]:
            raise ShapeError(
                f"rope: table has shape {table.shape}; expected (context, R/2, 2) with context > 0 "
                f"and R <= H = {x.shape[3]}"
            )
        if positions.shape not in ((x.shape[1],), x.shape[:2]):
            raise ShapeError(f"rope: positions have shape {positions.shape}; expected {(x.shape[1],)} or {x.shape[:2]}")
        for name, spec, allowed in (
            ("x", x, ("f32", "f16")),
            ("table", table, ("f32",)),
            ("positions", positions, ("i32",)),
        ):
            if spec.dtype not in allowed:
                raise TypeError(f"rope: {name} is {spec.dtype}; expected {' or '.join(allowed)}")
        return x

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, None, None]:
        """Rotations are turned back: the same kernel with the sines' sign changed. Angles get no gradient."""
        _, table, positions, _ = tensors
        sign = Tensor([1.0, -1.0], table.device)
        return apply(self, dy, table.detach() * sign, positions), None, None

    def lower(self, record: Recorder, x: Array, table: Array, positions: Array, out: Array) -> None:
        record_rope(record, x, table, positions, out, interleaved=self.interleaved)


def record_rope(
    record: Recorder,
    x: Array,
    table: Array,
    positions: Array,
    out: Array,
    *,
    interleaved: bool,
    four: bool | None = None,
) -> None:
    """One dispatch of shaders/rope/rope.wgsl or, four features at a time, rope4.wgsl (four: None: where it fits)."""
    if x.size == 0:
        return
    batch, tokens, heads, head_dim = x.shape
    rotated = 2 * table.shape[1]
    if four is None:
        four = head_dim % 4 == 0 and rotated % (4 if interleaved else 8) == 0 and rotated > 0
    group = 256 if four else 64
    kernel = record.device.kernel(
        f"rope/rope{'4' * four}.wgsl",
        f"rope{'4' * four}",
        types={"Elem": x.dtype},
        constants={"WG": group, "INTERLEAVED": int(interleaved)},
    )
    unit = 4 if four else 1
    units = head_dim // 4 - (0 if interleaved else rotated // 8)
    size = batch * tokens * -(-heads // HEADS) * units if four else x.size
    record(
        kernel,
        -(-size // group),
        x=x.buffer,
        table=table.buffer,
        positions=positions.buffer,
        out=out.buffer,
        size=size,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim // unit,
        rotated=rotated // unit,
        table_rows=table.shape[0],
        position_stride=tokens if len(positions.shape) == 2 else 0,
    )


__all__ = ["rope"]
