"""Buffers, the pool, uploads and read-backs."""

from __future__ import annotations

import gc
import re
import sys

import numpy as np
import pytest

from gpu import Device, GpuError, LimitExceeded, OutOfMemory
from gpu.memory import UPLOAD_BUDGET, size_class

FILL = """
struct Params { count: u32, value: u32 }
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<uniform> p: Params;
@compute @workgroup_size(64)
fn fill(@builtin(global_invocation_id) id: vec3<u32>) { if (id.x < p.count) { out[id.x] = p.value; } }
"""


def fill(device: Device, out, count: int, value: int = 7) -> None:
    recorder = device.recorder()
    recorder(device.kernel_source(FILL, "fill", label="fill"), grid=-(-count // 64), out=out, count=count, value=value)
    recorder.submit()


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 4095, 4096, 4097, 5000, (1 << 20) + 1, (1 << 30) - 1])
def test_size_classes_waste_an_eighth_at_most(nbytes):
    size = size_class(nbytes)
    assert size >= nbytes and size % 256 == 0
    assert size_class(size) == size
    assert size - nbytes <= 256 or size <= nbytes * 1.125


# CASES 12: sizes that are no whole number of 4-byte words -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.uint32, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 63, 127, 255, 1025])
def test_upload_and_read_give_the_same_bytes(device, rng, dtype, count):
    want = rng.integers(0, 100, count).astype(dtype)
    left, buffer, right = (device.upload(a) for a in (np.full(64, 9, np.uint32), want, np.full(64, 9, np.uint32)))
    assert buffer.nbytes == want.nbytes
    np.testing.assert_array_equal(device.read(buffer, dtype, count), want)
    buffer.write(want[::-1])
    np.testing.assert_array_equal(device.read(buffer, dtype, (count, 1))[:, 0], want[::-1])
    for neighbour in (left, right):
        np.testing.assert_array_equal(device.read(neighbour, np.uint32, 64), 9)


def test_half_precision_times_two(device):
    if not device.caps.f16:
        pytest.skip("this device has no f16")
    kernel = device.kernel_source(
        """
        struct Params { count: u32 }
        @group(0) @binding(0) var<storage, read> x: array<f16>;
        @group(0) @binding(1) var<storage, read_write> out: array<f16>;
        @group(0) @binding(2) var<uniform> p: Params;
        @compute @workgroup_size(4) fn twice(@builtin(local_invocation_index) i: u32) {
          if (i < p.count) { out[i] = x[i] * 2.0h; }
        }""",
        "twice",
        label="twice",
    )
    for count in (1, 3):
        x, out = device.upload(np.array([1, 2, 3][:count], np.float16)), device.alloc(2 * count)
        recorder = device.recorder()
        recorder(kernel, grid=1, x=x, out=out, count=count)
        recorder.submit()
        assert device.read(out, np.float16, count).tolist() == [2, 4, 6][:count]


def test_arrays_are_copied_in_c_order(device, rng):
    x = rng.standard_normal((3, 5)).astype(np.float32)
    for array in (x.T, x[:, ::2], x[::-1], np.asfortranarray(x)):
        np.testing.assert_array_equal(device.read(device.upload(array), np.float32, array.shape), array)
    assert device.read(device.upload(b"abcde"), np.uint8, 5).tobytes() == b"abcde"


def test_a_read_result_can_be_changed(device):
    got = device.read(device.upload(np.arange(4, dtype=np.uint32)), np.uint32, 4)
    got += 1
    assert got.tolist() == [1, 2, 3, 4]


# Ranges --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(128, 4), (4, 4), (-256, 4), (256, 769), (1024, 1), (0, 1025), (0, -4), (512, -256)]
)
def test_a_view_outside_or_off_its_alignment_is_refused(device, offset, nbytes):
    message = f"view({offset}, {nbytes}) of a buffer of 1024 bytes: the offset must be a multiple of 256"
    with pytest.raises(GpuError, match=re.escape(message)):
        device.alloc(1024).view(offset, nbytes)


def test_views_share_memory_and_nest(device):
    whole = device.upload(np.arange(256, dtype=np.uint32))
    part = whole.view(256, 512)
    deeper = part.view(256, 256)
    np.testing.assert_array_equal(device.read(deeper, np.uint32, 64), np.arange(128, 192))
    deeper.write(np.array([1, 2], np.uint32), offset=8)
    fill(device, part, 5)
    want = np.arange(256, dtype=np.uint32)
    want[64:69] = 7
    want[130:132] = 1, 2
    np.testing.assert_array_equal(device.read(whole, np.uint32, 256), want)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(2, 4), (-4, 4), (4, 13), (16, 4), (0, 17), (0, 400)], ids=lambda value: str(value)
)
def test_reading_and_writing_outside_is_refused(device, offset, nbytes):
    parent = device.upload(np.zeros(256, np.uint32))
    for buffer in (device.upload(np.zeros(4, np.uint32)), parent.view(256, 16)):
        message = f"{nbytes} bytes at offset {offset} of a buffer of 16"
        with pytest.raises(GpuError, match=f"write: {message}"):
            buffer.write(bytes(nbytes), offset=offset)
        with pytest.raises(GpuError, match=f"read: {message}"):
            device.read_later(buffer, nbytes, offset)


def test_a_released_buffer_is_refused(device):
    buffer = device.alloc(1024)
    view = buffer.view(256, 256)
    buffer.release()
    buffer.release()  # again is no error
    for gone in (buffer, view):
        assert gone.released
        with pytest.raises(GpuError, match=r"write: the buffer .* was released; allocate a new one"):
            gone.write(b"abcd")
        with pytest.raises(GpuError, match=r"read: the buffer .* was released"):
            device.read(gone, np.uint8, 4)
        with pytest.raises(GpuError, match="fill: 'out' was released; allocate a new buffer"):
            fill(device, gone, 1)


@pytest.mark.parametrize("nbytes", [1.5, "4", None, float("nan")])
def test_a_size_that_is_no_whole_number_is_refused(device, nbytes):
    with pytest.raises(GpuError, match=r"alloc: .* bytes asked for; a size is a whole number, 0 or more"):
        device.alloc(nbytes)


@pytest.mark.parametrize("data", ["abc", None, [object()], np.array(["a"])])
def test_data_that_is_no_numbers_is_refused(device, data):
    buffer = device.alloc(64)
    for name, call in (("upload", lambda: device.upload(data)), ("write", lambda: buffer.write(data))):
        with pytest.raises(GpuError, match=rf"{name}: got .* data of type .*; expected bytes or numbers"):
            call()


@pytest.mark.parametrize("shape", [(-1,), -4, (1.5,), "a", None, (2**40, 2**40)], ids=str)
def test_reading_a_shape_that_is_none_is_refused(device, shape):
    with pytest.raises(GpuError, match=r"read: shape is|read: \d+ bytes at offset 0 of a buffer of 64"):
        device.read(device.alloc(64), np.float32, shape)


def test_a_negative_size_is_refused(device):
    with pytest.raises(GpuError, match="alloc: -1 bytes asked for; a size is a whole number, 0 or more"):
        device.alloc(-1)


# Pool and counters ---------------------------------------------------------------------------------------------------


def test_memory_comes_back_from_the_pool(fresh):
    first = fresh.alloc(5000)
    raw, before = first.raw, fresh.counters.allocations
    live, pooled = fresh.counters.bytes_live, fresh.counters.bytes_pooled
    first.release()
    assert fresh.counters.bytes_live == live - size_class(5000)
    assert fresh.counters.bytes_pooled == pooled + size_class(5000)
    second = fresh.alloc(5100)  # the same class
    assert second.raw is raw
    assert fresh.counters.allocations == before
    assert (fresh.counters.bytes_live, fresh.counters.bytes_pooled) == (live, pooled)


def test_a_view_keeps_its_parents_memory(fresh):
    view = fresh.upload(np.arange(128, dtype=np.uint32)).view(256, 256)
    gc.collect()
    other = fresh.upload(np.zeros(128, np.uint32))
    np.testing.assert_array_equal(fresh.read(view, np.uint32, 64), np.arange(64, 128))
    assert other.raw is not view.raw


def test_a_plan_keeps_the_buffers_it_uses(fresh):
    out = fresh.alloc(1024)
    recorder = fresh.recorder()
    kernel = fresh.kernel_source(FILL, "fill", label="fill")
    temp = recorder.temp(1024)
    raws = [out.raw, temp.raw]
    recorder(kernel, grid=4, out=temp, count=256, value=1)
    recorder(kernel, grid=4, out=out, count=256, value=2)
    plan = recorder.plan()
    del out, temp
    gc.collect()
    others = [fresh.alloc(1024) for _ in range(4)]
    assert not any(other.raw is raw for other in others for raw in raws)
    plan.replay()
    fresh.wait()
    del plan
    gc.collect()
    again = [fresh.alloc(1024) for _ in range(2)]
    assert {id(buffer.raw) for buffer in again} == {id(raw) for raw in raws}


def test_peak_and_trim(fresh):
    base = fresh.counters.bytes_live
    buffers = [fresh.alloc(1 << 20) for _ in range(3)]
    assert fresh.counters.bytes_live == base + (3 << 20)
    assert fresh.counters.bytes_peak >= base + (3 << 20)
    del buffers
    gc.collect()
    peak = fresh.counters.bytes_peak
    assert fresh.counters.bytes_live == base
    assert fresh.memory.trim() >= 3 << 20
    assert fresh.counters.bytes_pooled == 0
    assert fresh.counters.bytes_peak == peak


# Too much ------------------------------------------------------------------------------------------------------------


def test_more_than_one_buffer_holds_is_refused_with_the_numbers(device):
    limit = device.caps.max_buffer
    with pytest.raises(LimitExceeded, match=f"alloc: {2 * limit:,} bytes asked for, .* holds at most {limit:,}; split"):
        device.alloc(2 * limit)


def out_of_memory(device: Device, times: int, monkeypatch) -> None:
    """The next `times` driver allocations fail as the binding reports it."""
    create, left = device.raw.create_buffer, [times]

    def create_buffer(**options):
        if left[0]:
            left[0] -= 1
            raise device.backend.module.GPUOutOfMemoryError("Not enough memory left.")
        return create(**options)

    monkeypatch.setattr(device.raw, "create_buffer", create_buffer)


def test_out_of_memory_is_typed_and_the_device_goes_on(fresh, monkeypatch):
    out_of_memory(fresh, 2, monkeypatch)  # the second time after giving back what the pool holds
    with pytest.raises(OutOfMemory, match=r"alloc 1,048,576 bytes: the device is out of memory .*\. Free buffers"):
        fresh.alloc(1 << 20)
    out = fresh.alloc(1 << 20)
    fill(fresh, out, 5)
    np.testing.assert_array_equal(fresh.read(out, np.uint32, 5), 7)


def test_the_pool_is_given_back_before_giving_up(fresh, monkeypatch):
    fresh.alloc(1 << 22).release()
    assert fresh.counters.bytes_pooled >= 1 << 22
    out_of_memory(fresh, 1, monkeypatch)
    buffer = fresh.alloc(1 << 20)
    assert buffer.nbytes == 1 << 20
    assert fresh.counters.bytes_pooled == 0


# Uploads and read-backs ----------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory; a software driver's buffers, and copies on their way to it, are among them."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_uploads_do_not_pile_up_on_the_host(fresh):
    """Ten budgets of uploads into one buffer: a software driver's memory is our own, so only staging may grow."""
    chunk = np.zeros(UPLOAD_BUDGET // 8, np.uint8)
    buffer = fresh.alloc(chunk.nbytes)
    buffer.write(chunk)
    fresh.wait()
    before, highest = resident(), 0
    for _ in range(80):
        buffer.write(chunk)
        highest = max(highest, resident())
    assert highest - before < 2.5 * UPLOAD_BUDGET


def test_a_large_upload_arrives_whole(fresh):
    want = np.arange((UPLOAD_BUDGET + (16 << 20)) // 4 + 3, dtype=np.uint32)
    buffer = fresh.upload(want)
    step = 1 << 20
    for start in (0, 4 << 20, 16 << 20, want.size - step):
        got = np.frombuffer(fresh.read_later(buffer, 4 * step, 4 * start).result(), np.uint32)
        np.testing.assert_array_equal(got, want[start : start + step])


def test_results_can_be_fetched_in_any_order(device):
    buffer = device.upload(np.zeros(64, np.uint32))
    pending = []
    for value in range(1, 6):
        fill(device, buffer, 64, value)
        pending.append(device.read_later(buffer, 256))
    for i in (3, 0, 4, 2, 1):
        assert pending[i].result() == np.full(64, i + 1, np.uint32).tobytes()
        with pytest.raises(GpuError, match="read back: this result was already fetched; keep the bytes"):
            pending[i].result()


def test_staging_buffers_are_used_again(fresh):
    buffer = fresh.alloc(1000)
    fresh.read(buffer, np.uint8, 1000)
    before = fresh.counters.allocations
    for _ in range(5):
        fresh.read(buffer, np.uint8, 1000)
    assert fresh.counters.allocations == before
    fresh.memory.reserve_staging(1000, 3)
    reserved = fresh.counters.allocations
    assert reserved == before + 2
    pending = [fresh.read_later(buffer, 1000) for _ in range(3)]
    assert [len(p.result()) for p in pending] == [1000] * 3
    assert fresh.counters.allocations == reserved


def test_copies(device, rng):
    x = rng.integers(0, 255, 300).astype(np.uint8)
    source, target = device.upload(x), device.upload(np.zeros(512, np.uint8))
    view = device.upload(np.zeros(1024, np.uint8)).view(512, 300)
    device.memory.copy([(source, target), (source, view)])
    np.testing.assert_array_equal(device.read(target, np.uint8, 512), np.concatenate([x, np.zeros(212, np.uint8)]))
    np.testing.assert_array_equal(device.read(view, np.uint8, 300), x)
    with pytest.raises(GpuError, match="copy: 512 bytes at offset 0 of a buffer of 300"):
        device.memory.copy([(target, source)])


# Canaries ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [4, 6, 256, 1000])
@pytest.mark.parametrize("freed", [False, True], ids=["live", "freed"])
def test_a_write_behind_the_end_is_caught(nbytes, freed):
    count = -(-nbytes // 4)
    with Device.open(canary=True) as device:
        out = device.alloc(nbytes)
        fill(device, out, count)
        device.memory.check_canaries()
        fill(device, out, count + 1)
        if freed:
            del out
        message = f"a kernel wrote behind the end of its buffer: {nbytes} bytes asked for, byte {4 * count} overwritten"
        with pytest.raises(GpuError, match=f"{message} with 0x00000007"):
            device.memory.check_canaries()
