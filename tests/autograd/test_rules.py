"""Every gradient rule against PyTorch's on the CPU, in float64 there."""

from __future__ import annotations

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.tensor import Tensor

torch = pytest.importorskip("torch")

ONE = {  # function of one tensor, and where its values lie
    "neg": (lambda F, x: -x, (-2, 2)),
    "abs": (lambda F, x: F.abs(x), (-2, 2)),
    "square": (lambda F, x: F.square(x), (-2, 2)),
    "reciprocal": (lambda F, x: F.reciprocal(x), (0.5, 2)),
    "exp": (lambda F, x: F.exp(x), (-2, 2)),
    "exp2": (lambda F, x: F.exp2(x), (-2, 2)),
    "expm1": (lambda F, x: F.expm1(x), (-2, 2)),
    "log": (lambda F, x: F.log(x), (0.2, 2)),
    "log2": (lambda F, x: F.log2(x), (0.2, 2)),
    "log1p": (lambda F, x: F.log1p(x), (-0.5, 2)),
    "sqrt": (lambda F, x: F.sqrt(x), (0.2, 2)),
    "rsqrt": (lambda F, x: F.rsqrt(x), (0.2, 2)),
    "sin": (lambda F, x: F.sin(x), (-3, 3)),
    "cos": (lambda F, x: F.cos(x), (-3, 3)),
    "tan": (lambda F, x: F.tan(x), (-1, 1)),
    "tanh": (lambda F, x: F.tanh(x), (-3, 3)),
    "erf": (lambda F, x: F.erf(x), (-2, 2)),
    "floor": (lambda F, x: F.floor(x), (-2, 2)),
    "round": (lambda F, x: F.round(x), (-2, 2)),
    "sign": (lambda F, x: F.sign(x), (-2, 2)),
    "sigmoid": (lambda F, x: F.sigmoid(x), (-4, 4)),
    "relu": (lambda F, x: F.relu(x), (-2, 2)),
    "silu": (lambda F, x: nnf(F).silu(x), (-4, 4)),
    "gelu": (lambda F, x: nnf(F).gelu(x), (-4, 4)),
    "gelu tanh": (lambda F, x: nnf(F).gelu(x, approximate="tanh"), (-4, 4)),
    "softplus": (lambda F, x: nnf(F).softplus(x), (-4, 4)),
    "softplus beta": (lambda F, x: nnf(F).softplus(x, beta=2.0), (-4, 4)),
    "pow 3": (lambda F, x: x**3, (-2, 2)),
    "pow 2.5": (lambda F, x: x**2.5, (0.1, 2)),
    "2 pow x": (lambda F, x: 2.0**x, (-2, 2)),
    "clamp": (lambda F, x: F.clamp(x, -0.5, 1.0), (-2, 2)),
    "sum": (lambda F, x: F.sum(x), (-2, 2)),
    "sum axis": (lambda F, x: F.sum(x, 1), (-2, 2)),
    "sum keep": (lambda F, x: F.sum(x, (0, 2), keepdim=True), (-2, 2)),
    "mean": (lambda F, x: F.mean(x, 1), (-2, 2)),
    "prod": (lambda F, x: F.prod(x, 1), (-2, 2)),
    "amax": (lambda F, x: F.amax(x, 1), (-2, 2)),
    "amin": (lambda F, x: F.amin(x, (0, 1)), (-2, 2)),
    "max dim": (lambda F, x: F.max(x, 1)[0], (-2, 2)),
    "var": (lambda F, x: F.var(x, 1), (-2, 2)),
    "std": (lambda F, x: F.std(x, 1), (-2, 2)),
    "logsumexp": (lambda F, x: F.logsumexp(x, 1), (-2, 2)),
    "softmax": (lambda F, x: F.softmax(x, 1), (-2, 2)),
    "log_softmax": (lambda F, x: F.log_softmax(x, -1), (-2, 2)),
    "reshape": (lambda F, x: F.reshape(x, (-1, 2)), (-2, 2)),
    "permute": (lambda F, x: F.permute(x, (2, 0, 1)), (-2, 2)),
    "flip": (lambda F, x: F.flip(x, (0, 2)), (-2, 2)),
    "slice": (lambda F, x: x[1:, ::2, -3:], (-2, 2)),
    "slice steps": (lambda F, x: x[..., 1::3], (-2, 2)),
    "slice int": (lambda F, x: x[-1, None, :, 2], (-2, 2)),
    "slice none": (lambda F, x: x[2:2], (-2, 2)),
    "expand": (lambda F, x: x[:, :1].expand(2, 3, 4, 6), (-2, 2)),
    "repeat": (lambda F, x: x.repeat(2, 1, 3), (-2, 2)),
    "tril": (lambda F, x: F.tril(x, 1), (-2, 2)),
    "triu": (lambda F, x: F.triu(x), (-2, 2)),
    "rms_norm": (lambda F, x: nnf(F).rms_norm(x, (6,), None, 1e-6), (-2, 2)),
    "layer_norm": (lambda F, x: nnf(F).layer_norm(x, (4, 6)), (-2, 2)),
}
TWO = {
    "add": (lambda F, a, b: a + b, (-2, 2)),
    "sub": (lambda F, a, b: a - b, (-2, 2)),
    "mul": (lambda F, a, b: a * b, (-2, 2)),
    "div": (lambda F, a, b: a / b, (0.5, 2)),
    "pow": (lambda F, a, b: a**b, (0.2, 2)),
    "maximum": (lambda F, a, b: F.maximum(a, b), (-2, 2)),
    "minimum": (lambda F, a, b: F.minimum(a, b), (-2, 2)),
    "fmod": (lambda F, a, b: F.fmod(a * 4, b), (0.5, 2)),
    "remainder": (lambda F, a, b: F.remainder(a * -4, b), (0.5, 2)),
    "where": (lambda F, a, b: F.where(a > b, a * 2, b * 3), (-2, 2)),
    "cat": (lambda F, a, b: F.cat([a, b, a], 1), (-2, 2)),
}
SHAPES = [((3, 4, 6), (3, 4, 6)), ((3, 4, 6), (4, 1)), ((6,), (3, 4, 6)), ((1, 4, 1), (3, 1, 6))]


def nnf(module):
    """torch keeps these under nn.functional."""
    return torch.nn.functional if module is torch else module


def values(rng, shape, low, high):
    """Uniform, on a grid that keeps clear of the kinks at whole numbers and halves."""
    return (np.round(rng.uniform(low, high, shape) * 32) / 32 + 1 / 96).astype(np.float32)


def compare(device, rng, function, arrays, *, rtol=2e-5, atol=2e-5):
    """Result, gradients, and gradients of gradients."""
    ours = [Tensor(a, device, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    y, t = function(F, *ours), function(torch, *theirs)
    np.testing.assert_allclose(y.numpy(), t.detach().numpy(), rtol=rtol, atol=atol, err_msg="result")
    dy = values(rng, y.shape, -1, 1)
    first = grad(y, ours, Tensor(dy, device), create_graph=True)
    true = torch.autograd.grad(t, theirs, torch.tensor(dy.astype(np.float64)), create_graph=True)
    for i, (g, expected) in enumerate(zip(first, true)):
        np.testing.assert_allclose(
            g.numpy(), expected.detach().numpy(), rtol=rtol, atol=atol, err_msg=f"gradient of operand {i}"
        )
    weights = [values(rng, g.shape, -1, 1) for g in first]
    total = sum((g * Tensor(w, device)).sum() for g, w in zip(first, weights))
    wanted = sum((g * torch.tensor(w.astype(np.float64))).sum() for g, w in zip(true, weights))
    none = [None] * len(ours)  # gradients that do not depend on the operands, as relu's
    second = grad(total, ours, allow_unused=True) if total.requires_grad else none
    truth = torch.autograd.grad(wanted, theirs, allow_unused=True) if wanted.requires_grad else none
    for i, (g, expected) in enumerate(zip(second, truth)):
        got = np.zeros(arrays[i].shape) if g is None else g.numpy()
        want = np.zeros(arrays[i].shape) if expected is None else expected.numpy(force=True)
        np.testing.assert_allclose(got, want, rtol=rtol * 4, atol=atol * 4, err_msg=f"second derivative of operand {i}")


@pytest.mark.parametrize("name", ONE)
def test_one_operand(device, rng, name):
    function, (low, high) = ONE[name]
    compare(device, rng, function, [values(rng, (3, 4, 6), low, high)])


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", TWO)
def test_two_operands(device, rng, name, shapes):
    if name == "cat" and shapes[0] != shapes[1]:
        pytest.skip("joined operands do not broadcast")
    function, (low, high) = TWO[name]
    a, b = (values(rng, s, low, high) for s in shapes)
    compare(device, rng, function, [a, b + np.float32(1 / 57)])


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)),
    ],
    ids=str,
)  # fmt: skip
def test_matmul(device, rng, shapes):
    compare(device, rng, lambda F, a, b: F.matmul(a, b), [values(rng, s, -1, 1) for s in shapes])


def test_products_of_transposed_operands(device, rng):
    compare(device, rng, lambda F, a, b: a.mT @ b.mT, [values(rng, s, -1, 1) for s in ((2, 4, 3), (5, 4))])


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_product_with_zeros(device, zeros):
    x = np.array([1.5, 2.0, -0.5, 3.0], np.float32)
    x[:zeros] = 0
    ours, theirs = Tensor(x, device, requires_grad=True), torch.tensor(x, requires_grad=True)
    ours.prod().backward()
    theirs.prod().backward()
    np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy())


def test_equal_extremes_share_or_choose_as_torch(device):
    x = np.array([[1, 3, 3], [2, 2, 0]], np.float32)
    for function in (lambda t: t.amax(1), lambda t: t.max(1)[0], lambda t: t.amin(), lambda t: t.clamp(2.0, 3.0)):
        ours, theirs = Tensor(x, device, requires_grad=True), torch.tensor(x, requires_grad=True)
        function(ours).sum().backward()
        function(theirs).sum().backward()
        np.testing.assert_array_equal(ours.grad.numpy(), theirs.grad.numpy())
    a, b = (Tensor(np.ones(3, np.float32), device, requires_grad=True) for _ in range(2))
    F.maximum(a, b).sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), [0.5] * 3)
    np.testing.assert_array_equal(b.grad.numpy(), [0.5] * 3)


def test_norms_with_weights(device, rng):
    shapes = ((3, 5), (5,), (5,))
    arrays = [values(rng, s, -2, 2) for s in shapes]
    compare(device, rng, lambda F, x, w, b: nnf(F).layer_norm(x, (5,), w, b), arrays)
    compare(device, rng, lambda F, x, w: nnf(F).rms_norm(x, (5,), w, 1e-5), arrays[:2])
