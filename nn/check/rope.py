"""Checks of shaders/rope/rope.wgsl: both pairings, partial rotation, positions out of order and out of range."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.check.reference import rotate
from nn.ops.rope import record_rope

if TYPE_CHECKING:
    from gpu import Device

# (B, T, N, H) and R: one pair; whole heads; partial rotation; odd H; nothing rotated; many workgroups; a folded grid.
SHAPES = [
    ((1, 1, 1, 2), 2),
    ((1, 5, 3, 64), 64),
    ((2, 7, 2, 80), 32),
    ((3, 2, 1, 7), 6),
    ((1, 3, 2, 5), 0),
    ((2, 33, 5, 16), 16),
]
# Units of one vector; whole heads; a group of heads that is not full; partial rotation; many workgroups.
FOURS = [
    ((1, 1, 1, 8), 8),
    ((1, 5, 3, 64), 64),
    ((2, 7, 6, 80), 32),
    ((3, 2, 1, 12), 8),
    ((2, 33, 5, 16), 16),
]
FOLDED = ((1, 2_097_153, 1, 2), 2)
CONTEXT = 41


def cases() -> list[Case]:
    """Pairing x dtype, by ones and by fours."""
    found = []
    for four in (False, True):
        for interleaved in (False, True):
            for elem in ("f32", "f16"):
                file = f"rope/rope{'4' * four}"
                name = f"{file} rope: {'interleaved' if interleaved else 'halves'} {elem}"
                run = partial(_run, interleaved=interleaved, elem=elem, four=four)
                found.append(Case(name, run, (f"{file}.wgsl",), frozenset({"f16"} if elem == "f16" else set())))
    return found


def _run(device: Device, rng: np.random.Generator, *, interleaved: bool, elem: str, four: bool) -> Iterator[Outcome]:
    for shape, rotated in (FOURS if four else SHAPES) + (
        [FOLDED] if elem == "f32" and not interleaved and not four else []
    ):
        batch, tokens, _, _ = shape
        x, x64 = upload(device, rng.standard_normal(shape), elem)
        angles = rng.uniform(-np.pi, np.pi, (CONTEXT, rotated // 2))
        table, table64 = upload(device, np.stack([np.cos(angles), np.sin(angles)], axis=-1))
        for lead in ((), (batch,)):
            numbers = rng.integers(-3, CONTEXT + 3, (*lead, tokens))  # those outside take the nearest row
            positions, _ = upload(device, numbers, "i32")
            out = poisoned(device, shape, elem)
            record = device.recorder()
            record_rope(record, x, table, positions, out, interleaved=interleaved, four=four)
            record.submit()
            rows = table64[np.broadcast_to(np.clip(numbers, 0, CONTEXT - 1), (batch, tokens))]  # (B, T, R/2, 2)
            pairing = "interleaved" if interleaved else "neox"
            want = np.stack([rotate(x64[b], rows[b, ..., 0], rows[b, ..., 1], pairing=pairing) for b in range(batch)])
            # Two products and their sum, each below |a| + |b| < 10.
            yield Outcome(
                fetch(device, out), want, STORE_ERROR[elem], 2e-6 + STORE_FLOOR[elem], label=f"{shape} {rotated} {lead}"
            )
