"""Test every shader on this device against NumPy.

Each case runs on a device that keeps the driver's bounds checks (checked) and on one that leaves them out (trusted, as
everything else here does), with guard bytes behind every buffer; the trusted one runs it twice and compares the bits.
What is printed is what belongs into a bug report. Exit code 1: a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from apps import term
from apps.info import describe, section, versions

if TYPE_CHECKING:
    from gpu import Device
    from nn.check import Case

MODES = ("checked", "trusted")
LOSSES = 5  # devices lost in one mode before the rest of it is given up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", metavar="WORD", help="only cases whose family, name or shader files hold this word")
    parser.add_argument("--mode", choices=MODES, help="only with, or only without, the driver's bounds checks")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default up to 8 on a GPU, 1 on a CPU driver")
    parser.add_argument("--json", action="store_true", help="one object")


def run(args: argparse.Namespace) -> int:
    from apps import check_jobs

    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be a whole number over 0, got {args.jobs}")
    if args.jobs is not None and args.jobs > check_jobs.most_jobs():
        raise ValueError(f"--jobs {args.jobs}: each opens devices of its own; at most {check_jobs.most_jobs()} here")
    check = Check(select(args.filter), (args.mode,) if args.mode else MODES, args.device, args.backend)
    jobs = args.jobs or check_jobs.default_jobs(_kind(args))
    with term.Bar("checking", unit="cases") as bar:
        if jobs == 1:
            check.run(bar.update)
        else:
            begin = time.monotonic()
            check_jobs.run_in_processes(check, check_jobs.as_source(args.filter), min(jobs, check.total), bar.update)
            check.seconds = time.monotonic() - begin
    print(json.dumps(check.as_json(), indent=2, ensure_ascii=False) if args.json else check.as_text())
    if check.interrupted:
        return term.INTERRUPTED
    return 1 if any(result.status == "failed" for result in check.results) else 0


def _kind(args: argparse.Namespace) -> str:
    """Of the adapter that will be used: "gpu" or "cpu". Raises NoAdapter."""
    from gpu.device import choose, list_adapters

    return choose(list_adapters(args.backend), args.device or os.environ.get("ANYGPU_DEVICE"))[0].kind


def select(word: str | None) -> dict[str, list[Case]]:
    """Families and their cases, those that a --filter word leaves. Raises ValueError if it leaves none."""
    from nn.check import cases_by_family

    families = cases_by_family()
    if word is None:
        return families
    wanted = word.lower()
    found = {
        name: [c for c in cases if wanted in " ".join((name, c.name, *c.shaders)).lower()]
        for name, cases in families.items()
    }
    if not any(found.values()):
        raise ValueError(f"--filter {word}: no case, shader file or family holds it. Families: {', '.join(families)}")
    return {name: cases for name, cases in found.items() if cases}


@dataclass(frozen=True)
class Result:
    """One case in one mode. status: "passed", "failed" or "skipped"; `message` says what is wrong or missing."""

    family: str
    case: str
    mode: str
    status: str
    message: str = ""
    seconds: float = 0.0


@dataclass
class Check:
    """A run over cases and modes on one adapter. `results` holds what is done, also after an interruption."""

    families: dict[str, list[Case]]
    modes: tuple[str, ...] = MODES
    device_name: str | None = None
    backend: str | None = None
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False
    header: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    on_start: Callable[[str, Case], None] = lambda family, case: None
    on_open: Callable[[dict[str, Any]], None] = lambda header: None

    @property
    def total(self) -> int:
        """Runs that a whole check makes."""
        return len(self.modes) * sum(map(len, self.families.values()))

    def run(self, progress: Any = lambda done, total: None) -> None:
        """Run everything, mode by mode. Raises GpuError only if no device can be opened to begin with."""
        begin = time.monotonic()
        try:
            for mode in self.modes:
                for result in self._run_mode(mode):
                    self.results.append(result)
                    progress(len(self.results), self.total)
        except KeyboardInterrupt:
            if not self.header:  # no device yet: nothing to report
                raise
            self.interrupted = True
        self.seconds = time.monotonic() - begin

    def _run_mode(self, mode: str) -> Iterator[Result]:
        from gpu import GpuError

        device: Device | None = self._open(mode)
        losses, gone = 0, ""
        try:
            for family, cases in self.families.items():
                for case in cases:
                    if device is None:
                        yield Result(family, case.name, mode, "skipped", gone)
                        continue
                    self.on_start(family, case)
                    begin = time.monotonic()
                    status, message, lost = _outcome(case, device, twice=mode == "trusted")
                    yield Result(family, case.name, mode, status, message, round(time.monotonic() - begin, 4))
                    if not lost:
                        continue
                    losses += 1
                    device.close()
                    device = None
                    if losses == LOSSES:
                        gone = f"the device was lost {losses} times"
                        continue
                    try:
                        device = self._open(mode)
                    except GpuError as error:
                        gone = f"the device was lost and cannot be opened again: {_short(str(error), 160)}"
        finally:
            if device is not None:
                device.close()

    def _open(self, mode: str) -> Device:
        from gpu import Device

        device = Device.open(self.device_name, backend=self.backend, checked=mode == "checked", canary=True)
        if not self.header:
            self.header = {**versions(), "device": describe(device)}
            self.on_open(self.header)
        return device

    # --- what it found -------------------------------------------------------------------------------------------

    def count(self, family: str | None = None) -> Counter[str]:
        """How many runs passed, failed and were skipped; of one family or all."""
        return Counter(r.status for r in self.results if family in (None, r.family))

    def repeated(self, family: str | None = None) -> int:
        """How many cases gave the same bits twice."""
        return sum(r.mode == "trusted" and r.status == "passed" for r in self.results if family in (None, r.family))

    def as_json(self) -> dict[str, Any]:
        """The whole report as plain values."""
        return {
            **self.header,
            "modes": list(self.modes),
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 2),
            "total": self.total,
            "counts": _counts(self.count()) | {"same_bits": self.repeated()},
            "families": {
                name: _counts(self.count(name)) | {"same_bits": self.repeated(name)} for name in self.families
            },
            "results": [asdict(result) for result in self.results],
        }

    def as_text(self) -> str:
        """Header, table by family, failures: what a person pastes into a bug report."""
        counts = self.count()
        done = f"{len(self.results)} of {self.total} runs in {term.time_text(self.seconds)}"
        verdict = term.style("failed", "red") if counts["failed"] else term.style("all passed", "green")
        if self.interrupted:
            verdict = term.style("interrupted", "yellow")
        blocks = [self._header_text(), self._table(), f"{verdict}: {done}"]
        if failures := [r for r in self.results if r.status == "failed"]:
            blocks.append(term.style("failures", "bold"))
            blocks += [f"{r.case} ({r.mode})\n  {_indented(r.message)}" for r in failures]
        return "\n\n".join(blocks)

    def _header_text(self) -> str:
        h, device = self.header, self.header["device"]
        probed = device["probed"]
        facts = [name for name in ("f16", "subgroups", "timestamps") if probed[name]]
        if probed["subgroups"]:
            facts[facts.index("subgroups")] = f"subgroups of {probed['subgroup_size']}"
        limits = device["limits"]
        rows = [
            ("adapter", f"{device['name']} ({device['kind']}, {device['api']})"),
            ("driver", device["driver"]),
            ("backend", device["backend_version"]),
            ("versions", f"python {h['python']}, numpy {h['numpy']}, {h['system']}"),
            ("features", ", ".join(device["features"]) or "none"),
            ("probed", ", ".join(facts) or "none of the optional features works"),
            ("limits", ", ".join(f"{name} {value:,}" for name, value in limits.items())),
            *(("switch", f"{name}={value}") for name, value in h["switches"].items()),
        ]
        return section(f"anygpu {h['anygpu']} check", rows)

    def _table(self) -> str:
        rows = []
        for name in self.families:
            why = Counter(r.message for r in self.results if r.family == name and r.status == "skipped")
            reasons = "; ".join(f"{n} x {message}" for message, n in why.most_common())
            rows.append((name, *self._cells(name), reasons))
        rows.append(("total", *self._cells(None), ""))
        header = ("family", "passed", "failed", "skipped", "same bits", "why skipped")
        return term.table(rows, header=header, right=(1, 2, 3, 4))

    def _cells(self, family: str | None) -> tuple[str, ...]:
        counts = self.count(family)
        same = str(self.repeated(family)) if "trusted" in self.modes else "-"
        return (*(str(counts[status]) for status in ("passed", "failed", "skipped")), same)


def _outcome(case: Case, device: Device, *, twice: bool) -> tuple[str, str, bool]:
    """(status, message, whether the device was lost) of one case; whatever it raises is its failure."""
    from gpu import DeviceLost
    from nn.check import lacking, run_case

    try:
        if missing := lacking(case, device):
            return "skipped", missing, False
        problem = run_case(case, device, twice=twice)
        device.memory.check_canaries()
    except DeviceLost as error:
        return "failed", f"DeviceLost: {error}", True
    except Exception as error:
        return "failed", _short(f"{type(error).__name__}: {error}", 2000), False
    return ("failed", problem, False) if problem else ("passed", "", False)


def _counts(counts: Counter[str]) -> dict[str, int]:
    return {status: counts[status] for status in ("passed", "failed", "skipped")}


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text)} characters)"


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n  ")
