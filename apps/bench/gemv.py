"""Suite gemv: few rows of activations times a stored weight, in every storage format: what a decode step does.

Dispatches depend on each other, and weights are taken in turn out of so many that no cache holds them (512 MB on a
GPU).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from apps.bench.case import Case, Run, Work, differ, lowered, pick, rows_of
from apps.bench.gemm import stored_rounding
from nn import functional as F
from nn.ops.base import Array
from nn.quant.fill import random_weight, uniform
from nn.quant.formats import FORMATS
from nn.quant.repack import plane_offsets
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu.device import Capabilities

FIRST = re.compile(r"q\S+ \S+ batch 1|q4_0 4096x4096 .*")  # as in gemm.py
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ESSENTIAL = ("q4_0", "q4_k", "q8_0", "f16")  # all batches also where time is short
ROTATE = {"gpu": 512 << 20, "cpu": 16 << 20}
SHAPES = {"gpu": ((4096, 4096), (22016, 4096)), "cpu": ((1024, 1024),)}


def cases(caps: Capabilities, *, dtypes: set[str] | None, shape: tuple[int, ...] | None) -> Iterator[Case]:
    """Every row for this device. shape: (N, K), rows and columns of the weight, or (batch, N, K)."""
    shapes, batches = SHAPES[caps.kind], BATCHES
    if shape is not None:
        shapes, batches = (shape[-2:],), shape[:-2] or BATCHES
    formats = [f for f in FORMATS if dtypes is None or f in dtypes]
    for rows, cols in shapes:
        for format in formats:
            if cols % FORMATS[format].block:
                continue
            before = {1: "", 2: ""}  # the last row that has run by then
            for batch in batches:
                square = (rows, cols) == SHAPES[caps.kind][0]
                quick = (
                    batch == 1 or format in ESSENTIAL[: 3 if square else 1] or dtypes is not None or shape is not None
                )
                if caps.kind == "cpu":
                    quick = batch in (1, 8) and format in ESSENTIAL
                level = 1 if quick else 2
                made = case(caps, format, batch, rows, cols, level=level, before=before[level])
                yield made
                before = {1: made.key if quick else before[1], 2: made.key}


def case(caps: Capabilities, format: str, batch: int, rows: int, cols: int, *, level: int, before: str) -> Case:
    """A row of a few tokens: x (batch, cols) f32 times a weight (rows, cols). before: the row with fewer tokens."""
    weight = plane_offsets(format, rows, cols)[1]
    copies = max(1, -(-ROTATE[caps.kind] // weight))
    traffic = weight + 4 * batch * (rows + cols)
    return Case(
        suite="gemv",
        key=f"{format} {rows}x{cols} batch {batch}",
        dtype=format,
        make=partial(_make, format=format, batch=batch, rows=rows, cols=cols, copies=copies),
        flops=2.0 * batch * rows * cols,
        nbytes=float(traffic),
        need=copies * weight + 4 * batch * (rows + cols),
        largest=min(weight, caps.max_binding),
        level=level,
        matrix=batch > 8,
        unit="GB/s",
        beside=(before, 1.0) if before else None,
        items=float(batch),
        torch=partial(_torch, batch=batch, rows=rows, cols=cols),
    )


@dataclass
class Held:
    """Weights to take in turn, and the values of the first."""

    weights: list[Tensor]

    @functools.cached_property
    def decoded(self) -> np.ndarray:
        """(rows, cols) f32, read back once."""
        return self.weights[0].numpy()


def _make(run: Run, *, format: str, batch: int, rows: int, cols: int, copies: int) -> Work:
    device = run.device

    def weights() -> Held:
        std = 1.0 / math.sqrt(3.0)
        made = [random_weight(device, (rows, cols), format, seed=run.seed(), std=std) for _ in range(copies)]
        return Held([Tensor(weight, device) for weight in made])

    held = run.kept("weights", (format, rows, cols), weights)
    x = uniform(device, (batch, cols), "f32", seed=run.seed())
    out = Array(device.alloc(4 * batch * rows), (batch, rows))
    plans = []
    for weight in held.weights:
        record = device.recorder()
        lowered(record, F.linear(Tensor(x), weight), out)
        plans.append(record.plan())

    check = partial(_wrong, run, x, held, out)
    return Work(plans, check, note="" if len(plans[0]) == 1 else f"{len(plans[0])} dispatches")


def _wrong(run: Run, x: Array, held: Held, out: Array) -> str | None:
    device = run.device
    (batch, rows), cols = out.shape, x.cols
    picked, wanted = pick(run.rng, batch), pick(run.rng, rows, 200)
    want = rows_of(device, x, picked) @ held.decoded[wanted].astype("f8").T
    return differ(rows_of(device, out, picked)[:, wanted], want, atol=stored_rounding(cols))


def _torch(peer: Any, *, batch: int, rows: int, cols: int) -> Any:
    """In f16: torch has no product with these formats. Weights rotate here too."""
    copies = max(1, -(-peer.rotate // (2 * rows * cols)))
    weights = peer.kept((rows, cols), lambda: [peer.random((rows, cols), "f16") for _ in range(copies)])
    x = peer.random((batch, cols), "f16")
    out = peer.random((batch, rows), "f16")
    turn = iter(range(1 << 60))
    return lambda: peer.torch.matmul(x, weights[next(turn) % copies].T, out=out)
