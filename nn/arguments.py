"""Arguments as people write them, turned into what operations take: host data, axes, sizes, shapes that broadcast."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.ops.base import DTYPES, ShapeError
from nn.quant.formats import bf16_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

NATURAL = {"float32": "f32", "float16": "f16", "int32": "i32", "uint32": "u32", "uint8": "u8", "bool": "bool"}


def host_array(data: Any, dtype: str | None) -> tuple[np.ndarray, str]:
    """`data` as it is stored, and its dtype. Raises TypeError or ValueError where values would be lost unasked."""
    given = data if isinstance(data, np.ndarray | np.generic) else None
    array = np.asarray(data)
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"Tensor: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if dtype is None:
        if given is None and array.dtype == np.float64:
            dtype = "f32"
        elif array.dtype == np.int64:
            dtype = "i32"
        elif array.dtype.name in NATURAL:
            dtype = NATURAL[array.dtype.name]
        else:
            raise TypeError(
                f"Tensor: {array.dtype} data has no dtype on the device; say what it becomes, e.g. dtype='f32'"
            )
    if dtype == "bf16":
        return bf16_bits(array), dtype
    if dtype == "bool":
        return (array != 0).astype(np.uint32), dtype
    kind = np.dtype(DTYPES[dtype][1])
    if kind.kind in "iu" and array.dtype.kind in "iuf" and array.size:
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        least, most = array.min(), array.max()
        if not (low <= np.trunc(least) and np.trunc(most) <= high):  # NaN does not fit either
            raise ValueError(f"Tensor: values {least}..{most} do not fit {dtype} ({low}..{high})")
    with np.errstate(over="ignore"):  # too large for f16 or f32: infinity, as everywhere
        return np.ascontiguousarray(array.astype(kind, copy=False)).reshape(array.shape), dtype


def axis_of(name: str, dim: object, ndim: int) -> int:
    """`dim` counted from the front. Raises IndexError where there is no such axis, TypeError for what is no number."""
    if not isinstance(dim, int | np.integer):
        raise TypeError(f"{name}: dim is {dim!r}; expected a whole number")
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"{name}: dim {dim} is out of range for {ndim} axes ({-ndim}..{ndim - 1})")
    return int(dim) % ndim if ndim else 0


def sizes(args: Sequence[Any]) -> tuple[int, ...]:
    """f(2, 3) and f((2, 3)) mean the same."""
    if len(args) == 1 and not isinstance(args[0], int | np.integer):
        args = args[0]
    try:
        return tuple(operator.index(n) for n in args)
    except TypeError:
        raise TypeError(f"sizes are whole numbers, got {args!r}") from None


def broadcast_shapes(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all of them broadcast to. Raises ShapeError."""
    rank = max(len(shape) for shape in shapes)
    out = []
    for axis in range(-rank, 0):
        lengths = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(lengths) > 1:
            raise ShapeError(
                f"{name}: shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast: "
                f"axis {axis} has lengths {sorted(lengths)}; lengths must be equal or 1"
            )
        out.append(lengths.pop() if lengths else 1)
    return tuple(out)
