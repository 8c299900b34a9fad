"""Checks of shaders/movement/: transposing copies, batched, with offsets and a border around the output."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.graph.copy import TransposeStep
from nn.graph.expr import Load, Value
from nn.graph.ir import Strided
from nn.ops.base import DTYPES, Array, Spec

if TYPE_CHECKING:
    from gpu import Device

# One element; less than a tile; a tile; a tile and a rim; several; a grid of more than 65,535 tiles.
SHAPES = [(1, 2, 2), (2, 5, 3), (1, 32, 32), (3, 33, 31), (2, 70, 101), (66_000, 2, 2)]


def cases() -> list[Case]:
    """Both places of the batch axis, in each element type."""
    found = []
    for dtype in ("f32", "f16", "i32", "bool"):
        needs = frozenset({"f16"} if dtype == "f16" else ())
        for batch in (0, 1):
            run = partial(transpose, dtype=dtype, batch=batch)
            name = f"movement/transpose: {dtype}, batch axis {batch}"
            found.append(Case(name, run, ("movement/transpose.wgsl",), needs))
    return found


def transpose(device: Device, rng: np.random.Generator, *, dtype: str, batch: int) -> Iterator[Outcome]:
    """out[b, r, c] = x[b, c, r] (batch 0) or out[r, b, c] = x[b, c, r] (batch 1), within a larger output."""
    kind = np.dtype(DTYPES[dtype][1])
    for b, r, c in SHAPES:
        if b > 1000 and (dtype != "f32" or batch):
            continue
        host = np.ascontiguousarray(rng.integers(0, 2000, (b, c, r + 3))).astype(kind)  # one column before, two behind
        before, after = 5, 7
        size = b * r * c + before + after
        out = Array(device.upload(np.full(size, 3000, kind)), (size,), dtype)
        source = Value(Spec(host.shape, dtype), array=Array(device.upload(host), host.shape, dtype))
        target = Value(out.spec, array=out)
        order = (0, 2, 1) if batch == 0 else (2, 0, 1)
        dense = Strided.dense(host.shape)
        turned = Strided(tuple((b, c, r)[a] for a in order), tuple(dense.strides[a] for a in order), 1)
        at = Strided(turned.shape, Strided.dense(turned.shape).strides, before)
        step = TransposeStep.of(Load(dtype, source, turned), target, at)
        assert step is not None
        record = device.recorder()
        step.record(record, lambda value: value.array)
        record.submit()
        want = np.full(size, 3000, kind)
        want[before:-after] = host[:, :, 1 : 1 + r].transpose(order).reshape(-1)
        yield Outcome(device.read(out.buffer, kind, size), want, label=f"{b} of {c}x{r}")
