"""Lengths in buckets: a few captures serve all, and padding changes no result."""

from __future__ import annotations

import numpy as np
import pytest

import nn.functional as F
from nn.graph.jit import jit
from nn.ops.base import ShapeError
from nn.tensor import Tensor

WIDTH = 8


def model(x, w, real):
    """Attention over real rows, then the mean of real rows: both wrong where padding takes part."""
    h = (x @ w).tanh()
    mask = real.reshape(1, 1, -1).expand(x.shape[0], x.shape[1], x.shape[1])
    y = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
    kept = F.where(real.reshape(1, -1, 1), y, 0.0)
    return y, kept.sum(1) / real.float().sum()


def test_padded_and_masked_equals_unpadded(device, rng):
    w = Tensor(np.float32(rng.standard_normal((WIDTH, WIDTH))), device)
    shapes = []

    @jit(pad={"x": 1}, buckets=(16, 4, 8), cut={"y": 1})
    def step(x, length, *, scale):
        shapes.append(x.shape)
        y, mean = model(x, w, F.arange(x.shape[1], device=device) < length)
        return {"y": y * scale, "mean": mean * scale}

    for length in (1, 3, 4, 5, 8, 9, 13, 16, 2, 7):
        x = Tensor(np.float32(rng.standard_normal((2, length, WIDTH))), device)
        got = step(x, scale=2.0)
        y, mean = model(x, w, F.arange(length, device=device) < length)
        assert got["y"].shape == (2, length, WIDTH)
        np.testing.assert_allclose(got["y"].numpy(), 2 * y.numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got["mean"].numpy(), 2 * mean.numpy(), rtol=1e-5, atol=1e-6)
    assert sorted(shapes) == [(2, 4, WIDTH), (2, 8, WIDTH), (2, 16, WIDTH)]


def test_random_lengths_compile_nothing_after_the_buckets(device, rng):
    step = jit(lambda ids, mask: (ids * mask).sum(0), pad={"ids": 0, "mask": -2}, buckets=[8, 32])

    def call(length):
        ids = rng.integers(0, 9, (length, 3)).astype(np.float32)
        mask = np.float32(rng.standard_normal((length, 3)))
        np.testing.assert_allclose(
            step(Tensor(ids, device), mask=Tensor(mask, device)).numpy(),
            (ids.astype(np.float64) * mask).sum(0),
            rtol=1e-5,
            atol=1e-5,
        )

    for length in (5, 8, 20, 32):
        call(length)
    before = device.counters.pipelines
    for length in rng.integers(1, 33, 20):
        call(int(length))
    assert device.counters.pipelines == before


def test_misuse_is_named(device):
    step = jit(lambda a, b: a + b, pad={"a": 0, "b": 0}, buckets=(4,))
    long, short = Tensor(np.ones(5, np.float32), device), Tensor(np.ones(3, np.float32), device)
    with pytest.raises(ShapeError, match=r"jit <lambda>: a length of 5; the longest bucket is 4, add a longer one"):
        step(long, long)
    with pytest.raises(ShapeError, match=r"lengths \{'a': 5, 'b': 3\}; expected one length"):
        step(long, short)
    with pytest.raises(TypeError, match="b is 3; expected a tensor with an axis 0 to pad"):
        step(short, 3)
    with pytest.raises(ValueError, match=r"pad names \['c'\]; the function's arguments are \['a', 'b'\]"):
        jit(lambda a, b: a, pad={"c": 0}, buckets=(4,))
    with pytest.raises(TypeError, match=r"cut is 0, and there the result is tuple; expected a tensor"):
        jit(lambda a: (a, a), pad={"a": 0}, buckets=(4,), cut=0)(short)
    both = jit(lambda a: (a * 2, a.sum()), pad={"a": 0}, buckets=(4,), cut={0: 0})(short)
    assert both[0].tolist() == [2, 2, 2] and both[1].item() == 3
    assert jit(lambda a: a * 2, pad={"a": 0}, buckets=(4,), cut=0)(short).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="expected lengths of 1 or more"):
        jit(lambda a: a, pad={"a": 0}, buckets=())
