"""checkpoint: the same gradients, O(sqrt n) memory for about a third more compute."""

from __future__ import annotations

import math

import numpy as np
import pytest

import nn
import nn.functional as F
from nn.autograd import grad
from nn.graph import schedule
from nn.graph.cost import cost_of
from nn.graph.jit import jit
from nn.random import Generator
from nn.tensor import Tensor

LAYERS, RUN = 24, 5  # runs of about sqrt(24) layers


def leaf(device, rng, *shape):
    return Tensor(np.float32(rng.standard_normal(shape) / math.sqrt(shape[-1])), device, requires_grad=True)


def stack(x, weights, run):
    """tanh layers, `run` of them under a checkpoint at a time (0: none)."""

    def layers(x, some):
        for w in some:
            x = (x @ w).tanh()
        return x

    for i in range(0, len(weights), run or len(weights)):
        some = weights[i : i + (run or len(weights))]
        x = nn.checkpoint(lambda x, some=some: layers(x, some))(x) if run else layers(x, some)
    return x


def test_memory_falls_to_a_root_for_a_third_more_compute(device, rng, monkeypatch):
    weights = [leaf(device, rng, 32, 32) for _ in range(LAYERS)]
    x = Tensor(np.float32(rng.standard_normal((256, 32))), device)
    found, results = {}, {}
    for run in (0, RUN):
        programs, compile_program = [], schedule.compile_program
        with monkeypatch.context() as patch:
            patch.setattr(schedule, "compile_program", lambda *a: programs.append(compile_program(*a)) or programs[-1])  # noqa: B023
            step = jit(lambda x, run=run: grad(stack(x, weights, run).square().sum(), weights))
            results[run] = [g.numpy() for g in step(x)]
        program = max(programs, key=lambda p: len(p.steps))
        nodes = [getattr(s, "node", None) for s in program.steps]
        flops = sum(cost_of(s, None if n is None else n.op).flops for s, n in zip(program.steps, nodes))
        found[run] = (program.temporary_bytes, flops)
    for plain, again in zip(results[0], results[RUN]):
        np.testing.assert_array_equal(plain, again)
    activation = 4 * 256 * 32
    assert found[0][0] >= LAYERS * activation  # all of them
    assert found[RUN][0] <= (2 * math.sqrt(LAYERS) + 4) * activation < 0.6 * found[0][0]
    assert 1.2 < found[RUN][1] / found[0][1] < 1.4


def test_gradients_of_arguments_and_of_what_is_taken_from_outside(device, rng):
    w, b, x = leaf(device, rng, 6, 5), leaf(device, rng, 5), leaf(device, rng, 4, 6)
    outer = b * 3  # made before, and has a history; what it is made of is used inside too
    plain = leaf(device, rng, 4, 5).detach()  # needs no gradient

    def block(x, extra, scale):
        h = (x @ w + outer) * scale + extra["plain"] * b
        return h.tanh(), (h.sum(), h.detach())

    def loss(f):
        y, (s, d) = f(x * 2, {"plain": plain}, scale=0.5)
        assert not d.requires_grad
        return y.square().sum() + s * 3 + (w * 0.1).sum()

    want = grad(loss(block), [w, b, x, outer], retain_graph=True)
    got = grad(loss(nn.checkpoint(block)), [w, b, x, outer], retain_graph=True)
    seen = []
    handle = w.register_hook(lambda g: seen.append(g) or g * 2)
    hooked = grad(loss(nn.checkpoint(block)), [w], retain_graph=True)[0]
    handle.remove()
    assert len(seen) == 1
    np.testing.assert_allclose(hooked.numpy(), 2 * want[0].numpy(), rtol=1e-6, atol=1e-6)
    for g, h in zip(got, want):
        np.testing.assert_allclose(g.numpy(), h.numpy(), rtol=1e-6, atol=1e-6)


def test_a_weight_that_is_used_before_and_inside(device, rng):
    w, x = leaf(device, rng, 5, 5), leaf(device, rng, 3, 5)
    f = lambda h: (h @ w).tanh()  # noqa: E731
    want = grad(f(f(x)).sum(), [w, x])
    got = grad(nn.checkpoint(f)(nn.checkpoint(f)(x)).sum(), [w, x])
    mixed = grad(nn.checkpoint(f)(f(x)).sum(), [w, x])
    for g, m, h in zip(got, mixed, want):
        np.testing.assert_allclose(g.numpy(), h.numpy(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(m.numpy(), h.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_dropout_draws_the_same_mask_again(device, rng, jitted):
    w, x = leaf(device, rng, 16, 16), leaf(device, rng, 8, 16)
    data = x.numpy()

    def run(f, seed):
        generator = Generator(device, seed)
        step = lambda x: grad(f(generator)(x).square().sum(), [w])[0]  # noqa: E731
        step = jit(step) if jitted else step
        return [step(Tensor(data, device)).numpy() for _ in range(2)]

    block = lambda g: lambda x: F.dropout((x @ w).tanh(), 0.5, generator=g) @ w  # noqa: E731
    plain, again = run(block, 7), run(lambda g: nn.checkpoint(block(g)), 7)
    for p, a in zip(plain, again):
        np.testing.assert_allclose(a, p, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(plain[0], plain[1])


def test_nested_and_without_gradients(device, rng):
    w, x = leaf(device, rng, 5, 5), leaf(device, rng, 3, 5)
    f = lambda h: (h @ w).tanh()  # noqa: E731
    nested = nn.checkpoint(lambda h: nn.checkpoint(f)(f(h)))
    want, got = grad(f(f(x)).sum(), [w])[0], grad(nested(x).sum(), [w])[0]
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6, atol=1e-6)
    plain = nn.checkpoint(lambda h: h * 2)(x.detach())
    assert not plain.requires_grad
    np.testing.assert_array_equal(plain.numpy(), x.numpy() * 2)


def test_second_derivatives_are_refused(device, rng):
    x = leaf(device, rng, 3)
    with pytest.raises(RuntimeError, match=r"checkpoint <lambda>.*create_graph=True.*without nn.checkpoint"):
        grad(nn.checkpoint(lambda x: x.exp())(x).sum(), [x], create_graph=True)


def test_a_function_that_changes_is_refused(device, rng):
    x = leaf(device, rng, 3)
    calls = []

    def moody(x):
        calls.append(1)
        return x * 2 if len(calls) == 1 else x.detach()

    with pytest.raises(RuntimeError, match=r"checkpoint moody.*other results.*same graph"):
        nn.checkpoint(moody)(x).sum().backward()
