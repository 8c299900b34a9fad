"""Cross-entropy of logits with class indices or class probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu.work import Cost
from nn import tape
from nn.ops import create
from nn.ops.base import FLOATS, Array, Op, Progress, ShapeError, Spec
from nn.ops.rows import RowVariant, record_rows
from nn.ops.softmax import log_softmax
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder

CLASSES = ("i32", "u32")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """How badly logits predict their targets: -log softmax(input)[target], from one read of the logits.

    Args:
        input: (C,), (N, C) or (N, C, d1, ...) f32 or f16 logits; classes are on axis 1 (axis 0 if there is no other).
        target: class indices i32 or u32 of input's shape without the classes; or probabilities, f32 or f16, of input's
            shape.
        weight: (C,) f32 or f16, a factor for each class; no gradient comes to it.
        size_average, reduce: PyTorch's old names of reduction; None.
        ignore_index: rows with this class index count nothing.
        reduction: "none", "sum", or "mean": over the rows by their classes' weights, the ignored ones left out (NaN if
            that is all of them); over all rows where targets are probabilities.
        label_smoothing: 0 to 1: so much of each target is spread over all classes.
    Returns: f32 (also for f16 logits): 0-d, or with "none" of the shape of the rows. A class index outside
        0..C - 1 that is not ignore_index gives NaN.
    Raises: ShapeError where shapes do not fit, TypeError for other dtypes, ValueError for options out of range.
    Source: Szegedy et al. 2016, arXiv:1512.00567 (smoothing). Name and signature: torch.nn.functional.cross_entropy.
    """
    name = "cross_entropy"
    if size_average is not None or reduce is not None:
        raise ValueError(f"{name}: size_average and reduce are not taken; pass reduction='none', 'mean' or 'sum'")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{name}: reduction is {reduction!r}; expected 'none', 'mean' or 'sum'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"{name}: label_smoothing is {label_smoothing}; expected a part of 1: 0.0 to 1.0, 0.1 is usual"
        )
    if input.ndim == 0 or input.shape[min(1, input.ndim - 1)] == 0:
        raise ShapeError(f"{name}: input has shape {input.shape}; expected (C,) or (N, C, ...) with at least one class")
    if input.dtype not in FLOATS:
        raise TypeError(f"{name}: input is {input.dtype}; expected f32 or f16 logits, convert with .to('f32')")
    axis = min(1, input.ndim - 1)
    classes = input.shape[axis]
    if weight is not None and (weight.shape != (classes,) or weight.dtype not in FLOATS):
        raise ShapeError(
            f"{name}: weight is {weight.dtype} of shape {weight.shape}; expected f32 or f16 ({classes},), one a class"
        )
    outer = (*input.shape[:axis], *input.shape[axis + 1 :])
    logits = _last(input, axis).reshape(math.prod(outer), classes)
    wide = None if weight is None else weight.detach().to("f32")
    if target.dtype in FLOATS:
        if target.shape != input.shape:
            raise ShapeError(
                f"{name}: target is {target.dtype} of shape {target.shape}; probabilities have input's shape "
                f"{input.shape}, class indices are i32 or u32 of shape {outer}"
            )
        goal = _last(target, axis).reshape(math.prod(outer), classes).to("f32")
        losses = _of_probabilities(logits.to("f32"), goal, wide, label_smoothing)
        count = None
    else:
        if target.dtype not in CLASSES:
            raise TypeError(f"{name}: target is {target.dtype}; expected class indices i32 or u32, or probabilities")
        if target.shape != outer:
            raise ShapeError(
                f"{name}: target has shape {target.shape}, input {input.shape}; class indices have input's shape "
                f"without axis {axis}: {outer}"
            )
        op = CrossEntropyRows(ignored=int(ignore_index), smoothing=float(label_smoothing))
        operands = (logits, target.reshape(math.prod(outer)))
        losses, _, count = apply(op, *operands) if wide is None else apply(op, *operands, wide)
    if reduction == "none":
        return losses.reshape(outer)
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if count is None else losses.sum() / count.detach().sum()


def _last(x: Tensor, axis: int) -> Tensor:
    """x with `axis` moved to the end."""
    axes = [a for a in range(x.ndim) if a != axis]
    return x if axis == x.ndim - 1 else x.permute((*axes, axis))


def _of_probabilities(logits: Tensor, goal: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """The loss of each row; written with public functions, whose gradients fuse."""
    if smoothing:
        goal = goal * (1.0 - smoothing) + smoothing / logits.shape[1]
    terms = goal * log_softmax(logits, -1)
    return -(terms if weight is None else terms * weight).sum(1)


@dataclass(frozen=True)
class CrossEntropyRows(Op):
    """Operands logits (N, C), classes (N,) and, optionally, weight (C,) f32. Results, each (N,) f32: the rows' losses,
    the logarithms of their sums of exponentials, and their classes' weights (0 where ignored)."""

    ignored: int
    smoothing: float
    group = "loss"

    def infer(self, *inputs: Spec) -> tuple[Spec, ...]:
        return (Spec(inputs[0].shape[:1]),) * 3

    def gradient(self, dy: tuple[Tensor, Tensor, Tensor], *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """dx = dloss * (w[y] (1 - s) (softmax - onehot) + s / C (sum(w) softmax - w)): one fused pass over the logits.

        The second and third result are for this rule only: nobody has a gradient for them.
        """
        x, goal, *weights = tensors[:-3]
        _, lse, kept = tensors[-3:]
        wide, count = x.to("f32"), x.shape[1]
        if tape.is_grad_enabled():
            lse = wide.logsumexp(-1)
        share = (wide - lse.unsqueeze(1)).exp()
        goal = goal.to("i32").unsqueeze(1)
        at = (create.arange(count, device=x.device, dtype="i32") == goal).to("f32")
        slope = kept.detach().unsqueeze(1) * (share - at)
        if self.smoothing:
            spread = share - 1.0 / count
            if weights:
                spread = (weights[0].sum() * share - weights[0]) * (1.0 / count)
            spread = (goal != self.ignored).to("f32") * spread
            slope = slope * (1.0 - self.smoothing) + spread * self.smoothing
        dx = dy[0].unsqueeze(1) * slope
        return (dx.to(x.dtype), None, *(None for _ in weights))

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        moved = super().cost(operands, results)
        return Cost(4 * operands[0].size, moved.read, moved.written)  # maximum, difference, exponential, sum

    def lower(self, record: Recorder, *arrays: Array) -> None:
        record_cross_entropy(record, *arrays, ignored=self.ignored, smoothing=self.smoothing)


def record_cross_entropy(
    record: Recorder,
    x: Array,
    goal: Array,
    *rest: Array,
    ignored: int,
    smoothing: float,
    variant: RowVariant | None = None,
) -> None:
    """One dispatch of shaders/loss/cross_entropy*.wgsl. rest: weight, if any, and the three results."""
    *weight, out, lse, kept = rest
    operands: dict[str, Any] = {"weight": weight[0].buffer} if weight else {}
    record_rows(
        record,
        "loss/cross_entropy",
        "cross_entropy" + "_weighted" * bool(weight),
        x,
        out,
        variant=variant,
        goal=goal.buffer,
        lse=lse.buffer,
        kept=kept.buffer,
        ignored=ignored,
        smoothing=smoothing,
        outside=math.nan,
        **operands,
    )


__all__ = ["cross_entropy"]
