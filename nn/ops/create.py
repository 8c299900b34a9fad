"""Tensors from nothing: filled arrays and ranges. They take no memory until a kernel has to read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nn.graph.ir import COMPUTE, INTEGERS, Arange, Expand, Node, constant
from nn.tensor import Tensor, apply, sizes

if TYPE_CHECKING:
    from gpu import Device


def full(size: Sequence[int], fill_value: float | int | bool, *, device: Device, dtype: str | None = None) -> Tensor:
    """A tensor of this shape with one value; dtype from the value as in PyTorch (bool, i32, f32)."""
    if dtype is None:
        dtype = "bool" if isinstance(fill_value, bool) else "i32" if isinstance(fill_value, int) else "f32"
    if dtype not in COMPUTE:
        raise TypeError(f"full: dtype {dtype!r}; expected one of {', '.join(COMPUTE)}")
    value = held("full", fill_value, dtype)
    scalar = Tensor(constant(value, dtype), device)
    shape = sizes((size,) if isinstance(size, int) else size)
    return apply(Expand(shape), scalar) if shape else scalar


def held(name: str, value: float | int | bool, dtype: str) -> float | int | bool:
    """The value as its dtype has it. Raises TypeError for what is no number, ValueError where it does not fit."""
    if not isinstance(value, bool | int | float | np.generic):
        raise TypeError(f"{name}: got {value!r}; expected a number")
    if dtype == "bool":
        return bool(value)
    if dtype not in INTEGERS:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}: {value!r} does not fit {dtype}") from None
    low, high = (-(2**31), 2**31 - 1) if dtype == "i32" else (0, 2**32 - 1)
    if not low <= value <= high or int(value) != value:
        raise ValueError(f"{name}: {value!r} does not fit {dtype}; expected a whole number from {low} to {high}")
    return int(value)


def zeros(*size: int | Sequence[int], device: Device, dtype: str = "f32") -> Tensor:
    """Zeros of this shape."""
    return full(sizes(size), 0, device=device, dtype=dtype)


def ones(*size: int | Sequence[int], device: Device, dtype: str = "f32") -> Tensor:
    """Ones of this shape."""
    return full(sizes(size), 1, device=device, dtype=dtype)


def zeros_like(input: Tensor) -> Tensor:
    """Zeros of input's shape and dtype, on its device."""
    return zeros(input.shape, device=input.device, dtype=input.dtype)


def ones_like(input: Tensor) -> Tensor:
    """Ones of input's shape and dtype, on its device."""
    return ones(input.shape, device=input.device, dtype=input.dtype)


def full_like(input: Tensor, fill_value: float | int | bool) -> Tensor:
    """fill_value in input's shape and dtype, on its device."""
    return full(input.shape, fill_value, device=input.device, dtype=input.dtype)


def arange(
    start: float, end: float | None = None, step: float = 1, *, device: Device, dtype: str | None = None
) -> Tensor:
    """start, start + step, ... up to but without end (arange(n): 0..n-1); i32 for integers, else f32."""
    if end is None:
        start, end = 0, start
    if step == 0:
        raise ValueError("arange: step is 0")
    if not all(math.isfinite(v) for v in (start, end, step)):
        raise ValueError(f"arange: {start}, {end}, {step}; expected finite numbers")
    whole = all(isinstance(v, int) for v in (start, end, step))
    dtype = dtype or ("i32" if whole else "f32")
    if dtype not in COMPUTE or dtype == "bool":
        raise TypeError(f"arange: dtype {dtype!r}; expected f32, f16, i32 or u32")
    if dtype in INTEGERS and not whole:
        raise TypeError(f"arange: {start}, {end}, {step} are not all integers, so no {dtype}")
    length = max(0, math.ceil((end - start) / step))
    if dtype in INTEGERS and length:
        held("arange", start, dtype)
        held("arange", start + step * (length - 1), dtype)
    op = Arange(length, start, step, dtype)
    return Tensor(Node(op, (), (op.infer(),)), device)


def eye(n: int, m: int | None = None, *, device: Device, dtype: str = "f32") -> Tensor:
    """Ones on the diagonal of an (n, m) matrix, zeros elsewhere."""
    rows, cols = arange(n, device=device), arange(n if m is None else m, device=device)
    return (rows.reshape(n, 1) == cols).to(dtype)


__all__ = ["arange", "eye", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like"]
