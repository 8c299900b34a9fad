"""Names, signatures and results are PyTorch's: the same expression on both sides."""

from __future__ import annotations

import numpy as np
import pytest

import nn.functional as F
from nn.tensor import Tensor

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")

EXPRESSIONS = [
    lambda t, x, y: x + y * 2 - 1 / (x * x + 1),
    lambda t, x, y: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    lambda t, x, y: x.var(0, correction=0) + x.std() + x.std((0, 1)).sum(),
    lambda t, x, y: x.max(1).values + x.min(1)[0],
    lambda t, x, y: x.max(1)[1] * 10 + x.argmin(1),
    lambda t, x, y: t.where(x > y, x, 0.0).sum(),
    lambda t, x, y: t.where(x > 0, 1.5, -2.0),
    lambda t, x, y: x.clamp(-0.5, 0.5).masked_fill(y > 0, 9.0),
    lambda t, x, y: x[1:, None, ::2].expand(-1, 2, -1).flatten(1).unsqueeze(-1).transpose(0, 1),
    lambda t, x, y: t.cat([x, y.T.reshape(4, 6)], -1).chunk(5, -1)[3],
    lambda t, x, y: t.stack([x, y], 1).permute(2, 0, 1).contiguous().view(-1, 2).T,
    lambda t, x, y: x.repeat(2, 1, 3).narrow(0, 1, 1).squeeze(0).split([7, 11], 1)[1],
    lambda t, x, y: t.tril(x, 1) - t.triu(y, -1),
    lambda t, x, y: x.flip((0, 1)).unflatten(1, (2, -1)).amax((0, 2)),
    lambda t, x, y: (x > 0).any(1) & (y < 3).all(1) | ~(x == y).any(),
    lambda t, x, y: (x % 0.7) + (x // 0.3) + t.fmod(y, 0.4),
    lambda t, x, y: (x.abs() + 0.1) ** y + 2**x + x**2 + (x.abs() + 1) ** -0.5,
    lambda t, x, y: t.logsumexp(x * 50, 1) + t.logsumexp(y, (0, 1)),
    lambda t, x, y: x.sigmoid().log1p().expm1() + t.maximum(x, y).tanh().erf() - t.minimum(x, y).floor().ceil(),
    lambda t, x, y: x.round() + x.trunc() + x.sign() + (x * 3).log2().isnan().float() + y.exp2() + y.cos() * y.sin(),
    lambda t, x, y: x.softmax(0) + y.log_softmax(1),
    lambda t, x, y: (x * 4).int() // 3 + (x * 4).int() % 3 + (y * 4).int().bitwise_and(5),
    lambda t, x, y: ((x * 9).int() / 4) + ((x > 0).sum(0) + 1).float() * (x > 0).float().prod(0),
    lambda t, x, y: (x * 9).int().sum(1) * 2 - (x * 9).int().amax(1),
]


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_expression(device, rng, number):
    a, b = rng.standard_normal((2, 4, 6)).astype(np.float32)
    want = EXPRESSIONS[number](torch, torch.tensor(a), torch.tensor(b))
    got = EXPRESSIONS[number](F, Tensor(a, device), Tensor(b, device))
    kinds = {"f32": torch.float32, "i32": (torch.int32, torch.int64), "bool": torch.bool}[got.dtype]
    assert want.dtype in (kinds if isinstance(kinds, tuple) else (kinds,))
    assert got.shape == tuple(want.shape)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=3e-5, atol=2e-5)


FUNCTIONALS = {
    "gelu": [{}, {"approximate": "tanh"}], "silu": [{}], "relu": [{}], "softplus": [{}, {"beta": 2.0}],
    "softmax": [{"dim": 0}],
    "log_softmax": [{"dim": 1}], "pad": [{"pad": (1, 2, -1, 3), "value": 2.5}],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONALS)
def test_functional(device, rng, name):
    a = rng.standard_normal((4, 6)).astype(np.float32) * 4
    for options in FUNCTIONALS[name]:
        want = getattr(torch.nn.functional, name)(torch.tensor(a), **options)
        got = getattr(F, name)(Tensor(a, device), **options)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=2e-5, atol=1e-5)


def test_softplus_and_gelu_extremes(device):
    a = np.float32([-1e4, -100, -20, 0, 20, 100, 1e4])
    for name in ("softplus", "gelu", "silu", "sigmoid", "tanh", "relu"):
        here = getattr(F, name)
        there = getattr(torch.nn.functional, name, None) or getattr(torch, name)
        np.testing.assert_allclose(
            here(Tensor(a, device)).numpy(), there(torch.tensor(a)).numpy(), rtol=1e-5, atol=1e-8
        )
