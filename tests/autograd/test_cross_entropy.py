"""cross_entropy's value, gradient and second derivative against PyTorch's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.ops.base import ShapeError
from nn.tensor import Tensor

torch = pytest.importorskip("torch")
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0, "reduction": "sum"},
    {"ignore_index": 2},
    {"ignore_index": 2, "label_smoothing": 0.3},
]
SHAPES = [(6, 5), (5,), (3, 5, 2, 4), (2, 1), (2, 4, 3), (0, 4), (9, 130)]


def both(device, rng, x, target, weight, options, *, second=True):
    ours = Tensor(x, device, requires_grad=True)
    theirs = torch.tensor(x.astype(np.float64), requires_grad=True)
    weights = (None, None)
    if weight is not None:
        weights = Tensor(weight, device), torch.tensor(weight.astype(np.float64))
    true = torch.tensor(target.astype(np.int64 if target.dtype.kind == "i" else np.float64))
    y = F.cross_entropy(ours, Tensor(target, device), weights[0], **options)
    t = torch.nn.functional.cross_entropy(theirs, true, weights[1], **options)
    assert y.shape == tuple(t.shape) and y.dtype == "f32"
    close = {"rtol": 2e-5, "atol": 2e-6}
    np.testing.assert_allclose(y.numpy(), t.detach().numpy(), **close)
    dy = rng.uniform(0.5, 1.5, y.shape).astype(np.float32)
    seeds = Tensor(dy, device), torch.tensor(dy.astype(np.float64))
    right = torch.autograd.grad(t, theirs, seeds[1], create_graph=True)[0]
    fused = grad(y, [ours], seeds[0], retain_graph=True)[0]
    np.testing.assert_allclose(fused.numpy(), right.numpy(force=True), **close)
    if second:
        first = grad(y, [ours], seeds[0], create_graph=True)[0]
        np.testing.assert_allclose(first.numpy(), right.numpy(force=True), **close)
        w = rng.standard_normal(x.shape).astype(np.float32)
        got = grad((first * Tensor(w, device)).sum(), [ours])[0]
        want = torch.autograd.grad((right * torch.tensor(w.astype(np.float64))).sum(), theirs)[0]
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_class_indices(device, rng, shape, options):
    axis = min(1, len(shape) - 1)
    target = rng.integers(0, shape[axis], (*shape[:axis], *shape[axis + 1 :])).astype(np.int32)
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    weight = rng.uniform(0.2, 2, shape[axis]).astype(np.float32)
    both(device, rng, x, target, weight, options, second=False)
    both(device, rng, x, target, None, options, second=x.size < 100)


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (5,), (3, 5, 2)], ids=str)
def test_probabilities(device, rng, shape, options):
    axis = min(1, len(shape) - 1)
    target = rng.dirichlet(np.ones(shape[axis]), (*shape[:axis], *shape[axis + 1 :]))
    target = np.ascontiguousarray(np.moveaxis(target, -1, axis)).astype(np.float32)
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    weight = rng.uniform(0.2, 2, shape[axis]).astype(np.float32)
    for w in (weight, None):
        both(device, rng, x, target, w, options)


def test_all_rows_ignored_give_nan_as_torch(device):
    x, goal = np.zeros((2, 3), np.float32), Tensor(np.full(2, -100, np.int32), device)
    assert np.isnan(F.cross_entropy(Tensor(x, device), goal).item())
    assert F.cross_entropy(Tensor(x, device), goal, reduction="sum").item() == 0.0
    ours = Tensor(x, device, requires_grad=True)
    F.cross_entropy(ours, goal, reduction="sum").backward()
    np.testing.assert_array_equal(ours.grad.numpy(), 0.0)


def test_a_class_that_is_none_gives_nan(device):
    x = Tensor(np.zeros((3, 4), np.float32), device)
    goal = Tensor(np.array([1, 4, -1], np.int32), device)
    np.testing.assert_allclose(
        F.cross_entropy(x, goal, reduction="none").numpy(), [np.log(4), np.nan, np.nan], rtol=1e-6
    )


def test_f16_logits_and_large_ones(device):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    x = np.array([[60000.0, 59968.0, -60000.0], [0.0, 1.0, 2.0]], np.float16)
    ours = Tensor(x, device, requires_grad=True)
    loss = F.cross_entropy(ours, Tensor(np.array([1, 0], np.uint32), device), reduction="sum")
    theirs = torch.tensor(x.astype(np.float64), requires_grad=True)
    true = torch.nn.functional.cross_entropy(theirs, torch.tensor([1, 0]), reduction="sum")
    true.backward()
    np.testing.assert_allclose(loss.item(), true.item(), rtol=1e-6)
    loss.backward()
    assert ours.grad.dtype == "f16"
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), atol=2**-10)


def test_forward_and_backward_are_few_dispatches(device, rng):
    """One pass over the logits forward and one back; what else there is has one number a row."""
    ours = Tensor(rng.standard_normal((64, 300)).astype(np.float32), device, requires_grad=True)
    goal = Tensor(rng.integers(0, 300, 64).astype(np.int32), device)
    before = device.counters.dispatches
    loss = F.cross_entropy(ours, goal)
    loss.backward()
    ours.grad.numpy()
    assert device.counters.dispatches - before <= 5


def test_mistakes_are_named(device):
    x = Tensor(np.zeros((2, 3), np.float32), device)
    goal = Tensor(np.zeros(2, np.int32), device)
    with pytest.raises(ShapeError, match=r"target has shape \(2,\), input \(3, 2\).*axis 1: \(3,\)"):
        F.cross_entropy(x.T, goal)
    with pytest.raises(ShapeError, match=r"weight is f32 of shape \(2,\); expected f32 or f16 \(3,\)"):
        F.cross_entropy(x, goal, Tensor(np.zeros(2, np.float32), device))
    with pytest.raises(ShapeError, match=r"probabilities have input's shape \(2, 3\)"):
        F.cross_entropy(x, goal.to("f32"))
    with pytest.raises(TypeError, match="input is i32; expected f32 or f16 logits"):
        F.cross_entropy(x.to("i32"), goal)
    with pytest.raises(ValueError, match="reduction is 'avg'; expected"):
        F.cross_entropy(x, goal, reduction="avg")
    with pytest.raises(ValueError, match="size_average and reduce are not taken"):
        F.cross_entropy(x, goal, None, True)
    with pytest.raises(ValueError, match=r"label_smoothing is 2.0; expected a part of 1"):
        F.cross_entropy(x, goal, label_smoothing=2.0)
