"""Checks of shaders/embedding: lookups in every storage format, through one window and several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.check.quant import random_raw, upload_in
from nn.ops.base import Array
from nn.ops.embedding import Embedding
from nn.quant import FORMATS, Weight, dequantize

if TYPE_CHECKING:
    from gpu import Device


def lookup(device: Device, ids: np.ndarray, table: Weight | Array, *, scale: float = 1.0) -> np.ndarray:
    """Run the kernel alone: ids (T,) integers -> (T, K) float32. What it does not write reads as NaN."""
    out = device.upload(np.full((ids.size, table.shape[1]), np.nan, np.float32))
    ids_on_device = Array(device.upload(ids.astype(np.int64).astype(np.uint32)), ids.shape, "u32")
    record = device.recorder()
    Embedding(scale).lower(record, ids_on_device, table, Array(out, (ids.size, table.shape[1])))
    record.submit()
    return device.read(out, np.float32, (ids.size, table.shape[1]))


def cases() -> list[Case]:
    found = []
    for format, fmt in FORMATS.items():
        for tokens, cols, pieces in ((1, fmt.block, 1), (67, 45 if fmt.dense else fmt.block * 2, 3)):
            found.append(
                Case(
                    f"embedding/embedding: {format}{f' {pieces} windows' if pieces > 1 else ''}, {tokens} of 41x{cols}",
                    partial(_lookup, format=format, tokens=tokens, cols=cols, pieces=pieces),
                    ("embedding/embedding.wgsl", f"quant/{format}.wgsl"),
                )
            )
    found.append(
        Case("embedding/embedding: ids outside, 41x33", _outside, ("embedding/embedding.wgsl", "quant/f32.wgsl"))
    )
    return found


def _lookup(
    device: Device, rng: np.random.Generator, *, format: str, tokens: int, cols: int, pieces: int
) -> Iterator[Outcome]:
    raw = random_raw(rng, format, 41, cols)
    table = upload_in(device, raw, (41, cols), format, pieces)
    ids = rng.integers(0, 41, tokens)
    ids[0] = 40
    scale = float(np.float32(25.3))
    want = dequantize(raw, format)[ids].astype(np.float64) * scale
    yield Outcome(lookup(device, ids, table, scale=scale), want, rtol=2e-7, label="scaled")  # one rounding
    # Each window has to leave the others' rows alone, whatever the order.
    backwards = Weight(table.shape, format, table.windows[::-1])
    yield Outcome(lookup(device, ids, backwards), dequantize(raw, format)[ids], label="scale 1, last window first")


def _outside(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    values = rng.standard_normal((41, 33)).astype(np.float32)
    raw = np.ascontiguousarray(values).view(np.uint8)
    ids = np.array([41, -1, 2**31 - 1, -(2**31), 0])
    want = values[[40, 40, 40, 40, 0]]
    for pieces in (1, 3):
        table = upload_in(device, raw, (41, 33), "f32", pieces)
        yield Outcome(lookup(device, ids, table), want, label=f"{pieces} windows")
