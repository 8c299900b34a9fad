"""Checks of shaders/measure/: what the ceilings are measured with computes what its header says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gpu.ceilings import SHADER, SPAN, WG
from nn.check.arrays import fetch, poisoned, upload
from nn.check.base import Case, Outcome

if TYPE_CHECKING:
    from gpu import Device


def cases() -> list[Case]:
    """Copies around the switch of a workgroup, both kinds of multiply-add, dependent launches."""
    found = [Case("measure/ceilings copy", copy, (SHADER,)), Case("measure/ceilings tick", tick, (SHADER,))]
    for fused in (0, 1):
        run = partial(multiply_add, fused=fused)
        found.append(Case(f"measure/ceilings multiply_add: {'fma' if fused else 'product and sum'}", run, (SHADER,)))
    return found


def copy(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """out = x. One vector; a workgroup less one; whole workgroups; a grid that folds in second runs, with a rim."""
    whole = WG * SPAN
    for n in (1, whole - 1, whole, 2 * whole, 9 * whole + 3):
        x, host = upload(device, rng.standard_normal((n, 4)))
        out = poisoned(device, (n, 4))
        record = device.recorder()
        kernel = device.kernel(SHADER, "copy", constants={"WG": WG, "SPAN": SPAN})
        record(kernel, -(-n // whole), x=x.buffer, out=out.buffer, n=n, rounds=0, scale=0.0, shift=0.0)
        record.submit()
        yield Outcome(fetch(device, out), host.astype(np.float32), label=f"{n} vectors")


def multiply_add(device: Device, rng: np.random.Generator, *, fused: int) -> Iterator[Outcome]:
    """Chain j of invocation i starts at i + 4 j + (0, 1, 2, 3); four times a round it is halved and raised by 1."""
    for n, rounds in ((1, 1), (WG + 1, 0), (9 * WG + 5, 2)):
        out = poisoned(device, (n, 4))
        record = device.recorder()
        kernel = device.kernel(SHADER, "multiply_add", constants={"WG": WG, "FUSED": fused})
        record(kernel, -(-n // WG), out=out.buffer, n=n, rounds=rounds, scale=0.5, shift=1.0)
        record.submit()
        start = np.arange(n)[:, None] + np.arange(32.0).reshape(8, 1, 4)
        kept = 0.5 ** (4 * rounds)
        want = (start * kept + 2.0 * (1.0 - kept)).sum(0)
        yield Outcome(fetch(device, out), want, rtol=1e-6, label=f"{n} invocations, {rounds} rounds")


def tick(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Dispatches in a row, each of which adds one to what the last one left."""
    out, host = upload(device, np.arange(4.0))
    kernel = device.kernel(SHADER, "tick")
    record = device.recorder()
    for _ in range(7):
        record(kernel, 1, out=out.buffer)
    record.submit()
    yield Outcome(fetch(device, out), host + 7.0, label="seven dispatches")
