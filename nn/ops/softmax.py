"""Softmax and log-softmax over one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn.ops.base import FLOATS, Array, Op, Progress, Spec
from nn.ops.rows import RowVariant, record_rows
from nn.tensor import Tensor, add_methods, apply, axis_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder


def softmax(input: Tensor, dim: int, *, dtype: str | None = None) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along `dim`.

    Elements of minus infinity are masked and give 0; where a whole row is masked the row is 0 (torch gives NaN).

    Args:
        input: any shape, f32 or f16. Sums are f32.
        dim: the axis that sums to 1.
        dtype: "f32" or "f16", to which input is converted first.
    Returns: shape of input.
    Raises: IndexError if there is no such axis, TypeError for other dtypes.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867. Name: torch.nn.functional.softmax.
    """
    return _along(SoftmaxRows(log=False), "softmax", input, dim, dtype)


def log_softmax(input: Tensor, dim: int, *, dtype: str | None = None) -> Tensor:
    """x - max - log(sum(exp(x - max))) along `dim`; masked elements (minus infinity) stay as they are.

    Arguments, result and errors as for `softmax`. Name: torch.nn.functional.log_softmax.
    """
    return _along(SoftmaxRows(log=True), "log_softmax", input, dim, dtype)


@dataclass(frozen=True)
class SoftmaxRows(Op):
    """Softmax or log-softmax of each row: the last axis."""

    log: bool
    group = "softmax"

    def infer(self, x: Spec) -> Spec:
        if x.dtype not in FLOATS:
            name = "log_softmax" if self.log else "softmax"
            raise TypeError(f"{name}: input is {x.dtype}; expected f32 or f16, pass dtype='f32'")
        return x

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        _, y = tensors
        if self.log:
            return (dy - y.exp() * dy.sum(-1, keepdim=True),)
        return (y * (dy - (dy * y).sum(-1, keepdim=True)),)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        moved = super().cost(operands, results)
        return Cost(5 * operands[0].size, moved.read, moved.written)  # maximum, difference, exponential, sum, quotient

    def lower(self, record: Recorder, x: Array, out: Array) -> None:
        record_softmax(record, x, out, log=self.log)


def record_softmax(record: Recorder, x: Array, out: Array, *, log: bool, variant: RowVariant | None = None) -> None:
    """One dispatch of shaders/softmax/softmax*.wgsl. variant: None takes the default one."""
    record_rows(record, "softmax/softmax", "log_softmax" if log else "softmax", x, out, variant=variant)


def _along(op: Op, name: str, x: Tensor, dim: int, dtype: str | None) -> Tensor:
    axis = axis_of(name, dim, x.ndim)
    if dtype is not None and dtype != x.dtype:
        x = x.to(dtype)
    if axis >= x.ndim - 1:
        return apply(op, x)
    return apply(op, x.transpose(axis, -1)).transpose(axis, -1)


__all__ = ["log_softmax", "softmax"]
add_methods(globals())
