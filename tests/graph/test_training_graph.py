"""What a training step is made of: gradients of splits are one join, heads copied together, weights read in place."""

from __future__ import annotations

import numpy as np

import nn.functional as F
from nn.autograd import grad as gradients
from nn.graph import schedule
from nn.graph.cost import StepScope
from nn.graph.jit import jit
from nn.layers import Parameter
from nn.optim import AdamW
from nn.tensor import Tensor


def names_of(device, *tensors):
    program = schedule.compile_program(device, [t.node for t in tensors])
    return [StepScope(step, path).name for step, path in zip(program.steps, program.paths, strict=True)]


def made(device, rng, *shape, grad=False):
    a = rng.standard_normal(shape).astype(np.float32)
    return Tensor(a, device, requires_grad=grad), a.astype(np.float64)


def program_of(device, monkeypatch, function, *args):
    """The largest program that a jitted call compiles."""
    found, compile_program = [], schedule.compile_program
    monkeypatch.setattr(schedule, "compile_program", lambda *a: found.append(compile_program(*a)) or found[-1])
    jit(function)(*args)
    return max(found, key=lambda program: len(program.steps))


def test_gradient_of_a_split_is_one_join(device, rng):
    x, a = made(device, rng, 3, 12, grad=True)
    p, q, r = x.split([4, 6, 2], 1)
    (grad,) = gradients((p * 2).sum() + q.square().sum() + (r * 3).sum(), x)
    assert len(names_of(device, grad)) == 1
    np.testing.assert_allclose(
        grad.numpy(), np.concatenate([np.full((3, 4), 2), 2 * a[:, 4:10], np.full((3, 2), 3)], 1), rtol=1e-6
    )
    u, _ = made(device, rng, 3, 12, grad=True)
    (grad,) = gradients((u[:, 2:5] * 2).sum() + (u[:, 7:9] * 3).sum(), u)
    want = np.zeros((3, 12))
    want[:, 2:5], want[:, 7:9] = 2, 3
    np.testing.assert_array_equal(grad.numpy(), want)
    (grad,) = gradients((u[:, 2:8] * 2).sum() + (u[:, 7:9] * 3).sum(), u)  # they overlap
    want = np.zeros((3, 12))
    want[:, 2:8] += 2
    want[:, 7:9] += 3
    np.testing.assert_array_equal(grad.numpy(), want)


def test_heads_are_split_and_joined_without_copies_between(device, rng):
    """Queries, keys and values of one product: one copy there, one back."""
    x, a = made(device, rng, 2, 64, 3 * 64)
    q, k, v = (t.reshape(2, 64, 4, 16).transpose(1, 2) for t in x.split(64, 2))
    out = F.scaled_dot_product_attention(q, k, v)
    names = names_of(device, out)
    assert names.count("fused copy") == 1 and len(names) == 2
    heads = [t.reshape(2, 64, 4, 16).transpose(0, 2, 1, 3) for t in np.split(a, 3, 2)]
    s = heads[0] @ heads[1].swapaxes(-1, -2) / 4
    w = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(out.numpy(), w / w.sum(-1, keepdims=True) @ heads[2], rtol=1e-4, atol=1e-5)
    parts = [made(device, rng, 2, 4, 5, 3) for _ in range(3)]
    joined = F.cat([t.transpose(1, 2).reshape(2, 5, 12) for t, _ in parts], 2)
    assert len(names_of(device, joined)) == 1
    want = np.concatenate([v.transpose(0, 2, 1, 3).reshape(2, 5, 12) for _, v in parts], 2)
    np.testing.assert_array_equal(joined.numpy(), want.astype(np.float32))


def test_readers_of_weights_stay_fused_in_front_of_the_update(device, rng, monkeypatch):
    weight = Parameter(np.float32(rng.standard_normal(5)), device)
    opt = AdamW([weight], lr=0.1)
    x, a = made(device, rng, 3, 5)

    def step(x):
        loss = (x * weight).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    before = weight.numpy().astype(np.float64)
    program = program_of(device, monkeypatch, step, x)
    names = [StepScope(s, p).name for s, p in zip(program.steps, program.paths)]
    assert names[0] == "sum(mul, square)"
    assert not any(n.startswith("fused mul") for n in names), names
    np.testing.assert_allclose(
        weight.numpy(), before * (1 - 0.1 * 0.01) - 0.1 * np.sign((2 * a * a * before).sum(0)), rtol=1e-4, atol=1e-5
    )


def test_chain_of_eight_is_one_dispatch(device, rng):
    x, a = made(device, rng, 7, 9)
    y = ((((x * 2 + 1).tanh() - 0.5).square() + x) * 0.25).relu()
    start = device.counters.dispatches
    y.realize()
    assert device.counters.dispatches - start == 1
    np.testing.assert_allclose(
        y.numpy(), np.maximum(((np.tanh(a * 2 + 1) - 0.5) ** 2 + a) * 0.25, 0), rtol=1e-5, atol=1e-6
    )


def test_adamw_over_150_tensors(device, rng):
    parameters = [Parameter(np.float32(rng.standard_normal((3, 1 + i % 7))), device) for i in range(150)]
    opt = AdamW(parameters, lr=0.01)
    for p in parameters:
        p.grad = Tensor(np.ones(p.shape, np.float32), device)
    opt.step()
    xs = Tensor(np.ones(1, np.float32), device)

    @jit
    def step(x):
        for p in parameters:
            p.grad = (p * x).detach()
        opt.step()
        opt.zero_grad()
        return x + 1

    step(xs)
    start = device.counters.dispatches
    step(xs)
    # the gradients' own kernels, one a parameter, the result, and what the update takes
    assert device.counters.dispatches - start <= 150 + 1 + 3
