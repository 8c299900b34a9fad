"""explain tells what runs, changes nothing, and its memory plan is within a quarter of the lower bound."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import numpy as np
import pytest

import nn
import nn.functional as F
from nn.graph.jit import jit
from nn.layers import LayerNorm, Linear, Module
from nn.optim import AdamW
from nn.tensor import Tensor

LENGTH, WIDTH, HEADS = 32, 64, 4


class Block(Module):
    def __init__(self, device, rng):
        made = {"device": device, "rng": rng}
        self.n1, self.n2 = LayerNorm(WIDTH, device=device), LayerNorm(WIDTH, device=device)
        self.qkv, self.proj = Linear(WIDTH, 3 * WIDTH, **made), Linear(WIDTH, WIDTH, **made)
        self.fc, self.out = Linear(WIDTH, 4 * WIDTH, **made), Linear(4 * WIDTH, WIDTH, **made)

    def forward(self, x):
        split = self.qkv(self.n1(x)).split(WIDTH, 2)
        q, k, v = (t.reshape(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for t in split)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(*x.shape))
        return x + self.out(F.gelu(self.fc(self.n2(x))))


class Stack(Module):
    def __init__(self, device, layers):
        rng = np.random.default_rng(0)
        self.blocks = [Block(device, rng) for _ in range(layers)]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def training_step(net):
    opt = AdamW(net.parameters(), lr=1e-3)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def test_text_and_page_of_a_small_function(device, rng):
    x, w = (Tensor(np.float32(rng.standard_normal((6, 6))), device) for _ in range(2))

    def small(x):
        return ((x @ w) * 1 + 0).relu() * 2, x.T.T.exp().sum(1)

    found = nn.explain(small, x)
    assert [k.name for k in found.kernels] == ["mat_mul, relu, mul", "sum(exp)"]
    assert found.before["permute"] == 2 and "permute" not in found.after and found.before["mul"] == 2
    assert found.after["mul"] == 1 and "add" not in found.after
    text = str(found)
    for part in (
        "small: 2 kernels",
        "mat_mul, relu, mul",
        "as written",
        "rewritten",
        "saved",
        "lower bound",
        "memory plan",
    ):
        assert part in text
    # products of 6x6x6; mul, add, relu, mul; sum; exp: 432 + 4 * 36 + 36 + 36 as written
    assert found.written.flops == 648 and found.work.flops == 648 - 72
    assert found.temporary_bytes == found.lower_bytes == 0
    page = found.html()
    assert page.startswith("<!doctype html>") and not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)", page)
    ElementTree.fromstring(found.svg())


def test_nothing_is_run_and_nothing_changes(device):
    net = Stack(device, 1)
    step = training_step(net)
    x = Tensor(np.ones((1, LENGTH, WIDTH), np.float32), device)
    before = [p.numpy() for p in net.parameters()]
    start = device.counters.dispatches
    first = nn.explain(step, x)
    assert device.counters.dispatches == start
    assert str(nn.explain(jit(step), x)).splitlines()[1:] == str(first).splitlines()[1:]
    for p, old in zip(net.parameters(), before):
        assert p.grad is None
        np.testing.assert_array_equal(p.numpy(), old)
    jitted = jit(step)
    losses = [jitted(x).item() for _ in range(3)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_memory_of_a_training_step_is_near_the_lower_bound(device, layers):
    found = nn.explain(training_step(Stack(device, layers)), Tensor(np.ones((2, LENGTH, WIDTH), np.float32), device))
    assert found.lower_bytes <= found.temporary_bytes <= 1.25 * found.lower_bytes < found.unshared_bytes
    slots = {}
    for t in found.temporaries:  # what lies in one slot does not live at one time, not even in the step that hands over
        for other in slots.get(t.slot, ()):
            assert t.first > other.last or other.first > t.last
        slots.setdefault(t.slot, []).append(t)
        assert t.nbytes <= found.slots[t.slot]


def test_kernels_of_a_layer_on_a_gpu(device, monkeypatch):
    """What one more layer adds to a step, forward and backward; planned as for a GPU, nothing is run."""
    monkeypatch.setattr(device, "caps", dataclasses.replace(device.caps, kind="gpu"))
    x = Tensor(np.ones((64, LENGTH, WIDTH), np.float32), device)
    found = {n: nn.explain(training_step(Stack(device, n)), x) for n in (2, 3)}
    names = [Counter(k.name for k in found[n].kernels) for n in (2, 3)]
    more = names[1] - names[0]
    assert sum(more.values()) <= 29, more
    assert names[1]["adam"] == 1 and more["fused copy"] == 0 and more["mat_mul, gelu"] == 1
    # the residual sums of forward are epilogues; those of backward are kernels of their own, behind the norms
    assert more["mat_mul, add"] == 2 and more["fused add"] == 2


def test_misuse_is_named(device):
    with pytest.raises(TypeError, match="explain <lambda>: takes at least one tensor"):
        nn.explain(lambda n: n, 3)
    with pytest.raises(RuntimeError, match="reads a value"):
        nn.explain(lambda x: x.item(), Tensor([1.0], device))
