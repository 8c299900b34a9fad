"""Operands for timing kernel variants: what the Trials of kernel families are made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nn.ops.base import DTYPES, Array

if TYPE_CHECKING:
    from gpu import Buffer, Device

_PERIOD = 1_048_573  # random values are repeated after so many: a prime, so that no row is like another one
_CHUNK = 16 << 20  # bytes


def random_array(device: Device, shape: tuple[int, ...], dtype: str = "f32", *, seed: int = 0) -> Array:
    """Uniform values in [-1, 1), the same for a shape, dtype and seed every time. f32, f16 or bf16."""
    values = np.random.default_rng(seed).uniform(-1, 1, _PERIOD).astype(np.float32)
    if dtype == "bf16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype(DTYPES[dtype][1])
    buffer = device.alloc(math.prod(shape) * stored.itemsize)
    fill(buffer, stored)
    return Array(buffer, shape, dtype)


def fill(buffer: Buffer, values: np.ndarray) -> None:
    """Write the values over a buffer again and again until its end."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    data = np.tile(data, 4) if data.size % 4 else data
    block = np.tile(data, max(1, _CHUNK // data.size))
    for start in range(0, buffer.nbytes, block.size):
        buffer.write(block[: buffer.nbytes - start], start)


def empty_array(device: Device, shape: tuple[int, ...], dtype: str = "f32") -> Array:
    """For results: contents undefined."""
    return Array(device.alloc(math.prod(shape) * DTYPES[dtype][0]), shape, dtype)


def bucket(n: int) -> int:
    """The power of two from n upwards: sizes of one bucket share a tuning."""
    return 1 << max(n - 1, 0).bit_length()


def shrunk(sizes: dict[str, int], cost: int, *, most: int, smallest: int = 64) -> dict[str, int]:
    """Sizes halved, the first ones first, until the product `cost * all sizes` is at most `most`.

    A call that is timed must be short: a driver may stop what takes seconds, and the budget is soon spent.
    """
    found = dict(sizes)
    for name in found:
        while cost * math.prod(found.values()) > most and found[name] // 2 >= smallest:
            found[name] //= 2
    return found
