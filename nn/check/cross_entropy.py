"""Checks of shaders/loss/: cross-entropy of rows, each entry in both variants, with and without subgroups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.check.rows import HOWS, libraries, needs, runs
from nn.ops.base import Array
from nn.ops.cross_entropy import record_cross_entropy

if TYPE_CHECKING:
    from gpu import Device

IGNORED = -7


def cases() -> list[Case]:
    """(serial, tree, subgroups) x dtype of the logits x with and without class weights."""
    found = []
    for how in HOWS:
        for elem, weighted in (("f32", False), ("f32", True), ("f16", False)):
            file = f"loss/cross_entropy{'_serial' if how == 'serial' else ''}.wgsl"
            name = f"loss/cross_entropy: {how} {elem}{' weighted' * weighted}"
            run = partial(_rows, elem=elem, weighted=weighted, how=how)
            found.append(Case(name, run, (file, "loss/cross_entropy_rows.wgsl", *libraries(how)), needs(how, elem)))
    return found


def cross_entropy(
    x: np.ndarray, goal: np.ndarray, weight: np.ndarray, smoothing: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss, log of the sum of exponentials, and weight of each row in float64. Classes that are none give NaN."""
    count = x.shape[1]
    top = x.max(1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(1)) + top[:, 0]
    y = np.clip(goal, 0, count - 1)
    own, terms = weight[y], weight * (lse[:, None] - x)
    loss = (1 - smoothing) * terms[np.arange(len(x)), y] + smoothing / count * terms.sum(1)
    outside = (goal < 0) | (goal >= count)
    loss, own = np.where(outside, np.nan, loss), np.where(outside, np.nan, own)
    ignored = goal == IGNORED
    return np.where(ignored, 0.0, loss), lse, np.where(ignored, 0.0, own)


def _rows(device: Device, rng: np.random.Generator, *, elem: str, weighted: bool, how: str) -> Iterator[Outcome]:
    main = elem == "f32" and not weighted
    for turn, (variant, shape) in enumerate(runs(device.caps, how, every=main, folded=main)):
        x, x64 = upload(device, rng.standard_normal(shape) * rng.uniform(0.1, 10) + rng.standard_normal() * 20, elem)
        goal = rng.integers(0, shape[1], shape[0])
        goal[1::5], goal[2::7] = IGNORED, shape[1]
        weight, weight64 = upload(device, rng.uniform(0.2, 2, shape[1]))
        smoothing = float(np.float32((0.0, 0.1, 1.0)[turn % 3]))
        goals = Array(device.upload(goal.astype(np.int32)), goal.shape, "i32")
        out = [poisoned(device, shape[:1]) for _ in range(3)]
        record = device.recorder()
        operands = (weight, *out) if weighted else out
        record_cross_entropy(record, x, goals, *operands, ignored=IGNORED, smoothing=smoothing, variant=variant)
        record.submit()
        want = cross_entropy(x64, goal, weight64 if weighted else np.ones(shape[1]), smoothing)
        # lse is right to a few units of its size, terms are differences of numbers of that size.
        size = float(np.abs(x64).max()) + np.log(shape[1])
        for got, right, label in zip(out, want, ("loss", "lse", "kept"), strict=True):
            yield Outcome(fetch(device, got), right, 1e-5, 4e-7 * size, label=f"{label}, {variant.name}, {shape}")
