"""Checks of shaders/norm/: RMSNorm and LayerNorm, each entry in both variants, with and without subgroups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.check.reference import layer_norm, rms_norm
from nn.check.rows import HOWS, libraries, needs, runs
from nn.ops.norm import record_layer_norm, record_rms_norm

if TYPE_CHECKING:
    from gpu import Device

ONE = np.ones(())
ROUNDING = 1e-5  # relative: f32 sums of up to 9000 squares in fixed order, inverseSqrt to 2 ulp, three products


def cases() -> list[Case]:
    """Every entry x dtype of rows x dtype of the gain x (serial, tree, subgroups)."""
    found = []
    for how in HOWS:
        for elem, gain in (("f32", "f32"), ("f16", "f16"), ("f16", "f32")):
            for family, entries in (("rms_norm", RMS_ENTRIES), ("layer_norm", LAYER_ENTRIES)):
                for entry in entries:
                    if elem != gain and entry not in ("add_rms_norm", "layer_norm_affine"):
                        continue  # the other entries read no gain, or nothing that these two do not
                    name = f"norm/{family} {entry}: {how} {elem} gain {gain}"
                    run = partial(entries[entry], elem=elem, gain_type=gain, how=how)
                    file = f"norm/{family}{'_serial' if how == 'serial' else ''}.wgsl"
                    found.append(Case(name, run, (file, *libraries(how)), needs(how, elem)))
    return found


def _rms(
    device: Device, rng: np.random.Generator, *, elem: str, gain_type: str, how: str, entry: str
) -> Iterator[Outcome]:
    main = elem == "f32" and entry == "rms_norm_gain"
    ways = list(runs(device.caps, how, every=main, folded=main))
    for variant, shape in ways:
        x, x64 = upload(device, rng.standard_normal(shape) * rng.uniform(0.1, 10), elem)
        gain, gain64 = upload(device, rng.standard_normal(shape[1:]), gain_type)
        residual, residual64 = upload(device, rng.standard_normal(shape), elem)
        out = poisoned(device, shape, elem)
        record = device.recorder()
        record_rms_norm(
            record,
            x,
            out,
            gain=None if entry == "rms_norm" else gain,
            residual=residual if entry == "add_rms_norm" else None,
            eps=1e-3,
            variant=variant,
        )
        record.submit()
        term = rms_norm(x64, ONE if entry == "rms_norm" else gain64, eps=1e-3)
        want = term + residual64 if entry == "add_rms_norm" else term
        atol = STORE_FLOOR[elem] + ROUNDING * float(np.abs(term).max())
        yield Outcome(fetch(device, out), want, ROUNDING + STORE_ERROR[elem], atol, label=f"{variant.name}, {shape}")
    if elem == "f32" and entry == "rms_norm":  # eps counts: without it this is +-1
        x, _ = upload(device, np.array([[0.001, -0.001]]))
        out = poisoned(device, (1, 2))
        record = device.recorder()
        record_rms_norm(record, x, out, eps=1e-6, variant=ways[-1][0])
        record.submit()
        yield Outcome(fetch(device, out), np.array([[0.707107, -0.707107]]), atol=2e-6, label="eps")


def _layer(
    device: Device, rng: np.random.Generator, *, elem: str, gain_type: str, how: str, entry: str
) -> Iterator[Outcome]:
    main = elem == "f32" and entry == "layer_norm_affine"
    ways = list(runs(device.caps, how, every=main, folded=main))
    for variant, shape in ways:
        x, x64 = upload(device, rng.standard_normal(shape) * rng.uniform(0.1, 10) + rng.standard_normal() * 4, elem)
        weight, weight64 = upload(device, rng.standard_normal(shape[1:]), gain_type)
        bias, bias64 = upload(device, rng.standard_normal(shape[1:]), gain_type)
        out = poisoned(device, shape, elem)
        record = device.recorder()
        record_layer_norm(
            record,
            x,
            out,
            weight=None if entry == "layer_norm" else weight,
            bias=bias if entry == "layer_norm_affine" else None,
            eps=1e-3,
            variant=variant,
        )
        record.submit()
        term = layer_norm(x64, ONE if entry == "layer_norm" else weight64, np.zeros(()), eps=1e-3)
        want = term + bias64 if entry == "layer_norm_affine" else term
        atol = STORE_FLOOR[elem] + ROUNDING * max(float(np.abs(term).max()), 1.0)
        yield Outcome(fetch(device, out), want, ROUNDING + STORE_ERROR[elem], atol, label=f"{variant.name}, {shape}")
    if elem == "f32" and entry == "layer_norm":
        # A mean 20,000 times the spread: E[x^2] - E[x]^2 in f32 would keep no digit of the variance.
        x, _ = upload(device, np.array([[8192.0, 8192.25, 8192.5, 8193.0]]))
        out = poisoned(device, (1, 4))
        record = device.recorder()
        record_layer_norm(record, x, out, eps=1e-5, variant=ways[0][0])
        record.submit()
        want = np.array([[-1.183173, -0.507074, 0.169025, 1.521222]])
        yield Outcome(fetch(device, out), want, atol=2e-6, label="large mean")


RMS_ENTRIES = {entry: partial(_rms, entry=entry) for entry in ("rms_norm", "rms_norm_gain", "add_rms_norm")}
LAYER_ENTRIES = {
    entry: partial(_layer, entry=entry) for entry in ("layer_norm", "layer_norm_weight", "layer_norm_affine")
}
