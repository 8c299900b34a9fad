"""Random numbers by counter: a number depends on the seed, on how many draws were made before, and on its place.

So nothing is stored, a mask is made again where it is needed, and an interrupted run continues with the same numbers.
Inside a jitted function the host writes seed and draw number before each replay: every replay draws afresh, and a
jitted loop draws what an unjitted one does.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.graph.ir import constant
from nn.graph.scopes import Trace, current_trace
from nn.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu import Device

Draw = tuple[Tensor, Tensor]  # seed and draw number, u32 without axes


class Generator:
    """A source of random numbers on a device. As torch.Generator: seeded, with a state that can be kept and put back.

    seed: 0 to 2^32 - 1. draws: how many were made so far.
    """

    def __init__(self, device: Device, seed: int = 0) -> None:
        self.device = device
        self._state = Tensor(np.zeros(2, np.uint32), device)  # seed and draw number, as recordings read them
        self._traced: weakref.WeakKeyDictionary[Trace, list[int]] = weakref.WeakKeyDictionary()
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> Generator:
        """Start over with this seed. Returns self. Raises ValueError where it does not fit 32 bits."""
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 32:
            raise ValueError(f"Generator: seed is {seed!r}; expected a whole number from 0 to 2^32 - 1")
        self.seed, self.draws = int(seed), 0
        return self

    def get_state(self) -> dict[str, int]:
        """What set_state takes back."""
        return {"seed": self.seed, "draws": self.draws}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue where get_state was called."""
        self.manual_seed(state["seed"])
        self.draws = int(state["draws"])

    def draw(self) -> Draw:
        """Seed and number of the next draw, for functions that make random numbers."""
        replayed = _log.next()
        if replayed is not None:
            return replayed
        trace = current_trace()
        if trace is None:
            made = tuple(Tensor(constant(v, "u32"), self.device) for v in (self.seed, self.draws % (1 << 32)))
            self.draws += 1
        else:
            uses = self._traced.get(trace)
            if uses is None:
                uses = self._traced[trace] = [0]
                trace.before.append(lambda: self._advance(uses))
            made = (self._state[0], self._state[1] + uses[0])
            uses[0] += 1
        _log.note(made)
        return made  # pyright: ignore[reportReturnType]

    def _advance(self, uses: list[int]) -> None:
        """Before a replay that makes `uses` draws."""
        self._state.array().buffer.write(np.array([self.seed, self.draws % (1 << 32)], np.uint32))
        self.draws += uses[0]


class _Log(threading.local):
    """Draws that this thread keeps, or makes again."""

    def __init__(self) -> None:
        self.kept: list[list[Any]] = []
        self.again: list[Iterator[Any]] = []

    def next(self) -> Draw | None:
        return next(self.again[-1]) if self.again else None

    def note(self, made: Any) -> None:
        for kept in self.kept:
            kept.append(made)


_log = _Log()


@contextlib.contextmanager
def kept() -> Iterator[list[Draw]]:
    """The draws that are made in the block, for `again`."""
    draws: list[Draw] = []
    _log.kept.append(draws)
    try:
        yield draws
    finally:
        _log.kept.pop()


@contextlib.contextmanager
def again(draws: list[Draw]) -> Iterator[None]:
    """The block makes these draws once more: recomputation sees the same numbers."""
    _log.again.append(iter(draws))
    try:
        yield
    finally:
        _log.again.pop()
