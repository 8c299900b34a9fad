"""Runs the checks of a shader on mutants of it, one after the other, each until the first check that fails.

By hand: python -m tests.mutation.hunt --seed 1 --count 30
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from gpu import Device, ShaderError, wgsl
from nn.check import Case, all_cases, lacking, run_case
from nn.graph import codegen
from tests.check import dry
from tests.mutation.mutants import Mutant, draw

SECONDS = 240.0  # for the checks of one mutant; what has not failed by then has survived
GRACE = (
    30.0  # for the check that runs at that moment; then the process is ended, and a check that hangs is one that fails
)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "caught" (by `case`), "survived" (`ran` cases), "does not compile" or "equivalent"."""

    mutant: Mutant
    outcome: str
    case: str = ""
    message: str = ""
    ran: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        how = f"by {self.case}: {self.message}" if self.case else f"{self.message or f'{self.ran} cases'}"
        return f"{self.outcome:<9} {self.seconds:5.1f} s {self.mutant}\n    {how[:300]}"


def hunt(seed: int, count: int, equivalent: dict[tuple[str, str, str], str]) -> Iterator[Verdict]:
    """Verdicts up to the one that makes `count` of them caught or survived.

    equivalent: reasons why a mutant computes the same, by (file, line before, line after), each stripped.
    """
    cases = all_cases()
    with Device.open() as device:
        seen = dry.look(cases, device)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "shaders"
        shutil.copytree(wgsl.SHADERS, root)
        worker = Worker(root)
        try:
            counted = 0
            for mutant in draw(seed):
                if counted == count:
                    break
                if reason := equivalent.get((mutant.file, mutant.before.strip(), mutant.after.strip())):
                    yield Verdict(mutant, "equivalent", message=reason)
                    continue
                names = [name for name, what in seen.items() if _concerns(mutant, what)]
                if not names:  # in a kernel that this device cannot run (matrix units)
                    continue
                mutant.write(root)
                verdict = worker.judge(mutant, sorted(names, key=lambda name: _key(mutant, name)))
                mutant.undo(root)
                counted += verdict.outcome in ("caught", "survived")
                yield verdict
        finally:
            worker.end()


def _concerns(mutant: Mutant, what: dry.Seen) -> bool:
    """Whether a case reaches the function that was changed (or uses the file, for a line outside of functions)."""
    inside = [f.name for f in dry.functions_of(mutant.file) if f.first <= mutant.line <= f.last]
    return any((mutant.file, name) in what.functions for name in inside) if inside else mutant.file in what.files


def _key(mutant: Mutant, name: str) -> bytes:
    """An order of its own for each mutant: neighbouring cases are alike."""
    return hashlib.blake2b(f"{mutant}\0{name}".encode()).digest()


class Worker:
    """A process that runs checks; started again when a mutant ended it, hung, or ran through without bounds checks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection

    def judge(self, mutant: Mutant, names: list[str]) -> Verdict:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_work, args=(theirs, self.root), daemon=True)
            self.process.start()
            theirs.close()
            self.pipe.recv()
        begin = time.monotonic()
        self.pipe.send(names)
        outcome, case, message, ran = "caught", "", "the check does not end", 0
        healthy = False
        if self.pipe.poll(SECONDS + GRACE):
            try:
                outcome, case, message, ran = self.pipe.recv()
                healthy = outcome != "survived"
            except EOFError:
                message = "the check ends the process"
        if not healthy:
            self.end()
        return Verdict(mutant, outcome, case, message, ran, time.monotonic() - begin)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def _work(pipe: Connection, root: Path) -> None:
    wgsl.SHADERS = root
    cases = {case.name: case for case in all_cases()}
    devices = [Device.open(checked=checked, canary=True) for checked in (True, False)]
    pipe.send("ready")
    while True:
        names = pipe.recv()
        codegen.library.cache_clear()
        for device in devices:
            device.kernels.clear()
        pipe.send(_judge([cases[name] for name in names], devices))


def _judge(cases: list[Case], devices: list[Device]) -> tuple[str, str, str, int]:
    """As `anygpu check`: every case checked, then trusted; a wrong value, an error or a changed guard byte counts."""
    begin, ran = time.monotonic(), 0
    for device in devices:
        for case in cases:
            if lacking(case, device):
                continue
            if time.monotonic() - begin > SECONDS:
                return "survived", "", f"{ran} cases; the others were not reached in {SECONDS:.0f} s", ran
            try:
                problem = run_case(case, device, twice=not device.caps.checked)
                device.memory.check_canaries()
            except ShaderError as error:
                return "does not compile", "", str(error), ran
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                return "caught", case.name, problem, ran
            ran += 1
    return "survived", "", "", ran


def main() -> None:
    from tests.mutation.test_mutants import EQUIVALENT

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    args = parser.parse_args()
    begin, tally = time.monotonic(), {}
    for verdict in hunt(args.seed, args.count, EQUIVALENT):
        tally[verdict.outcome] = tally.get(verdict.outcome, 0) + 1
        print(verdict, flush=True)
    print(f"{tally} in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
