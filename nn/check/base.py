"""A check: one kernel on one input against a float64 NumPy truth. `anygpu check` and the tests run the same list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpu import Capabilities, Device


FOLD = 7  # workgroups a row in second runs: few enough that small inputs have rows, the last one with some to spare


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
    `shaders` lists the .wgsl files it exercises, for coverage and mutation tests. `fits`: whether the device's limits
    allow its kernels; None: every device's do.
    """

    name: str
    run: Callable[[Device, np.random.Generator], Iterable[Outcome]]
    shaders: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    fits: Callable[[Capabilities], bool] | None = None


def compare(outcome: Outcome) -> str | None:
    """None if the outcome is right, else what is wrong: how many values, the worst one, and where."""
    got, want = np.asarray(outcome.got), np.asarray(outcome.want)
    if got.shape != want.shape:
        return f"{outcome.label}: shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return None
    exact = outcome.rtol == 0.0 and outcome.atol == 0.0
    if exact and got.dtype.kind in "iub":
        bad = got != want
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    else:
        with np.errstate(invalid="ignore"):  # NaN and infinities are compared by hand
            g, w = got.astype(np.float64), want.astype(np.float64)
            error = np.abs(g - w)
            same = (g == w) | (np.isnan(g) & np.isnan(w))
            bad = ~(same | (error <= outcome.atol + outcome.rtol * np.abs(w)))
    if not bad.any():
        return None
    where = np.unravel_index(int(np.argmax(np.where(bad, np.nan_to_num(error, nan=np.inf), -1.0))), got.shape)
    place = tuple(int(i) for i in where)
    return (
        f"{outcome.label}: {int(bad.sum())} of {got.size} wrong, "
        f"worst at {place}: got {got[where]}, expected {want[where]}"
    )


def lacking(case: Case, device: Device) -> str | None:
    """Why this device cannot run the case ("the device has no f16"), or None if it can."""
    absent = [need for need in sorted(case.needs) if not getattr(device.caps, need)]
    if absent:
        return f"the device has no {' and no '.join(absent)}"
    return None if case.fits is None or case.fits(device.caps) else "its workgroups are larger than the device's"


def run_case(case: Case, device: Device, *, twice: bool = False) -> str | None:
    """Run one case on a device. None if it passes, otherwise what is wrong. Inputs are seeded by the case's name.

    twice: run it a second time and compare the bits of both runs: one device gives the same bits every time. Then grids
    are folded into rows of FOLD workgroups, as those over the device's limit are, which changes no bit either.
    """
    seen: list[np.ndarray] = []
    for outcome in case.run(device, _generator(case)):
        if problem := compare(outcome):
            return problem
        seen.append(np.asarray(outcome.got))
    if not seen:
        return "the case compared nothing"
    if not twice:
        return None
    fold_at, device.fold_at = device.fold_at, FOLD
    try:
        again = list(case.run(device, _generator(case)))
    finally:
        device.fold_at = fold_at
    if len(again) != len(seen):
        return f"a second run compared {len(again)} results, the first {len(seen)}"
    for before, outcome in zip(seen, again, strict=True):
        if problem := _other_bits(before, np.asarray(outcome.got)):
            return f"{outcome.label}: a second run gave other bits: {problem}"
    return None


def _generator(case: Case) -> np.random.Generator:
    return np.random.default_rng(list(case.name.encode()))


def _other_bits(first: np.ndarray, second: np.ndarray) -> str | None:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return f"{second.dtype} {second.shape} after {first.dtype} {first.shape}"
    width = first.dtype.itemsize
    a, b = (np.frombuffer(x.tobytes(), np.uint8).reshape(-1, width) for x in (first, second))
    differ = (a != b).any(1)
    if not differ.any():
        return None
    place = int(np.argmax(differ))
    values = f"{first.reshape(-1)[place]} then {second.reshape(-1)[place]}"
    return f"{int(differ.sum())} of {differ.size}, first at {place}: {values}"
