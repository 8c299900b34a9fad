"""A check: one kernel on one input, compared with a float64 NumPy truth. `anygpu check` and the test suite run the same list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpu import Device


@dataclass(frozen=True)
class Outcome:
    """What the device gave and what is right. Passes when |got - want| <= atol + rtol * |want| everywhere; NaN fails
    unless `want` is NaN there too. Integers are compared exactly (tolerances zero)."""

    got: np.ndarray
    want: np.ndarray
    rtol: float = 0.0
    atol: float = 0.0
    label: str = "out"


@dataclass(frozen=True)
class Case:
    """One check. `name` reads "file entry: variant, shape", e.g. "norm/rms_norm: f16 3x257 subgroups".

    `run(device, rng)` yields outcomes; `needs` names capabilities ("f16", "subgroups") without which it is skipped.
    `shaders` lists the .wgsl files it exercises, for coverage and mutation tests.
    """

    name: str
    run: Callable[[Device, np.random.Generator], Iterable[Outcome]]
    shaders: tuple[str, ...]
    needs: frozenset[str] = frozenset()
