"""Ceilings: sane numbers, remembered a device. What the kernels compute
is checked by nn/check/ceilings.py; how fast they are is not a test's business."""

from __future__ import annotations

from dataclasses import replace

from gpu.ceilings import Ceilings, measure


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


def test_without_timestamps_it_is_the_hosts_clock(fresh):
    fresh.caps = replace(fresh.caps, timestamps=False)
    assert not measure(fresh).by_timestamps
