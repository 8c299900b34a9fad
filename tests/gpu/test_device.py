"""The life of a device: close, loss, errors that arrive late, and going on afterwards (CASES 14)."""

from __future__ import annotations

import gc
import subprocess
import sys
import traceback

import numpy as np
import pytest

from gpu import Device, DeviceLost, GpuError, OutOfMemory

SQUARE = """
struct Params { count: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
@compute @workgroup_size(64)
fn square(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < p.count) { out[id.x] = x[id.x] * x[id.x] + 0.1; }
}
"""
X = np.linspace(-3, 3, 100, dtype=np.float32)


class Work:
    """Everything a user may still hold when a device goes away."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.x, self.out = device.upload(X), device.alloc(X.nbytes)
        self.kernel = device.kernel_source(SQUARE, "square", label="square")
        self.recorder = device.recorder()
        self.record(self.recorder)
        self.plan = self.recorder.plan()
        self.record(self.recorder)

    def record(self, recorder) -> None:
        recorder(self.kernel, grid=2, x=self.x, out=self.out, count=X.size)

    def result(self) -> bytes:
        self.plan.replay()
        return self.device.read(self.out, np.float32, X.size).tobytes()

    def uses(self):
        """name -> a call that touches the device."""
        device = self.device
        return {
            "alloc": lambda: device.alloc(4),
            "upload": lambda: device.upload(X),
            "write": lambda: self.x.write(X),
            "read": lambda: device.read(self.out, np.float32, 4),
            "read_later": lambda: device.read_later(self.out, 4),
            "copy": lambda: device.memory.copy([(self.x, self.out)]),
            "replay": lambda: self.plan.replay(),
            "replay with read": lambda: self.plan.replay(write=(self.x, bytes(4)), read=(self.out, 4)),
            "plan": lambda: self.recorder.plan(),
            "submit": lambda: self.recorder.submit(),
            "recorder": lambda: device.recorder(),
            "kernel": lambda: device.kernel_source(SQUARE + "\n", "square", label="again"),
            "file": lambda: device.kernel("norm/rms_norm.wgsl", "rms_norm", constants={"WG": 32}),
            "wait": lambda: device.wait(),
        }


USES = [
    "alloc", "upload", "write", "read", "read_later", "copy", "replay", "replay with read", "plan", "submit",
    "recorder", "kernel", "file", "wait",
]  # fmt: skip


@pytest.fixture
def work():
    with Device.open() as device:
        yield Work(device)


def test_uses_are_complete(work):
    assert list(work.uses()) == USES


# Close ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", USES)
def test_use_after_close_raises_device_lost(work, use):
    work.device.close()
    with pytest.raises(DeviceLost, match=r"the device .* was closed: open a new Device and load again"):
        work.uses()[use]()


def test_results_under_way_when_the_device_closes_are_lost(work):
    pending = work.device.read_later(work.out, 4)
    work.device.close()
    with pytest.raises(DeviceLost, match="was closed"):
        pending.result()


def test_reopening_gives_the_same_bits(work):
    first = work.result()
    np.testing.assert_allclose(np.frombuffer(first, np.float32), X.astype(np.float64) ** 2 + 0.1, rtol=1e-6)
    work.device.close()
    with Device.open() as device:
        assert Work(device).result() == first


def test_a_planned_close_says_nothing(capfd, caplog):
    """With buffers, plans and results still held; closed twice; and collected afterwards."""
    device = Device.open()
    work = Work(device)
    work.result()
    pending = device.read_later(work.out, 4)
    device.close()
    device.close()
    del work, pending, device
    gc.collect()
    with Device.open() as other:  # where late callbacks of the closed one would run
        Work(other).result()
    assert capfd.readouterr() == ("", "")
    said = [r.getMessage() for r in caplog.records if "running on the CPU" not in r.getMessage()]  # said when opening
    assert said == []


def test_a_device_that_is_never_closed_ends_quietly(device):
    """A process of its own also shows what a driver prints only once, when it first lists adapters."""
    code = (
        "import numpy as np; from gpu import Device; "
        f"d = Device.open('{device.adapter.index}'); b = d.upload(np.arange(4)); "  # asked for: a CPU needs no warning
        "p = d.read_later(b, 4); print(d.read(b, np.int64, 4).sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


def test_buffers_may_outlive_their_device():
    device = Device.open()
    buffer = device.alloc(1024)
    view = buffer.view(256, 4)
    device.close()
    del device
    gc.collect()
    buffer.release()
    assert view.released


# Loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", USES)
def test_a_lost_device_raises_from_every_call(work, use, capfd):
    """The loss is not known before this very call: each path must survive it by itself."""
    work.result()
    work.device.raw.destroy()
    with pytest.raises(DeviceLost, match=r"the device was lost \(.+\)\. Open a new Device and load again"):
        work.uses()[use]()
        assert use in ("alloc", "recorder", "wait"), "only what asks nothing of the driver may pass"
        work.result()
    with pytest.raises(DeviceLost):
        work.result()
    assert capfd.readouterr().err == ""
    with Device.open() as device:
        other = Work(device)
        np.testing.assert_allclose(np.frombuffer(other.result(), np.float32), X**2 + np.float32(0.1), rtol=1e-6)


def test_a_result_under_way_when_the_device_is_lost(work):
    pending = work.plan.replay(read=(work.out, 400))
    work.device.raw.destroy()
    try:  # either it was done already, or the loss is reported
        data = np.frombuffer(pending.result(), np.float32)
    except DeviceLost:
        pass
    else:
        np.testing.assert_allclose(data, X**2 + np.float32(0.1), rtol=1e-6)
    with pytest.raises(DeviceLost):
        work.result()


# Errors --------------------------------------------------------------------------------------------------------------


def late_error(device: Device) -> None:
    """Let the driver report a validation error while no call of the engine is there to raise it."""
    gc.collect()  # what the binding frees later might be told of the error in place of the engine
    backend = device.backend
    descriptor = backend._ffi.new("WGPUBufferDescriptor *", {"size": 16, "usage": 0xFF})  # usages at odds
    backend._lib.wgpuBufferRelease(backend._lib.wgpuDeviceCreateBuffer(device.raw._internal, descriptor))


@pytest.mark.parametrize("use", USES)
def test_an_error_outside_any_call_is_raised_by_the_next_one(work, use, caplog):
    late_error(work.device)
    with pytest.raises(GpuError, match="an earlier call failed later on: "):
        work.uses()[use]()
        raise AssertionError(f"{use} did not raise")
    assert caplog.text == ""
    work.uses()[use]()  # told once
    work.device.wait()


def test_late_out_of_memory_and_loss_are_typed(monkeypatch, work):
    backend = work.device.backend
    if backend.name == "wgpu":
        monkeypatch.setattr(backend, "_reported", [("OutOfMemory", "Not enough memory left.")])
    else:
        backend._handler.pending.append(("OutOfMemory", "Not enough memory left."))
    with pytest.raises(OutOfMemory, match="an earlier call failed later on: the device is out of memory"):
        work.result()
    work.result()


def test_a_late_error_of_one_device_is_not_raised_by_another(work):
    if work.device.backend.name == "dawn":
        pytest.skip("Dawn's binding keeps one list for all devices; it is raised by whichever asks first")
    with Device.open() as other:
        late_error(other)
        work.result()
        with pytest.raises(GpuError, match="an earlier call failed later on"):
            other.alloc(4)


def test_errors_hold_no_frames_of_the_binding(work):
    """CPython's collector can crash on the cycle in which a binding's error lies with a view of the bytes written."""
    work.device.raw.destroy()
    with pytest.raises(DeviceLost) as caught, work.device.backend.errors("upload"):
        work.device.raw.queue.write_buffer(work.x.raw, 0, X)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__cause__.__traceback__)]
    inside = [frame for frame in frames if "site-packages" in frame.f_code.co_filename]
    assert inside and not any(frame.f_locals for frame in inside)
    del caught, frames, inside
    gc.collect()


def test_running_on_a_cpu_is_announced(device, monkeypatch, caplog):
    if device.caps.kind != "cpu":
        pytest.skip("this adapter is a GPU")
    monkeypatch.delenv("ANYGPU_DEVICE", raising=False)
    with caplog.at_level("WARNING", logger="anygpu"):
        Device.open().close()
        assert f"running on the CPU through {device.caps.name}" in caplog.text
        caplog.clear()
        Device.open(device.caps.name).close()  # asked for by name: no surprise
        assert not caplog.records
