"""Repacking, upload and row windows, and the decode kernel on the device."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from gpu import Device
from nn.check import quant as check
from nn.check.quant import random_raw, upload_in
from nn.ops.base import Array, ShapeError
from nn.quant import FORMATS, Weight, dequantize
from nn.quant.repack import plane_offsets, planes
from nn.quant.weight import window_rows

CASES = check.cases()


@pytest.fixture(scope="module")
def _checked():
    device = Device.open(checked=True, canary=True)
    yield device
    device.close()


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])
def test_decode_with_the_drivers_bounds_checks(case, _checked, rng):
    for outcome in case.run(_checked, rng):
        np.testing.assert_array_equal(outcome.got, outcome.want, err_msg=outcome.label)
    _checked.memory.check_canaries()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 9, 37])
def test_planes_give_every_byte_once(name, rows, rng, monkeypatch):
    monkeypatch.setattr("nn.quant.repack._CHUNK", 2000)
    cols = 45 if FORMATS[name].dense else 768
    _, size = plane_offsets(name, rows, cols)
    assert size % 16 == 0
    seen = np.zeros(size, int)
    whole = np.zeros(size, np.uint8)
    for offset, piece in planes(random_raw(rng, name, rows, cols), name, cols):
        assert offset % 4 == 0 and piece.size % 4 == 0 and piece.dtype == np.uint8
        seen[offset : offset + piece.size] += 1
        whole[offset : offset + piece.size] = piece
    assert (seen == 1).all()


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_do_not_depend_on_the_chunk_size(name, rng, monkeypatch):
    cols = 45 if FORMATS[name].dense else 768
    raw = random_raw(rng, name, 37, cols)

    def assembled():
        whole = np.zeros(plane_offsets(name, 37, cols)[1], np.uint8)
        for offset, piece in planes(raw, name, cols):
            whole[offset : offset + piece.size] = piece
        return whole

    one = assembled()
    monkeypatch.setattr("nn.quant.repack._CHUNK", 2000)
    np.testing.assert_array_equal(assembled(), one)


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q6_k", "f32"])
def test_repacking_needs_little_memory(name, rng):
    cols = 1024
    rows = (24 << 20) // FORMATS[name].row_bytes(cols)
    raw = rng.integers(0, 256, (rows, FORMATS[name].row_bytes(cols)), dtype=np.uint8)
    tracemalloc.start()
    total = sum(piece.size for _, piece in planes(raw, name, cols))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total >= raw.nbytes and peak < 12 << 20


def test_quants_lie_in_the_stated_order():
    q = np.arange(32, dtype=np.uint8) % 16  # weight k is k mod 16
    raw = np.zeros((1, 20), np.uint8)
    raw[0, 4:] = q[:16] | (q[16:] << 4)
    words = next(planes(raw, "q4_1", 32))[1].view("<u4")
    unpacked = [(int(words[k // 8]) >> (8 * (k % 4) + 4 * (k // 4 % 2))) & 15 for k in range(32)]
    assert unpacked == q.tolist()


def test_window_rows_are_even_and_fit():
    # Gemma's table and the smallest binding limit of WebGPU: two windows of the same size, not one full and one rest.
    step = window_rows("q8_0", 262_144, 640, 128 << 20)
    assert step == 131_072 and plane_offsets("q8_0", step, 640)[1] <= 128 << 20
    assert window_rows("q4_k", 7, 256, 1 << 20) == 7
    with pytest.raises(ValueError, match="a f32 row of 1024 weights takes more than the 4,000 bytes"):
        window_rows("f32", 2, 1024, 4000)


def test_upload_cuts_at_the_limit_and_decodes(device, rng):
    raw = random_raw(rng, "q5_1", 100, 64)
    weight = Weight.upload(device, raw, (100, 64), "q5_1", window_bytes=1024)
    assert [w.row0 for w in weight.windows] == list(range(0, 100, weight.windows[0].rows))
    assert sum(w.rows for w in weight.windows) == 100 and all(w.buffer.nbytes <= 1024 for w in weight.windows)
    assert weight.nbytes == sum(w.buffer.nbytes for w in weight.windows)
    np.testing.assert_array_equal(weight.to_numpy(device), dequantize(raw, "q5_1"))


def test_to_numpy_reads_in_parts(device, rng, monkeypatch):
    monkeypatch.setattr("nn.quant.weight._READ_BYTES", 4 * 64 * 7)
    raw = random_raw(rng, "q4_0", 23, 64)
    weight = upload_in(device, raw, (23, 64), "q4_0", 2)
    np.testing.assert_array_equal(weight.to_numpy(device), dequantize(raw, "q4_0"))


def test_upload_takes_a_flat_read_only_file(device, rng, tmp_path):
    raw = random_raw(rng, "q4_1", 5, 96)
    (tmp_path / "w").write_bytes(raw.tobytes())
    mapped = np.memmap(tmp_path / "w", np.uint8, mode="r")
    weight = Weight.upload(device, mapped, (5, 96), "q4_1")
    np.testing.assert_array_equal(weight.to_numpy(device), dequantize(raw, "q4_1"))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0"])
def test_from_array(device, rng, name):
    x = rng.standard_normal((7, 64)).astype(np.float32)
    weight = Weight.from_array(device, x, name)
    assert weight.shape == (7, 64) and weight.format == name
    np.testing.assert_allclose(
        weight.to_numpy(device), x, rtol=0, atol={"f32": 0, "f16": 2e-3, "bf16": 2e-2}.get(name, 2e-2)
    )


def test_of_reads_a_dense_matrix_in_place(device, rng):
    x = rng.standard_normal((7, 64)).astype(np.float32)
    array = Array(device.upload(x), (7, 64))
    weight = Weight.of(array)
    assert weight.windows[0].buffer is array.buffer
    np.testing.assert_array_equal(weight.to_numpy(device), x)
    with pytest.raises(ShapeError, match=r"got f32 of shape \(8, 56\); .* multiple of 32"):
        Weight.of(Array(array.buffer, (8, 56)))


def test_upload_refuses_a_wrong_size(device):
    with pytest.raises(ValueError, match="uint8 with 33 elements; a q8_0 matrix of 1 x 32 is uint8 with 34"):
        Weight.upload(device, np.zeros(33, np.uint8), (1, 32), "q8_0")
    with pytest.raises(ValueError, match="do not divide"):
        Weight.upload(device, np.zeros(33, np.uint8), (1, 33), "q8_0")
    with pytest.raises(ShapeError, match="expected a matrix"):
        Weight.from_array(device, np.zeros(3, np.float32))
