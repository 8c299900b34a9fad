"""How Plans are encoded: calls that keep the GIL, and the public API they fall back to."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from gpu import Device, GpuError, native, probe
from gpu.native import DirectCalls, PublicCalls

STEP = """
struct Params { by: u32 }
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<uniform> p: Params;
@group(1) @binding(0) var<storage, read> extra: array<u32>;
@compute @workgroup_size(1) fn step() { out[0] = out[0] * 3u + p.by; }
@compute @workgroup_size(1) fn more() { out[0] += extra[0]; }
"""
DISPATCHES = 150


def make_plan(device: Device):
    """A buffer and a Plan of DISPATCHES dispatches of two kernels on it, one with a second bind group."""
    out, extra = device.upload(np.zeros(1, np.uint32)), device.upload(np.array([5], np.uint32))
    step, more = (device.kernel_source(STEP, entry, label=entry) for entry in ("step", "more"))
    recorder = device.recorder()
    for i in range(DISPATCHES):
        if i % 3 == 2:
            recorder(more, grid=1, out=out, extra=extra)
        else:
            recorder(step, grid=1, out=out, by=i)
    return out, recorder.plan()


def expected(start: int) -> int:
    value = start
    for i in range(DISPATCHES):
        value = value + 5 if i % 3 == 2 else value * 3 + i
        value %= 1 << 32
    return value


def open_public(monkeypatch) -> Device:
    """A device whose direct calls are found wanting."""
    monkeypatch.setattr(DirectCalls, "run", lambda *args: None)  # encodes nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = Device.open()
    assert isinstance(device.backend.calls, PublicCalls)
    return device


# The same results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["direct", "public"])
def test_replays_write_run_and_read(monkeypatch, calls):
    with open_public(monkeypatch) if calls == "public" else Device.open() as device:
        assert isinstance(device.backend.calls, PublicCalls if calls == "public" else DirectCalls)
        out, plan = make_plan(device)
        ahead = None
        for start in (1, 2, 3):
            pending = plan.replay(write=(out, np.array([start], np.uint32).tobytes()), read=(out, 4))
            if ahead is not None:
                assert np.frombuffer(ahead.result(), np.uint32)[0] == expected(start - 1)
            ahead = pending
        assert np.frombuffer(ahead.result(), np.uint32)[0] == expected(3)
        plan.replay()
        assert device.read(out, np.uint32, 1)[0] == expected(expected(3))


def test_both_interfaces_have_the_same_methods():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(DirectCalls) == public(PublicCalls)
    assert public(DirectCalls) == {"pointer", "compile", "write", "run", "run_timed", "timestamp_passes"}


# Falling back --------------------------------------------------------------------------------------------------------


def fails(*_args, **_options):
    raise OSError("no such calling convention")


@pytest.mark.parametrize(
    ("method", "broken", "message"),
    [
        ("run", lambda *args: None, "a replay gave a wrong result"),
        ("run", fails, "a replay failed (no such calling convention)"),
        ("write", lambda *args: None, "a replay gave a wrong result"),
        ("compile", fails, "a replay failed (no such calling convention)"),
    ],
)
def test_calls_that_do_not_work_fall_back_with_one_warning(monkeypatch, method, broken, message):
    monkeypatch.setattr(DirectCalls, method, broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = Device.open()
    with device:
        assert len(caught) == 1
        text = rf"direct calls of .* do not work: {re.escape(message)}; using its public API, which is slower"
        assert re.search(text, str(caught[0].message))
        assert isinstance(device.backend.calls, PublicCalls)
        out, plan = make_plan(device)
        plan.replay()
        assert device.read(out, np.uint32, 1)[0] == expected(0)


def test_a_library_without_the_functions_falls_back(monkeypatch):
    def lacking(self, *args, **options):
        raise AttributeError("function wgpuQueueSubmit not found")

    monkeypatch.setattr(DirectCalls, "__init__", lacking)
    with pytest.warns(UserWarning, match="do not work: the library lacks a function"):
        device = Device.open()
    with device:
        out, plan = make_plan(device)
        plan.replay()
        assert device.read(out, np.uint32, 1)[0] == expected(0)


def test_a_driver_that_computes_nothing_right_is_refused(monkeypatch):
    monkeypatch.setattr(probe, "_replay_works", lambda device: False)
    with pytest.warns(UserWarning, match="a wrong result"), pytest.raises(GpuError, match="this driver cannot be used"):
        Device.open()


@pytest.mark.parametrize("when", ["at the start", "at the end"])
def test_nothing_is_submitted_once_an_error_was_reported(monkeypatch, when):
    """wgpu-native ends the process when a submit is refused, so nothing wrong may get that far."""
    with Device.open() as device:
        out, plan = make_plan(device)
        if when == "at the start":
            device.raw.destroy()
        else:
            step = device.kernel_source(STEP, "step", label="step")
            recorder = device.recorder()
            recorder(step, grid=1, out=out, by=1)
            plan = recorder.plan()
            x, y, z = device.caps.max_workgroups + 1, 1, 1  # past the recorder's own check
            commands, count = plan._batches[0]
            plan._batches[0] = [(*command[:3], x, y, z) for command in commands], count
        submitted = []
        monkeypatch.setattr(device.backend.calls, "_submit", lambda *args: submitted.append(args))
        with pytest.raises(GpuError, match="replay: "):
            plan.replay()
        assert submitted == []


# The GIL -------------------------------------------------------------------------------------------------------------


def test_the_functions_keep_the_gil(device):
    calls = device.backend.calls
    functions = [value for value in vars(calls).values() if isinstance(value, ctypes._CFuncPtr)]
    assert len(functions) == len(native._FUNCTIONS) - 1  # one of the two submits
    assert all(function._flags_ & ctypes._FUNCFLAG_PYTHONAPI for function in functions)


def progress_during_replays(device: Device) -> int:
    """How far a busy thread gets while Plans are encoded, with a switch interval longer than that takes."""
    _, plan = make_plan(device)
    plan.replay()
    device.wait()
    done = threading.Event()
    count = [0]

    def busy() -> None:
        while not done.is_set():
            count[0] += 1
            time.sleep(0)  # give the GIL back at once

    thread = threading.Thread(target=busy)
    interval = sys.getswitchinterval()
    run, progress = device.backend.calls.run, []

    def counted(*args):
        before = count[0]
        index = run(*args)
        progress.append(count[0] - before)
        return index

    sys.setswitchinterval(60.0)
    thread.start()
    device.backend.calls.run = counted
    try:
        for _ in range(10):
            plan.replay()
            device.wait()
    finally:
        done.set()
        device.backend.calls.run = run
        sys.setswitchinterval(interval)
        thread.join()
    assert len(progress) == 10 and count[0] > 0
    return sum(progress)


def test_a_busy_thread_does_not_come_between_the_calls_of_a_replay(monkeypatch):
    with Device.open() as device:
        assert progress_during_replays(device) == 0


def test_the_public_api_does_let_other_threads_in_between(monkeypatch):
    """The control of the test above: it would see the GIL being dropped."""
    with open_public(monkeypatch) as device:
        assert progress_during_replays(device) > 0
