"""rope as a public function; the kernel's variants are in nn/check/rope.py."""

from __future__ import annotations

import numpy as np
import pytest

from nn.ops.base import ShapeError
from nn.ops.rope import rope
from nn.tensor import Tensor


def angles(context, rotated, base=10_000.0):
    at = np.arange(context)[:, None] * base ** (-np.arange(0, rotated, 2) / rotated)
    return np.stack([np.cos(at), np.sin(at)], axis=-1).astype(np.float32)


def test_scores_depend_on_the_distance_only(device, rng):
    q, k = rng.standard_normal((2, 16))
    table = Tensor(angles(64, 16), device)
    x = Tensor(np.stack([q, k]).astype(np.float32).reshape(1, 2, 1, 16), device)
    scores = []
    for first in (0, 7, 40):
        for interleaved in (False, True):
            turned = rope(x, table, Tensor(np.array([first + 5, first], np.int32), device), interleaved=interleaved)
            a, b = turned.numpy()[0, :, 0]
            scores.append((interleaved, float(a @ b)))
    for pairing in (False, True):
        of = [s for p, s in scores if p == pairing]
        np.testing.assert_allclose(of, of[0], atol=2e-5)
    assert abs(scores[0][1] - scores[1][1]) > 1e-3  # the two pairings are not the same rotation


def test_by_hand_with_partial_rotation(device):
    table = Tensor(
        np.array([[[1, 0]], [[0, 1]]], np.float32), device
    )  # position 1 turns by a quarter: (a, b) -> (-b, a)
    x = Tensor(np.array([1, 2, 3], np.float32).reshape(1, 1, 1, 3), device)
    at = Tensor(np.array([1], np.int32), device)
    np.testing.assert_array_equal(rope(x, table, at).numpy().reshape(-1), [-2, 1, 3])


def test_pairing_by_hand(device):
    table = Tensor(np.array([[[0, 1], [1, 0]]], np.float32), device)  # pair 0 turns by a quarter, pair 1 stays
    x = Tensor(np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 1, 4), device)
    at = Tensor(np.array([0], np.int32), device)
    np.testing.assert_array_equal(rope(x, table, at).numpy().reshape(-1), [-3, 2, 1, 4])
    np.testing.assert_array_equal(rope(x, table, at, interleaved=True).numpy().reshape(-1), [-2, 1, 3, 4])


def test_errors(device):
    table = Tensor(angles(8, 4), device)
    at = Tensor(np.zeros(3, np.int32), device)
    with pytest.raises(ShapeError, match=r"expected \(B, T, N, H\)"):
        rope(Tensor(np.zeros((3, 4), np.float32), device), table, at)
    with pytest.raises(ShapeError, match=r"R <= H = 2"):
        rope(Tensor(np.zeros((1, 3, 1, 2), np.float32), device), table, at)
    with pytest.raises(ShapeError, match=r"positions have shape \(3,\); expected \(2,\) or \(1, 2\)"):
        rope(Tensor(np.zeros((1, 2, 1, 4), np.float32), device), table, at)
    with pytest.raises(TypeError, match="positions is f32; expected i32"):
        rope(Tensor(np.zeros((1, 3, 1, 4), np.float32), device), table, Tensor(np.zeros(3, np.float32), device))
