"""Gradients of attention: flash kernels and composite rule against PyTorch's in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.tensor import Tensor

torch = pytest.importorskip("torch")


def truth(q, k, v, mask, *, causal, offset, window, softcap, scale):
    """Attention as the docstring has it, in torch; rows that see no key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = scale * q @ k.mT
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask
    at = torch.arange(q.shape[2])[:, None] + offset
    key = torch.arange(k.shape[2])
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen = (key <= at) & ((key > at - window) if window else True)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    s = s.masked_fill(~seen, -math.inf)
    dead = (s == -math.inf).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ v


CASES = {  # (batch, heads, kv heads, L, S, D), options
    "one": ((1, 1, 1, 1, 1, 1), {}),
    "plain": ((2, 2, 2, 70, 67, 20), {}),
    "causal": ((1, 3, 3, 67, 67, 64), {"causal": True}),
    "causal from the left": ((1, 2, 1, 40, 70, 8), {"causal": True, "offset": 0}),
    "gqa": ((2, 6, 2, 33, 65, 36), {"causal": True}),
    "rows that see nothing": ((1, 2, 2, 65, 33, 16), {"causal": True, "offset": -32}),
    "window": ((1, 2, 1, 130, 140, 12), {"causal": True, "window": 33}),
    "softcap": ((1, 2, 1, 9, 35, 32), {"softcap": 2.0}),
    "odd": ((1, 2, 2, 5, 7, 63), {"causal": True, "scale": 0.3}),
    "wide": ((1, 1, 1, 34, 35, 256), {}),
    "bool mask": ((2, 2, 1, 34, 40, 16), {"mask": "bool", "shape": (2, 1, 34, 40)}),
    "additive mask": ((2, 4, 2, 7, 40, 16), {"mask": "f32", "shape": (1, 4, 1, 40)}),
    "no keys": ((1, 2, 2, 3, 0, 4), {}),
    "no queries": ((1, 2, 2, 0, 3, 4), {}),
}


def setup(device, rng, name):
    (b, h, kv, n, m, d), options = CASES[name]
    options = dict(options)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((b, h, n, d), (b, kv, m, d), (b, kv, m, d))]
    kind, shape = options.pop("mask", None), options.pop("shape", ())
    mask = None if kind is None else rng.random(shape) < 0.6 if kind == "bool" else rng.standard_normal(shape)
    if kind == "bool":
        mask[..., 0, :] = False
    ours = [Tensor(a, device, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    if kind == "f32":
        mask = mask.astype(np.float32)
    masks = [None, None] if mask is None else [Tensor(mask, device), torch.tensor(mask)]
    if kind == "f32":
        masks[1] = masks[1].double()
        masks[0].requires_grad = True
        masks[1].requires_grad_()
        ours.append(masks[0])
        theirs.append(masks[1])
    full = {"causal": False, "window": None, "softcap": None, "scale": 1 / math.sqrt(d)} | options
    offset = full.pop("offset", m - n)
    y = F.attention(*ours[:3], mask=masks[0], offset=offset, **full)
    t = truth(*theirs[:3], masks[1], offset=offset, **{k: v or 0 for k, v in full.items()})
    return ours, theirs, y, t


@pytest.mark.parametrize("name", CASES)
def test_flash_gradients(device, rng, name, monkeypatch):
    """With the kernels that a GPU takes, on any device."""
    monkeypatch.setattr(device, "caps", replace(device.caps, kind="gpu", max_workgroup_bytes=16384))
    ours, theirs, y, t = setup(device, rng, name)
    np.testing.assert_allclose(y.numpy(), t.numpy(force=True), rtol=1e-4, atol=1e-5)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    got = grad(y, ours, Tensor(dy, device))
    want = torch.autograd.grad(t, theirs, torch.tensor(dy.astype(np.float64)))
    for what, g, w in zip(("q", "k", "v", "mask"), got, want):
        np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=1e-4, atol=2e-5, err_msg=what)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("wide", "window", "plain")])
def test_composite_rule_and_second_derivatives(device, rng, name):
    ours, theirs, y, t = setup(device, rng, name)
    dy = rng.standard_normal(y.shape).astype(np.float32)
    first = grad(y, ours, Tensor(dy, device), create_graph=True)
    true = torch.autograd.grad(t, theirs, torch.tensor(dy.astype(np.float64)), create_graph=True)
    for what, g, w in zip(("q", "k", "v", "mask"), first, true):
        np.testing.assert_allclose(g.numpy(), w.numpy(force=True), rtol=1e-4, atol=2e-5, err_msg=what)
    weights = [rng.standard_normal(g.shape).astype(np.float32) for g in first]
    total = sum((g * Tensor(w, device)).sum() for g, w in zip(first, weights))
    wanted = sum((g * torch.tensor(w.astype(np.float64))).sum() for g, w in zip(true, weights))
    second = grad(total, ours, allow_unused=True)
    for g, w in zip(second, torch.autograd.grad(wanted, theirs, allow_unused=True)):
        if w is not None:
            np.testing.assert_allclose(g.numpy(), w.numpy(force=True), rtol=1e-3, atol=2e-4)
