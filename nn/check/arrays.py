"""Arrays for checks: uploaded inputs, outputs that are poisoned before the kernel runs, and their values in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nn.ops.base import DTYPES, Array

if TYPE_CHECKING:
    from gpu import Device

# Largest relative error of storing an f32 result: f16 keeps 11 bits, and a driver may truncate.
STORE_ERROR = {"f32": 0.0, "f16": 2.0**-10}
# The spacing of subnormal values, below which a relative error means nothing.
STORE_FLOOR = {"f32": 0.0, "f16": 2.0**-24}


def upload(device: Device, values: np.ndarray, dtype: str = "f32") -> tuple[Array, np.ndarray]:
    """The values on the device, and in float64 as the device sees them: after rounding to `dtype`."""
    stored = np.ascontiguousarray(values).astype(DTYPES[dtype][1])
    return Array(device.upload(stored), stored.shape, dtype), stored.astype(np.float64)


def poisoned(device: Device, shape: tuple[int, ...], dtype: str = "f32") -> Array:
    """An output of which an element that no kernel writes fails every comparison."""
    kind = np.dtype(DTYPES[dtype][1])
    values = np.full(shape, np.nan if kind.kind == "f" else np.iinfo(kind).max, kind)
    return Array(device.upload(values), shape, dtype)


def fetch(device: Device, array: Array) -> np.ndarray:
    """The values of an array, after all submitted work."""
    return device.read(array.buffer, DTYPES[array.dtype][1], array.shape)
