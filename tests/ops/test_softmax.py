"""softmax and log_softmax as public functions; the kernels' variants are in nn/check/softmax.py."""

from __future__ import annotations

import numpy as np
import pytest

from nn.check.softmax import log_softmax as log_truth
from nn.check.softmax import softmax as truth
from nn.ops.base import Array
from nn.ops.rows import SERIAL, RowVariant
from nn.ops.softmax import log_softmax, record_softmax, softmax
from nn.tensor import Tensor


@pytest.mark.parametrize("dim", [-1, 0, 1, -2])
def test_any_axis(device, rng, dim):
    x = (rng.standard_normal((3, 5, 7)) * 4).astype(np.float32)
    exact = np.moveaxis(x.astype(np.float64), dim, -1)
    t = Tensor(x, device)
    np.testing.assert_allclose(softmax(t, dim).numpy(), np.moveaxis(truth(exact), -1, dim), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        log_softmax(t, dim).numpy(), np.moveaxis(log_truth(exact), -1, dim), rtol=1e-5, atol=4e-6
    )


def test_extremes(device):  # CASES 1
    got = softmax(Tensor(np.array([1000, 1002, 999], np.float32), device), 0).numpy()
    np.testing.assert_allclose(got, [0.114195, 0.843795, 0.042010], atol=1e-6)
    masked = np.full((2, 3), -np.inf, np.float32)
    masked[1, 1] = 5.0
    np.testing.assert_array_equal(softmax(Tensor(masked, device), -1).numpy(), [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(log_softmax(Tensor(masked, device), -1).numpy()[1], [-np.inf, 0, -np.inf])


def test_extremes_f16(device):  # CASES 1
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    got = softmax(Tensor(np.array([12, 11, 8], np.float16), device), 0)
    assert got.dtype == "f16"
    np.testing.assert_allclose(got.numpy(), [0.7214, 0.2654, 0.0132], atol=3e-4)
    wide = softmax(Tensor(np.array([12, 11, 8], np.float16), device), 0, dtype="f32")
    assert wide.dtype == "f32"
    np.testing.assert_allclose(wide.numpy(), truth(np.array([12.0, 11.0, 8.0])), rtol=1e-5)


@pytest.mark.parametrize("variant", [SERIAL, RowVariant(32, 2, 64, 1), RowVariant(8, 1, 64, 4)], ids=lambda v: v.name)
@pytest.mark.parametrize("log", [True, False])
def test_nan_is_not_hidden(device, rng, log, variant):
    # WGSL lets a driver assume that there are no NaNs, so `anygpu check` does not ask; the ones tested here keep them.
    x = rng.standard_normal((2, 72)).astype(np.float32)
    x[0, 66] = np.nan
    out = Array(device.alloc(x.nbytes), x.shape)
    record = device.recorder()
    record_softmax(record, Array(device.upload(x), x.shape), out, log=log, variant=variant)
    record.submit()
    got = device.read(out.buffer, np.float32, x.shape)
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


def test_truths_by_hand():
    x = np.array([[0.0, np.log(3.0)], [-np.inf, -np.inf]])
    np.testing.assert_allclose(truth(x), [[0.25, 0.75], [0.0, 0.0]])
    np.testing.assert_allclose(log_truth(x[:1]), np.log([[0.25, 0.75]]))


def test_errors(device):
    x = Tensor(np.zeros((2, 3), np.float32), device)
    with pytest.raises(IndexError, match="softmax: dim 2 is out of range for 2 axes"):
        softmax(x, 2)
    with pytest.raises(TypeError, match=r"log_softmax: input is i32.*dtype='f32'"):
        log_softmax(Tensor(np.zeros((2, 3), np.int32), device), -1)
