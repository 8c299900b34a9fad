"""Checks of shaders/random: each word from its index and seed, nothing outside the range; weights as wide as asked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.quant.fill import PLANES, random_weight, uniform
from nn.quant.formats import bf16_values

if TYPE_CHECKING:
    from gpu import Device

FILE = "random/fill.wgsl"
UNTOUCHED = 0xDEADBEEF


def hashed(v: np.ndarray) -> np.ndarray:
    """PCG's output function after one step, on uint32."""
    state = v * np.uint32(747796405) + np.uint32(2891336453)
    word = ((state >> ((state >> np.uint32(28)) + np.uint32(4))) ^ state) * np.uint32(277803737)
    return (word >> np.uint32(22)) ^ word


def bits(count: int, seed: int) -> np.ndarray:
    """The words that fill_bits writes."""
    return hashed(np.arange(count, dtype=np.uint32) + hashed(np.array([seed], np.uint32)))


def unit(count: int, seed: int) -> np.ndarray:
    """The same as numbers in [0, 1)."""
    return (bits(count, seed) >> np.uint32(8)).astype(np.float64) * 2.0**-24


def cases() -> list[Case]:
    """Every entry of random/fill.wgsl at offsets and lengths around a workgroup, and weights made of them."""
    found = [
        Case(f"random/fill fill_bits: {count} words at {first}", partial(_bits, first=first, count=count), (FILE,))
        for first, count in ((0, 1), (3, 255), (17, 2049))
    ]
    for dtype in ("f32", "f16", "bf16"):
        for shape in ((1,), (3, 171)):
            size = "x".join(map(str, shape))
            found.append(
                Case(f"random/fill fill_{dtype}: {size}", partial(_uniform, shape=shape, dtype=dtype), (FILE,))
            )
    for format in PLANES:
        found.append(Case(f"random/fill weight: {format}, 64x512", partial(_weight, format=format), (FILE,)))
    return found


def _bits(device: Device, rng: np.random.Generator, *, first: int, count: int) -> Iterator[Outcome]:
    seed, mask = int(rng.integers(1 << 32)), 0x3F3F3F3F
    out = device.upload(np.full(first + count + 5, UNTOUCHED, np.uint32))
    record = device.recorder()
    rest = {"low": 0.0, "range": 0.0, "low_odd": 0.0, "range_odd": 0.0}
    record(
        device.kernel(FILE, "fill_bits"),
        -(-count // 256),
        out=out,
        first=first,
        count=count,
        seed=seed,
        mask=mask,
        **rest,
    )
    record.submit()
    want = np.full(first + count + 5, UNTOUCHED, np.uint32)
    want[first : first + count] = bits(count, seed) & np.uint32(mask)
    yield Outcome(device.read(out, np.uint32, want.shape), want)


def _uniform(device: Device, rng: np.random.Generator, *, shape: tuple[int, ...], dtype: str) -> Iterator[Outcome]:
    seed = int(rng.integers(1 << 32))
    array = uniform(device, shape, dtype, seed=seed, low=-3.0, high=5.0)
    kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
    got = device.read(array.buffer, kind, shape)
    values = bf16_values(got) if dtype == "bf16" else got
    want = (8.0 * unit(array.size, seed) - 3.0).reshape(shape)
    # One rounding of the product and one of the sum; then to 11 or 8 bits.
    step = {"f32": 1e-6, "f16": 8.0 * 2.0**-11, "bf16": 8.0 * 2.0**-8}[dtype]
    yield Outcome(values, want, atol=step)


def _weight(device: Device, rng: np.random.Generator, *, format: str) -> Iterator[Outcome]:
    """Mean and spread of the decoded values: 32,768 of them, whose scales are shared by 16 to 256."""
    weight = random_weight(device, (64, 512), format, seed=int(rng.integers(1 << 32)), std=0.25)
    values = weight.to_numpy(device).astype(np.float64)
    yield Outcome(np.array(np.isfinite(values).all()), np.array(True), label="finite")
    yield Outcome(np.array(values.std()), np.array(0.25), rtol=0.1, label="standard deviation")
    yield Outcome(np.array(values.mean()), np.array(0.0), atol=0.06, label="mean")
    yield Outcome(np.array(len(np.unique(values[0])) > 3), np.array(True), label="different values")
