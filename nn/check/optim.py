"""Checks of shaders/optim and of the zeros between tensors in one row, against float64 NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.check.base import Case, Outcome

if TYPE_CHECKING:
    from gpu import Device

ROWS = 1000  # numbers of a row; a step changes [FIRST, FIRST + LENGTH)
FIRST, LENGTH = 64, 768
HYPER: dict[str, tuple[float, ...]] = {
    "adam": (0.1, 0.9, 0.99, 1e-8, 0.2, 1 - 0.9**3, 1 - 0.99**3, -1.0),
    "sgd": (0.1, 0.0, 1.0, 0.2, -1.0),
    "sgd_momentum": (0.1, 0.9, 0.7, 0.2, 1.0),
    "lion": (0.1, 0.9, 0.99, 0.2),
}
STATES = {"adam": ("m", "v"), "sgd": (), "sgd_momentum": ("v",), "lion": ("m",)}


def truth(entry: str, option: bool, w: np.ndarray, g: np.ndarray, states: list[np.ndarray]) -> list[np.ndarray]:
    """The weights and states after a step, in float64; option: Adam's coupled decay, or Nesterov's momentum."""
    h = [float(np.float32(x)) for x in HYPER[entry]]
    if entry == "adam":
        lr, beta1, beta2, eps, decay, c1, c2, sign = h
        g = sign * g + (decay * w if option else 0.0)
        m, v = beta1 * states[0] + (1 - beta1) * g, beta2 * states[1] + (1 - beta2) * g * g
        kept = w if option else w * (1 - lr * decay)
        return [kept - lr / c1 * m / (np.sqrt(v / c2) + eps), m, v]
    if entry == "lion":
        lr, beta1, beta2, decay = h
        (m,) = states
        step = lr * np.sign(beta1 * m + (1 - beta1) * g)
        return [w * (1 - lr * decay) - step, beta2 * m + (1 - beta2) * g]
    lr, momentum, kept, decay, sign = h
    g = sign * g + decay * w
    if entry == "sgd":
        return [w - lr * g]
    v = momentum * states[0] + kept * g
    return [w - lr * (g + momentum * v if option else v), v]


def step(
    device: Device, rng: np.random.Generator, *, path: str, entry: str, option: str = "", factor: float = 0.5
) -> Iterator[Outcome]:
    """One step of part of a row; the rest of it stays. A factor that is not finite changes nothing."""
    w, g = rng.standard_normal((2, ROWS)).astype(np.float32)
    states = [np.abs(rng.standard_normal(ROWS)).astype(np.float32) for _ in STATES[entry]]
    rows = {"weight": device.upload(w)} | {
        name: device.upload(state) for name, state in zip(STATES[entry], states, strict=True)
    }
    record = device.recorder()
    kernel = device.kernel(path, entry, constants={option: 1} if option else {})
    others: dict[str, Any] = {
        "grad": device.upload(g),
        "factor": device.upload(np.array([factor], np.float32)),
        "hyper": device.upload(np.array(HYPER[entry], np.float32)),
    }
    record(kernel, -(-LENGTH // 1024), size=LENGTH // 4, first=FIRST // 4, **rows, **others)
    record.submit()
    given = [x.astype(np.float64) for x in (w, *states)]
    want = [x.copy() for x in given]
    if np.isfinite(factor):
        part = slice(FIRST, FIRST + LENGTH)
        made = truth(entry, bool(option), given[0], factor * g.astype(np.float64), given[1:])
        for x, y in zip(want, made, strict=True):
            x[part] = y[part]
    for (name, buffer), x in zip(rows.items(), want, strict=True):
        yield Outcome(device.read(buffer, np.float32, (ROWS,)), x, 2e-6, 2e-6, name)


def gaps(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Gaps of one word and of 64, and words between them that stay."""
    pieces = [(3, 1), (10, 64), (100, 63), (199, 1)]
    x = rng.standard_normal(200).astype(np.float32)
    out = device.upload(x)
    record = device.recorder()
    table = device.upload(np.array(pieces, np.uint32))
    record(device.kernel("movement/gaps.wgsl", "clear_gaps"), len(pieces), table=table, out=out, gaps=len(pieces))
    record.submit()
    for start, length in pieces:
        x[start : start + length] = 0.0
    yield Outcome(device.read(out, np.float32, (200,)), x)


def cases() -> list[Case]:
    found = [Case("movement/gaps: 4 gaps", gaps, ("movement/gaps.wgsl",))]
    for path, entry, options in (
        ("optim/adam.wgsl", "adam", ("", "COUPLED")),
        ("optim/sgd.wgsl", "sgd", ("",)),
        ("optim/sgd.wgsl", "sgd_momentum", ("", "NESTEROV")),
        ("optim/lion.wgsl", "lion", ("",)),
    ):
        for option in options:
            run = partial(step, path=path, entry=entry, option=option)
            found.append(Case(f"optim/{entry}{f': {option.lower()}' if option else ''}", run, (path,)))
        for factor in (np.inf, np.nan):
            run = partial(step, path=path, entry=entry, factor=factor)
            found.append(Case(f"optim/{entry}: factor {factor}", run, (path,)))
    return found
