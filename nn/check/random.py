"""Checks of random numbers by counter: the bits of pcg3d, and the numbers made of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.ops.random import BITS, UNIT, uniform_numbers
from nn.random import Generator

if TYPE_CHECKING:
    from gpu import Device


def pcg3d(index: np.ndarray, draw: int, seed: int) -> np.ndarray:
    """The first of three words, in u32 (Jarzynski & Olano 2020)."""
    with np.errstate(over="ignore"):
        x, y, z = (v * np.uint32(1664525) + np.uint32(1013904223) for v in (index, np.uint32(draw), np.uint32(seed)))
        for turn in range(2):
            x = x + y * z
            y = y + z * x
            z = z + x * y
            if turn == 0:
                x, y, z = (v ^ (v >> np.uint32(16)) for v in (x, y, z))
    return np.asarray(x)


def numbers(device: Device, rng: np.random.Generator, *, bits: bool, size: int) -> Iterator[Outcome]:
    """Two draws in a row."""
    seed = int(rng.integers(0, 1 << 32))
    generator = Generator(device, seed)
    for draw in range(2):
        got = uniform_numbers(BITS if bits else UNIT, (size,), generator).numpy()
        want = pcg3d(np.arange(size, dtype=np.uint32), draw, seed)
        if bits:
            yield Outcome(got.astype(np.int64), want.astype(np.int64))
        else:
            yield Outcome(got, (want >> 8) * 2.0**-24, 0.0, 0.0, f"draw {draw}")


def cases() -> list[Case]:
    found = []
    for bits in (True, False):
        for size in (1, 1031):
            run = partial(numbers, bits=bits, size=size)
            found.append(Case(f"random/{'bits' if bits else 'unit'}: {size}", run, ("elementwise/math.wgsl",)))
    return found
