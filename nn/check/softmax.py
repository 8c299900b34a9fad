"""Checks of shaders/softmax/: softmax and log-softmax in both variants, with and without subgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.ops.softmax import record_softmax

if TYPE_CHECKING:
    from gpu import Device

SHAPES = [(1, 1), (3, 5), (7, 64), (8, 65), (9, 6), (2, 257), (3, 512), (2, 513), (2, 1031)]
FOLDED = {False: (65_537, 3), True: (524_289, 2)}  # one workgroup past 65,535 of them
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
    for serial, subgroups in ((True, False), (False, False), (False, True)):
        how = "serial" if serial else "subgroups" if subgroups else "tree"
        files = (f"softmax/softmax{'_serial' if serial else ''}.wgsl",)
        files += () if serial else (f"lib/reduce{'_subgroup' if subgroups else ''}.wgsl",)
        for elem in ("f32", "f16"):
            needs = frozenset({"f16"} if elem == "f16" else set()) | ({"subgroups"} if subgroups else set())
            for log in (False, True):
                entry = "log_softmax" if log else "softmax"
                run = partial(_run, elem=elem, log=log, serial=serial, subgroups=subgroups)
                found.append(Case(f"softmax/softmax {entry}: {how} {elem}", run, files, needs))
    return found


def _run(
    device: Device, rng: np.random.Generator, *, elem: str, log: bool, serial: bool, subgroups: bool
) -> Iterator[Outcome]:
    def outcome(values: np.ndarray, label: str) -> Outcome:
        x, x64 = upload(device, values, elem)
        out = poisoned(device, x.shape, elem)
        record = device.recorder()
        record_softmax(record, x, out, log=log, serial=serial, subgroups=subgroups)
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
        return Outcome(fetch(device, out), right, rtol, atol, label=label)

    for shape in SHAPES + ([FOLDED[serial]] if elem == "f32" and not subgroups and not log else []):
        yield outcome(rng.standard_normal(shape) * 4, str(shape))
    extremes = rng.uniform(-80, 80, (5, 77))
    yield outcome(extremes, "logits to 80")
    extremes[0] = -np.inf  # masked throughout
    extremes[1, 1:] = -np.inf  # one element left
    extremes[2, :-1] = -np.inf
    extremes[3, rng.permutation(77)[:40]] = -np.inf
    yield outcome(extremes, "masked")
    if not log:
        # Values by hand, to the digits they are given with.
        by_hand = {
            "f32": ([1000, 1002, 999], [0.114195, 0.843795, 0.042010]),
            "f16": ([12, 11, 8], [0.7214, 0.2654, 0.0132]),
        }
        values, right = by_hand[elem]
        yield replace(
            outcome(np.array([values]), "by hand"), want=np.array([right]), atol={"f32": 1e-6, "f16": 3e-4}[elem]
        )
