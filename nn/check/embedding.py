"""Checks of shaders/embedding: lookups in every storage format, through one window and several; and their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.check.quant import random_raw, upload_in
from nn.ops.base import Array
from nn.ops.embedding import GradVariant, grad_variant, record_embedding, record_embedding_grad
from nn.quant import FORMATS, Weight, dequantize

if TYPE_CHECKING:
    from gpu import Device


def lookup(
    device: Device, ids: np.ndarray, table: Weight | Array, *, scale: float = 1.0, four: bool | None = None
) -> np.ndarray:
    """Run the kernel alone: ids (T,) integers -> (T, K) float32. What it does not write reads as NaN."""
    out = device.upload(np.full((ids.size, table.shape[1]), np.nan, np.float32))
    ids_on_device = Array(device.upload(ids.astype(np.int64).astype(np.uint32)), ids.shape, "u32")
    record = device.recorder()
    weight = table if isinstance(table, Weight) else Weight.of(table)
    record_embedding(record, ids_on_device, weight, Array(out, (ids.size, table.shape[1])), scale=scale, four=four)
    record.submit()
    return device.read(out, np.float32, (ids.size, table.shape[1]))


def cases() -> list[Case]:
    """Every storage format, by one and by four numbers, in one window and in several; ids outside the table."""
    found = []
    for format, fmt in FORMATS.items():
        for tokens, cols, pieces in ((1, fmt.block, 1), (67, 45 if fmt.dense else fmt.block * 2, 3), (67, 44, 3)):
            if cols % fmt.block and not fmt.dense:
                continue
            for four in (True, False) if cols % 4 == 0 else (False,):
                entry = f"embedding{'4' * four}"
                windows = f" {pieces} windows" if pieces > 1 else ""
                found.append(
                    Case(
                        f"embedding/{entry}: {format}{windows}, {tokens} of 41x{cols}",
                        partial(_lookup, format=format, tokens=tokens, cols=cols, pieces=pieces, four=four),
                        (f"embedding/{entry}.wgsl", f"quant/{format}.wgsl"),
                    )
                )
    for cols, entry in ((33, "embedding"), (36, "embedding4")):
        files = (f"embedding/{entry}.wgsl", "quant/f32.wgsl")
        found.append(Case(f"embedding/{entry}: ids outside, 41x{cols}", partial(_outside, cols=cols), files))
    for elem in ("f32", "f16"):
        for serial in (False, True):
            files = ("embedding/embedding_grad.wgsl", "lib/pack1.wgsl", "lib/pack4.wgsl", "reduce/parts.wgsl")
            entry = f"embedding_grad{'_serial' * serial}"
            name = f"embedding/{entry}: {elem} by one and by four columns, whole and in chunks"
            run = partial(_grad, elem=elem, serial=serial)
            found.append(Case(name, run, files, frozenset({"f16"} if elem == "f16" else ())))
    return found


# (tokens, vocab, cols, table rows a workgroup, tokens a chunk): one element; words of 32 flags and tiles of 2048 ids
# with something over; more columns than a workgroup has invocations; rows that nobody looks up; no token at all.
GRADS = [
    (1, 1, 1, 1, 1),
    (33, 3, 7, 2, 40),
    (200, 5, 8, 1, 64),
    (4200, 7, 260, 4, 5000),
    (2049, 65, 67, 65, 512),
    (100, 1000, 12, 32, 1000),
    (0, 3, 4, 2, 1),
]


def _grad(device: Device, rng: np.random.Generator, *, elem: str, serial: bool) -> Iterator[Outcome]:
    for tokens, vocab, cols, rows, chunk in GRADS:
        ids = np.minimum(rng.geometric(0.3, tokens) - 1, vocab - 1) if vocab < 100 else rng.integers(0, vocab, tokens)
        given = ids.copy()
        given[::17] = np.where(ids[::17] == vocab - 1, -1, ids[::17])  # outside: counts as the last row
        dy, dy64 = upload(device, rng.standard_normal((tokens, cols)), elem)
        on_device = Array(device.upload(given.astype(np.int64).astype(np.uint32)), given.shape, "u32")
        want = np.zeros((vocab, cols))
        np.add.at(want, ids, dy64 * 1.5)
        for variant in (
            GradVariant(rows, chunk, 8 if serial else 64, serial),
            grad_variant(device.caps, tokens, vocab, cols),
        ):
            out = poisoned(device, (vocab, cols))
            record = device.recorder()
            record_embedding_grad(record, on_device, dy, out, scale=1.5, variant=variant)
            record.submit()
            # Every sum of n terms of about 1.5 is wrong by at most about n half units of its largest value on the way.
            atol = 2.0**-24 * 8 * (tokens + 1) ** 0.5 * float(np.abs(want).max(initial=1.0))
            yield Outcome(fetch(device, out), want, 1e-6, atol, label=f"{tokens} of {vocab}x{cols}, {variant}")


def _lookup(
    device: Device, rng: np.random.Generator, *, format: str, tokens: int, cols: int, pieces: int, four: bool
) -> Iterator[Outcome]:
    raw = random_raw(rng, format, 41, cols)
    table = upload_in(device, raw, (41, cols), format, pieces)
    ids = rng.integers(0, 41, tokens)
    ids[0] = 40
    scale = float(np.float32(25.3))
    want = dequantize(raw, format)[ids].astype(np.float64) * scale
    yield Outcome(lookup(device, ids, table, scale=scale, four=four), want, rtol=2e-7, label="scaled")  # one rounding
    # Each window has to leave the others' rows alone, whatever the order.
    backwards = Weight(table.shape, format, table.windows[::-1])
    yield Outcome(
        lookup(device, ids, backwards, four=four), dequantize(raw, format)[ids], label="scale 1, last window first"
    )


def _outside(device: Device, rng: np.random.Generator, *, cols: int) -> Iterator[Outcome]:
    values = rng.standard_normal((41, cols)).astype(np.float32)
    raw = np.ascontiguousarray(values).view(np.uint8)
    ids = np.array([41, -1, 2**31 - 1, -(2**31), 0])
    want = values[[40, 40, 40, 40, 0]]
    for pieces in (1, 3):
        table = upload_in(device, raw, (41, cols), "f32", pieces)
        yield Outcome(lookup(device, ids, table), want, label=f"{pieces} windows")
