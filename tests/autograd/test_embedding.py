"""The embedding table's gradient against PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.tensor import Tensor

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(7,), (2, 9), (0,), ()], ids=str)
@pytest.mark.parametrize("vocab", [3, 70])
def test_table_gradient(device, rng, shape, vocab):
    ids = rng.integers(0, vocab, shape)
    table = rng.standard_normal((vocab, 32)).astype(np.float32)
    dy = rng.standard_normal((*shape, 32)).astype(np.float32)
    ours = Tensor(table, device, requires_grad=True)
    theirs = torch.tensor(table.astype(np.float64), requires_grad=True)
    F.embedding(Tensor(np.asarray(ids, np.int32), device), ours, scale=3.0).backward(Tensor(dy, device))
    (torch.nn.functional.embedding(torch.tensor(ids), theirs) * 3.0).backward(torch.tensor(dy.astype(np.float64)))
    assert ours.grad is not None and ours.grad.dtype == "f32"
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-6, atol=1e-6)


def test_second_derivatives_and_what_is_left_of_padded_columns(device, rng):
    """Rows are cubed, so that the second derivative depends on the table; 5 of 32 columns are used."""
    ids = np.array([1, 0, 1, 2, 1])
    table = rng.standard_normal((4, 32)).astype(np.float32)
    weight = rng.standard_normal((4, 32)).astype(np.float32)

    def second(module, t, i, w):
        y = (module.embedding(i, t)[:, :5] ** 3).sum()
        gradient = grad if module is F else torch.autograd.grad
        (first,) = gradient(y, [t], create_graph=True)
        return first, gradient((first * w).sum(), [t])[0]

    got = second(
        F, Tensor(table, device, requires_grad=True), Tensor(ids.astype(np.int32), device), Tensor(weight, device)
    )
    double = torch.tensor(table.astype(np.float64), requires_grad=True)
    want = second(torch.nn.functional, double, torch.tensor(ids), torch.tensor(weight.astype(np.float64)))
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.numpy(), w.numpy(force=True), rtol=1e-5, atol=1e-5)


def test_f16_table_sums_in_f32(device):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    table = Tensor(np.zeros((2, 32), np.float16), device, requires_grad=True)
    y = F.embedding(Tensor(np.zeros(4096, np.int32), device), table)
    (y * 0.25).sum().backward()
    assert table.grad.dtype == "f16"
    np.testing.assert_array_equal(table.grad.numpy(), [[1024.0] * 32, [0.0] * 32])


def test_a_bf16_table_has_no_gradient(device):
    table = Tensor(np.zeros((2, 32), np.float32), device, dtype="bf16")
    table.requires_grad = True
    y = F.embedding(Tensor(np.zeros(3, np.int32), device), table)
    with pytest.raises(TypeError, match="no gradient to a bf16 table; keep the table that is trained in f32 or f16"):
        y.sum().backward()
