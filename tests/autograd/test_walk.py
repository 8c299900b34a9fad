"""The walk back: accumulation, hooks, what is kept and let go, and the messages where it cannot go on."""

from __future__ import annotations

import numpy as np
import pytest

import nn
from nn import functional as F
from nn.autograd import backward, grad
from nn.graph.jit import jit
from nn.layers import Linear
from nn.ops.base import ShapeError
from nn.tape import enable_grad, is_grad_enabled, no_grad
from nn.tensor import Tensor


def leaf(device, *values, **options):
    return Tensor(np.array(values, np.float32), device, requires_grad=True, **options)


def test_gradients_add_up_over_uses_and_over_calls(device):
    x = leaf(device, 1.0, 2.0)
    (x * x + x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3, 5])
    (x * 3.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [6, 8])
    x.grad = None
    backward([x.sum(), (x * 2.0).sum()])
    np.testing.assert_array_equal(x.grad.numpy(), [3, 3])


def test_a_diamond_is_walked_once(device):
    calls = []
    x = leaf(device, 2.0)
    y = x * x
    y.register_hook(lambda g: calls.append(g.numpy().tolist()))
    (y * 3.0 + y * y).sum().backward()
    assert calls == [[11.0]]  # 3 + 2 y
    np.testing.assert_array_equal(x.grad.numpy(), [44.0])


def test_a_long_chain_does_not_recurse(device):
    x = leaf(device, 1.0)
    y = x
    for _ in range(3000):
        y = y + 1.0
    (g,) = grad(y.sum(), x)
    assert g.numpy().tolist() == [1.0]


def test_hooks_replace_and_go(device):
    x = leaf(device, 1.0, 1.0)
    double = x.register_hook(lambda g: g * 2.0)
    y = x * 3.0
    y.register_hook(lambda g: g + 1.0)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [12, 12])
    double.remove()
    x.grad = None
    (x * 3.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3, 3])
    x.register_hook(lambda g: g.sum())
    with pytest.raises(ShapeError, match=r"register_hook: the hook returned .*expected a tensor \[2\] or None"):
        x.sum().backward()


def test_retain_grad_keeps_that_of_a_result(device):
    x = leaf(device, 1.0, 2.0)
    y = x * 2.0
    y.retain_grad()
    (y * y).sum().backward()
    np.testing.assert_array_equal(y.grad.numpy(), [4, 8])
    assert not y.is_leaf and x.is_leaf


def test_a_second_walk_needs_the_history(device):
    x = leaf(device, 2.0)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.numpy().tolist() == [8.0]
    with pytest.raises(RuntimeError, match=r"backward: the walk back comes to \w+ a second time.*retain_graph=True"):
        y.backward()


def test_what_needs_no_gradient_says_so(device):
    x = Tensor(np.ones(2, np.float32), device)
    with pytest.raises(RuntimeError, match=r"backward: the tensor .* needs no gradient: no operand of what made it"):
        x.sum().backward()
    y = leaf(device, 1.0)
    with no_grad():
        assert not (y * 2.0).requires_grad and not is_grad_enabled()
        with enable_grad():
            assert (y * 2.0).requires_grad
    assert not (y * 2.0).detach().requires_grad
    assert not (y > 0.0).requires_grad
    assert not (y * 2.0).int().requires_grad
    with pytest.raises(RuntimeError, match=r"without a gradient only a single element can start, e.g. a loss"):
        leaf(device, 1.0, 2.0).exp().backward()
    with pytest.raises(ShapeError, match=r"the gradient is f32 \[3\]; the tensor is f32 \[1\], and both must agree"):
        y.exp().backward(Tensor(np.ones(3, np.float32), device))
    with pytest.raises(TypeError, match="requires_grad: the tensor is i32; gradients are taken of f32, f16"):
        Tensor([1, 2], device, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires_grad: this tensor is a result"):
        (y * 2.0).requires_grad = False


def test_grad_leaves_grad_alone_and_names_what_was_unused(device):
    x, z = leaf(device, 3.0), leaf(device, 1.0)
    y = (x * x).sum()
    g, none = grad(y, [x, z], retain_graph=True, allow_unused=True)
    assert g.numpy().tolist() == [6.0] and none is None and x.grad is None
    with pytest.raises(RuntimeError, match=r"grad: input 1 \[1\] was not used to make the outputs; pass allow_unused"):
        grad(y, [x, z])


def test_gradient_of_a_result_in_the_middle(device):
    x = leaf(device, 2.0, 3.0)
    y = x * x
    (g,) = grad((y * y).sum(), y)
    np.testing.assert_array_equal(g.numpy(), [8, 18])


def test_backward_for_some_inputs_only(device):
    x, z = leaf(device, 2.0), leaf(device, 3.0)
    (x * z).sum().backward(inputs=[x])
    assert x.grad.numpy().tolist() == [3.0] and z.grad is None


def test_an_operand_written_over_since_is_an_error(device):
    layer = Linear(3, 2, device=device)
    x = Tensor(np.ones((1, 3), np.float32), device, requires_grad=True)
    y = layer(x).realize().sum()
    layer.load_state_dict({"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)})
    with pytest.raises(RuntimeError, match="was written over since; take gradients before that"):
        y.backward()


def test_operations_without_a_rule_name_themselves(device):
    x, step = leaf(device, *range(20)).reshape(2, 10), Tensor(np.array([0, 2, 0, 0], np.uint32), device)
    caches = [Tensor(np.zeros((4, 1, 2), np.float32), device) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"writes in place, and an operand needs a gradient.*under no_grad"):
        F.store_qkv(x, *caches, step)
    y = F.last_row(x, step).sum()
    with pytest.raises(NotImplementedError, match=r"has no gradient rule; define gradient\(\) in its Op"):
        y.backward()


def test_straight_through(device):
    x = leaf(device, 0.4, 1.6)
    y = x + (x.round() - x).detach()
    (y * y).sum().backward()
    np.testing.assert_array_equal(y.numpy(), [0, 2])
    np.testing.assert_array_equal(x.grad.numpy(), [0, 4])


def test_a_jitted_step_takes_gradients_inside(device):
    layer = Linear(3, 2, device=device)

    def gradients(x):
        return grad(layer(x).square().sum(), list(layer.parameters()))

    x = Tensor(np.ones((4, 3), np.float32), device)
    for got, expected in zip(jit(gradients)(x), gradients(x)):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-6)


def test_eager_backward_frees_the_history_and_keeps_the_loss(device):
    layer = Linear(3, 1, device=device)
    loss = layer(Tensor(np.ones((2, 3), np.float32), device)).square().mean()
    loss.backward()
    assert loss.node.value is not None and layer.weight.grad.node.value is not None
    assert loss.grad_fn.tensors is None


def test_gradients_of_functions(device):
    x, y = Tensor([1.0, 2.0], device), Tensor([3.0, 4.0], device)
    value, (gx, gy) = nn.value_and_grad(lambda a, b: (a * a * b).sum(), (0, 1))(x, y)
    assert value.item() == 19.0
    np.testing.assert_array_equal(gx.numpy(), [6, 16])
    np.testing.assert_array_equal(gy.numpy(), [1, 4])
    cube = nn.grad(nn.grad(lambda a: (a**3).sum()))
    assert cube(Tensor(2.0, device)).item() == 12.0
    assert x.grad is None and not x.requires_grad
    with pytest.raises(TypeError, match="grad: argument 0 is float; expected a tensor, choose another with argnums="):
        nn.grad(lambda a: a)(1.0)
