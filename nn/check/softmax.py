"""Checks of shaders/softmax/: softmax and log-softmax in both variants, with and without subgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.check.rows import HOWS, libraries, needs, runs
from nn.ops.rows import RowVariant
from nn.ops.softmax import record_softmax

if TYPE_CHECKING:
    from gpu import Device

# WGSL lets exp(d) be wrong by 3 + 2 |d| ulp of 6e-8, where d = x - max: that dominates every rounding of the sums.
EXP_ULP = 2.0**-24


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float64; rows of nothing but minus infinity give 0."""
    top = np.max(x, axis=-1, keepdims=True)
    weights = np.where(np.isneginf(x), 0.0, np.exp(x - np.where(np.isneginf(top), 0.0, top)))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0.0, 1.0, total)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float64; minus infinity stays."""
    top = np.max(x, axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    total = np.exp(x - top).sum(-1, keepdims=True)
    return np.where(np.isneginf(x), x, x - top - np.log(np.where(total == 0.0, 1.0, total)))


def cases() -> list[Case]:
    """Entry x dtype x (serial, tree, subgroups)."""
    found = []
    for how in HOWS:
        files = (f"softmax/softmax{'_serial' if how == 'serial' else ''}.wgsl", *libraries(how))
        for elem in ("f32", "f16"):
            for log in (False, True):
                entry = "log_softmax" if log else "softmax"
                run = partial(_run, elem=elem, log=log, how=how)
                found.append(Case(f"softmax/softmax {entry}: {how} {elem}", run, files, needs(how, elem)))
    return found


def _run(device: Device, rng: np.random.Generator, *, elem: str, log: bool, how: str) -> Iterator[Outcome]:
    def outcome(variant: RowVariant, values: np.ndarray, label: str) -> Outcome:
        x, x64 = upload(device, values, elem)
        out = poisoned(device, x.shape, elem)
        record = device.recorder()
        record_softmax(record, x, out, log=log, variant=variant)
        record.submit()
        with np.errstate(invalid="ignore"):
            right = (log_softmax if log else softmax)(x64)
        finite = x64[np.isfinite(x64)]
        spread = float(finite.max() - finite.min()) if finite.size else 0.0
        error = (8 + 4 * min(spread, 100.0)) * EXP_ULP  # two roundings of d and of the sum besides exp's own
        # softmax: relative to the value. log_softmax: x, max and log of the sum are each rounded once.
        rtol = STORE_ERROR[elem] + error
        atol = (
            STORE_FLOOR[elem]
            + (error if log else 1e-37)
            + (2e-7 * float(np.abs(finite).max()) if log and finite.size else 0.0)
        )
        return Outcome(fetch(device, out), right, rtol, atol, label=f"{variant.name}, {label}")

    ways = list(runs(device.caps, how, every=elem == "f32" and not log, folded=elem == "f32" and not log))
    for variant, shape in ways:
        yield outcome(variant, rng.standard_normal(shape) * 4, str(shape))
    for variant in dict.fromkeys(variant for variant, _ in ways):
        yield from _extremes(rng, elem, partial(outcome, variant), log=log, cols=80 if variant.pack == 4 else 77)


def _extremes(
    rng: np.random.Generator, elem: str, outcome: Callable[[np.ndarray, str], Outcome], *, log: bool, cols: int
) -> Iterator[Outcome]:
    extremes = rng.uniform(-80, 80, (5, cols))
    yield outcome(extremes, "logits to 80")
    extremes[0] = -np.inf  # masked throughout
    extremes[1, 1:] = -np.inf  # one element left
    extremes[2, :-1] = -np.inf
    extremes[3, rng.permutation(cols)[:40]] = -np.inf
    yield outcome(extremes, "masked")
    if not log:
        # Values by hand, to the digits they are given with. The fourth is masked.
        by_hand = {
            "f32": ([1000, 1002, 999, -np.inf], [0.114195, 0.843795, 0.042010, 0]),
            "f16": ([12, 11, 8, -np.inf], [0.7214, 0.2654, 0.0132, 0]),
        }
        values, right = by_hand[elem]
        yield replace(
            outcome(np.array([values]), "by hand"), want=np.array([right]), atol={"f32": 1e-6, "f16": 3e-4}[elem]
        )
