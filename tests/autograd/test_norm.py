"""Gradients of norms by the fused kernel, which software drivers do not take by themselves, against PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.tensor import Tensor

torch = pytest.importorskip("torch")


@pytest.fixture
def as_gpu(device, monkeypatch):
    """The device with what a GPU takes."""
    monkeypatch.setattr(device, "caps", replace(device.caps, kind="gpu"))
    return device


@pytest.mark.parametrize("name", ["layer_norm wb", "layer_norm w", "layer_norm", "rms_norm w", "rms_norm"])
@pytest.mark.parametrize("shape", [(3, 5, 12), (2, 7), (0, 8)], ids=str)
def test_fused_gradients(as_gpu, rng, name, shape):
    function, weights = name.split()[0], name.split()[1:]
    count = len(weights[0]) if weights else 0
    arrays = [rng.standard_normal(s).astype(np.float32) for s in (shape, *[shape[-1:]] * count)]
    ours = [Tensor(a, as_gpu, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    dy = rng.standard_normal(shape).astype(np.float32)
    y = getattr(F, function)(ours[0], shape[-1:], *ours[1:], eps=1e-5)
    t = getattr(torch.nn.functional, function)(theirs[0], shape[-1:], *theirs[1:], eps=1e-5)
    got = grad(y, ours, Tensor(dy, as_gpu))
    for g, w in zip(got, torch.autograd.grad(t, theirs, torch.tensor(dy.astype(np.float64)))):
        np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=2e-5, atol=1e-5)


def test_two_axes_and_dispatches(as_gpu, rng):
    """The row kernel, and one that adds up what its workgroups have of both weights."""
    x, w, b = (Tensor(rng.standard_normal(s).astype(np.float32), as_gpu) for s in ((9, 4, 8), (4, 8), (4, 8)))
    operands = [x, w, b]
    for t in operands:
        t.requires_grad = True
    y = F.layer_norm(x, (4, 8), w, b)
    dy = Tensor(rng.standard_normal((9, 4, 8)).astype(np.float32), as_gpu)
    y.numpy(), dy.numpy()
    got = grad(y, operands, dy)
    before = as_gpu.counters.dispatches
    got[0].numpy()
    assert as_gpu.counters.dispatches - before == 2
    theirs = [torch.tensor(t.numpy().astype(np.float64), requires_grad=True) for t in operands]
    t = torch.nn.functional.layer_norm(theirs[0], (4, 8), *theirs[1:])
    for g, want in zip(got, torch.autograd.grad(t, theirs, torch.tensor(dy.numpy().astype(np.float64)))):
        np.testing.assert_allclose(g.numpy(), want.numpy(), rtol=2e-5, atol=1e-5)


def test_rows_too_long_for_registers_take_the_composite_rule(as_gpu, rng):
    a = rng.standard_normal((2, 8197)).astype(np.float32)
    x, theirs = Tensor(a, as_gpu, requires_grad=True), torch.tensor(a.astype(np.float64), requires_grad=True)
    dy = rng.standard_normal(a.shape).astype(np.float32)
    F.layer_norm(x, (8197,)).backward(Tensor(dy, as_gpu))
    torch.nn.functional.layer_norm(theirs, (8197,)).backward(torch.tensor(dy.astype(np.float64)))
    np.testing.assert_allclose(x.grad.numpy(), theirs.grad.numpy(), rtol=2e-5, atol=1e-5)
