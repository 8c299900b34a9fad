"""Operations that read rows where they lie and write heads as models go on with them: no copies around attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nn import functional as F
from nn.autograd import grad
from nn.tensor import Tensor


def attend(qkv, heads):
    """A model's attention: (B, T, 3 C) -> (B, T, C)."""
    b, t, c = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (x.reshape(b, t, heads, c // heads).transpose(1, 2) for x in qkv.split(c, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)


@pytest.mark.parametrize("heads, width", [(2, 128), (3, 192), (2, 24), (1, 64)])
def test_attention_of_a_joint_projection(device, rng, heads, width):
    """64 floats are 256 bytes: offsets that can be bound. 24 are not: copies in, none out."""
    a = rng.standard_normal((2, 5, 3 * width)).astype(np.float32)
    x = Tensor(a, device)
    before = device.counters.dispatches
    got = attend(x, heads).numpy()
    assert device.counters.dispatches - before <= (1 if width % 64 == 0 else 4)
    d = width // heads
    q, k, v = (part.reshape(2, 5, heads, d).transpose(0, 2, 1, 3) for part in np.split(a.astype(np.float64), 3, -1))
    s = np.where(np.tri(5, dtype=bool), q @ k.swapaxes(2, 3) / d**0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(2, 5, width)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_joint_projection_is_written_in_place(device, rng, monkeypatch):
    """Four kernels: forward, what each row needs, dq, dk with dv. Nothing is joined afterwards."""
    monkeypatch.setattr(device, "caps", replace(device.caps, kind="gpu"))
    x = Tensor(rng.standard_normal((2, 5, 3 * 128)).astype(np.float32), device, requires_grad=True)
    y, dy = attend(x, 2), Tensor(rng.standard_normal((2, 5, 128)).astype(np.float32), device)
    (got,) = grad(y, [x], dy, retain_graph=True)
    parts = [grad(y, [x], dy * one, retain_graph=True)[0].numpy() for one in (0.25, 0.75)]
    before = device.counters.dispatches
    whole = got.numpy()
    assert device.counters.dispatches - before <= 4
    np.testing.assert_allclose(whole, parts[0] + parts[1], rtol=1e-4, atol=1e-5)


def test_parts_that_are_joined_as_they_lie(device, rng):
    """Neighbours in a result are no copy; swapped, from two results or from what is there already, they are one."""
    a = rng.standard_normal((3, 8)).astype(np.float32)
    x = Tensor(a, device)
    y = F.softmax(x, -1)
    whole = y.numpy()
    for order in ((0, 1), (1, 0), (0, 0)):
        z = F.softmax(x, -1)
        parts = z[:, :3], z[:, 3:]
        joined = F.cat([parts[i] for i in order], 1)
        pieces = whole[:, :3], whole[:, 3:]
        np.testing.assert_array_equal(joined.numpy(), np.concatenate([pieces[i] for i in order], 1))
    np.testing.assert_array_equal(F.cat([x[:, :3], x[:, 3:]], 1).numpy(), a)


def test_results_laid_out_otherwise_are_copied_where_they_are_asked_for(device, rng):
    q, k, v = (Tensor(rng.standard_normal((2, 3, 4, 8)).astype(np.float32), device) for _ in range(3))
    y = F.scaled_dot_product_attention(q, k, v)
    whole, rows, flipped = y.numpy(), (y * 2.0).numpy(), y.flip(2).numpy()
    np.testing.assert_array_equal(rows, whole * 2)
    np.testing.assert_array_equal(flipped, whole[:, :, ::-1])
    np.testing.assert_array_equal(F.scaled_dot_product_attention(q, k.flip(2), v.flip(2)).shape, whole.shape)
    again = F.scaled_dot_product_attention(q[:, :, :, :4], k[..., 4:], v.transpose(0, 1).transpose(0, 1)[..., :4])
    want = F.scaled_dot_product_attention(*(Tensor(t.numpy(), device) for t in (q[..., :4], k[..., 4:], v[..., :4])))
    np.testing.assert_array_equal(again.numpy(), want.numpy())
