"""Checks of shaders/movement/bf16.wgsl: conversions bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.ops.base import Array
from nn.ops.bf16 import record_bf16
from nn.quant.formats import bf16_bits

if TYPE_CHECKING:
    from gpu import Device

SPECIAL = [0.0, -0.0, np.inf, -np.inf, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-45, -1e-40]


def conversion(device: Device, rng: np.random.Generator, *, entry: str, size: int) -> Iterator[Outcome]:
    """Random bits and special values; narrow: NaN of every payload too."""
    bits = rng.integers(0, 1 << 32, size, np.uint32)
    bits[: len(SPECIAL)] = np.array(SPECIAL, np.float32).view(np.uint32)[:size]
    wide, narrow = bits.view(np.float32), (bits >> 16).astype(np.uint16)
    given, kind = (wide, np.uint16) if entry == "narrow" else (narrow, np.uint32)
    out = device.upload(np.full(size, 0xABCD, kind))
    shape = (size,)
    record = device.recorder()
    dtypes = ("f32", "bf16") if entry == "narrow" else ("bf16", "f32")
    record_bf16(record, entry, Array(device.upload(given), shape, dtypes[0]), Array(out, shape, dtypes[1]))
    record.submit()
    got = device.read(out, kind, shape)
    if entry == "widen":
        yield Outcome(got.astype(np.int64), narrow.astype(np.int64) << 16)
        return
    nan = np.isnan(wide)
    yield Outcome(got[~nan].astype(np.int64), bf16_bits(wide[~nan]).astype(np.int64))
    yield Outcome((got[nan] & 0x7FFF) > 0x7F80, np.ones(int(nan.sum()), bool))


def cases() -> list[Case]:
    return [
        Case(f"movement/bf16: {entry} {size}", partial(conversion, entry=entry, size=size), ("movement/bf16.wgsl",))
        for entry in ("widen", "narrow")
        for size in (1, 2, 513, 70_001)
    ]
