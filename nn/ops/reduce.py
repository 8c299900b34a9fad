"""Reductions over axes. f16 accumulates in f32; the order is fixed, so a device gives the same bits on every run.

dim is an axis, a tuple of axes, or None for all; keepdim leaves them with length 1. What produces the operand is fused
into the kernel (shaders/reduce/fold.wgsl).
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import NamedTuple

from nn.graph.ir import Reduce, Reshape
from nn.ops import elementwise
from nn.tape import is_grad_enabled
from nn.tensor import Tensor, add_methods, apply, axis_of

Dim = int | Sequence[int] | None


class ValuesIndices(NamedTuple):
    """What max(input, dim) and min(input, dim) give: the extreme values and where they are (i32)."""

    values: Tensor
    indices: Tensor


def axes_of(name: str, input: Tensor, dim: Dim) -> tuple[int, ...]:
    """The axes that `dim` means, ascending. Raises IndexError for one that is not there, ValueError for one twice."""
    if dim is None:
        return tuple(range(input.ndim))
    dims = tuple(dim) if isinstance(dim, tuple | list | range) else (dim,)
    axes = tuple(sorted(axis_of(name, d, input.ndim) for d in dims))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: dim {dim} names an axis twice")
    return axes if input.ndim else ()


def fold(kind: str, input: Tensor, dim: Dim, keepdim: bool, dtype: str) -> Tensor:
    """A Reduce node; kinds as in nn/graph/fold.py. Raises ValueError for an extreme value of nothing."""
    axes = axes_of(kind, input, dim)
    if kind in ("max", "min", "argmax", "argmin") and builtins.any(input.shape[a] == 0 for a in axes):
        raise ValueError(f"{kind}: {list(input.shape)} has no elements along axes {axes}, so no extreme value")
    out = apply(Reduce(kind, axes, dtype), input)
    return out if keepdim else apply(Reshape(tuple(n for a, n in enumerate(input.shape) if a not in axes)), out)


def sum(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Sum; bools are counted as i32."""
    input = input.to("i32") if input.dtype == "bool" else input
    return fold("sum", input, dim, keepdim, input.dtype)


def mean(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Mean of floats; NaN over nothing."""
    elementwise.require_floats("mean", input)
    return fold("mean", input, dim, keepdim, input.dtype)


def prod(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Product; bools are multiplied as i32."""
    input = input.to("i32") if input.dtype == "bool" else input
    return fold("prod", input, dim, keepdim, input.dtype)


def amax(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Largest value; NaN if there is one."""
    return fold("max", input, dim, keepdim, input.dtype) if input.dtype != "bool" else any(input, dim, keepdim)


def amin(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Smallest value; NaN if there is one."""
    return fold("min", input, dim, keepdim, input.dtype) if input.dtype != "bool" else all(input, dim, keepdim)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index (i32) of the largest value, the first of equals; NaN is largest. dim None: into input.flatten()."""
    return arg("argmax", input, dim, keepdim)


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index (i32) of the smallest value, the first of equals; NaN is smallest. dim None: into input.flatten()."""
    return arg("argmin", input, dim, keepdim)


def arg(kind: str, input: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    input = input.to("i32") if input.dtype == "bool" else input
    return fold(kind, input, None if dim is None else axis_of(kind, dim, input.ndim), keepdim, "i32")


def max(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Tensor | ValuesIndices:
    """Largest value of all; with dim (values, indices) along it; with a tensor the element-wise maximum."""
    if isinstance(dim, Tensor):
        return elementwise.maximum(input, dim)
    if dim is None:
        return amax(input, keepdim=keepdim)
    return at_extreme(amax(input, dim, keepdim), argmax(input, dim, keepdim), input, dim, keepdim)


def min(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Tensor | ValuesIndices:
    """Smallest value of all; with dim (values, indices) along it; with a tensor the element-wise minimum."""
    if isinstance(dim, Tensor):
        return elementwise.minimum(input, dim)
    if dim is None:
        return amin(input, keepdim=keepdim)
    return at_extreme(amin(input, dim, keepdim), argmin(input, dim, keepdim), input, dim, keepdim)


def at_extreme(values: Tensor, indices: Tensor, input: Tensor, dim: int, keepdim: bool) -> ValuesIndices:
    """Both results; where input needs a gradient, it flows to the element at the index only, as in torch."""
    if not (input.requires_grad and is_grad_enabled()):
        return ValuesIndices(values, indices)
    from nn.ops.create import arange  # here: that module imports those that import this one

    axis = axis_of("max", dim, input.ndim)
    at = indices if keepdim or not input.ndim else indices.unsqueeze(axis)
    places = arange(input.shape[axis] if input.ndim else 1, device=input.device)
    chosen = places.reshape([-1 if a == axis else 1 for a in range(input.ndim)]) == at
    return ValuesIndices(sum(elementwise.where(chosen, input, 0.0), axis, keepdim), indices)


def any(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Is any element nonzero? bool."""
    return fold("any", input.to("bool"), dim, keepdim, "bool")


def all(input: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Are all elements nonzero? bool."""
    return fold("all", input.to("bool"), dim, keepdim, "bool")


def var(input: Tensor, dim: Dim = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Variance: the sum of squared distances from the mean over (count - correction). Two passes, so a large mean costs
    no digits. f16 is computed in f32."""
    elementwise.require_floats("var", input)
    axes = axes_of("var", input, dim)
    count = math.prod(input.shape[a] for a in axes)
    wide = input.to("f32")
    centred = wide - mean(wide, axes, keepdim=True)
    total = sum(elementwise.square(centred), axes, keepdim)
    return (total / float(builtins.max(count - correction, 0))).to(input.dtype)


def std(input: Tensor, dim: Dim = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Square root of var."""
    return elementwise.sqrt(var(input.to("f32") if input.dtype == "f16" else input, dim, correction, keepdim)).to(
        input.dtype
    )


def logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) along dim, with the largest value taken out first; -infinity where all are."""
    elementwise.require_floats("logsumexp", input)
    wide = input.to("f32")
    top = amax(wide, dim, keepdim=True)
    top = elementwise.where(elementwise.isfinite(top), top, 0.0)
    total = elementwise.log(sum(elementwise.exp(wide - top), dim, keepdim=True)) + top
    out = total if keepdim else apply(Reshape(tuple(amax(input, dim).shape)), total)
    return out.to(input.dtype)


__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min", "prod", "std", "sum", "var",
]  # fmt: skip
add_methods(globals())
