"""Ceilings: sane numbers, remembered a device, and the same arithmetic with the host's clock. What the kernels compute
is checked by nn/check/ceilings.py; how fast they are is not a test's business."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpu import ceilings
from gpu.ceilings import Ceilings, measure, seconds_of


def test_every_ceiling_is_measured_once(fresh):
    found = measure(fresh)
    assert found.copy_bytes_per_s > 1e6 and found.f32_flops > 1e6 and 0 < found.launch_s < 1
    assert found.by_timestamps == fresh.caps.timestamps
    assert set(found.as_dict()) == {"copy_bytes_per_s", "f32_flops", "matrix_flops", "launch_s", "by_timestamps"}
    pipelines = fresh.counters.pipelines
    assert measure(fresh) is found
    assert fresh.counters.pipelines == pipelines
    again = measure(fresh, again=True)
    assert isinstance(again, Ceilings) and again is not found and measure(fresh) is again


def test_measuring_leaves_no_large_buffers(fresh):
    before = fresh.counters.bytes_live
    measure(fresh)
    assert fresh.counters.bytes_live == before
    assert fresh.counters.bytes_pooled < 64 << 20


def ticking(device, count):
    out = device.upload(np.zeros(4, np.float32))
    kernel = device.kernel(ceilings.SHADER, "tick")
    record = device.recorder()
    for _ in range(count):
        record(kernel, 1, out=out)
    return record.plan(), out


def test_seconds_of_runs_the_plan_as_often_as_asked(fresh):
    plan, out = ticking(fresh, 3)
    assert seconds_of(plan, repeats=5) > 0
    assert fresh.read(out, np.float32, 4).tolist() == [15.0] * 4


def test_seconds_of_without_timestamps_takes_the_hosts_clock(fresh):
    fresh.caps = replace(fresh.caps, timestamps=False)
    plan, out = ticking(fresh, 2)
    assert seconds_of(plan, repeats=3) > 0
    assert fresh.read(out, np.float32, 4).tolist() == [6.0] * 4
    assert not measure(fresh).by_timestamps
