"""What dispatches are for: names, shapes and amounts of work that a recording carries beside its commands.

Replaying never looks at them; gpu.profile does. A Scope is put around recording code:

    with record.scope(Scope("rms_norm", path="layers.3.attention", cost=Cost(4e3, 8e3, 4e3))):
        record(kernel, ...)

Scopes may be nested: a step on the way, such as the norm ahead of a product, is a scope inside the product's. A cost is
that of the dispatches which are in no inner scope with a cost of its own; several of them share it by their time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from gpu.device import Device


@dataclass(frozen=True)
class Cost:
    """Work in floating point (or integer) operations, bytes read and bytes written, each piece of memory once."""

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.written + other.written)

    def __mul__(self, share: float) -> Cost:
        return Cost(self.flops * share, self.read * share, self.written * share)


class Scope:
    """What some dispatches do.

    name: the operation ("rms_norm"). path: where in the model ("layers.3.attention"). kind: the group it is counted
    in ("attention", "linear", "norm", ...). operands, results: their shapes as text. cost: the work of the scope's own
    dispatches; it gets the bytes that the replay wrote as its state (Plan.replay), None where there were none, and how
    often the plan ran before in the same replay (Plan.repeated), so that work which depends on a position is counted
    for that position.
    """

    __slots__ = ("_cost", "kind", "name", "operands", "parent", "path", "results")

    def __init__(
        self,
        name: str,
        *,
        path: str = "",
        kind: str = "other",
        operands: Sequence[str] = (),
        results: Sequence[str] = (),
        cost: Callable[[bytes | None, int], Cost] | Cost | None = None,
    ) -> None:
        self.name, self.path, self.kind = name, path, kind
        self.operands, self.results = operands, results
        self.parent: Scope | None = None  # the scope it was opened in
        self._cost = cost

    def cost(self, state: bytes | None = None, turn: int = 0) -> Cost | None:
        """The work of the scope's own dispatches, or None if nobody said."""
        return self._cost(state, turn) if callable(self._cost) else self._cost

    def __repr__(self) -> str:
        return f"Scope({self.path + ': ' if self.path else ''}{self.name})"


_NOTHING = contextlib.nullcontext()


def watched(device: Device, name: str, **details: Any) -> contextlib.AbstractContextManager[Any]:
    """A stretch of host time that a profile of the device shows, where there is one."""
    return _NOTHING if device.profile is None else device.profile.span(name, **details)


# --- costs of scopes over dispatches ---------------------------------------------------------------------------------


def _outward(scope: Scope | None) -> Iterator[Scope]:
    while scope is not None:
        yield scope
        scope = scope.parent


def costed(scope: Scope | None, state: bytes | None) -> Scope | None:
    """The nearest scope around a dispatch that says what it costs."""
    return next((s for s in _outward(scope) if s.cost(state) is not None), None)


def placed(scope: Scope | None) -> Scope | None:
    """The nearest scope with a place in a model; the nearest one at all where there is none."""
    return next((s for s in _outward(scope) if s.path), scope)


def joined(scope: Scope, inner: Scope | None) -> str:
    """The name of a dispatch of an inner scope: both names."""
    return scope.name if inner is None else f"{scope.name}: {inner.name}"


def spread(scopes: Sequence[tuple[Scope | None, int]], seconds: np.ndarray, state: bytes | None) -> list[Cost | None]:
    """The cost of each dispatch: that of the nearest scope which says one, shared by time among those it is nearest
    to. scopes: of each dispatch, with the number of its turn where a plan is repeated."""
    owners = [None if (owner := costed(scope, state)) is None else (owner, turn) for scope, turn in scopes]
    spent: dict[tuple[Scope, int], float] = {}
    count: dict[tuple[Scope, int], int] = {}
    for owner, took in zip(owners, seconds.tolist(), strict=True):
        if owner is not None:
            spent[owner] = spent.get(owner, 0.0) + took
            count[owner] = count.get(owner, 0) + 1
    costs = {(scope, turn): scope.cost(state, turn) or Cost() for scope, turn in spent}
    return [
        None if owner is None else costs[owner] * (took / spent[owner] if spent[owner] > 0 else 1 / count[owner])
        for owner, took in zip(owners, seconds.tolist(), strict=True)
    ]
