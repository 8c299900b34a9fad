"""Learning rates that change from step to step: a factor of each group's first rate, as a function of the step.

`step()` once an optimizer's step, as torch.optim.lr_scheduler; it also works around a jitted step, which reads the rate
before each replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nn.optim.optimizer import Optimizer

Factor = Callable[[int], float]


class LambdaLR:
    """Sets every group's lr to its first one times factor(step), step 0 at once. As torch's."""

    def __init__(self, optimizer: Optimizer, factor: Factor) -> None:
        self.optimizer, self.factor, self.steps = optimizer, factor, 0
        self.base = [group["lr"] for group in optimizer.param_groups]
        self._set()

    def step(self) -> None:
        """Go on to the next step's rate."""
        self.steps += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """The rate of each group now."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "base": list(self.base)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.steps, self.base = int(state["steps"]), list(state["base"])  # pyright: ignore[reportArgumentType]
        self._set()

    def _set(self) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * self.factor(self.steps)


def constant() -> Factor:
    """1."""
    return lambda step: 1.0


def linear(total: int, *, warmup: int = 0, floor: float = 0.0) -> Factor:
    """Up from 0 over `warmup` steps, then in a straight line to `floor` at step `total`."""
    check("linear", total, warmup)
    return lambda step: rise(step, warmup, lambda t: 1.0 - (1.0 - floor) * t, total)


def cosine(total: int, *, warmup: int = 0, floor: float = 0.1) -> Factor:
    """Up from 0 over `warmup` steps, then down half a cosine to `floor` at step `total`. Loshchilov & Hutter 2017,
    arXiv:1608.03983, without restarts."""
    check("cosine", total, warmup)
    return lambda step: rise(step, warmup, lambda t: floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * t)), total)


def steps(every: int, gamma: float = 0.1) -> Factor:
    """Times gamma after every so many steps. As torch's StepLR."""
    if every < 1:
        raise ValueError(f"steps: every is {every}; expected 1 or more")
    return lambda step: gamma ** (step // every)


def one_cycle(total: int, *, start: float = 0.04, peak_at: float = 0.3, floor: float = 4e-6) -> Factor:
    """From `start` up to 1 at peak_at * total, down to `floor`, by half cosines.

    Smith & Topin 2019, arXiv:1708.07120.
    """
    check("one_cycle", total, 0)
    top = max(peak_at * total, 1.0)

    def factor(step: int) -> float:
        low, t = (start, 1.0 - step / top) if step < top else (floor, min((step - top) / max(total - top, 1.0), 1.0))
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * t))

    return factor


def rise(step: int, warmup: int, fall: Callable[[float], float], total: int) -> float:
    """A straight line up to 1, then fall(t) with t from 0 to 1."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return fall(min((step - warmup) / max(total - warmup, 1), 1.0))


def check(name: str, total: int, warmup: int) -> None:
    if total < 1 or not 0 <= warmup <= total:
        raise ValueError(f"{name}: total {total}, warmup {warmup}; expected 0 <= warmup <= total and total >= 1")
