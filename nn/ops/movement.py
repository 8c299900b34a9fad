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
from nn.tensor import Tensor, add_methods, apply, axis_of, broadcast_shapes, sizes


def reshape(input: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in the same (row-major) order under another shape; one length may be -1."""
    shape = tuple(int(n) for n in shape)
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise ShapeError(f"reshape: {list(shape)}; lengths are 0 or more, and at most one is -1")
    if -1 in shape:
        known = -math.prod(shape)
        if known == 0 or input.numel() % known:
            raise ShapeError(
                f"reshape: {list(input.shape)} has {input.numel()} elements, which do not divide into {list(shape)}"
            )
        shape = tuple(input.numel() // known if n == -1 else n for n in shape)
    return input if shape == input.shape else apply(Reshape(shape), input)


def permute(input: Tensor, dims: Sequence[int]) -> Tensor:
    """Axes in another order: result axis i is axis dims[i] of input."""
    if len(dims) != input.ndim:
        raise ShapeError(f"permute: {len(dims)} axes for a tensor with {input.ndim}; name each once")
    return apply(Permute(tuple(axis_of("permute", d, input.ndim) for d in dims)), input)


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two axes exchanged."""
    a, b = axis_of("transpose", dim0, input.ndim), axis_of("transpose", dim1, input.ndim)
    axes = list(range(input.ndim))
    if axes:
        axes[a], axes[b] = axes[b], axes[a]
    return permute(input, axes)


def expand(input: Tensor, size: Sequence[int]) -> Tensor:
    """Axes of length 1 repeated to `size` (-1 keeps a length); new axes come in front."""
    new = len(size) - input.ndim
    if new < 0:
        raise ShapeError(f"expand: {list(input.shape)} to {list(size)}; the result cannot have fewer axes")
    shape = tuple(input.shape[i - new] if n == -1 and i >= new else int(n) for i, n in enumerate(size))
    return input if shape == input.shape else apply(Expand(shape), input)


def broadcast_to(input: Tensor, shape: Sequence[int]) -> Tensor:
    """input repeated along axes of length 1 to `shape`."""
    return expand(input, shape)


def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors at the shape they share."""
    shape = broadcast_shapes("broadcast_tensors", [t.shape for t in tensors])
    return tuple(expand(t, shape) for t in tensors)


def squeeze(input: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Without its axes of length 1, or without those of `dim` that have length 1."""
    if dim is None:
        return reshape(input, [n for n in input.shape if n != 1])
    dims = {axis_of("squeeze", d, input.ndim) for d in ((dim,) if isinstance(dim, int) else dim)}
    return reshape(input, [n for a, n in enumerate(input.shape) if a not in dims or n != 1])


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """With a new axis of length 1 before axis `dim`."""
    dim = axis_of("unsqueeze", dim, input.ndim + 1)
    return reshape(input, (*input.shape[:dim], 1, *input.shape[dim:]))


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Axes start_dim..end_dim merged into one; a 0-d tensor becomes (1,)."""
    if input.ndim == 0:
        return reshape(input, (1,))
    a, b = axis_of("flatten", start_dim, input.ndim), axis_of("flatten", end_dim, input.ndim)
    if a > b:
        raise ShapeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(input, (*input.shape[:a], math.prod(input.shape[a : b + 1]), *input.shape[b + 1 :]))


def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Axis `dim` split into axes of these lengths; one may be -1."""
    dim = axis_of("unflatten", dim, input.ndim)
    known = math.prod(n for n in sizes if n != -1)
    parts = [input.shape[dim] // max(known, 1) if n == -1 else n for n in sizes]
    if math.prod(parts) != input.shape[dim]:
        raise ShapeError(f"unflatten: axis {dim} has length {input.shape[dim]}, {list(sizes)} does not multiply to it")
    return reshape(input, (*input.shape[:dim], *parts, *input.shape[dim + 1 :]))


def contiguous(input: Tensor) -> Tensor:
    """The same values in row-major memory."""
    return apply(Contiguous(), input)


def clone(input: Tensor) -> Tensor:
    """A copy in memory of its own."""
    return apply(Contiguous(copy=True), input)


def cut(input: Tensor, starts: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Tensor:
    return apply(Slice(tuple(starts), tuple(steps), tuple(shape)), input)


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`length` elements of axis `dim` from `start` on (negative: from the end)."""
    dim = axis_of("narrow", dim, input.ndim)
    start += input.shape[dim] if start < 0 else 0
    if not (0 <= start <= input.shape[dim] and 0 <= length <= input.shape[dim] - start):
        raise IndexError(f"narrow: {length} elements from {start} leave an axis of length {input.shape[dim]}")
    starts, shape = [0] * input.ndim, list(input.shape)
    starts[dim], shape[dim] = (start if length else 0), length
    return cut(input, starts, [1] * input.ndim, shape)


def flip(input: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Reversed along these axes."""
    axes = {axis_of("flip", d, input.ndim) for d in ((dims,) if isinstance(dims, int) else dims)}
    starts = [n - 1 if a in axes and n else 0 for a, n in enumerate(input.shape)]
    return cut(input, starts, [-1 if a in axes else 1 for a in range(input.ndim)], input.shape)


def split(input: Tensor, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces along `dim`: of split_size each (the last may be smaller), or of the lengths given."""
    dim = axis_of("split", dim, input.ndim)
    n = input.shape[dim]
    if isinstance(split_size, int):
        if split_size <= 0:
            raise ValueError(f"split: split_size must be > 0, got {split_size}")
        lengths = [min(split_size, n - start) for start in range(0, n, split_size)] or [0]
    else:
        lengths = list(split_size)
        if sum(lengths) != n or min(lengths, default=0) < 0:
            raise ShapeError(f"split: lengths {lengths} do not add up to axis {dim} of length {n}")
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(narrow(input, dim, start, length) for start, length in zip(starts, lengths))


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal length along `dim` (the last may be smaller)."""
    if chunks <= 0:
        raise ValueError(f"chunk: chunks must be > 0, got {chunks}")
    return split(input, max(1, -(-input.shape[axis_of("chunk", dim, input.ndim)] // chunks)), dim)


def repeat(input: Tensor, *repeats: int | Sequence[int]) -> Tensor:
    """input repeated repeats[i] times along axis i; new axes come in front."""
    times = sizes(repeats)
    if len(times) < input.ndim or min(times, default=0) < 0:
        raise ShapeError(
            f"repeat: {list(times)} for {list(input.shape)}; one number of 0 or more for each axis, more add "
            "axes in front"
        )
    shape = (*(1,) * (len(times) - input.ndim), *input.shape)
    paired = reshape(input, [m for n in shape for m in (1, n)])
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


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """input with `value` around it. pad counts from the last axis: (left, right, top, bottom, ...); negative cuts."""
    if mode != "constant":
        raise ValueError(f"pad: mode {mode!r}; only 'constant' is there")
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise ShapeError(f"pad: {list(pad)}; two numbers an axis, at most {input.ndim} axes")
    for i in range(0, len(pad), 2):
        axis = input.ndim - 1 - i // 2
        before, after = int(pad[i]), int(pad[i + 1])
        input = narrow(input, axis, max(-before, 0), input.shape[axis] - max(-before, 0) - max(-after, 0))
        parts = [input]
        for length, front in ((before, True), (after, False)):
            if length > 0:
                shape = (*input.shape[:axis], length, *input.shape[axis + 1 :])
                border = expand(elementwise.number("pad", value, input.dtype, input), shape)
                parts = [border, *parts] if front else [*parts, border]
        input = cat(parts, axis) if len(parts) > 1 else input
    return input


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """input with zeros above the diagonal of its last two axes."""
    return elementwise.where(band(input, "tril") <= diagonal, input, zero(input))


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """input with zeros below the diagonal of its last two axes."""
    return elementwise.where(band(input, "triu") >= diagonal, input, zero(input))


def zero(input: Tensor) -> bool | int:
    return False if input.dtype == "bool" else 0


def band(input: Tensor, name: str) -> Tensor:
    """column - row for the last two axes, i32."""
    from nn.ops.create import arange

    if input.ndim < 2:
        raise ShapeError(f"{name}: {list(input.shape)}; takes at least two axes")
    rows, cols = input.shape[-2:]
    return arange(cols, device=input.device) - reshape(arange(rows, device=input.device), (rows, 1))


def index(input: Tensor, key: Any) -> Tensor:
    """input[key] for integers, slices with a positive step, None and ... (as NumPy's basic indexing)."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for k in keys:
        if not (k is None or k is Ellipsis or isinstance(k, slice | int | np.integer)) or isinstance(k, bool):
            raise IndexError(
                f"index: got a {type(k).__name__}; integers, slices, None and ... are there. To look rows up by a "
                "tensor use nn.functional.embedding, to choose by a mask use where"
            )
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > input.ndim or sum(k is Ellipsis for k in keys) > 1:
        raise IndexError(f"index: {used} indices for {input.ndim} axes of {list(input.shape)} (and at most one ...)")
    where = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[where : where + 1] = [slice(None)] * (input.ndim - used)
    starts, steps, lengths, shape = [], [], [], []
    axis = 0
    for k in keys:
        if k is None:
            shape.append(1)
            continue
        n = input.shape[axis]
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
    whole = lengths == list(input.shape) and not any(starts) and all(s == 1 for s in steps)
    return reshape(input if whole else cut(input, starts, steps, lengths), shape)


__all__ = [
    "broadcast_tensors", "broadcast_to", "cat", "chunk", "clone", "contiguous", "expand", "flatten", "flip", "narrow",
    "pad", "permute", "repeat", "reshape", "split", "squeeze", "stack", "transpose", "tril", "triu", "unflatten",
    "unsqueeze",
]  # fmt: skip
add_methods(globals())
