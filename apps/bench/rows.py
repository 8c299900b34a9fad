"""Runs cases one after another: room, time left, warm-up, check of the result, timing, peer."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from apps import term
from apps.bench.case import Case, Row, Run, Skip
from apps.bench.ceilings import Ceilings
from apps.bench.measure import Stopwatch
from gpu.errors import DeviceLost

if TYPE_CHECKING:
    from gpu import Device

KERNEL_SUITES = ("gemm", "gemv", "attention", "memory")
ROW_SECONDS = {"gpu": 0.25, "cpu": 2.0}  # to warm and measure one row
LONGEST_CALL = 0.25  # seconds of one call at the ceilings
PEER_SECONDS = {"gpu": 0.12, "cpu": 0.5}


@dataclass
class Budget:
    """Seconds left of a whole run; None: no end."""

    seconds: float | None
    start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds; infinity without an end."""
        return float("inf") if self.seconds is None else self.seconds - (time.perf_counter() - self.start)


@dataclass
class Runner:
    """One device and everything that its rows need."""

    device: Device
    watch: Stopwatch
    ceilings: Ceilings
    peer: Any = None  # peers.Torch, peers.NumPy or None
    show: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)
    share: float = float("inf")  # seconds that the next row may take, by the budget

    def __post_init__(self) -> None:
        self.made = Run(self.device, self.watch, self.ceilings, np.random.default_rng(0))

    def suite(
        self,
        name: str,
        *,
        dtypes: set[str] | None,
        shape: tuple[int, ...] | None,
        budget: Budget,
        seconds: float | None,
    ) -> list[Row]:
        """Every row of a suite, in its order; those that FIRST names are measured first, then level 1, then level 2.

        seconds: this suite's part of the budget.
        """
        module = importlib.import_module(f"apps.bench.{name}")
        cases = list(module.cases(self.device.caps, dtypes=dtypes, shape=shape))
        unique = list({case.key: case for case in cases}.values())
        end = time.perf_counter() + (seconds if seconds is not None else float("inf"))
        rows: dict[str, Row] = {}
        level_of = {case.key: 0 if module.FIRST.fullmatch(case.key) else case.level for case in unique}
        for level in (0, 1, 2):
            these = [case for case in unique if level_of[case.key] == level]
            for done, case in enumerate(these):
                left = min(end - time.perf_counter(), budget.left)
                if left <= 0:
                    row = self._row(case, status="skipped", note="no time left (--budget)")
                else:  # half of a row's part for measuring; the rest goes into making and checking
                    self.share = 0.5 * left / (len(these) - done)
                    row = self.case(case, rows)
                rows[case.key] = row
                self.rows.append(row)
                if level < 2 or row.status != "skipped":
                    self.show(row)
        self.made.drop()
        return [rows[case.key] for case in unique]

    def add(self, row: Row) -> None:
        """Take a row that was measured elsewhere."""
        self.rows.append(row)
        self.show(row)

    def case(self, case: Case, before: dict[str, Row]) -> Row:
        """Measure one case. An error makes a failed row."""
        row = self._row(case)
        if reason := self._no_room(case):
            row.status, row.note = "skipped", reason
            return row
        try:
            self._measure(case, row)
        except Skip as skip:
            row.status, row.note = "skipped", str(skip)
        except DeviceLost:
            raise
        except Exception as error:  # a bug in one operation leaves the others their rows
            row.status, row.note = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        if row.status == "ok":
            self._compare(case, row, before)
        return row

    def _row(self, case: Case, **more: Any) -> Row:
        return Row(case.suite, case.key, case.dtype, flops=case.flops, nbytes=case.nbytes, **more)

    def _no_room(self, case: Case) -> str:
        """Why this row is not for this device; empty if it is."""
        from nn.models.load import default_memory

        caps = self.device.caps
        if case.dtype == "f16" and not caps.f16:
            return "the device has no f16"
        most = min(caps.max_binding, caps.max_buffer)
        if case.largest > most:
            return f"a buffer of {term.size_text(case.largest)}, this device binds {term.size_text(most)}"
        room = default_memory(self.device)
        if case.need > 0.8 * room:
            return f"takes {term.size_text(case.need)}, this device is given {term.size_text(room)}"
        least, _ = self.ceilings.bound(case.flops, case.nbytes, matrix=case.matrix)
        if caps.kind == "gpu" and least > LONGEST_CALL:
            return (
                f"takes {least:.2g} s or more here in one go, which drivers may take for a hang; give a smaller --shape"
            )
        return ""

    def _measure(self, case: Case, row: Row) -> None:
        work = case.make(self.made)
        work.plans[0].replay()
        self.device.wait()
        row.note, row.extra = work.note, work.extra
        if problem := work.check():
            row.status, row.note = "wrong", problem
            return
        limit = min(ROW_SECONDS[self.device.caps.kind], self.share)
        sample = self.watch.time(work.plans, limit=limit, calls=work.calls)
        row.seconds, row.low, row.high = sample.median, sample.low, sample.high
        row.spread, row.batches, row.clock = sample.spread, sample.batches, sample.clock
        least, row.ceiling = self.ceilings.bound(case.flops, case.nbytes, matrix=case.matrix)
        row.share = least / sample.median
        row.unit = case.unit or ("GB/s" if row.ceiling == "copy" else "GFLOP/s")
        row.rate = (case.nbytes if row.unit == "GB/s" else case.flops) / sample.median * 1e-9
        row.items = case.items / sample.median
        del work

    def _compare(self, case: Case, row: Row, before: dict[str, Row]) -> None:
        if case.beside is not None:
            key, row.rule = case.beside
            other = before.get(key)
            if other is not None and other.status == "ok":
                row.beside_key = key
                row.beside = row.items / other.items if row.items else row.rate / other.rate
        make = getattr(case, self.peer.short.split()[0], None) if self.peer else None
        if make is None:
            return
        try:
            sample = self.peer.time(make, min(PEER_SECONDS[self.device.caps.kind], self.share))
            row.peer, row.peer_seconds = self.peer.short, sample.median
            row.ratio = sample.median / row.seconds
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            row.note = f"{row.note}; {self.peer.short}: {type(error).__name__}: {error}".strip("; ").splitlines()[0]
        finally:
            if case.suite != "gemv":
                self.peer.free()


def failures(rows: Iterable[Row]) -> list[Row]:
    """The rows that make the command fail."""
    return [row for row in rows if row.status in ("wrong", "failed")]


# --- printing ---------------------------------------------------------------------------------------------------------

WIDTHS = (46, 10, 22, 10, 8, 12, 9)
HEADER = ("shape", "time", "lowest .. highest", "rate", "unit", "of ceiling", "vs peer")


def header_line(peer: str) -> str:
    """The table's heading; `peer` names its last column."""
    cells = [*HEADER[:-1], f"vs {peer}" if peer else ""]
    return term.style(_aligned(cells), "bold")


def _aligned(cells: Sequence[str]) -> str:
    left = f"{cells[0]:<{WIDTHS[0]}}"
    return "  ".join([left, *(f"{cell:>{width}}" for cell, width in zip(cells[1:], WIDTHS[1:]))]).rstrip()


def row_line(row: Row) -> str:
    """One row for people."""
    if row.status != "ok":
        word = {"wrong": "WRONG", "failed": "FAILED"}.get(row.status, row.status)
        shown = term.style(word, "red") if row.status in ("wrong", "failed") else word
        return f"{row.key:<{WIDTHS[0]}}  {shown}: {row.note}"
    scale, _ = time_unit(row.seconds)
    cells = [
        row.key,
        time_text(row.seconds),
        f"{row.low * scale:.4g} .. {row.high * scale:.4g}",
        f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
        row.unit,
        f"{100 * row.share:.0f} % {row.ceiling}",
        f"{row.ratio:.2f}x" if row.ratio else "",
    ]
    notes = [beside_text(row)] if row.beside else []
    notes += [row.note] if row.note else []
    if row.batches < 3:
        notes.append("measured once" if row.batches == 1 else "measured twice")
    elif row.spread > 0.05:
        notes.append(f"spread {100 * row.spread:.0f} %")
    return _aligned(cells) + (f"  {'; '.join(notes)}" if notes else "")


def beside_text(row: Row) -> str:
    """How the row stands beside another one, and whether that is enough."""
    what = "rows/s" if row.items else ""
    text = f"{100 * row.beside:.0f} % of {what}{' of ' if what else ''}{row.beside_key}"
    if row.rule and row.beside < row.rule:
        text += f" (under {100 * row.rule:.0f} %)"
    return text


def time_text(seconds: float) -> str:
    """Four digits and a unit."""
    scale, unit = time_unit(seconds)
    return f"{seconds * scale:.4g} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """(factor, unit) to show seconds in."""
    if seconds >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
