"""What the Trials of kernel families have in common: results, shape classes, sizes that do not take long."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nn.ops.base import DTYPES, Array

if TYPE_CHECKING:
    from gpu import Device


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
