"""Element-wise work joins the matrix product whose result it reads: one dispatch, the same numbers, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest

import nn.functional as F
from gpu.wgsl import load
from nn.graph import schedule
from nn.graph.cost import StepScope
from nn.ops.matmul import MatMul
from nn.tensor import Tensor, apply


def steps_of(device, *tensors):
    """Names of the steps that compute these."""
    program = schedule.compile_program(device, [t.node for t in tensors])
    return [StepScope(step, path).name for step, path in zip(program.steps, program.paths, strict=True)]


def made(device, rng, *shape, dtype=np.float32):
    a = rng.standard_normal(shape).astype(dtype)
    return Tensor(a, device), a.astype(np.float64)


def close(t, want):
    scale = max(1.0, float(np.abs(want).max(initial=0)))
    assert t.shape == want.shape
    np.testing.assert_allclose(t.numpy(), want, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (1, 7, 5), (3, 5, 7), (16, 32, 64), (33, 17, 65), (70, 64, 132), (4, 0, 6)]
)
def test_activation_residual_and_scale_are_one_dispatch(device, rng, m, k, n):
    (x, a), (w, b), (bias, c), (r, d) = (made(device, rng, *s) for s in ((m, k), (n, k), (n,), (m, n)))
    y = (apply(MatMul(trans_b=True, bias=True), x, w, bias).relu() * 0.5 + r) * 3
    assert steps_of(device, y) == ["mat_mul, relu, mul, add, mul"]
    close(y, (np.maximum(a @ b.T + c, 0) * 0.5 + d) * 3)


def test_what_others_read_is_written_too(device, rng):
    (x, a), (w, b) = made(device, rng, 9, 5), made(device, rng, 5, 6)
    pre = x @ w
    y, total = pre.tanh(), pre.sum(0)
    names = steps_of(device, y, total)
    assert names[0] == "mat_mul, tanh" and len(names) == 2
    close(y, np.tanh(a @ b))
    close(total, (a @ b).sum(0))
    z = x @ w
    kept = (z.exp(), z)
    assert steps_of(device, *kept) == ["mat_mul, exp"]
    close(kept[0], np.exp(a @ b))
    close(kept[1], a @ b)


def test_rows_columns_and_positions_of_other_operands(device, rng):
    (x, a), (w, b) = made(device, rng, 2, 3, 4, 5), made(device, rng, 2, 3, 5, 7)
    (row, r), (col, c), (head, h), (turned, t) = (
        made(device, rng, *s) for s in ((7,), (4, 1), (3, 1, 1), (7, 4, 3, 2))
    )
    causal = F.arange(4, device=device).reshape(4, 1) >= F.arange(7, device=device)
    y = F.where(causal, (x @ w) * col + row + head + turned.permute(3, 2, 1, 0), -5.0)
    assert len(steps_of(device, y)) == 1
    want = (a @ b) * c + r + h + t.transpose(3, 2, 1, 0)
    close(y, np.where(np.arange(4)[:, None] >= np.arange(7), want, -5.0))


def test_batches_that_take_several_dispatches(device, rng):
    (x, a), (w, b), (r, c) = (
        made(device, rng, 2, 1, 3, 1, 4, 5),
        made(device, rng, 1, 3, 1, 2, 5, 6),
        made(device, rng, 6),
    )
    y = (x @ w) * 2 + r
    close(y, (a @ b) * 2 + c)
    (u, d) = made(device, rng, 2, 3, 3, 2, 4, 6)
    close((x @ w) * u, (a @ b) * d)


def test_reshaped_result_and_both_operands(device, rng):
    (x, a), (w, b), (r, c) = made(device, rng, 6, 5), made(device, rng, 5, 8), made(device, rng, 2, 3, 8)
    y = r - (x @ w).reshape(2, 3, 8)
    assert len(steps_of(device, y)) == 1
    close(y, c - (a @ b).reshape(2, 3, 8))
    z = (x @ w).square() + (x @ w) * 2  # equal products are one
    assert len(steps_of(device, z)) == 1
    close(z, (a @ b) ** 2 + 2 * (a @ b))
    both = (x @ w) * (x.relu() @ w)
    assert steps_of(device, both)[-1].startswith("mat_mul") and len(steps_of(device, both)) == 3
    close(both, (a @ b) * (np.maximum(a, 0) @ b))


def test_transposed_readers_and_other_sizes_stay_apart(device, rng):
    (x, a), (w, b) = made(device, rng, 6, 5), made(device, rng, 5, 6)
    y = (x @ w).T + 1
    close(y, (a @ b).T + 1)
    mixed = (x @ w) + (x @ w).T
    close(mixed, (a @ b) + (a @ b).T)
    wide = (x @ w).reshape(6, 1, 6) * Tensor(np.arange(3, dtype=np.float32).reshape(3, 1), device)
    close(wide, (a @ b)[:, None] * np.arange(3)[:, None])
    close((x @ w)[1:] * 2, (a @ b)[1:] * 2)


def test_other_result_types(device, rng):
    (x, a), (w, b) = made(device, rng, 6, 5), made(device, rng, 5, 6)
    pre = x @ w
    positive = pre > 0
    pre.realize(), positive.realize()
    np.testing.assert_array_equal(positive.numpy(), pre.numpy() > 0)
    pre = x @ w
    both = (pre > 0, pre)
    assert steps_of(device, *both) == ["mat_mul, gt"]
    schedule.realize(device, [t.node for t in both])
    np.testing.assert_array_equal(both[0].numpy(), both[1].numpy() > 0)
    close(both[1], a @ b)


def test_more_buffers_than_a_shader_binds(device, rng):
    (x, a), (w, b) = made(device, rng, 6, 5), made(device, rng, 5, 6)
    y, want = x @ w, a @ b
    for _ in range(9):
        t, v = made(device, rng, 6, 6)
        y, want = y * 0.5 + t, want * 0.5 + v
    close(y, want)


def test_f16(device, rng):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    (x, a), (w, b), (r, c) = (made(device, rng, *s, dtype=np.float16) for s in ((33, 20), (20, 31), (33, 31)))
    y = (x @ w) * 0.5 + r
    assert len(steps_of(device, y)) == 1
    np.testing.assert_allclose(y.numpy(), (a @ b) * 0.5 + c, rtol=2e-3, atol=5e-3)


def test_gradients_through_an_activation(device, rng):
    """The derivative of the activation joins the product behind it; its input, written forward, is read back."""
    shapes = ((9, 5), (7, 5), (3, 7))
    (x, a), (w, b), (u, c) = (made(device, rng, *s) for s in shapes)
    for t in (x, w, u):
        t.requires_grad = True
    (F.linear(F.linear(x, w).tanh(), u).square().sum() * 0.5).backward()
    pre = a @ b.T
    h = np.tanh(pre)
    dy = h @ c.T
    dpre = (dy @ c) * (1 - h**2)
    close(u.grad, dy.T @ h)
    close(w.grad, dpre.T @ a)
    close(x.grad, dpre @ b)


def test_generated_text_names_what_is_fused(device, rng):
    (x, _), (w, _) = made(device, rng, 6, 5), made(device, rng, 5, 6)
    program = schedule.compile_program(device, [((x @ w).relu() * 2).node])
    (step,) = program.steps
    record = device.recorder()
    values = {}

    def array_of(value):
        if value.array is not None:
            return value.array
        return values.setdefault(value, Tensor(np.zeros(value.spec.shape, np.float32), device).array())

    made_ = step.epilogue(array_of)
    text = load("matmul/gemm.wgsl", slots=made_.slots).code
    assert "// fused: relu, mul" in text and "fn epilogue(value: f32" in text
    step.record(record, array_of)
    record.submit()
