"""ANYGPU_NANCHECK=1 names the first operation that made a NaN, and changes nothing else."""

from __future__ import annotations

import numpy as np
import pytest

import nn.functional as F
from nn.graph.jit import jit
from nn.graph.nancheck import NaNFound
from nn.graph.scopes import named
from nn.layers import Linear
from nn.optim import AdamW
from nn.tensor import Tensor


@pytest.fixture(autouse=True)
def hunt(monkeypatch):
    monkeypatch.setenv("ANYGPU_NANCHECK", "1")


def test_inside_a_fused_kernel(device):
    x = Tensor([1.0, -1.0, 4.0], device)
    with named("head"):
        y = (x * 2 + 1).log().exp()
    with pytest.raises(NaNFound, match=r"fused mul, add, log, exp in head made the first NaN: 1 of 3.*gave one is log"):
        y.numpy()


def test_in_a_reduction_and_behind_a_product(device, rng):
    x = Tensor(np.float32(rng.standard_normal((5, 7))), device)
    with pytest.raises(NaNFound, match=r"sum\(abs, neg, sqrt\) made the first NaN.*gave one is sqrt"):
        (-x.abs()).sqrt().sum(1).numpy()
    w = Tensor(np.float32(rng.standard_normal((7, 7))), device)
    with pytest.raises(NaNFound, match=r"mat_mul, .*gave one is sqrt"):
        (-(x @ w).abs() - 1).sqrt().numpy()
    large = Tensor(np.full((5, 5), 3e38, np.float32), device)
    signs = Tensor(np.float32([[1], [-1], [1], [-1], [1]]) * np.ones((5, 5), np.float32), device)
    with pytest.raises(NaNFound, match=r"made the first NaN"):
        ((large * 10) @ signs * 2).numpy()


def test_the_first_and_not_what_comes_after(device):
    x = Tensor([0.0, 1.0], device)
    bad = x / x
    kept = bad.sum()  # NaN out of NaN
    with pytest.raises(NaNFound, match=r"(fused div|sum\(div\)) made the first NaN"):
        kept.numpy()
    given = Tensor([np.nan, 1.0], device)
    assert np.isnan((given * 2).numpy()[0])  # the operand had it


def test_steps_of_training_run_and_are_named(device, rng):
    net = Linear(4, 3, device=device, rng=rng)
    opt = AdamW(net.parameters(), lr=0.1)

    @jit
    def step(x):
        loss = net(x).square().mean().sqrt()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    losses = [step(Tensor(np.ones((2, 4), np.float32), device)).item() for _ in range(3)]
    assert losses[2] < losses[0]
    with pytest.raises(NaNFound, match="made the first NaN"):
        step(Tensor(np.full((2, 4), np.inf, np.float32), device))


def test_finite_numbers_come_out_as_ever(device, rng):
    a = np.float32(rng.standard_normal((6, 6)))
    x = Tensor(a, device)
    y = F.softmax(x @ x, -1).sum(0)
    e = np.exp(a @ a - (a @ a).max(-1, keepdims=True))
    np.testing.assert_allclose(y.numpy(), (e / e.sum(-1, keepdims=True)).sum(0), rtol=1e-4, atol=1e-5)
