"""jit for arguments of many lengths: they are padded to the next of a few, so that each of those is captured once.

    @jit(pad={"ids": 1}, buckets=(64, 128, 256), cut=1)
    def logits(ids, length):                    # length: how many of ids' columns are real, i32 without axes
        real = F.arange(ids.shape[1], device=ids.device) < length
        ...

Padding is zeros behind the end. What is right for it the function has to say, with `length`: a mask of attention, of a
mean, of a loss. cut takes it off the results again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.graph.jit import Jitted
from nn.ops.base import ShapeError
from nn.tape import no_grad
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device


Cut = int | Mapping[int | str, int] | None


class Bucketed:
    """A function under jit, for arguments whose length differs from call to call; `jit(pad=..., buckets=...)` makes it.

    pad: the axis that varies, by the name of each argument that has one; all of a call have the same length there.
    buckets: lengths to pad to. cut: the axis along which padding is taken off the result, where that is one tensor; for
    a dict or tuple, such axes by key or position.
    """

    def __init__(self, function: Callable[..., Any], pad: Mapping[str, int], buckets: Sequence[int], cut: Cut) -> None:
        functools.update_wrapper(self, function)
        self.jitted, self.name = Jitted(function), getattr(function, "__name__", type(function).__name__)
        self.pad, self.buckets, self.cut = dict(pad), sorted({int(n) for n in buckets}), cut
        self.signature = inspect.signature(function)
        names = set(self.signature.parameters)
        if not self.pad or not set(self.pad) <= names - {"length"}:
            raise ValueError(
                f"jit {self.name}: pad names {sorted(self.pad)}; the function's arguments are {sorted(names)}"
            )
        if not self.buckets or self.buckets[0] < 1:
            raise ValueError(f"jit {self.name}: buckets are {list(buckets)}; expected lengths of 1 or more")
        self.told = "length" in names
        self._lengths: dict[tuple[Device, int], Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.told:
            kwargs = {**kwargs, "length": None}
        bound = self.signature.bind(*args, **kwargs)
        length, device = self.length_of(bound.arguments)
        bucket = next((n for n in self.buckets if n >= length), None)
        if bucket is None:
            raise ShapeError(
                f"jit {self.name}: a length of {length}; the longest bucket is {self.buckets[-1]}, add a longer one"
            )
        for name, axis in self.pad.items():
            bound.arguments[name] = padded(bound.arguments[name], axis, bucket)
        if self.told:
            key = (device, length)
            if key not in self._lengths:
                self._lengths[key] = Tensor(np.int32(length), device)
            bound.arguments["length"] = self._lengths[key]
        result = self.jitted(*bound.args, **bound.kwargs)
        if self.cut is None or length == bucket:
            return result
        if isinstance(self.cut, int):
            return self.shortened(result, self.cut, length)
        pieces: dict[Any, Any] = dict(result) if isinstance(result, dict) else dict(enumerate(result))
        pieces |= {key: self.shortened(pieces.get(key), axis, length) for key, axis in self.cut.items()}
        return pieces if isinstance(result, dict) else tuple(pieces.values())

    def length_of(self, arguments: Mapping[str, Any]) -> tuple[int, Device]:
        """The length that all padded arguments share, and their device."""
        lengths = {}
        for name, axis in self.pad.items():
            tensor = arguments.get(name)
            if not isinstance(tensor, Tensor) or not -tensor.ndim <= axis < tensor.ndim:
                raise TypeError(f"jit {self.name}: {name} is {tensor!r}; expected a tensor with an axis {axis} to pad")
            lengths[name] = tensor.shape[axis]
        if len(set(lengths.values())) != 1:
            raise ShapeError(f"jit {self.name}: padded arguments have lengths {lengths}; expected one length")
        return next(iter(lengths.values())), arguments[next(iter(self.pad))].device

    def shortened(self, tensor: Any, axis: int, length: int) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"jit {self.name}: cut is {self.cut!r}, and there the result is {type(tensor).__name__}; expected a "
                "tensor (cut: an axis for one tensor, or {key or position: axis})"
            )
        return tensor.narrow(axis, 0, length)  # pyright: ignore[reportAttributeAccessIssue]


def padded(tensor: Tensor, axis: int, length: int) -> Tensor:
    """The tensor with zeros behind its end along an axis."""
    more = length - tensor.shape[axis]
    if not more:
        return tensor
    with no_grad():
        behind = [0, 0] * (tensor.ndim - 1 - axis % tensor.ndim) + [0, more]
        return tensor.pad(behind).detach()  # pyright: ignore[reportAttributeAccessIssue]


__all__ = ["Bucketed"]
