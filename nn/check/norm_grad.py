"""Checks of shaders/norm/norm_grad.wgsl: the gradients of RMSNorm and LayerNorm, with and without subgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.check.rows import libraries, needs
from nn.ops.norm_grad import NormGradVariant, norm_grad_variant, record_norm_grad

if TYPE_CHECKING:
    from gpu import Device

# One element; odd; runs within a subgroup and across several, some without rows; rows that fill what is held, and not.
SHAPES = [
    (NormGradVariant(8, 1, 1), (1, 1)),
    (NormGradVariant(8, 3, 2), (5, 23)),
    (NormGradVariant(8, 2, 3, 32, 4), (70, 60)),
    (NormGradVariant(64, 1, 5, 64, 4), (17, 256)),
    (NormGradVariant(256, 2, 2, 256, 4), (3, 1028)),
]


def cases() -> list[Case]:
    """Each entry x (tree, subgroups) x dtype of rows and of the gain."""
    found = []
    for how in ("tree", "subgroups"):
        for elem, gain, entry in (
            ("f32", "f32", "affine"), ("f16", "f32", "gain"), ("f32", "f16", "gain"), ("f32", "f32", "plain"),
        ):  # fmt: skip
            for centred in (True, False):
                if entry == "affine" and not centred:
                    continue
                name = f"norm/norm_grad {entry}: {how} {elem} gain {gain}{' centred' * centred}"
                run = partial(_gradients, elem=elem, gain_type=gain, entry=entry, centred=centred, how=how)
                files = ("norm/norm_grad.wgsl", "reduce/parts.wgsl", *libraries(how))
                found.append(Case(name, run, files, needs(how, elem, gain)))
    return found


def norm_gradients(
    x: np.ndarray, dy: np.ndarray, gain: np.ndarray, *, eps: float, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx, dgain and dbias in float64."""
    n = x - x.mean(1, keepdims=True) * centred
    s = 1 / np.sqrt((n**2).mean(1, keepdims=True) + eps)
    n, g = n * s, dy * gain
    dx = s * (g - g.mean(1, keepdims=True) * centred - n * (g * n).mean(1, keepdims=True))
    return dx, (dy * n).sum(0), dy.sum(0)


def _gradients(
    device: Device,
    rng: np.random.Generator,
    *,
    elem: str,
    gain_type: str,
    entry: str,
    centred: bool,
    how: str,
) -> Iterator[Outcome]:
    ways = list(SHAPES)
    if entry == "affine":
        ways += [(v, s) for s in ((5000, 24), (9, 4100)) if (v := norm_grad_variant(device.caps, *s))]
    for variant, shape in ways:
        variant = replace(variant, subgroups=how == "subgroups")
        x, x64 = upload(device, rng.standard_normal(shape) + rng.standard_normal() * 4, elem)
        dy, dy64 = upload(device, rng.standard_normal(shape), elem)
        gain, gain64 = upload(device, rng.standard_normal(shape[1:]), gain_type)
        dx, dgain, dbias = (poisoned(device, x.shape, elem), *(poisoned(device, gain.shape, gain_type) for _ in "ab"))
        record = device.recorder()
        made = {"plain": [dx], "gain": [dx, dgain], "affine": [dx, dgain, dbias]}[entry]
        record_norm_grad(
            record, x, dy, None if entry == "plain" else gain, *made, eps=1e-2, centred=centred, variant=variant
        )
        record.submit()
        ones = np.ones(()) if entry == "plain" else gain64
        want = norm_gradients(x64, dy64, ones, eps=1e-2, centred=centred)
        for array, right, label in zip(made, want, ("dx", "dgain", "dbias")):
            atol = STORE_FLOOR[array.dtype] + 2e-6 * max(float(np.abs(right).max()), 1.0) + 1e-6 * shape[0] ** 0.5
            rtol = 1e-5 + STORE_ERROR[array.dtype]
            yield Outcome(fetch(device, array), right, rtol, atol, label=f"{label}, {shape}, {variant}")
