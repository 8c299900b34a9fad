"""A transformer block with its loss, as language models train it, against PyTorch: all backward kernels at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.graph.jit import jit
from nn.tensor import Tensor

torch = pytest.importorskip("torch")
B, T, H, C, V = 2, 9, 2, 128, 33
SHAPES = {"wte": (V, C), "n1": (C,), "b1": (C,), "qkv": (3 * C, C), "proj": (C, C), "n2": (C,), "up": (4 * C, C),
          "down": (C, 4 * C), "head": (V, C)}  # fmt: skip


def loss_of(F, p, ids, goal, sdpa):
    x = F.embedding(ids, p["wte"])
    qkv = F.layer_norm(x, (C,), p["n1"], p["b1"]) @ p["qkv"].mT
    q, k, v = (a.reshape(B, T, H, C // H).transpose(1, 2) for a in qkv.split(C, -1))
    y = sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
    x = x + y @ p["proj"].mT
    x = x + F.gelu(F.layer_norm(x, (C,), p["n2"]) @ p["up"].mT) @ p["down"].mT
    return F.cross_entropy((x @ p["head"].mT).reshape(B * T, V), goal.reshape(B * T), ignore_index=3)


@pytest.mark.parametrize("kind", ["as it is", "gpu"])
def test_gradients_of_a_block(device, rng, monkeypatch, kind):
    """At once and captured, with the kernels of this device and with those of a GPU."""
    if kind == "gpu":
        monkeypatch.setattr(device, "caps", replace(device.caps, kind="gpu"))
    arrays = {
        name: (rng.standard_normal(s) * (0.5 if len(s) == 1 else 0.1)).astype(np.float32) for name, s in SHAPES.items()
    }
    ids, goal = rng.integers(0, V, (2, B, T)).astype(np.int32)
    true = {name: torch.tensor(a.astype(np.float64), requires_grad=True) for name, a in arrays.items()}
    tf = torch.nn.functional
    wanted = loss_of(tf, true, torch.tensor(ids), torch.tensor(goal.astype(np.int64)), tf.scaled_dot_product_attention)
    slopes = torch.autograd.grad(wanted, list(true.values()))
    ours = {name: Tensor(a, device, requires_grad=True) for name, a in arrays.items()}

    def step(ids, goal):
        loss = loss_of(F, ours, ids, goal, F.scaled_dot_product_attention)
        return (loss, *grad(loss, list(ours.values())))

    given = Tensor(ids, device), Tensor(goal, device)
    for run in (step, jit(step)):
        loss, *gradients = run(*given)
        np.testing.assert_allclose(loss.item(), wanted.item(), rtol=1e-5)
        for name, g, w in zip(SHAPES, gradients, slopes):
            size = float(w.abs().max())
            np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=1e-4, atol=2e-5 * size, err_msg=name)
