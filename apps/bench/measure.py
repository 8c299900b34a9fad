"""How long recorded work takes: batches between two timestamps, repeated until they agree or the time is out.

A batch is one compute pass that runs one or several Plans in turn, many times. The Plans write the same results, so
each dispatch waits for the one before it, as in a model. Where a device has no timestamps, the host times a batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpu import Device, Plan

SPREAD = 0.02  # batches agree when the middle half of them lies within this share of the median
HOT = 1.05  # a GPU counts as warm when work of known length takes no longer than this times its least
BATCH_SECONDS = 0.01  # what a batch should last at least: timestamps tick in microseconds on some devices
LONGEST_BATCH = 0.15  # and at most, where a call allows it: drivers of laptops kill a submit that runs for seconds
MOST_DISPATCHES = 4000  # a batch: encoding takes host time
LEAST_BATCHES, MOST_BATCHES = 5, 60


@dataclass(frozen=True)
class Sample:
    """Seconds of one call: median, lowest and highest of `batches`; spread of the middle half over the median."""

    median: float
    low: float
    high: float
    spread: float
    batches: int
    clock: str  # "gpu" or "wall"

    @classmethod
    def of(cls, seconds: Sequence[float], clock: str) -> Sample:
        """The summary of seconds a call, one for each batch."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), spread(seconds), len(seconds), clock)


def spread(seconds: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 1 while there are fewer than three values."""
    if len(seconds) < 3:
        return 1.0
    low, median, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / median) if median > 0 else 1.0


def repeat(batch: Callable[[], float], limit: float, *, least: int = LEAST_BATCHES, clock: str) -> Sample:
    """Call `batch` (it gives seconds of one call) until its spread is under SPREAD or `limit` seconds have passed."""
    end = time.perf_counter() + limit
    seconds: list[float] = []
    while len(seconds) < MOST_BATCHES:
        seconds.append(batch())
        if len(seconds) >= least and spread(seconds) < SPREAD:
            break
        if time.perf_counter() > end and seconds:
            break
    return Sample.of(seconds, clock)


class Stopwatch:
    """Times Plans of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.clock = "gpu" if device.caps.timestamps else "wall"
        self._spin: tuple[Plan, int, float] | None = None  # work of known length: plan, rounds, the least seconds seen
        if device.caps.timestamps:
            raw, module = device.raw, device.backend.module
            with device.backend.errors("bench"):
                self._queries = raw.create_query_set(type="timestamp", count=2)
                usage = module.BufferUsage
                self._resolved = raw.create_buffer(size=256, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
            self._period = device.backend.timestamp_period(raw)

    def batch(self, plans: Sequence[Plan], rounds: int) -> float:
        """Seconds of all plans run in turn, `rounds` times."""
        return self._on_gpu(plans, rounds) if self.clock == "gpu" else self._on_wall(plans, rounds)

    def _on_gpu(self, plans: Sequence[Plan], rounds: int) -> float:
        device = self.device
        with device.backend.errors("bench"):
            encoder = device.raw.create_command_encoder()
            writes = {"query_set": self._queries, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
            compute = encoder.begin_compute_pass(timestamp_writes=writes)
            commands = [
                (kernel.pipeline, groups, counts)
                for plan in plans
                for kernel, groups, counts in zip(plan.kernels, plan.groups, plan.counts)
            ]
            last = None
            for _ in range(rounds):
                for pipeline, groups, counts in commands:
                    if pipeline is not last:
                        compute.set_pipeline(pipeline)
                        last = pipeline
                    for index, group in enumerate(groups):
                        compute.set_bind_group(index, group)
                    compute.dispatch_workgroups(*counts)
            compute.end()
            encoder.resolve_query_set(self._queries, 0, 2, self._resolved, 0)
            device.backend.submit(device.raw, encoder.finish())
        ticks = np.frombuffer(device.memory.read_raw(self._resolved, 0, 16), np.uint64)
        return float(int(ticks[1]) - int(ticks[0])) * self._period * 1e-9

    def _on_wall(self, plans: Sequence[Plan], rounds: int) -> float:
        self.device.wait()
        start = time.perf_counter()
        for _ in range(rounds):
            for plan in plans:
                plan.replay()
        self.device.wait()
        return time.perf_counter() - start

    def heat(self) -> None:
        """Keep a GPU busy until work of known length takes as little time as it ever did, three seconds at most.

        A GPU that idled while the host made inputs runs at a fraction of its clock, and does so steadily for a while:
        that two batches agree says nothing about it.
        """
        if self._spin is None:
            return
        plan, rounds, least = self._spin
        end = time.perf_counter() + 3.0
        while (now := self.batch([plan], rounds)) > HOT * least and time.perf_counter() < end:
            pass
        self._spin = plan, rounds, min(now, least)

    def learn(self, plan: Plan, rounds: int, seconds: float) -> None:
        """Take this plan, run so many times in so many seconds on a warm device, as the work that `heat` does."""
        self._spin = plan, rounds, seconds

    def time(self, plans: Sequence[Plan], *, limit: float, calls: int = 1) -> Sample:
        """Seconds of one call, of which each plan holds `calls`. limit: seconds for warming and measuring together."""
        self.heat()
        begin = time.perf_counter()
        per_round = len(plans) * calls
        once = max(self.batch(plans, 1), 1e-7)
        once = min(once, max(self.batch(plans, 1), 1e-7)) if once < limit else once
        dispatches = max(sum(len(plan) for plan in plans), 1)
        rounds = int(
            min(max(BATCH_SECONDS / once, 1), max(LONGEST_BATCH / once, 1), max(MOST_DISPATCHES / dispatches, 1))
        )
        before = once
        while time.perf_counter() - begin < 0.3 * limit:  # clocks rise under load: until two batches agree
            now = self.batch(plans, rounds) / rounds
            settled = abs(now - before) < SPREAD * now
            before = now
            if settled:
                break
        left = limit - (time.perf_counter() - begin)
        least = LEAST_BATCHES if once * rounds * LEAST_BATCHES < max(left, 0.0) else 1
        return repeat(lambda: self.batch(plans, rounds) / rounds / per_round, left, least=least, clock=self.clock)


def warm(device: Device, watch: Stopwatch, *, limit: float) -> None:
    """Keep the device busy until its clock has risen: two batches in a row take the same time, or `limit` is out."""
    workgroups = 4096 if device.caps.kind == "gpu" else 16
    buffer = device.alloc(4 * 256 * workgroups)
    kernel = device.kernel_source(_SPIN, "spin", label="bench warm-up")
    record = device.recorder()
    record(kernel, grid=workgroups, a=buffer)
    plan = record.plan()
    once = max(watch.batch([plan], 1), 1e-6)
    rounds = int(min(max(0.05 / once, 1), 200))
    end, before, agreed, least = time.perf_counter() + limit, 0.0, 0, float("inf")
    while agreed < 3 and time.perf_counter() < end:
        now = watch.batch([plan], rounds)
        agreed = agreed + 1 if abs(now - before) < SPREAD * now else 0
        before, least = now, min(now, least)
    if device.caps.kind == "gpu" and watch.clock == "gpu":
        watch.learn(plan, max(rounds // 5, 1), least / rounds * max(rounds // 5, 1))


_SPIN = """@group(0) @binding(0) var<storage, read_write> a: array<f32>;
@compute @workgroup_size(256) fn spin(@builtin(global_invocation_id) g: vec3<u32>) {
  var v = a[g.x];
  for (var i = 0u; i < 1024u; i++) { v = v * 0.999 + 0.5; }
  a[g.x] = v;
}"""
