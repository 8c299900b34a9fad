"""Shapes: views cost nothing (they become strides of the kernel that reads them), joins copy once.

No operation here depends on memory layout: `view` never fails for layout reasons, and `contiguous` matters only before
the memory is handed to something outside the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nn.graph.ir import Cat, Contiguous, Expand, Permute, Reshape, Slice
from nn.ops import elementwise
from nn.ops.base import ShapeError
from nn.tensor import Tensor, apply, axis_of, broadcast_shapes, sizes


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in the same (row-major) order under another shape; one length may be -1."""
    shape = tuple(int(n) for n in shape)
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise ShapeError(f"reshape: {list(shape)}; lengths are 0 or more, and at most one is -1")
    if -1 in shape:
        known = -math.prod(shape)
        if known == 0 or x.numel() % known:
            raise ShapeError(
                f"reshape: {list(x.shape)} has {x.numel()} elements, which do not divide into {list(shape)}"
            )
        shape = tuple(x.numel() // known if n == -1 else n for n in shape)
    return x if shape == x.shape else apply(Reshape(shape), x)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Axes in another order: result axis i is axis dims[i] of x."""
    if len(dims) != x.ndim:
        raise ShapeError(f"permute: {len(dims)} axes for a tensor with {x.ndim}; name each once")
    return apply(Permute(tuple(axis_of("permute", d, x.ndim) for d in dims)), x)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two axes exchanged."""
    a, b = axis_of("transpose", dim0, x.ndim), axis_of("transpose", dim1, x.ndim)
    axes = list(range(x.ndim))
    if axes:
        axes[a], axes[b] = axes[b], axes[a]
    return permute(x, axes)


def expand(x: Tensor, size: Sequence[int]) -> Tensor:
    """Axes of length 1 repeated to `size` (-1 keeps a length); new axes come in front."""
    new = len(size) - x.ndim
    if new < 0:
        raise ShapeError(f"expand: {list(x.shape)} to {list(size)}; the result cannot have fewer axes")
    shape = tuple(x.shape[i - new] if n == -1 and i >= new else int(n) for i, n in enumerate(size))
    return x if shape == x.shape else apply(Expand(shape), x)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x repeated along axes of length 1 to `shape`."""
    return expand(x, shape)


def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors at the shape they share."""
    shape = broadcast_shapes("broadcast_tensors", [t.shape for t in tensors])
    return tuple(expand(t, shape) for t in tensors)


def squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Without its axes of length 1, or without those of `dim` that have length 1."""
    if dim is None:
        return reshape(x, [n for n in x.shape if n != 1])
    dims = {axis_of("squeeze", d, x.ndim) for d in ((dim,) if isinstance(dim, int) else dim)}
    return reshape(x, [n for a, n in enumerate(x.shape) if a not in dims or n != 1])


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """With a new axis of length 1 before axis `dim`."""
    dim = axis_of("unsqueeze", dim, x.ndim + 1)
    return reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Axes start_dim..end_dim merged into one; a 0-d tensor becomes (1,)."""
    if x.ndim == 0:
        return reshape(x, (1,))
    a, b = axis_of("flatten", start_dim, x.ndim), axis_of("flatten", end_dim, x.ndim)
    if a > b:
        raise ShapeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(x, (*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]))


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Axis `dim` split into axes of these lengths; one may be -1."""
    dim = axis_of("unflatten", dim, x.ndim)
    known = math.prod(n for n in sizes if n != -1)
    parts = [x.shape[dim] // max(known, 1) if n == -1 else n for n in sizes]
    if math.prod(parts) != x.shape[dim]:
        raise ShapeError(f"unflatten: axis {dim} has length {x.shape[dim]}, {list(sizes)} does not multiply to it")
    return reshape(x, (*x.shape[:dim], *parts, *x.shape[dim + 1 :]))


def contiguous(x: Tensor) -> Tensor:
    """The same values in row-major memory."""
    return apply(Contiguous(), x)


def clone(x: Tensor) -> Tensor:
    """A copy in memory of its own."""
    return apply(Contiguous(copy=True), x)


def cut(x: Tensor, starts: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Tensor:
    return apply(Slice(tuple(starts), tuple(steps), tuple(shape)), x)


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`length` elements of axis `dim` from `start` on (negative: from the end)."""
    dim = axis_of("narrow", dim, x.ndim)
    start += x.shape[dim] if start < 0 else 0
    if not (0 <= start <= x.shape[dim] and 0 <= length <= x.shape[dim] - start):
        raise IndexError(f"narrow: {length} elements from {start} leave an axis of length {x.shape[dim]}")
    starts, shape = [0] * x.ndim, list(x.shape)
    starts[dim], shape[dim] = (start if length else 0), length
    return cut(x, starts, [1] * x.ndim, shape)


def flip(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Reversed along these axes."""
    axes = {axis_of("flip", d, x.ndim) for d in ((dims,) if isinstance(dims, int) else dims)}
    starts = [n - 1 if a in axes and n else 0 for a, n in enumerate(x.shape)]
    return cut(x, starts, [-1 if a in axes else 1 for a in range(x.ndim)], x.shape)


def split(x: Tensor, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces along `dim`: of split_size each (the last may be smaller), or of the lengths given."""
    dim = axis_of("split", dim, x.ndim)
    n = x.shape[dim]
    if isinstance(split_size, int):
        if split_size <= 0:
            raise ValueError(f"split: split_size must be > 0, got {split_size}")
        lengths = [min(split_size, n - start) for start in range(0, n, split_size)] or [0]
    else:
        lengths = list(split_size)
        if sum(lengths) != n or min(lengths, default=0) < 0:
            raise ShapeError(f"split: lengths {lengths} do not add up to axis {dim} of length {n}")
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(narrow(x, dim, start, length) for start, length in zip(starts, lengths))


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal length along `dim` (the last may be smaller)."""
    if chunks <= 0:
        raise ValueError(f"chunk: chunks must be > 0, got {chunks}")
    return split(x, max(1, -(-x.shape[axis_of("chunk", dim, x.ndim)] // chunks)), dim)


def repeat(x: Tensor, *repeats: int | Sequence[int]) -> Tensor:
    """x repeated repeats[i] times along axis i; new axes come in front."""
    times = sizes(repeats)
    if len(times) < x.ndim or min(times, default=0) < 0:
        raise ShapeError(
            f"repeat: {list(times)} for {list(x.shape)}; one number of 0 or more for each axis, more add axes in front"
        )
    shape = (*(1,) * (len(times) - x.ndim), *x.shape)
    paired = reshape(x, [m for n in shape for m in (1, n)])
    spread = expand(paired, [m for t, n in zip(times, shape) for m in (t, n)])
    return reshape(spread, [t * n for t, n in zip(times, shape)])


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after another along `dim`; their other axes agree. Any number of them; empty ones add nothing."""
    tensors = tuple(tensors)
    if not tensors:
        raise ValueError("cat: got no tensors")
    return apply(Cat(axis_of("cat", dim, tensors[0].ndim)), *tensors)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new axis `dim`."""
    tensors = tuple(tensors)
    if not tensors:
        raise ValueError("stack: got no tensors")
    dim = axis_of("stack", dim, tensors[0].ndim + 1)
    return cat([unsqueeze(t, dim) for t in tensors], dim)


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """x with `value` around it. pad counts from the last axis: (left, right, top, bottom, ...); negative cuts off."""
    if mode != "constant":
        raise ValueError(f"pad: mode {mode!r}; only 'constant' is there")
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise ShapeError(f"pad: {list(pad)}; two numbers an axis, at most {x.ndim} axes")
    for i in range(0, len(pad), 2):
        axis = x.ndim - 1 - i // 2
        before, after = int(pad[i]), int(pad[i + 1])
        x = narrow(x, axis, max(-before, 0), x.shape[axis] - max(-before, 0) - max(-after, 0))
        parts = [x]
        for length, at in ((before, 0), (after, len(parts))):
            if length > 0:
                shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
                parts.insert(at if at == 0 else len(parts), expand(elementwise.number("pad", value, x.dtype, x), shape))
        x = cat(parts, axis) if len(parts) > 1 else x
    return x


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """x with zeros above the diagonal of its last two axes."""
    return elementwise.where(band(x, "tril") <= diagonal, x, zero(x))


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """x with zeros below the diagonal of its last two axes."""
    return elementwise.where(band(x, "triu") >= diagonal, x, zero(x))


def zero(x: Tensor) -> bool | int:
    return False if x.dtype == "bool" else 0


def band(x: Tensor, name: str) -> Tensor:
    """column - row for the last two axes, i32."""
    from nn.ops.create import arange

    if x.ndim < 2:
        raise ShapeError(f"{name}: {list(x.shape)}; takes at least two axes")
    rows, cols = x.shape[-2:]
    return arange(cols, device=x.device) - reshape(arange(rows, device=x.device), (rows, 1))


def index(x: Tensor, key: Any) -> Tensor:
    """x[key] for integers, slices with a positive step, None and ... (as NumPy's basic indexing)."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for k in keys:
        if not (k is None or k is Ellipsis or isinstance(k, slice | int | np.integer)) or isinstance(k, bool):
            raise IndexError(
                f"index: got a {type(k).__name__}; integers, slices, None and ... are there. To look rows up by a "
                "tensor use nn.functional.embedding, to choose by a mask use where"
            )
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > x.ndim or sum(k is Ellipsis for k in keys) > 1:
        raise IndexError(f"index: {used} indices for {x.ndim} axes of {list(x.shape)} (and at most one ...)")
    where = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[where : where + 1] = [slice(None)] * (x.ndim - used)
    starts, steps, lengths, shape = [], [], [], []
    axis = 0
    for k in keys:
        if k is None:
            shape.append(1)
            continue
        n = x.shape[axis]
        if isinstance(k, slice):
            if k.step is not None and k.step <= 0:
                raise ValueError(f"index: slice step {k.step}; steps are positive, use flip to reverse")
            start, stop, step = k.indices(n)
            length = max(0, -(-(stop - start) // step))
            starts.append(start if length else 0)
            steps.append(step)
            lengths.append(length)
            shape.append(length)
        else:
            if not -n <= k < n:
                raise IndexError(f"index: {k} is out of range for axis {axis} of length {n}")
            starts.append(int(k) % n)
            steps.append(1)
            lengths.append(1)
        axis += 1
    whole = lengths == list(x.shape) and not any(starts) and all(s == 1 for s in steps)
    return reshape(x if whole else cut(x, starts, steps, lengths), shape)


__all__ = [
    "broadcast_tensors", "broadcast_to", "cat", "chunk", "clone", "contiguous", "expand", "flatten", "flip", "narrow",
    "pad", "permute", "repeat", "reshape", "split", "squeeze", "stack", "transpose", "tril", "triu", "unflatten",
    "unsqueeze",
]  # fmt: skip
