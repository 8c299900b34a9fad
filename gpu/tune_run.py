"""Which variant of a family is fastest on this device at one shape: compile, compare with the plain one, time.

Variants are struck off, never fatal: one that does not compile or run, that gives another result than the plain variant
(the default), or that needs more memory than the call and EXTRA_BYTES. The rest is timed in turns, so that a change of
the clock or of the machine's load meets all of them, and what is clearly slower is left out of the later rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.errors import DeviceLost, GpuError
from gpu.profile import Stopwatch
from gpu.tune import EXTRA_BYTES, Result, Trial

if TYPE_CHECKING:
    from gpu.device import Device
    from gpu.recorder import Plan
    from gpu.tune import Family

WIN = 1.03  # the default is replaced only by what is faster by more than this
ROUNDS = 9
SLOW_AT_ONCE = 3.0  # times the best: left out after one sample
SLOW = 1.2  # times the best: left out after two rounds or more
DUEL = 5  # samples at least of the default and of what would replace it
LONG = 5e-3  # seconds of a call from which the host's clock tells enough to leave it out
COMPILING = 10.0  # times the budget: no further variant is compiled after that
SAMPLE = (1e-3, 2e-2)  # seconds of a sample, from and to; a single call may take longer
CHECKED_BYTES = 8 << 20  # of each result that are compared; of larger ones, windows spread over it
WINDOWS = 64
WARM = (0.3, 1.0)  # seconds, at least and at most, that a GPU is kept busy before variants are timed

log = logging.getLogger("anygpu")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """One variant: median seconds a call (None: not timed), and why it was left out, if it was."""

    name: str
    seconds: float | None
    samples: int
    left_out: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one shape class. ratio: the default's time over the winner's, 1 where the default stays."""

    winner: str
    default: str
    ratio: float
    timings: tuple[Timing, ...]


@dataclass
class _Candidate:
    variant: Any
    samples: list[float] = field(default_factory=list)  # seconds a call
    seen: float = 0.0  # seconds of the call whose result was compared, by the host's clock
    runs: int = 1
    left_out: str = ""

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def best(self) -> float:
        return min(self.samples, default=float("inf"))

    @property
    def median(self) -> float:
        return float(np.median(self.samples)) if self.samples else float("inf")


def compare(
    device: Device,
    family: Family[Any, Any],
    shape: Any,
    variants: Sequence[Any],
    default: Any,
    *,
    budget: float,
    clock: Clock = time.monotonic,
) -> Verdict:
    """Time the variants of one shape on operands made for it.

    Args:
        budget: seconds for running: half for comparing results, half for timing. Compiling comes on top, up to ten
            times as much, and up to a second of bringing a GPU's clock up.
        clock: the seconds that the budget is counted in; tests give their own.
    Raises: GpuError where not one variant works, or the operands cannot be made.
    """
    candidates = [_Candidate(v) for v in (default, *(v for v in variants if v.name != default.name))]
    if len(candidates) == 1:
        return Verdict(default.name, default.name, 1.0, (Timing(default.name, None, 0, "the only one"),))
    allowed = EXTRA_BYTES + (0 if family.nbytes is None else family.nbytes(shape) * 9 // 8)  # as the pool rounds up
    with device.memory.at_most(allowed):
        trial = family.trial(device, shape)
        _check(device, trial, candidates, f"{family.name} {family.shape_class(shape)}", budget, clock)
        alive = [c for c in candidates if not c.left_out]
        if not alive:
            raise GpuError(f"not one of {len(candidates)} variants works; {default.name} {candidates[0].left_out}")
        _race(device, trial, alive, Stopwatch(device), budget / 2, clock)
    return _verdict(candidates, default.name)


def _check(
    device: Device, trial: Trial[Any], candidates: list[_Candidate], what: str, budget: float, clock: Clock
) -> None:
    """Leave out what does not work, and what gives another result than the first that does."""
    compile_until, running = clock() + COMPILING * budget, 0.0
    plain: list[np.ndarray] | None = None
    for candidate in candidates:
        if plain is not None and (clock() > compile_until or running > budget / 2):
            candidate.left_out = "not tried: the time was over"
            continue
        try:
            plan = _plan(device, trial, candidate, 1)
            plan.replay()  # some drivers compile only now
            device.wait()
            begin = clock()
            got, candidate.seen = _results(device, trial, plan, clock)
            problem = "" if plain is None else _difference(trial.results, got, plain)
            running += clock() - begin
        except DeviceLost:
            raise
        except Exception as error:  # a driver may fail in any way; the next variant is tried
            candidate.left_out = f"failed: {next(iter(str(error).splitlines()), '') or type(error).__name__}"
        else:
            candidate.left_out = f"wrong: {problem}" if problem else ""
            plain = got if plain is None and not problem else plain
        if candidate.left_out:
            log.warning("anygpu: %s: %s is struck off, %s", what, candidate.name, candidate.left_out)


def _plan(device: Device, trial: Trial[Any], candidate: _Candidate, turns: int) -> Plan:
    """A Plan of so many calls. It is made anew for every use, so that only one variant's scratch memory is held."""
    recorder = device.recorder()
    for turn in range(turns):
        trial.record(recorder, candidate.variant, turn)
    return recorder.plan()


def _windows(result: Result) -> list[tuple[int, int]]:
    """(offset, bytes) of the parts of a result that are compared: all of it, or windows from its start to its end."""
    nbytes = result.buffer.nbytes
    if nbytes <= CHECKED_BYTES:
        return [(0, nbytes)]
    size = CHECKED_BYTES // WINDOWS
    last = (nbytes - size) // 16 * 16
    starts = [last * i // (WINDOWS - 1) // 16 * 16 for i in range(WINDOWS)]
    return [(start, size if start < last else nbytes - start) for start in starts]


def _results(device: Device, trial: Trial[Any], plan: Plan, clock: Clock) -> tuple[list[np.ndarray], float]:
    """What a plan writes where it finds no finite number, so that a place that it leaves out shows; and its seconds."""
    places = [(result, _windows(result)) for result in trial.results]
    for result, windows in places:
        for offset, nbytes in windows:
            result.buffer.write(np.full(nbytes, 0xFF, np.uint8), offset)
    device.wait()
    begin = clock()
    plan.replay()
    device.wait()
    seconds = clock() - begin
    return [
        np.concatenate([np.frombuffer(device.memory.read(result.buffer, n, at), np.uint8) for at, n in windows])
        for result, windows in places
    ], seconds


def _difference(results: Sequence[Result], got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> str:
    """How the values differ from the plain variant's by more than the tolerance, or nothing."""
    for result, g, w in zip(results, got, want, strict=True):
        left, right = (_numbers(x, result.dtype) for x in (g, w))
        with np.errstate(invalid="ignore", over="ignore"):
            good = np.abs(left - right) <= result.atol + result.rtol * np.abs(right)
        if not good.all():
            place, bad = int(np.argmin(good)), int(good.size - np.count_nonzero(good))
            return f"{bad:,} of {good.size:,} values differ, the first is {left[place]:g}, expected {right[place]:g}"
    return ""


def _numbers(data: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)


def _race(
    device: Device, trial: Trial[Any], alive: list[_Candidate], watch: Stopwatch, seconds: float, clock: Clock
) -> None:
    """Take samples of all in turns until ROUNDS are done, one is left, or the time is spent."""

    def sample(candidate: _Candidate, runs: int) -> float:
        return watch.seconds(_plan(device, trial, candidate, trial.turns), runs=runs) / trial.turns

    if device.caps.kind == "gpu":
        _warm(watch, _plan(device, trial, alive[0], trial.turns), clock)
    deadline = clock() + seconds
    target = min(max(seconds / (ROUNDS * len(alive)), SAMPLE[0]), SAMPLE[1])
    quickest = min(c.seen for c in alive)
    for candidate in [alive[0], *sorted(alive[1:], key=lambda c: c.seen)]:
        if candidate.seen > max(SLOW_AT_ONCE * quickest, LONG):
            candidate.samples, candidate.left_out = (
                [candidate.seen],
                f"slow: {candidate.seen / quickest:.1f} times the best",
            )
            continue
        if candidate is not alive[0] and clock() > deadline:
            candidate.left_out = "not timed: the time was over"
            continue
        first = sample(candidate, 1)
        if first * trial.turns < target:  # a short one tells more after a few in a row
            first = sample(candidate, 4)
        candidate.samples = [first]
        candidate.runs = max(1, int(target / max(first * trial.turns, 1e-9)))
    _leave_out([c for c in alive if c.samples], SLOW_AT_ONCE)
    racing = [c for c in alive if not c.left_out]
    for candidate in racing:  # the first samples said who races; they are not held against longer ones
        candidate.samples = []
    for round_ in range(ROUNDS):
        if len(racing) <= 1 or (round_ and clock() > deadline):
            break
        for candidate in racing if round_ % 2 else reversed(racing):
            candidate.samples.append(sample(candidate, candidate.runs))
        if round_:
            _leave_out(racing, SLOW)
            racing = [c for c in racing if not c.left_out]
    shipped, best = alive[0], min(racing, key=lambda c: c.median)
    while shipped.best <= SLOW_AT_ONCE * best.best and min(len(shipped.samples), len(best.samples)) < DUEL:
        for candidate in (best, shipped):  # whatever the time: one sample says little beside other programs
            candidate.samples.append(sample(candidate, candidate.runs))


def _warm(watch: Stopwatch, plan: Plan, clock: Clock) -> None:
    """Keep a GPU busy until its clock is up: at least WARM[0] seconds, and until the plan gets no faster, or WARM[1].

    While variants are compiled the clock falls to a tenth, and a variant bound by arithmetic then loses to one bound by
    memory that it beats in use.
    """
    begin, runs = clock(), max(1, int(SAMPLE[1] / max(watch.seconds(plan), 1e-6)))
    seen: list[float] = []
    while clock() - begin < WARM[1]:
        seen.append(watch.seconds(plan, runs=runs))
        if clock() - begin >= WARM[0] and len(seen) > 5 and seen[-1] > 0.97 * seen[-6]:
            return


def _leave_out(racing: Sequence[_Candidate], factor: float) -> None:
    best = min(c.best for c in racing)
    for candidate in racing:
        if not candidate.left_out and candidate.best > factor * best:
            candidate.left_out = f"slow: {candidate.best / best:.1f} times the best"


def _verdict(candidates: Sequence[_Candidate], default: str) -> Verdict:
    """The default, unless another one is faster by WIN, by the median and by the best sample."""
    shipped = candidates[0]
    winner = min((c for c in candidates if c.samples), key=lambda c: (bool(c.left_out), c.median))
    ratio = 1.0
    if shipped.samples and winner.best > 0.0:  # a call of no dispatches takes no time
        ratio = min(shipped.median / winner.median, shipped.best / winner.best)
    if shipped.samples and ratio <= WIN:
        winner, ratio = shipped, 1.0
    timings = tuple(Timing(c.name, c.median if c.samples else None, len(c.samples), c.left_out) for c in candidates)
    return Verdict(winner.name, default, ratio, timings)
