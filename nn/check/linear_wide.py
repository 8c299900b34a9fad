"""Checks of products with stored weights on matrix units (nn/ops/linear_wide.py) against float64 NumPy.

The truth takes the factors as the kernels round them: weights to f16, activations to 11 bits of their row's scale.
What is left is the rounding of f32 sums, so that a wrong term shows. The steps around the product run on any device
with f16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.check.base import Case, Outcome
from nn.check.linear import gated, normal, poisoned, products
from nn.check.quant import random_raw, upload_in
from nn.ops.linear import multiply
from nn.ops.linear_variants import WIDE, WIDES, Variant
from nn.quant.formats import FORMATS, dequantize, format_of

if TYPE_CHECKING:
    from gpu import Device

STEPS = ("matmul/halve_rows.wgsl", "quant/widen.wgsl")
ENTRIES = ("linear", "linear_bias", "linear_residual", "linear_bias_residual", "gated_linear")


def row_scale(x: np.ndarray) -> np.ndarray:
    """What each row is multiplied with: the power of two that brings its largest value to 2^14..2^15. (T, 1)"""
    most = np.abs(x).max(1, keepdims=True, initial=0.0)
    exponent = np.where(most > 0.0, np.floor(np.log2(np.where(most > 0.0, most, 1.0))), 14.0)
    return np.exp2(np.clip(14.0 - exponent, -100, 100))


def halved(x: np.ndarray) -> np.ndarray:
    """x as the kernels take it, in float64."""
    scale = row_scale(x)
    return (x * scale).astype(np.float16).astype(np.float64) / scale


def wide_rows(
    device: Device,
    rng: np.random.Generator,
    *,
    chosen: Variant,
    entry: str,
    format: str,
    rows: int,
    cols: int,
    tokens: int,
    pieces: int = 1,
    size: float = 1.0,
) -> Iterator[Outcome]:
    """One product. size: of the activations; each row has its own order of magnitude besides."""
    raw = random_raw(rng, format, rows, cols)
    weight, matrix = upload_in(device, raw, (rows, cols), format, pieces), dequantize(raw, format)
    x = normal(rng, tokens, cols) * (size * np.exp2(rng.integers(-8, 9, (tokens, 1)))).astype(np.float32)
    x[tokens // 2] = 0.0
    bias, width = normal(rng, rows), rows // 2 if "gated" in entry else rows
    residual, out = normal(rng, tokens, width), poisoned(device, tokens, width)
    want, atol = products(halved(x), matrix.astype(np.float16))
    buffers: dict[str, np.ndarray] = {"x": x}
    if "bias" in entry:
        want, buffers["bias"] = want + bias, bias
    if "residual" in entry:
        want, buffers["residual"] = want + residual, residual
    if "gated" in entry:
        atol *= 2.0 * (1.0 + np.abs(want).max())
        want = gated(want[:, :width], want[:, width:], "silu")
    uploaded: dict[str, Any] = {name: device.upload(array) for name, array in buffers.items()}
    record = device.recorder()
    multiply(
        record, chosen, entry, weight, tokens=tokens, out=out, out_cols=width, eps=0.0,
        constants={"GELU": 0} if "gated" in entry else None, **uploaded,
    )  # fmt: skip
    record.submit()
    yield Outcome(device.read(out, np.float32, want.shape), want, 1e-5, atol, f"{tokens} tokens")


def halve_steps(device: Device, rng: np.random.Generator, *, tokens: int, cols: int) -> Iterator[Outcome]:
    """Rows of every magnitude, an empty one among them, as halves with their scales."""
    x = normal(rng, tokens, cols) * np.exp2(rng.integers(-60, 61, (tokens, 1))).astype(np.float32)
    x[0] = 0.0
    out, scales = device.upload(np.full((tokens, cols), np.nan, np.float16)), poisoned(device, tokens)
    record = device.recorder()
    kernel = device.kernel("matmul/halve_rows.wgsl", "halve_rows")
    record(kernel, tokens, x=device.upload(x), out=out, scales=scales, rows=tokens, cols=cols, out_cols=0, first_col=0)
    record.submit()
    scale = row_scale(x)
    want = (x * scale).astype(np.float16).astype(np.float64)
    yield Outcome(device.read(scales, np.float32, (tokens, 1)), 1 / scale, 0.0, 0.0, "scales")
    yield Outcome(device.read(out, np.float16, (tokens, cols)), want, 0.0, 0.0, "halves")


def widen_steps(device: Device, rng: np.random.Generator, *, format: str, rows: int, cols: int) -> Iterator[Outcome]:
    """A window of weights as halves."""
    raw = random_raw(rng, format, rows, cols)
    weight = upload_in(device, raw, (rows, cols), format, 1)
    out = device.upload(np.full((rows, cols), np.nan, np.float16))
    record = device.recorder()
    kernel = device.kernel("quant/widen.wgsl", "widen", parts={"format": weight.shader})
    record(kernel, -(-rows * cols // 1024), w=weight.windows[0].buffer, out=out, w_rows=rows, cols=cols)
    record.submit()
    yield Outcome(device.read(out, np.float16, (rows, cols)), dequantize(raw, format).astype(np.float16), 0.0, 0.0, "")


def cases() -> list[Case]:
    """Every stored format is decoded once, meets a tile, and every entry; sizes lie around the tiles' edges."""
    f16 = frozenset({"f16"})
    found = [
        Case(f"matmul/halve_rows: {t} x {cols}", partial(halve_steps, tokens=t, cols=cols), STEPS[:1], f16)
        for t, cols in ((1, 32), (5, 352), (3, 2080))
    ]
    formats = [f for f in FORMATS if f == "f16" or not format_of(f).dense]
    for i, format in enumerate(formats):
        cols = max(32, format_of(format).block)
        if format != "f16":
            run = partial(widen_steps, format=format, rows=37, cols=3 * cols)
            found.append(Case(f"quant/widen: {format}", run, (STEPS[1], f"quant/{format}.wgsl"), f16))
        chosen, entry = WIDES[i % len(WIDES)], ENTRIES[i % len(ENTRIES)]
        run = partial(
            wide_rows, chosen=chosen, entry=entry, format=format, rows=(130, 258)[i % 2], cols=2 * cols,
            tokens=(64, 129, 33)[i % 3], pieces=1 if entry == "gated_linear" else 1 + i % 2, size=(1.0, 3e5)[i % 2],
        )  # fmt: skip
        shaders = (WIDE, "matmul/halves_linear.wgsl", f"quant/{format}.wgsl", *STEPS)
        needs = frozenset({"matrix_f16"})
        found.append(Case(f"matmul/{entry}: {chosen.name}, {format} K={2 * cols}", run, shaders, needs))
    return found
