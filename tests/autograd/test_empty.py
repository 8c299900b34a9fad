"""Operands without elements, on a device without the tests' canaries: an empty buffer is bound as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpu import Device
from nn import functional as F
from nn.autograd import grad
from nn.tensor import Tensor


@pytest.fixture(scope="module", params=["as it is", "gpu"])
def bare(request):
    with Device.open() as device:
        if request.param == "gpu":
            device.caps = replace(device.caps, kind="gpu")
        yield device


def test_a_table_that_nobody_looks_up(bare):
    table = Tensor(np.ones((3, 32), np.float32), bare, requires_grad=True)
    F.embedding(Tensor(np.zeros(0, np.int32), bare), table).sum().backward()
    np.testing.assert_array_equal(table.grad.numpy(), np.zeros((3, 32)))


@pytest.mark.parametrize("rows, keys", [(0, 3), (3, 0)])
def test_attention_without_queries_or_keys(bare, rows, keys):
    q, k, v = (Tensor(np.ones((1, 2, n, 4), np.float32), bare, requires_grad=True) for n in (rows, keys, keys))
    y = F.scaled_dot_product_attention(q, k, v)
    for x, g in zip((q, k, v), grad(y, [q, k, v], Tensor(np.ones(y.shape, np.float32), bare))):
        np.testing.assert_array_equal(g.numpy(), np.zeros(x.shape))


def test_losses_and_norms_of_no_rows(bare):
    x = Tensor(np.zeros((0, 8), np.float32), bare, requires_grad=True)
    loss = F.cross_entropy(x, Tensor(np.zeros(0, np.int32), bare), reduction="sum")
    assert loss.item() == 0.0
    w = Tensor(np.ones(8, np.float32), bare, requires_grad=True)
    dx, dw = grad(F.layer_norm(x, (8,), w).sum() + loss, [x, w])
    assert dx.shape == (0, 8)
    np.testing.assert_array_equal(dw.numpy(), np.zeros(8))
