"""How long a Plan, or each dispatch of it, takes on the device, by timestamp queries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpu.errors import GpuError
from gpu.recorder import MAX_PER_SUBMIT, Plan

if TYPE_CHECKING:
    from gpu.device import Device

MAX_QUERIES = 4096  # WebGPU's limit on a query set


@dataclass(frozen=True)
class Timed:
    """One dispatch: the kernel's label, its workgroup counts, and the median seconds on the device."""

    label: str
    counts: tuple[int, int, int]
    seconds: float


class Stopwatch:
    """Times whole Plans: so many runs in one compute pass between two timestamps, in one submit.

    Where a device has no timestamps, or they cannot be true, it is the host's clock around submit and wait.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.timestamps = device.caps.timestamps
        if self.timestamps:
            usage = device.backend.module.BufferUsage
            with device.backend.errors("stopwatch"):
                self._queries = device.raw.create_query_set(type="timestamp", count=2)
                self._resolved = device.raw.create_buffer(size=256, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
                self._period = device.backend.timestamp_period(device.raw)

    def seconds(self, plan: Plan, *, runs: int = 1) -> float:
        """Seconds of one run of the plan, the mean of `runs` back to back. Waits for earlier work first."""
        device = self.device
        runs = max(1, min(runs, MAX_PER_SUBMIT // max(1, len(plan))))
        if len(plan) == 0:
            return 0.0
        device.wait()
        begin = time.perf_counter()
        if not self.timestamps:
            for _ in range(runs):
                plan.replay()
            device.wait()
            return (time.perf_counter() - begin) / runs
        with device.backend.errors("stopwatch"):
            encoder = device.raw.create_command_encoder()
            writes = {"query_set": self._queries, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
            compute = encoder.begin_compute_pass(timestamp_writes=writes)
            for _ in range(runs):
                for kernel, groups, counts in zip(plan.kernels, plan.groups, plan.counts, strict=True):
                    compute.set_pipeline(kernel.pipeline)
                    for group, bound in enumerate(groups):
                        compute.set_bind_group(group, bound)
                    compute.dispatch_workgroups(*counts)
            compute.end()
            encoder.resolve_query_set(self._queries, 0, 2, self._resolved, 0)
            device.backend.submit(device.raw, encoder.finish())
            device.counters.submits += 1
            start, end = np.frombuffer(device.memory.read_raw(self._resolved, 0, 16), np.uint64).tolist()
        elapsed = time.perf_counter() - begin
        measured = (end - start) * self._period * 1e-9
        if not 0.0 < measured <= 1.5 * elapsed + 1e-4:  # a driver whose timestamps stand still or run wild
            self.timestamps = False
            return self.seconds(plan, runs=runs)
        return measured / runs


def profile_plan(plan: Plan, *, repeats: int = 7) -> list[Timed]:
    """Run a plan `repeats` times with every dispatch in a pass of its own between two timestamps.

    A pass a dispatch costs time of its own, so the sum is more than a replay takes; compare dispatches with each other.
    Raises GpuError where the device has no timestamps.
    """
    device = plan.device
    if not device.caps.timestamps:
        raise GpuError(f"profile: {device.caps.name} has no timestamp queries through {device.caps.backend}")
    module, raw = device.backend.module, device.raw
    step = MAX_QUERIES // 2
    seconds = np.zeros((repeats, len(plan)))
    with device.backend.errors("profile"):
        queries = raw.create_query_set(type="timestamp", count=2 * min(step, len(plan)))
        nbytes = 16 * min(step, len(plan))
        usage = module.BufferUsage
        resolved = raw.create_buffer(size=nbytes, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        period = device.backend.timestamp_period(raw)
        for run in range(repeats):
            for first in range(0, len(plan), step):
                count = min(step, len(plan) - first)
                encoder = raw.create_command_encoder()
                for i in range(count):
                    writes = {"query_set": queries, "beginning_of_pass_write_index": 2 * i}
                    writes["end_of_pass_write_index"] = 2 * i + 1
                    compute = encoder.begin_compute_pass(timestamp_writes=writes)
                    compute.set_pipeline(plan.kernels[first + i].pipeline)
                    for group, bound in enumerate(plan.groups[first + i]):
                        compute.set_bind_group(group, bound)
                    compute.dispatch_workgroups(*plan.counts[first + i])
                    compute.end()
                encoder.resolve_query_set(queries, 0, 2 * count, resolved, 0)
                device.backend.submit(raw, encoder.finish())
                ticks = np.frombuffer(device.memory.read_raw(resolved, 0, 16 * count), np.uint64).reshape(count, 2)
                seconds[run, first : first + count] = (ticks[:, 1] - ticks[:, 0]).astype(np.float64) * period * 1e-9
    medians = np.median(seconds, axis=0)
    return [
        Timed(kernel.label, counts, float(s))
        for kernel, counts, s in zip(plan.kernels, plan.counts, medians, strict=True)
    ]


def by_kernel(timed: Sequence[Timed]) -> list[tuple[str, int, float]]:
    """(label and grid, dispatches, seconds of all of them together), the dearest first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for t in timed:
        groups[f"{t.label} {'x'.join(str(n) for n in t.counts if n > 1) or 1}"].append(t.seconds)
    return sorted(((label, len(s), sum(s)) for label, s in groups.items()), key=lambda row: -row[2])
