"""rms_norm, add_rms_norm and layer_norm as public functions; the kernels' variants are in nn/check/norm.py."""

from __future__ import annotations

import numpy as np
import pytest

from nn.check import reference
from nn.ops.base import ShapeError
from nn.ops.norm import add_rms_norm, layer_norm, rms_norm
from nn.tensor import Tensor


def test_rms_norm_over_one_and_two_axes(device, rng):
    x = rng.standard_normal((3, 4, 7)).astype(np.float32)
    w = rng.standard_normal((4, 7)).astype(np.float32)
    t = Tensor(x, device)
    got = rms_norm(t, 7, Tensor(w[0], device), 1e-5).numpy()
    np.testing.assert_allclose(got, reference.rms_norm(x.astype(np.float64), w[0], eps=1e-5), rtol=1e-5, atol=1e-6)
    got = rms_norm(t, (4, 7), Tensor(w, device), eps=1e-5).numpy()
    want = reference.rms_norm(x.astype(np.float64).reshape(3, 28), w.reshape(28), eps=1e-5).reshape(x.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_rms_norm_default_eps_is_torch_machine_epsilon(device):
    x = np.array([[1e-4, -1e-4]], np.float32)  # mean square 1e-8, eps 1.19e-7: well below 1
    got = rms_norm(Tensor(x, device), (2,)).numpy()
    np.testing.assert_allclose(got, x / np.sqrt(1e-8 + 2.0**-23), rtol=1e-5)


def test_rms_norm_small_values(device):  # CASES 24
    got = rms_norm(Tensor(np.array([0.001, -0.001], np.float32), device), (2,), eps=1e-6).numpy()
    np.testing.assert_allclose(got, [0.707107, -0.707107], atol=2e-6)


def test_rms_norm_of_f16_sums_in_f32(device):  # CASES 4: the sum of squares, 4e7, is beyond f16
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    got = rms_norm(Tensor(np.full((1, 4096), 100.0, np.float16), device), (4096,), eps=0.0)
    assert got.dtype == "f16"
    np.testing.assert_allclose(got.numpy(), 1.0, rtol=0, atol=2.0**-10)  # a driver may truncate when it stores f16


def test_add_rms_norm(device, rng):
    x, residual = rng.standard_normal((2, 5, 33)).astype(np.float32)
    w = rng.standard_normal(33).astype(np.float32)
    got = add_rms_norm(Tensor(residual, device), Tensor(x, device), Tensor(w, device), eps=1e-6).numpy()
    np.testing.assert_allclose(
        got, residual + reference.rms_norm(x.astype(np.float64), w, eps=1e-6), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("parts", ["", "w", "b", "wb"])
def test_layer_norm_with_and_without_weight_and_bias(device, rng, parts):
    x = (rng.standard_normal((2, 3, 65)) * 3 + 1).astype(np.float32)
    w, b = rng.standard_normal((2, 65)).astype(np.float32)
    got = layer_norm(
        Tensor(x, device),
        (65,),
        Tensor(w, device) if "w" in parts else None,
        Tensor(b, device) if "b" in parts else None,
    ).numpy()
    gain, shift = w if "w" in parts else np.ones(()), b if "b" in parts else np.zeros(())
    want = reference.layer_norm(x.astype(np.float64), gain, shift, eps=1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=4e-6)


def test_layer_norm_with_a_large_mean(device):  # CASES 2
    x = np.array([8192, 8192.25, 8192.5, 8193], np.float32)
    got = layer_norm(Tensor(x, device), (4,), eps=1e-5).numpy()
    np.testing.assert_allclose(got, [-1.183173, -0.507074, 0.169025, 1.521222], atol=2e-6)


def test_truths_by_hand():
    gain = np.array([1.0, 2.0])
    got = reference.rms_norm(np.array([[3.0, 4.0]]), gain, eps=0.0)
    np.testing.assert_allclose(got, [[3 / 12.5**0.5, 8 / 12.5**0.5]])
    got = reference.layer_norm(np.array([[1.0, 3.0]]), gain, np.array([0.0, 5.0]), eps=3.0)
    np.testing.assert_allclose(got, [[-0.5, 6.0]])


def test_no_rows_give_no_rows(device):
    x = Tensor(np.zeros((0, 8), np.float32), device)
    assert rms_norm(x, (8,)).numpy().shape == (0, 8)
    assert layer_norm(x, (8,)).numpy().shape == (0, 8)


def test_errors_name_the_thing_and_the_remedy(device):
    x = Tensor(np.zeros((2, 8), np.float32), device)
    w = Tensor(np.zeros(7, np.float32), device)
    with pytest.raises(ShapeError, match=r"rms_norm: input has shape \(2, 8\).*normalized_shape \(7,\)"):
        rms_norm(x, 7)
    with pytest.raises(ShapeError, match=r"weight or bias has shape \(7,\).*rows .* have shape \(8,\)"):
        rms_norm(x, 8, w)
    with pytest.raises(TypeError, match=r"second argument is the shape of a row.*rms_norm\(x, \(C,\), weight\)"):
        rms_norm(x, w)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"eps is -1\.0.*>= 0"):
        layer_norm(x, 8, eps=-1.0)
    with pytest.raises(ShapeError, match=r"layer_norm: bias has shape \(7,\)"):
        layer_norm(x, 8, None, w)
    with pytest.raises(TypeError, match="input is i32; expected f32 or f16"):
        rms_norm(Tensor(np.zeros((2, 8), np.int32), device), 8)
    with pytest.raises(ShapeError, match="both must be the same"):
        add_rms_norm(x, Tensor(np.zeros((1, 8), np.float32), device), Tensor(np.zeros(8, np.float32), device), eps=1e-6)
