"""Random numbers: their distribution, that they repeat, and that recordings draw afresh."""

from __future__ import annotations

import numpy as np
import pytest

from nn import functional as F
from nn.graph.jit import jit
from nn.random import Generator, again, kept
from nn.tensor import Tensor


def test_distributions(device):
    generator = Generator(device, seed=3)
    u, n = F.rand(1 << 16, generator=generator).numpy(), F.randn(256, 257, generator=generator).numpy()
    assert u.min() >= 0.0 and u.max() < 1.0
    counts = np.histogram(u, 64, (0, 1))[0]
    assert ((counts - 1024.0) ** 2 / 1024).sum() < 120  # chi-square, 63 degrees of freedom: 1 in 10^5
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert abs(n.mean()) < 0.02 and abs(n.std() - 1) < 0.02
    assert abs((n**3).mean()) < 0.05 and abs((n**4).mean() - 3) < 0.15
    assert abs(np.corrcoef(n[:, 0], n[:, 1])[0, 1]) < 0.25
    whole = F.randint(-3, 4, (70_000,), generator=generator).numpy()
    assert np.abs(np.bincount(whole + 3, minlength=7) - 10_000).max() < 500
    heads = F.bernoulli(Tensor(np.full(20_000, 0.3, np.float32), device), generator=generator).numpy()
    assert set(np.unique(heads)) == {0.0, 1.0} and abs(heads.mean() - 0.3) < 0.02


def test_draws_differ_and_repeat(device):
    first, second = Generator(device, seed=1), Generator(device, seed=1)
    a, b = (F.rand(100, generator=first).numpy() for _ in range(2))
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(F.rand(100, generator=second).numpy(), a)
    state = second.get_state()
    np.testing.assert_array_equal(F.rand(100, generator=second).numpy(), b)
    second.set_state(state)
    np.testing.assert_array_equal(F.rand(100, generator=second).numpy(), b)
    assert not np.array_equal(F.rand(100, generator=Generator(device, seed=2)).numpy(), a)


def test_a_recording_draws_what_a_loop_draws(device):
    def noisy(x, generator):
        return F.dropout(x, 0.5, generator=generator) + F.rand(8, generator=generator)

    x = Tensor(np.ones(8, np.float32), device)
    plain, jitted = Generator(device, seed=5), Generator(device, seed=5)
    step = jit(lambda x: noisy(x, jitted))
    for _ in range(4):
        np.testing.assert_array_equal(step(x).numpy(), noisy(x, plain).numpy())
    assert plain.draws == jitted.draws == 8


def test_dropout_and_its_gradient_share_a_mask(device):
    x = Tensor(np.full((64, 65), 2.0, np.float32), device, requires_grad=True)
    y = F.dropout(x, 0.25, generator=Generator(device, seed=9))
    y.sum().backward()
    got, slope = y.numpy(), x.grad.numpy()
    np.testing.assert_array_equal(got, slope * 2)
    assert set(np.unique(slope)) == {0.0, np.float32(4 / 3)}
    assert abs((slope == 0).mean() - 0.25) < 0.03
    assert F.dropout(x, 0.25, training=False) is x
    assert not F.dropout(x, 1.0, generator=Generator(device)).numpy().any()


def test_draws_can_be_made_again(device):
    generator = Generator(device, seed=4)
    with kept() as draws:
        first = F.rand(50, generator=generator).numpy(), F.randn(50, generator=generator).numpy()
    before = generator.get_state()
    with again(draws):
        second = F.rand(50, generator=generator).numpy(), F.randn(50, generator=generator).numpy()
    np.testing.assert_array_equal(first, second)
    assert generator.get_state() == before


def test_bad_input(device):
    x = Tensor(np.ones(3, np.float32), device)
    with pytest.raises(ValueError, match=r"dropout: p is 1.5; expected a probability from 0 to 1"):
        F.dropout(x, 1.5)
    with pytest.raises(TypeError, match="dropout: training draws random numbers; pass generator="):
        F.dropout(x, 0.5)
    with pytest.raises(ValueError, match=r"Generator: seed is -1; expected a whole number from 0 to 2\^32 - 1"):
        Generator(device, seed=-1)
    with pytest.raises(ValueError, match="randint: low 3, high 3"):
        F.randint(3, 3, (2,), generator=Generator(device))
