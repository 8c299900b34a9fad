"""Whole training runs beside PyTorch's: the same weights and batches, the loss of every step."""

from __future__ import annotations

import numpy as np
import pytest

import nn
from nn import functional as F
from nn import optim
from nn.layers import Embedding, LayerNorm, Linear, Module

torch = pytest.importorskip("torch")
WIDTH, HEADS, LAYERS, VOCAB, BATCH, LENGTH, STEPS = 64, 4, 2, 65, 4, 32, 200


class Block(Module):
    """A layer of GPT-2: attention and a GELU, each behind a norm."""

    def __init__(self, device, rng):
        self.norm_1, self.norm_2 = LayerNorm(WIDTH, device=device), LayerNorm(WIDTH, device=device)
        self.qkv, self.proj = (
            Linear(WIDTH, 3 * WIDTH, device=device, rng=rng),
            Linear(WIDTH, WIDTH, device=device, rng=rng),
        )
        self.up, self.down = (Linear(a, b, device=device, rng=rng) for a, b in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (h.reshape(b, t, HEADS, c // HEADS).transpose(1, 2) for h in self.qkv(self.norm_1(x)).split(c, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(Module):
    def __init__(self, device, rng):
        self.tokens, self.places = (Embedding(n, WIDTH, device=device, rng=rng) for n in (VOCAB, LENGTH))
        self.blocks = [Block(device, rng) for _ in range(LAYERS)]
        self.norm, self.head = LayerNorm(WIDTH, device=device), Linear(WIDTH, VOCAB, False, device=device, rng=rng)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Theirs(torch.nn.Module):
    """The same with PyTorch's layers and the same names."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in range(LAYERS))
        for block in self.blocks:
            block.norm_1, block.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            block.qkv, block.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            block.up, block.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCAB, False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        b, t, c = x.shape
        for block in self.blocks:
            parts = block.qkv(block.norm_1(x)).split(c, 2)
            q, k, v = (h.reshape(b, t, HEADS, c // HEADS).transpose(1, 2) for h in parts)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block.proj(mixed.transpose(1, 2).reshape(b, t, c))
            x = x + block.down(torch.nn.functional.gelu(block.up(block.norm_2(x)), approximate="tanh"))
        return self.head(self.norm(x))


def test_a_small_gpt_trains_as_in_pytorch(device, rng):
    """200 steps of AdamW with warm-up, cosine and clipping: the loss of each within 1e-3."""
    text = np.cumsum(rng.integers(0, 3, 4000)) % VOCAB  # something that can be learnt
    starts = rng.integers(0, len(text) - LENGTH - 1, (STEPS, BATCH))
    batches = [np.stack([text[s : s + LENGTH + 1] for s in row]).astype(np.int32) for row in starts]
    model, theirs = GPT(device, rng), Theirs()
    theirs.load_state_dict({name: torch.tensor(value.numpy()) for name, value in model.state_dict().items()})
    ours, true = optim.AdamW(model.parameters(), lr=3e-3), torch.optim.AdamW(theirs.parameters(), lr=3e-3)
    factor = optim.cosine(STEPS, warmup=20)
    rates, their_rates = optim.LambdaLR(ours, factor), torch.optim.lr_scheduler.LambdaLR(true, factor)

    @nn.jit
    def step(ids, targets):
        ours.zero_grad()
        loss = F.cross_entropy(model(ids).reshape(-1, VOCAB), targets)
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        ours.step()
        return loss

    losses = []
    for batch in batches:
        ids, targets = batch[:, :-1], batch[:, 1:].reshape(-1)
        loss = step(
            nn.Tensor(np.ascontiguousarray(ids), device), nn.Tensor(np.ascontiguousarray(targets), device)
        ).item()
        rates.step()
        true.zero_grad()
        logits = theirs(torch.tensor(ids).long())
        wanted = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.tensor(targets).long())
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        true.step()
        their_rates.step()
        losses.append((loss, wanted.item()))
    got, want = np.array(losses).T
    np.testing.assert_allclose(got, want, rtol=0.0, atol=1e-3)
    assert want[-20:].mean() < 0.5 * want[0]
