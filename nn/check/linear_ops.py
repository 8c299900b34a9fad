"""Checks of the operations on weight matrices (nn/ops/linear.py), as this device lowers them: one dispatch or several.

The kernels by themselves are in linear.py here, whose truths these share.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.check.base import Case, Outcome
from nn.check.linear import EPS, SHARED, Projection, gated, normal, poisoned, products, rms_norm
from nn.check.quant import random_raw, upload_in
from nn.ops.base import Array, Op
from nn.ops.linear import GatedMLP, Linear, NormLinear, QKVRope
from nn.quant import dequantize

if TYPE_CHECKING:
    from gpu import Buffer, Device


def cases() -> list[Case]:
    """The operations themselves, as this device lowers them: the choice of kernels and what happens between them."""
    found = []
    for format, cols, pieces in (("q4_1", 96, 1), ("q8_0", 160, 2), ("f32", 45, 1), ("f16", 77, 2), ("q6_k", 256, 3)):
        for tokens in (1, 3, 9):
            label = f"{format} {tokens}x{cols}, {pieces} windows"
            options = {"format": format, "cols": cols, "pieces": pieces, "tokens": tokens}
            shaders = ("matmul/rows.wgsl", *SHARED)
            found.append(Case(f"ops/linear: {label}", partial(_linear, **options), shaders))
            found.append(Case(f"ops/gated_mlp: {label}", partial(_gated, **options), shaders))
    for form, options in (
        ("one matrix", {}),
        ("bias", {"bias": True}),
        ("three formats", {"split": True}),
        ("three formats, bias", {"split": True, "bias": True}),
        ("head norms", {"norms": True}),
        ("head norms, bias", {"norms": True, "bias": True}),
    ):
        for tokens in (1, 3, 9):
            run = partial(_qkv, tokens=tokens, **options)
            found.append(Case(f"ops/qkv_rope: {form}, {tokens} tokens", run, ("rope/rope_cache.wgsl", *SHARED)))
    return found


def _lower(device: Device, op: Op, *operands: Any, out: Buffer, shape: tuple[int, ...]) -> np.ndarray:
    record = device.recorder()
    op.lower(record, *operands, Array(out, shape))
    record.submit()
    return device.read(out, np.float32, shape)


def _array(device: Device, array: np.ndarray) -> Array:  # f32
    return Array(device.upload(array), array.shape)


def _linear(
    device: Device, rng: np.random.Generator, *, format: str, cols: int, pieces: int, tokens: int
) -> Iterator[Outcome]:
    raw = random_raw(rng, format, 75, cols)
    weight, matrix = upload_in(device, raw, (75, cols), format, pieces), dequantize(raw, format)
    x, gain, bias, residual = normal(rng, tokens, cols), normal(rng, cols), normal(rng, 75), normal(rng, tokens, 75)
    arrays = [_array(device, a) for a in (x, gain, bias, residual)]
    plain, atol = products(x, matrix)
    for with_bias in (False, True):
        for with_residual in (False, True):
            more = [a for a, wanted in ((arrays[2], with_bias), (arrays[3], with_residual)) if wanted]
            op = Linear(bias=with_bias, residual=with_residual)
            got = _lower(device, op, arrays[0], weight, *more, out=poisoned(device, tokens, 75), shape=(tokens, 75))
            yield Outcome(got, plain + with_bias * bias + with_residual * residual, 1e-5, atol, repr(op))
    want, atol = products(rms_norm(x, gain), matrix)
    op = NormLinear(eps=EPS)
    got = _lower(device, op, *arrays[:2], weight, out=poisoned(device, tokens, 75), shape=(tokens, 75))
    yield Outcome(got, want, 1e-5, atol, repr(op))


def _gated(
    device: Device, rng: np.random.Generator, *, format: str, cols: int, pieces: int, tokens: int
) -> Iterator[Outcome]:
    raw = random_raw(rng, format, 74, cols)
    weight, matrix = upload_in(device, raw, (74, cols), format, pieces), dequantize(raw, format)
    x, gain = normal(rng, tokens, cols), normal(rng, cols)
    both, atol = products(rms_norm(x, gain), matrix)
    for activation in ("silu", "gelu_tanh"):
        op = GatedMLP(eps=EPS, activation=activation)
        operands = (_array(device, x), _array(device, gain), weight)
        got = _lower(device, op, *operands, out=poisoned(device, tokens, 37), shape=(tokens, 37))
        want = gated(both[:, :37], both[:, 37:], activation)
        yield Outcome(got, want, 1e-5, 2 * atol * (1 + np.abs(both).max()), repr(op))


def _qkv(
    device: Device,
    rng: np.random.Generator,
    *,
    tokens: int,
    bias: bool = False,
    split: bool = False,
    norms: bool = False,
) -> Iterator[Outcome]:
    case = Projection(rng, heads=4, kv_heads=2, head_dim=16, rotated=16, tokens=tokens, valid=tokens)
    rows = (64, 32, 32) if split else (128,)
    raws = [(f, random_raw(rng, f, n, 96)) for f, n in zip(("q4_1", "q8_0", "f32"), rows, strict=False)]
    weights = [upload_in(device, raw, (len(raw), 96), f, 1) for f, raw in raws]
    matrix = np.concatenate([dequantize(raw, f) for f, raw in raws])
    x, gain, added = normal(rng, tokens, 96), normal(rng, 96), normal(rng, 128)
    gains = [normal(rng, 16) for _ in range(2 * norms)]
    qkv, atol = products(rms_norm(x, gain), matrix)
    buffers = case.upload(device)
    caches = [Array(buffers[name], (case.context, 2, 16)) for name in ("k_cache", "v_cache")]
    ends = [Array(buffers["rope"], case.table.shape), Array(buffers["step"], (4,), "u32")]
    more = [_array(device, a) for a in ([added] if bias else []) + gains]
    op = QKVRope(eps=EPS, weights=len(weights), bias=bias, norms=norms)
    operands = (_array(device, x), _array(device, gain), *caches, *ends, *weights, *more)
    _lower(device, op, *operands, out=buffers["out"], shape=(tokens, 64))
    # A head norm divides by the head's root mean square, which scales the error of the products as it does them.
    scale = 8.0 if norms else 1.0
    yield from case.outcomes(device, buffers, case.truth(qkv + added if bias else qkv, *gains), atol * scale)
