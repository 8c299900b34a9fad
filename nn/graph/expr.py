"""Expressions: what one generated kernel computes for one element, over values that are in memory.

An expression is a small immutable graph. Views never appear in it: they have become strides of the loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nn.graph.ir import Arange, Cast, Map, Strided, View
from nn.ops.base import Array, Spec

if TYPE_CHECKING:
    from nn.quant.weight import Weight


@dataclass(eq=False)
class Value:
    """A piece of device memory that steps read and write. `array` is set if it exists before the program runs."""

    spec: Spec
    array: Array | Weight | None = None
    argument: int | None = None  # it is this argument of a traced function: its memory changes from call to call
    home: tuple[Value, int] | None = None  # it lies inside another value, from this element on

    @property
    def owner(self) -> Value:
        """The value whose memory it is in: itself, unless it has a home."""
        return self if self.home is None else self.home[0]


@dataclass(frozen=True, eq=False)
class Expr:
    dtype: str

    @property
    def loads(self) -> tuple[Load, ...]:
        return ()

    @property
    def cost(self) -> int:
        """Arithmetic operations, shared ones counted once a use."""
        return 0

    def seen_through(self, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        """The expression whose element at an index is this one's element where `view` points; None if a load cannot."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Scalar(Expr):
    value: float | int | bool

    def seen_through(self, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        return self


@dataclass(frozen=True, eq=False)
class Index(Expr):
    """start + step * position, for the position that `at` gives."""

    op: Arange
    at: Strided

    def seen_through(self, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        at = view.apply(self.at)
        return None if at is None else Index(self.dtype, self.op, at)


@dataclass(frozen=True, eq=False)
class Load(Expr):
    value: Value
    at: Strided

    @property
    def loads(self) -> tuple[Load, ...]:
        return (self,)

    def seen_through(self, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        at = view.apply(self.at)
        return None if at is None else Load(self.dtype, self.value, at)


@dataclass(frozen=True, eq=False)
class Apply(Expr):
    op: Map | Cast
    args: tuple[Expr, ...]
    _loads: tuple[Load, ...] = field(init=False)
    _cost: int = field(init=False)

    def __post_init__(self) -> None:
        distinct = {(load.value, load.at): load for arg in self.args for load in arg.loads}
        object.__setattr__(self, "_loads", tuple(distinct.values()))
        object.__setattr__(self, "_cost", 1 + sum(arg.cost for arg in self.args))

    @property
    def loads(self) -> tuple[Load, ...]:
        return self._loads

    @property
    def cost(self) -> int:
        return self._cost

    def seen_through(self, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        if self not in memo:
            args = [arg.seen_through(view, memo) for arg in self.args]
            moved = tuple(arg for arg in args if arg is not None)
            memo[self] = Apply(self.dtype, self.op, moved) if len(moved) == len(args) else None
        return memo[self]


def walk(expr: Expr) -> list[Expr]:
    """Every distinct sub-expression, operands first."""
    order: list[Expr] = []
    done: set[Expr] = set()

    def visit(e: Expr) -> None:
        if e in done:
            return
        done.add(e)
        if isinstance(e, Apply):
            for arg in e.args:
                visit(arg)
        order.append(e)

    visit(expr)
    return order


def scalars(expr: Expr) -> int:
    """How many numbers the kernel gets through Params."""
    return sum(1 if isinstance(e, Scalar) else 2 if isinstance(e, Index) else 0 for e in walk(expr))


def coalesce(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring axes that every stride set steps through as if they were one, and drop axes of length 1."""
    axes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, n in enumerate(shape):
        if n == 1:
            continue
        if axes and all(s[-1] == own[axis] * n for s, own in zip(steps, strides)):
            axes[-1] *= n
            for s, own in zip(steps, strides):
                s[-1] = own[axis]
        else:
            axes.append(n)
            for s, own in zip(steps, strides):
                s.append(own[axis])
    return tuple(axes), [tuple(s) for s in steps]
