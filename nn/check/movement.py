"""Checks of shaders/movement/: transposing copies, batched, with offsets and a border around the output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.graph.copy import TransposeStep
from nn.graph.expr import Load, Value
from nn.graph.ir import Strided
from nn.ops.base import DTYPES, Array, Spec
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device

# One element; less than a tile; a tile; a tile and a rim; several; a grid of more than 65,535 tiles.
SHAPES = [(1, 2, 2), (2, 5, 3), (1, 32, 32), (3, 33, 31), (2, 70, 101), (66_000, 2, 2)]
FOURS = [(1, 4, 4), (2, 8, 4), (1, 64, 64), (3, 68, 60), (2, 72, 132), (66_000, 4, 4)]


def cases() -> list[Case]:
    """Places of the batch axes (one in front or between, two), in each element type, by ones and by fours."""
    found = []
    for dtype in ("f32", "f16", "i32", "bool"):
        needs = frozenset({"f16"} if dtype == "f16" else ())
        for four in (False, True):
            for order in ((0, 2, 1), (2, 0, 1), (0, 1, 3, 2), (1, 3, 0, 2)):
                if len(order) == 4 and dtype in ("i32", "bool"):
                    continue  # moved as f32 is
                file = f"movement/transpose{'4' * four}"
                run = partial(transpose, dtype=dtype, order=order, four=four)
                found.append(Case(f"{file}: {dtype}, axes {order}", run, (f"{file}.wgsl",), needs))
    found.append(Case("ops/contiguous: f16 copied two at a time and singly", halves, (), frozenset({"f16"})))
    return found


def transpose(
    device: Device, rng: np.random.Generator, *, dtype: str, order: tuple[int, ...], four: bool
) -> Iterator[Outcome]:
    """out = x.transpose(order), x a part of larger rows, within a larger output."""
    kind = np.dtype(DTYPES[dtype][1])
    first, more, before, after = (4, 8, 8, 4) if four else (1, 3, 5, 7)
    for b, r, c in FOURS if four else SHAPES:
        if b > 1000 and (dtype != "f32" or order != (0, 2, 1)):
            continue
        lead = (b,) if len(order) == 3 else (b, 3)
        host = rng.integers(0, 2000, (*lead, c, r + more)).astype(kind)  # some columns before, some behind
        size = math.prod(lead) * r * c + before + after
        out = Array(device.upload(np.full(size, 3000, kind)), (size,), dtype)
        source = Value(Spec(host.shape, dtype), array=Array(device.upload(host), host.shape, dtype))
        target = Value(out.spec, array=out)
        dense = Strided.dense(host.shape)
        sizes = (*lead, c, r)
        turned = Strided(tuple(sizes[a] for a in order), tuple(dense.strides[a] for a in order), first)
        at = Strided(turned.shape, Strided.dense(turned.shape).strides, before)
        step = TransposeStep.of(Load(dtype, source, turned), target, at)
        assert step is not None
        step = replace(step, four=four)
        record = device.recorder()
        step.record(record, lambda value: value.array)
        record.submit()
        want = np.full(size, 3000, kind)
        want[before:-after] = host[..., first : first + r].transpose(order).reshape(-1)
        yield Outcome(device.read(out.buffer, kind, size), want, label=f"{lead} of {c}x{r}")


def halves(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Copies of f16 whose rows lie at even and at odd places; random bits, so that NaNs have to stay what they are."""
    bits = rng.integers(0, 1 << 16, (6, 10, 4, 8), np.uint16).view(np.float16)
    x = Tensor(bits, device)
    moved = [
        ("whole", x.clone(), bits),
        ("permuted", x.permute((0, 2, 1, 3)).contiguous(), bits.transpose(0, 2, 1, 3)),
        ("even", x[1:, :, :, 2:6].clone(), bits[1:, :, :, 2:6]),
        ("odd start", x[1:, :, :, 1:5].clone(), bits[1:, :, :, 1:5]),
        ("odd length", x[1:, :, :, 2:7].clone(), bits[1:, :, :, 2:7]),
        ("odd rows", x.reshape(128, 15)[:, 2:8].clone(), bits.reshape(128, 15)[:, 2:8]),
        ("repeated", x[:, :1].expand(x.shape).contiguous(), np.broadcast_to(bits[:, :1], bits.shape)),
        ("reversed rows", x.flip(1).contiguous(), bits[:, ::-1]),
    ]
    for label, got, want in moved:
        yield Outcome(got.numpy().view(np.uint16), np.ascontiguousarray(want).view(np.uint16), label=label)
