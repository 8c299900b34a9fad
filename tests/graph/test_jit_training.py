"""Training steps under jit equal those without: gradients left behind, accumulation, schedules, nothing allocated."""

from __future__ import annotations

import numpy as np
import pytest

from nn.graph.jit import jit
from nn.layers import Linear, Module
from nn.optim import Adam, AdamW
from nn.tensor import Tensor


def zero(net):
    for p in net.parameters():
        p.grad = None


class Net(Module):
    def __init__(self, device):
        rng = np.random.default_rng(3)
        self.a = Linear(6, 16, device=device, rng=rng)
        self.b = Linear(16, 4, device=device, rng=rng)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def data(device, rng, n=5):
    return [
        (
            Tensor(np.float32(rng.standard_normal((8, 6))), device),
            Tensor(np.float32(rng.standard_normal((8, 4))), device),
        )
        for _ in range(n)
    ]


def train(device, batches, *, jitted, optimizer=AdamW, pieces=1, schedule=lambda i: 0.01):
    net = Net(device)
    opt = optimizer(net.parameters(), lr=0.01)

    def step(x, y):
        opt.zero_grad()
        total = 0
        for p in range(pieces):
            rows = slice(p * 8 // pieces, (p + 1) * 8 // pieces)
            loss = (net(x[rows]) - y[rows]).square().mean() / pieces
            loss.backward()
            total = loss + total
        opt.step()
        return total

    step = jit(step) if jitted else step
    losses = []
    for i, (x, y) in enumerate(batches):
        opt.param_groups[0]["lr"] = schedule(i)
        losses.append(step(x, y).item())
    return losses, [p.numpy() for p in net.parameters()]


@pytest.mark.parametrize("optimizer", [AdamW, Adam])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_steps_with_a_schedule_and_accumulation_equal_those_without_jit(device, rng, optimizer, pieces):
    batches = data(device, rng)
    rates = lambda i: 0.02 * (1 + np.cos(i)) / 2  # noqa: E731
    plain = train(device, batches, jitted=False, optimizer=optimizer, pieces=pieces, schedule=rates)
    quick = train(device, batches, jitted=True, optimizer=optimizer, pieces=pieces, schedule=rates)
    np.testing.assert_allclose(quick[0], plain[0], rtol=1e-5)
    for a, b in zip(quick[1], plain[1]):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    whole = train(device, batches, jitted=True, optimizer=optimizer, schedule=rates)
    np.testing.assert_allclose(quick[0], whole[0], rtol=1e-4)


def test_second_step_compiles_and_allocates_nothing(device, rng):
    net = Net(device)
    opt = AdamW(net.parameters(), lr=0.01)

    @jit
    def step(x, y):
        loss = (net(x) - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    batches = data(device, rng)
    step(*batches[0])
    device.wait()
    before = device.counters.pipelines, device.counters.allocations
    for x, y in batches[1:]:
        step(x, y)
    assert (device.counters.pipelines, device.counters.allocations) == before


def test_gradients_left_behind_are_results_of_each_call(device, rng):
    net = Net(device)

    @jit
    def step(x, y):
        zero(net)
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    for x, y in data(device, rng):
        step(x, y)
        got = [p.grad.numpy() for p in net.parameters()]
        zero(net)
        (net(x) - y).square().mean().backward()
        for g, p in zip(got, net.parameters()):
            np.testing.assert_allclose(g, p.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_old_gradients_are_refused_not_wrong(device, rng):
    net = Net(device)
    step = jit(lambda x, y: (net(x) - y).square().mean().backward())
    (x, y), *_ = data(device, rng)
    step(x, y)
    kept = net.a.weight.grad
    with pytest.raises(RuntimeError, match=r"jit <lambda>: the function adds to the \.grad.*zero_grad\(\) first"):
        step(x, y)
    zero(net)
    step(x, y)
    with pytest.raises(RuntimeError, match="written over its memory"):
        kept.numpy()
    with pytest.raises(RuntimeError, match=r"adds to the \.grad"):  # while it is captured
        jit(lambda x, y: (net(x) - y).square().mean().backward())(x, y)
    net.a.weight.grad.numpy()  # what was there is there


def test_a_failed_capture_leaves_everything_as_it_was(device, rng):
    net = Net(device)
    opt = AdamW(net.parameters(), lr=0.01)
    (x, y), *_ = data(device, rng)
    before = [p.numpy() for p in net.parameters()]

    @jit
    def step(x, y):
        loss = (net(x) - y).square().mean()
        loss.backward()
        opt.step()
        return loss.item()

    with pytest.raises(RuntimeError, match="jit: the traced function reads a value"):
        step(x, y)
    for p, old in zip(net.parameters(), before):
        assert p.grad is None
        np.testing.assert_array_equal(p.numpy(), old)
    assert opt.steps == 0
    (net(x) - y).square().mean().backward()
    opt.step()
    assert opt.steps == 1
