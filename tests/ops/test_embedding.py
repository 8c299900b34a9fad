"""Embedding lookup: the kernel with bounds checks, large tables in windows, and the public function."""

from __future__ import annotations

import numpy as np
import pytest

from gpu import Device
from nn.check import embedding as check
from nn.check.embedding import lookup
from nn.ops.base import Array, ShapeError, Spec
from nn.ops.embedding import Embedding, embedding
from nn.quant import Weight
from nn.tensor import Tensor

CASES = check.cases()


@pytest.fixture(scope="module")
def _checked():
    device = Device.open(checked=True, canary=True)
    yield device
    device.close()


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])
def test_lookup_with_the_drivers_bounds_checks(case, _checked, rng):
    for outcome in case.run(_checked, rng):
        np.testing.assert_allclose(
            outcome.got, outcome.want, rtol=outcome.rtol, atol=outcome.atol, err_msg=outcome.label
        )
    _checked.memory.check_canaries()


def test_table_larger_than_the_smallest_binding_limit(device):  # CASES 11: 33000 x 1024 f32, row r = r
    values = np.repeat(np.arange(33_000, dtype=np.float32)[:, None], 1024, axis=1)
    table = Weight.upload(device, values.view(np.uint8), values.shape, "f32", window_bytes=128 << 20)
    assert len(table.windows) == 2
    ids = np.array([0, 32_767, 32_999, 16_499, 16_500])
    np.testing.assert_array_equal(lookup(device, ids, table), values[ids])


def test_tensors_of_any_shape(device, rng):
    values = rng.standard_normal((19, 37)).astype(np.float32)
    ids = rng.integers(0, 19, (3, 5)).astype(np.int32)
    table = Tensor(Weight.from_array(device, values))
    out = embedding(Tensor(ids, device), table, scale=2.0)
    assert out.shape == (3, 5, 37) and out.dtype == "f32"
    np.testing.assert_array_equal(out.numpy(), 2.0 * values[ids])


def test_dense_tensor_as_table(device, rng):
    values = rng.standard_normal((19, 64)).astype(np.float16)
    ids = np.array([3, 18], np.uint32)
    out = embedding(Tensor(ids, device), Tensor(values, device))
    np.testing.assert_array_equal(out.numpy(), values[ids].astype(np.float32))


def test_no_ids_give_no_rows(device):
    out = embedding(Tensor(np.zeros((0,), np.int32), device), Tensor(np.zeros((4, 32), np.float32), device))
    assert out.shape == (0, 32) and out.numpy().shape == (0, 32)


def test_lookups_of_one_recording_fold_their_grid(device, rng):
    # 70,000 ids of 257 columns: 71,094 workgroups, more than one grid dimension holds.
    values = rng.standard_normal((11, 257)).astype(np.float32)
    ids = rng.integers(0, 11, 70_000)
    got = lookup(device, ids, Weight.from_array(device, values))
    np.testing.assert_array_equal(got, values[ids])


def test_errors():
    with pytest.raises(ShapeError, match="ids are f32, expected i32 or u32"):
        Embedding().infer(Spec((3,), "f32"), Spec((4, 32), "q8_0"))
    with pytest.raises(ShapeError, match=r"the table is f32 of shape \(4,\)"):
        Embedding().infer(Spec((3,), "i32"), Spec((4,), "f32"))
    with pytest.raises(ShapeError, match="the table is u8"):
        Embedding().infer(Spec((3,), "i32"), Spec((4, 32), "u8"))


def test_a_dense_table_of_another_width_needs_a_weight(device):
    table = Array(device.upload(np.zeros((4, 33), np.float32)), (4, 33))
    with pytest.raises(ShapeError, match=r"Weight.of: got f32 of shape \(4, 33\); .* use Weight.from_array"):
        lookup(device, np.array([1]), table)
