"""cat is one dispatch: every axis, vectors and single elements, expressions, broadcast and turned parts, dtypes."""

from __future__ import annotations

import numpy as np
import pytest

import nn.functional as F
from nn.graph import schedule
from nn.tensor import Tensor


def count(device, tensor):
    return len(schedule.compile_program(device, [tensor.node]).steps)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("lengths", [(1, 1), (4, 8), (3, 4, 1), (5, 0, 2), (64, 4, 12), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("others", [(2, 3, 4), (3, 2, 5)])
def test_every_axis(device, rng, axis, lengths, others):
    shapes = [(*others[:axis], n, *others[axis:]) for n in lengths]
    values = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    joined = F.cat([Tensor(v, device) for v in values], axis)
    assert count(device, joined) == 1
    np.testing.assert_array_equal(joined.numpy(), np.concatenate(values, axis))


@pytest.mark.parametrize("width", [4, 5, 8])
def test_parts_that_are_computed_repeated_and_turned(device, rng, width):
    a, b = rng.standard_normal((6, width)).astype(np.float32), rng.standard_normal((width, 6)).astype(np.float32)
    row = rng.standard_normal(width).astype(np.float32)
    x, y, r = (Tensor(v, device) for v in (a, b, row))
    joined = F.cat([x * 2 + 1, y.T, r.expand(3, width), x.flip(0), x.flip(1), x[1:3] * r], 0)
    assert count(device, joined) == 1
    want = np.concatenate([a * 2 + 1, b.T, np.broadcast_to(row, (3, width)), a[::-1], a[:, ::-1], a[1:3] * row])
    np.testing.assert_allclose(joined.numpy(), want, rtol=1e-6)
    side = F.cat([x.relu(), F.zeros((6, width), device=device), r.reshape(1, -1).expand(6, width) - x, x[:, :1]], 1)
    assert count(device, side) == 1
    want = np.concatenate([np.maximum(a, 0), np.zeros_like(a), row - a, a[:, :1]], 1)
    np.testing.assert_allclose(side.numpy(), want, rtol=1e-6)


def test_other_dtypes(device, rng):
    a = rng.integers(-9, 9, (4, 8)).astype(np.int32)
    x = Tensor(a, device)
    np.testing.assert_array_equal(F.cat([x, x * 2], 1).numpy(), np.concatenate([a, a * 2], 1))
    np.testing.assert_array_equal(F.cat([x > 0, x < 3], 0).numpy(), np.concatenate([a > 0, a < 3]))
    mixed = F.cat([x.float(), (x > 0).float()], 0)
    np.testing.assert_array_equal(mixed.numpy(), np.concatenate([a, a > 0]).astype(np.float32))
    if device.caps.f16:
        h = a.astype(np.float16)
        y = Tensor(h, device)
        np.testing.assert_array_equal(F.cat([y, y * 2, y[:, :3]], 1).numpy(), np.concatenate([h, h * 2, h[:, :3]], 1))


def test_more_parts_than_a_kernel_binds(device, rng):
    values = [rng.standard_normal((2, 3)).astype(np.float32) for _ in range(12)]
    for axis in (0, 1):
        joined = F.cat([Tensor(v, device) for v in values], axis)
        np.testing.assert_array_equal(joined.numpy(), np.concatenate(values, axis))
    x = Tensor(values[0], device)
    same = F.cat([x] * 30, 0)
    np.testing.assert_array_equal(same.numpy(), np.concatenate([values[0]] * 30))


def test_positions_are_parts_too(device):
    joined = F.cat([F.arange(5, device=device), F.arange(3, device=device) * 2])
    np.testing.assert_array_equal(joined.numpy(), [0, 1, 2, 3, 4, 0, 2, 4])
