"""Optimizers against PyTorch's, step by step; what makes a step, what a state holds, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

from nn import functional as F
from nn import optim
from nn.graph.jit import jit
from nn.layers import Linear, Sequential
from nn.layers.module import Parameter
from nn.tensor import Tensor

torch = pytest.importorskip("torch")
SHAPES = ((7, 33), (33,), (5,), (1,))
MAKERS = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "sgd momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "sgd maximize": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "maximize": True}),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "adamw maximize": (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "maximize": True}),
}


def weights(rng):
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("name", MAKERS)
def test_steps_equal_torch(device, rng, name):
    make, theirs, options = MAKERS[name]
    start = weights(rng)
    ours = [Parameter(w, device) for w in start]
    true = [torch.tensor(w, dtype=torch.float64, requires_grad=True) for w in start]
    a, b = make(ours, **options), theirs(true, **options)
    for step in range(6):
        gradients = weights(rng)
        for p, t, g in zip(ours, true, gradients):
            p.grad, t.grad = Tensor(g, device), torch.tensor(g, dtype=torch.float64)
        if step == 3:  # a parameter without a gradient is left alone
            ours[1].grad = true[1].grad = None
        a.step()
        if step != 3:
            b.step()
        else:
            b.step()
            break
    for p, t in zip(ours, true):
        np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_lion_follows_its_formula(device, rng):
    start, gradients = weights(rng), [weights(rng) for _ in range(3)]
    ours = [Parameter(w, device) for w in start]
    optimizer = optim.Lion(ours, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    want, moments = [w.astype(np.float64) for w in start], [np.zeros(w.shape) for w in start]
    for each in gradients:
        for i, g in enumerate(each):
            want[i] = want[i] * (1 - 0.001) - 0.01 * np.sign(0.9 * moments[i] + 0.1 * g)
            moments[i] = 0.99 * moments[i] + 0.01 * g
            ours[i].grad = Tensor(g, device)
        optimizer.step()
    for p, w in zip(ours, want):
        np.testing.assert_allclose(p.numpy(), w, rtol=1e-5, atol=1e-6)


def test_groups_have_their_own_options(device, rng):
    start = weights(rng)
    ours, true = [Parameter(w, device) for w in start], [torch.tensor(w, requires_grad=True) for w in start]

    def groups(p):
        return [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "lr": 0.01}]

    a, b = optim.AdamW(groups(ours), lr=0.1), torch.optim.AdamW(groups(true), lr=0.1)
    for p, t, g in zip(ours, true, weights(rng)):
        p.grad, t.grad = Tensor(g, device), torch.tensor(g)
    a.step()
    b.step()
    for p, t in zip(ours, true):
        np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=1e-5, atol=1e-6)


def model_and_data(device, rng):
    model = Sequential(Linear(6, 9, device=device, rng=rng), F.tanh, Linear(9, 3, device=device, rng=rng))
    return model, rng.standard_normal((8, 4, 6)).astype(np.float32), rng.standard_normal((8, 4, 3)).astype(np.float32)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_loop_with_schedule_and_clipping_equals_torch(device, jitted):
    model, xs, ys = model_and_data(device, np.random.default_rng(1))
    theirs = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    with torch.no_grad():
        for t, p in zip(theirs.parameters(), model.parameters()):
            t.copy_(torch.tensor(p.numpy()))
    ours, true = optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(theirs.parameters(), lr=0.1)
    factor = optim.cosine(8, warmup=2)
    rates, lambdas = optim.LambdaLR(ours, factor), torch.optim.lr_scheduler.LambdaLR(true, factor)

    def step(x, y):
        ours.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        norm = optim.clip_grad_norm_(model.parameters(), 0.3)
        ours.step()
        return loss, norm

    run = jit(step) if jitted else step
    for x, y in zip(xs, ys):
        loss, norm = (t.item() for t in run(Tensor(x, device), Tensor(y, device)))
        rates.step()
        true.zero_grad()
        wanted = ((theirs(torch.tensor(x)) - torch.tensor(y)) ** 2).mean()
        wanted.backward()
        wanted_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        true.step()
        lambdas.step()
        assert abs(loss - wanted.item()) < 2e-5 and abs(norm - wanted_norm.item()) < 2e-5
        assert rates.get_last_lr() == pytest.approx(lambdas.get_last_lr())


def test_one_dispatch_updates_everything(device, rng):
    parameters = [Parameter(rng.standard_normal((3, 5)).astype(np.float32), device) for _ in range(150)]
    optimizer = optim.AdamW(parameters)

    @jit
    def step(x):
        optimizer.zero_grad()
        sum((p * x).sum() for p in parameters).backward()
        before = optim.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return before

    step(Tensor(np.float32(2.0), device))
    (capture,) = step.captures.values()
    names = [kernel.label for kernel in capture.plan.kernels]
    assert sum("adam" in name for name in names) == 1


def test_a_factor_that_is_not_finite_leaves_everything_alone(device, rng):
    (w,) = [Parameter(rng.standard_normal(70).astype(np.float32), device)]
    before = w.numpy()
    for make in (optim.AdamW, optim.Lion, lambda p: optim.SGD(p, momentum=0.9)):
        optimizer = make([w])
        w.grad = Tensor(np.ones(70, np.float32), device)
        optimizer.step(factor=Tensor(np.array([np.inf], np.float32), device))
        np.testing.assert_array_equal(w.numpy(), before)
    optimizer.step(factor=Tensor(np.array([0.5], np.float32), device))
    np.testing.assert_allclose(w.numpy(), before - 0.5e-3, rtol=1e-5, atol=1e-7)


def test_a_state_continues_bit_for_bit(device, rng):
    def run(split):
        model, xs, ys = model_and_data(device, np.random.default_rng(5))
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        for i, (x, y) in enumerate(zip(xs, ys)):
            if i == split:
                state, values = optimizer.state_dict(), {k: v.numpy() for k, v in model.state_dict().items()}
                model, _, _ = model_and_data(device, np.random.default_rng(6))
                optimizer = optim.AdamW(model.parameters(), lr=1.0)
                model.load_state_dict(values)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (model(Tensor(x, device)) - Tensor(y, device)).square().mean().backward()
            optimizer.step()
        return [p.numpy() for p in model.parameters()]

    for a, b in zip(run(None), run(3)):
        np.testing.assert_array_equal(a, b)


def test_schedules():
    factor = optim.cosine(10, warmup=4, floor=0.1)
    assert [round(factor(i), 3) for i in (0, 3, 4, 7, 10, 20)] == [0.2, 0.8, 1.0, 0.55, 0.1, 0.1]
    assert [optim.linear(4)(i) for i in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [optim.steps(2, 0.5)(i) for i in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]
    cycle = optim.one_cycle(100)
    assert cycle(0) == pytest.approx(0.04) and cycle(30) == 1.0 and cycle(100) == pytest.approx(4e-6)
    assert optim.constant()(7) == 1.0
    with pytest.raises(ValueError, match="cosine: total 3, warmup 5; expected 0 <= warmup <= total"):
        optim.cosine(3, warmup=5)


def test_bad_input(device, rng):
    w = Parameter(np.ones(3, np.float32), device)
    cases = [
        (lambda: optim.AdamW([]), ValueError, "AdamW: got no parameters; pass model.parameters"),
        (lambda: optim.AdamW([w, w]), ValueError, r"AdamW: a parameter \[3\] is in two groups, or twice in one"),
        (lambda: optim.AdamW([{"params": [w], "rate": 1}]), ValueError, r"a group has \['rate'\]; its options are"),
        (lambda: optim.AdamW([w * 2.0]), TypeError, "expected parameters"),
        (lambda: optim.AdamW([Tensor([1.0], device)]), TypeError, "expected parameters"),
        (lambda: optim.AdamW([w], lr=-1.0), ValueError, "AdamW: lr is -1.0; expected 0.0 or more"),
        (lambda: optim.SGD([w], nesterov=True), ValueError, "SGD: nesterov needs momentum > 0"),
        (lambda: optim.clip_grad_norm_([w], 1.0), ValueError, "no parameter has a gradient"),
        (lambda: optim.AdamW([Parameter(np.ones(3), device, dtype="f16")]), TypeError, "optimizers keep f32 weights"),
    ]
    for make, kind, text in cases:
        with pytest.raises(kind, match=text):
            make()
    other = optim.AdamW([Parameter(np.ones(4, np.float32), device)])
    with pytest.raises(ValueError, match="AdamW: the state is of 1 parameters, the optimizer has 1, or their sh"):
        other.load_state_dict(optim.AdamW([w]).state_dict())
