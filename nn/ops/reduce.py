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
from nn.tensor import Tensor, apply, axis_of

Dim = int | Sequence[int] | None


class ValuesIndices(NamedTuple):
    """What max(x, dim) and min(x, dim) give: the extreme values and where they are (i32)."""

    values: Tensor
    indices: Tensor


def axes_of(name: str, x: Tensor, dim: Dim) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    axes = tuple(sorted(axis_of(name, d, x.ndim) for d in dims))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: dim {dim} names an axis twice")
    return axes if x.ndim else ()


def fold(kind: str, x: Tensor, dim: Dim, keepdim: bool, dtype: str) -> Tensor:
    axes = axes_of(kind, x, dim)
    if kind in ("max", "min", "argmax", "argmin") and builtins.any(x.shape[a] == 0 for a in axes):
        raise ValueError(f"{kind}: {list(x.shape)} has no elements along axes {axes}, so no extreme value")
    out = apply(Reduce(kind, axes, dtype), x)
    return out if keepdim else apply(Reshape(tuple(n for a, n in enumerate(x.shape) if a not in axes)), out)


def sum(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Sum; bools are counted as i32."""
    x = x.to("i32") if x.dtype == "bool" else x
    return fold("sum", x, dim, keepdim, x.dtype)


def mean(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Mean of floats; NaN over nothing."""
    elementwise.floating("mean", x)
    return fold("mean", x, dim, keepdim, x.dtype)


def prod(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Product; bools are multiplied as i32."""
    x = x.to("i32") if x.dtype == "bool" else x
    return fold("prod", x, dim, keepdim, x.dtype)


def amax(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Largest value; NaN if there is one."""
    return fold("max", x, dim, keepdim, x.dtype) if x.dtype != "bool" else any(x, dim, keepdim)


def amin(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Smallest value; NaN if there is one."""
    return fold("min", x, dim, keepdim, x.dtype) if x.dtype != "bool" else all(x, dim, keepdim)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index (i32) of the largest value, the first of equals; NaN counts as largest. dim None: into x.flatten()."""
    return arg("argmax", x, dim, keepdim)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Index (i32) of the smallest value, the first of equals; NaN counts as smallest. dim None: into x.flatten()."""
    return arg("argmin", x, dim, keepdim)


def arg(kind: str, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    x = x.to("i32") if x.dtype == "bool" else x
    return fold(kind, x, None if dim is None else axis_of(kind, dim, x.ndim), keepdim, "i32")


def max(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Tensor | ValuesIndices:
    """Largest value of all; with dim (values, indices) along it; with a tensor the element-wise maximum."""
    if isinstance(dim, Tensor):
        return elementwise.maximum(x, dim)
    if dim is None:
        return amax(x, keepdim=keepdim)
    return ValuesIndices(amax(x, dim, keepdim), argmax(x, dim, keepdim))


def min(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Tensor | ValuesIndices:
    """Smallest value of all; with dim (values, indices) along it; with a tensor the element-wise minimum."""
    if isinstance(dim, Tensor):
        return elementwise.minimum(x, dim)
    if dim is None:
        return amin(x, keepdim=keepdim)
    return ValuesIndices(amin(x, dim, keepdim), argmin(x, dim, keepdim))


def any(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Is any element nonzero? bool."""
    return fold("any", x.to("bool"), dim, keepdim, "bool")


def all(x: Tensor, dim: Dim = None, keepdim: bool = False) -> Tensor:
    """Are all elements nonzero? bool."""
    return fold("all", x.to("bool"), dim, keepdim, "bool")


def var(x: Tensor, dim: Dim = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Variance: the sum of squared distances from the mean over (count - correction). Two passes, so a large mean costs
    no digits. f16 is computed in f32."""
    elementwise.floating("var", x)
    axes = axes_of("var", x, dim)
    count = math.prod(x.shape[a] for a in axes)
    wide = x.to("f32")
    centred = wide - mean(wide, axes, keepdim=True)
    total = sum(elementwise.square(centred), axes, keepdim)
    return (total / float(builtins.max(count - correction, 0))).to(x.dtype)


def std(x: Tensor, dim: Dim = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Square root of var."""
    return elementwise.sqrt(var(x.to("f32") if x.dtype == "f16" else x, dim, correction, keepdim)).to(x.dtype)


def logsumexp(x: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) along dim, with the largest value taken out first; -infinity where all are."""
    elementwise.floating("logsumexp", x)
    wide = x.to("f32")
    top = amax(wide, dim, keepdim=True)
    top = elementwise.where(elementwise.isfinite(top), top, 0.0)
    total = elementwise.log(sum(elementwise.exp(wide - top), dim, keepdim=True)) + top
    out = total if keepdim else apply(Reshape(tuple(amax(x, dim).shape)), total)
    return out.to(x.dtype)


__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min", "prod", "std", "sum", "var",
]  # fmt: skip
