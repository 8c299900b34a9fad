"""What a device does while something runs, and what the host does meanwhile: `with gpu.profile(device) as p: ...`.

While a profile is on, every dispatch goes into a compute pass of its own between two timestamps. Nothing waits for
them: they are read when the block ends, so the host runs ahead as it always does. A pass costs time of its own (about 3
us on an NVIDIA H200, where a dispatch costs 1.9): it is measured at the end, with a dispatch that does nothing, stated
in `note`, and taken off the seconds of every dispatch. The timeline shows what was measured.

The two clocks are laid over each other by the latest offset at which no submit begins on the device before the host
made it: at least one submit finds the device idle, so its beginning is the truth to within the cost of a submit.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpu.ceilings import SHADER as TICK_SHADER
from gpu.ceilings import Ceilings, measure
from gpu.device import Device
from gpu.errors import GpuError
from gpu.roofline import Roof, Row, roof_of, rows_of, table_of
from gpu.work import Cost, costed, joined, placed, spread

if TYPE_CHECKING:
    from gpu.recorder import Plan

DRAIN = 512  # submits whose timestamps wait to be read, before some are
PASSES = 256  # compute passes described at first; more when a submit needs them


@dataclass(frozen=True)
class Event:
    """One dispatch on the device; or one submit, where `per` is "submit" or there are no timestamps.

    start: seconds since the profile began. measured: seconds from there to its end on the device. seconds: the same
    without the cost of a pass of its own. cost: the work, None where nobody said. grid: workgroups. buffers: (name in
    the shader, bytes bound). submit: its number in Profile.submits.
    """

    name: str
    path: str
    kind: str
    kernel: str
    grid: tuple[int, int, int]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    buffers: tuple[tuple[str, int], ...]
    start: float
    measured: float
    seconds: float
    cost: Cost | None
    submit: int
    matrix: bool = False
    dispatches: int = 1

    @property
    def end(self) -> float:
        """Seconds since the profile began."""
        return self.start + self.measured


@dataclass(frozen=True)
class Span:
    """A stretch of host time: seconds since the profile began, how deep it is nested, and details."""

    name: str
    start: float
    seconds: float
    depth: int
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """Seconds since the profile began."""
        return self.start + self.seconds


@dataclass
class Submit:
    """One submit: dispatches first..first + count of a plan. replay: number of the replay that it is a part of. state:
    the bytes that the replay wrote (Plan.replay), so that positions are known. kinds: of the scopes in it. turns: how
    often the plan ran in it (Plan.repeated). start, end: on the device, in seconds since the profile began."""

    plan: Plan | None  # None when the profile is complete: it holds buffers
    first: int
    count: int
    replay: int
    state: bytes | None
    submitted: float
    resolved: Any = None
    ticks: np.ndarray | None = None
    start: float = 0.0
    end: float = 0.0
    kinds: frozenset[str] = frozenset()
    turns: int = 1


@dataclass(frozen=True)
class Gap:
    """Time between two submits in which the device had nothing to do, and what the host did: name -> seconds."""

    start: float
    seconds: float
    doing: dict[str, float]


class Profile:
    """Made by `gpu.profile`; complete when its block ends. Until then what was recorded in the block keeps its memory.

    events: what ran on the device, in order. spans: what the host did. submits: in order. ceilings: of the device.
    overhead_s: what a pass of its own adds to a dispatch; 0 where none was put around each. note: how to read it.
    """

    def __init__(
        self, device: Device, *, per: Literal["dispatch", "submit"] = "dispatch", ceilings: Ceilings | None = None
    ) -> None:
        self.device, self.per = device, per
        self.timestamps = device.caps.timestamps
        self.ceilings = ceilings
        self.overhead_s = 0.0
        self.seconds = 0.0
        self.events: list[Event] = []
        self.spans: list[Span] = []
        self.submits: list[Submit] = []
        self._open: list[str] = []
        self._replays = 0
        self._quiet = False
        self._drained = 0
        self._commands: weakref.WeakKeyDictionary[Plan, list[Any]] = weakref.WeakKeyDictionary()
        self._passes: Any = None
        self._keep: list[Any] = []
        self._began = time.perf_counter()

    @property
    def note(self) -> str:
        """How the times came about, in one sentence."""
        if not self.timestamps:
            return (
                f"{self.device.caps.name} has no timestamps through {self.device.caps.backend}: times are the host's, "
                "a submit each, waiting included"
            )
        if self.per == "submit":
            return "device timestamps around each submit"
        return (
            "device timestamps around each dispatch, which runs in a pass of its own; what that costs, "
            f"{self.overhead_s * 1e6:.1f} us each as measured here, is taken off"
        )

    # --- watching ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        if self.device.profile is not None:
            raise GpuError("profile: the device is being profiled; profiles cannot be nested: end the outer one first")
        self.device.wait()  # earlier work is not this profile's
        if self.timestamps:
            self._described(1)
        self._began = time.perf_counter()
        self.device.profile = self
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.device.profile = None
        if kind is None:
            self._finish()

    def now(self) -> float:
        """Seconds since the profile began."""
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def span(self, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Name a stretch of host time; more details may be put into the dictionary that the block gets."""
        if self._quiet:
            yield {}
            return
        start, depth = self.now(), len(self._open)
        self._open.append(name)
        try:
            yield details
        finally:
            self._open.pop()
            self.spans.append(Span(name, start, self.now() - start, depth, details))

    def run(
        self, plan: Plan, first: int, compiled: Sequence[Any], copies: Sequence[Any], *, state: bytes | None
    ) -> Any:
        """What Plan.replay calls in place of the encoder's `run`: the same work, timed. Returns the submit's index."""
        device, calls = self.device, self.device.backend.calls
        begin = self.now()
        self._replays += first == 0
        made = Submit(plan, first, len(compiled), self._replays - 1, state, 0.0)
        if not self.timestamps:
            index = calls.run(device.pointer, device.queue_pointer, compiled, copies)
            made.submitted = made.start = begin
            submitted = encoded = self.now()
            device.backend.wait(device.raw)
            made.end = self.now()
        else:
            batches = [compiled] if self.per == "submit" else self._single(plan)[first : first + len(compiled)]
            batches = batches if len(compiled) else []
            if batches:
                usage = device.backend.module.BufferUsage
                made.resolved = device.raw.create_buffer(
                    size=16 * len(batches), usage=usage.QUERY_RESOLVE | usage.COPY_SRC
                )
                pointer: Any = calls.pointer(made.resolved)
            else:
                pointer = None
            passes = self._described(len(batches))
            index, at = calls.run_timed(device.pointer, device.queue_pointer, batches, passes, pointer, copies)
            encoded, submitted = at - self._began, self.now()
            made.submitted = encoded
        depth = len(self._open)
        self.spans.append(Span("encode", begin, encoded - begin, depth, {"dispatches": len(compiled)}))
        self.spans.append(Span("submit", encoded, submitted - encoded, depth))
        if not self.timestamps:
            self.spans.append(Span("wait", submitted, made.end - submitted, depth))
        self.submits.append(made)
        if len(self.submits) - self._drained > DRAIN:
            self._drain(len(self.submits) - DRAIN // 2)
        return index

    def _single(self, plan: Plan) -> list[Any]:
        """The plan's commands, each compiled by itself."""
        if plan not in self._commands:
            compile_ = self.device.backend.calls.compile
            self._commands[plan] = [
                compile_([(kernel.pipeline, groups, counts)])
                for kernel, groups, counts in zip(plan.kernels, plan.groups, plan.counts, strict=True)
            ]
        return self._commands[plan]

    def _described(self, count: int) -> Any:
        if self._passes is None or len(self._passes.descriptions) < count:
            number = max(PASSES, count)
            queries = self.device.raw.create_query_set(type="timestamp", count=2 * number)
            self._keep.append(self._passes)
            self._passes = self.device.backend.calls.timestamp_passes(queries, number)
        return self._passes

    def _drain(self, until: int) -> None:
        """Read the timestamps of submits up to number `until`."""
        self._quiet = True
        try:
            for made in self.submits[self._drained : until]:
                if made.resolved is not None:
                    count = 1 if self.per == "submit" else made.count
                    data = self.device.memory.read_raw(made.resolved, 0, 16 * count)
                    made.ticks = np.frombuffer(data, np.uint64).astype(np.int64).reshape(count, 2)
                    made.resolved.destroy()
                    made.resolved = None
            self._drained = until
        finally:
            self._quiet = False

    # --- what was seen -----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.device.wait()
        self.seconds = self.now()
        with self.device.backend.errors("profile"):
            self._drain(len(self.submits))
        if self.timestamps:
            times = self._aligned()
        else:
            times = [np.array([[s.start, s.end]] if s.count else np.zeros((0, 2))) for s in self.submits]
        for made, pairs in zip(self.submits, times, strict=True):
            made.start = made.end = made.submitted
            if len(pairs):
                made.start, made.end = float(pairs[0, 0]), float(pairs[:, 1].max())
        numbers = range(len(self.submits))
        for _, group in itertools.groupby(numbers, key=lambda i: self.submits[i].replay):
            self._add_events([(i, self.submits[i], times[i]) for i in group if len(times[i])])
        for made in self.submits:
            assert made.plan is not None
            named = (placed(scope) for scope in made.plan.scopes[made.first : made.first + made.count])
            made.turns = max(1, made.count // max(made.plan.period, 1))
            made.kinds = frozenset(scope.kind for scope in named if scope is not None)
            made.plan = None
        self._commands.clear()
        self._passes, self._keep = None, []
        self.spans.sort(key=lambda span: (span.start, span.depth, -span.seconds))
        if self.ceilings is None and self.events:
            self.ceilings = measure(self.device)
        if self.per == "dispatch" and self.timestamps and self.events:
            assert self.ceilings is not None
            least = self.ceilings.launch_s
            self.overhead_s = max(_least(self.device) - least, 0.0)
            self.events = [
                replace(event, seconds=max(event.measured - self.overhead_s, min(event.measured, least)))
                for event in self.events
            ]

    def _aligned(self) -> list[np.ndarray]:
        """(begin, end) of every pass of each submit, in seconds on the host's clock."""
        period = self.device.backend.timestamp_period(self.device.raw) * 1e-9
        known = [made for made in self.submits if made.ticks is not None]
        if not known:
            return [np.zeros((0, 2)) for _ in self.submits]
        zero = min(int(made.ticks[0, 0]) for made in known if made.ticks is not None)
        times = [np.zeros((0, 2)) if m.ticks is None else (m.ticks - zero) * period for m in self.submits]
        offset = max(made.submitted - float(t[0, 0]) for made, t in zip(self.submits, times, strict=True) if len(t))
        return [np.column_stack([t[:, 0], np.maximum(t[:, 1], t[:, 0])]) + offset for t in times]

    def _add_events(self, parts: Sequence[tuple[int, Submit, np.ndarray]]) -> None:
        """Events of the submits of one replay: (number, submit, times)."""
        whole = all(len(pairs) == made.count for _, made, pairs in parts) and self.per == "dispatch"
        if not parts or not (whole and self.timestamps):
            self.events += [self._submit_event(*part, alone=len(parts) == 1) for part in parts]
            return
        plan, state = parts[0][1].plan, parts[0][1].state
        assert plan is not None
        chosen = [(number, made.first + i) for number, made, _ in parts for i in range(made.count)]
        pairs = np.concatenate([pairs for _, _, pairs in parts])
        lasted = pairs[:, 1] - pairs[:, 0]
        matrices = {kernel: "matrices" in kernel.source.extensions() for kernel in set(plan.kernels)}
        costs = spread([(plan.scopes[i], i // plan.period) for _, i in chosen], lasted, state)
        for (number, i), start, seconds, cost in zip(chosen, pairs[:, 0].tolist(), lasted.tolist(), costs, strict=True):
            kernel, inner = plan.kernels[i], plan.scopes[i]
            scope = placed(inner)
            self.events.append(
                Event(
                    name=kernel.label if scope is None else scope.name if scope is inner else joined(scope, inner),
                    path="" if scope is None else scope.path,
                    kind="other" if inner is None else inner.kind,
                    kernel=kernel.label,
                    grid=plan.counts[i],
                    operands=() if scope is None else tuple(scope.operands),
                    results=() if scope is None else tuple(scope.results),
                    buffers=plan.bound(i),
                    start=start,
                    measured=seconds,
                    seconds=seconds,
                    cost=cost,
                    submit=number,
                    matrix=matrices[kernel],
                )
            )

    def _submit_event(self, number: int, made: Submit, pairs: np.ndarray, *, alone: bool) -> Event:
        """One event for a whole submit; with its cost where it is a whole replay and everything in it has one."""
        assert made.plan is not None
        scopes = made.plan.scopes[made.first : made.first + made.count]
        turns = [(made.first + i) // made.plan.period for i in range(made.count)]
        owners = [costed(scope, made.state) for scope in scopes]
        counted = dict.fromkeys((owner, turn) for owner, turn in zip(owners, turns) if owner is not None)
        known = [owner.cost(made.state, turn) or Cost() for owner, turn in counted]
        complete = alone and None not in owners
        start, end = float(pairs[0, 0]), float(pairs[-1, 1])
        return Event(
            name=f"{made.count} dispatches",
            path="",
            kind="submit",
            kernel="",
            grid=(0, 0, 0),
            operands=(),
            results=(),
            buffers=(),
            start=start,
            measured=end - start,
            seconds=end - start,
            cost=sum(known, Cost()) if complete else None,
            submit=number,
            dispatches=made.count,
        )

    @property
    def busy_s(self) -> float:
        """Seconds in which the device was at work."""
        total, until = 0.0, float("-inf")
        for event in self.events:
            total += max(0.0, event.end - max(event.start, until))
            until = max(until, event.end)
        return total

    def gaps(self, *, least: float = 1e-6) -> list[Gap]:
        """Where the device waited for the host between one submit and the next, for at least so many seconds."""
        found, until = [], None
        for made in self.submits:
            if made.end <= made.start:
                continue
            if until is not None and made.start - until >= least:
                found.append(Gap(until, made.start - until, self._doing(until, made.start)))
            until = made.end if until is None else max(until, made.end)
        return found

    def _doing(self, start: float, end: float) -> dict[str, float]:
        """Seconds of [start, end] by what the host did: its innermost spans, and "python" for the rest."""
        doing: dict[str, float] = {}
        inner = [s for s in self.spans if s.name in HOST_WORK and s.end > start and s.start < end]
        for span in inner:
            doing[span.name] = doing.get(span.name, 0.0) + min(span.end, end) - max(span.start, start)
        rest = end - start - sum(doing.values())
        return doing | ({"python": rest} if rest > 1e-7 else {})

    def host(self) -> dict[str, float]:
        """Seconds of host time by what was done: encode, submit, wait, upload, compile."""
        totals: dict[str, float] = dict.fromkeys(HOST_WORK, 0.0)
        for span in self.spans:
            if span.name in totals:
                totals[span.name] += span.seconds
        return totals

    # --- telling -----------------------------------------------------------------------------------------------------

    def roof(self, event: Event) -> Roof | None:
        """How near an event comes to what the device can do, and what bounds it; None without a cost."""
        return roof_of(event, self.ceilings) if self.ceilings is not None else None

    def rows(self, **options: Any) -> list[Row]:
        """Events summed up; see gpu.roofline.rows_of for the options."""
        return rows_of(self.events, self.roof, **options)

    def table(self, **options: Any) -> str:
        """The rows as aligned text, the dearest first, with totals and the host's share."""
        return table_of(self, **options)

    def to_chrome(self, path: str | Path) -> None:
        """Write a trace that chrome://tracing and ui.perfetto.dev open."""
        from gpu.chrome import write

        write(self, Path(path))

    def to_html(self, path: str | Path, *, title: str = "anygpu profile") -> None:
        """Write a page that needs nothing else: a timeline, a roofline and a table."""
        from gpu.folders import write_whole
        from gpu.page import Page

        write_whole(path, Page(title).profile(self).html())


HOST_WORK = ("encode", "submit", "wait", "upload", "compile")


def profile(
    device: Device | None = None, *, per: Literal["dispatch", "submit"] = "dispatch", ceilings: Ceilings | None = None
) -> Profile:
    """Watch a device while a block runs, whatever runs there: replayed plans, eager recordings, whole models.

        with gpu.profile(device) as p:
            model(x)
        print(p.table())
        p.to_html("profile.html")

    Args:
        device: an open Device; None takes the only open one.
        per: "dispatch" times each by itself; "submit" leaves the work as it is and times whole submits, so that gaps
            between them are those of an unwatched run.
        ceilings: what to compare with; None measures the device (about a second, the first time).
    Raises: GpuError if there is no open device or more than one, or if the device is being profiled already.
    """
    if per not in ("dispatch", "submit"):
        raise GpuError(f"profile: per is {per!r}; expected 'dispatch' or 'submit'")
    if device is None:
        there = Device.all_open()
        if len(there) != 1:
            raise GpuError(f"profile: {len(there)} devices are open; pass the one to watch: gpu.profile(device)")
        device = there[0]
    return Profile(device, per=per, ceilings=ceilings)


def _least(device: Device) -> float:
    """Seconds between the timestamps of a pass that holds one dispatch which does nothing."""
    kernel, out = device.kernel(TICK_SHADER, "tick"), device.upload(np.zeros(4, np.float32))
    record = device.recorder()
    for _ in range(32):
        record(kernel, 1, out=out)
    plan, inner = record.plan(), Profile(device)
    device.profile = inner
    try:
        for _ in range(2):
            plan.replay()
    finally:
        device.profile = None
    inner._drain(len(inner.submits))
    ticks = inner.submits[-1].ticks
    assert ticks is not None
    period = device.backend.timestamp_period(device.raw) * 1e-9
    return float(np.median(ticks[:, 1] - ticks[:, 0])) * period
