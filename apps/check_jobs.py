"""`anygpu check` in several processes: most of its time is compilation, which a driver does on one core a process.

Each process opens devices of its own and takes every n-th case. A process that dies (a driver may end it) costs the
case it was at, which is reported as failed; another process goes on with the rest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from apps.check import Check, Result
from gpu.errors import GpuError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from nn.check import Case

Families = dict[str, "list[Case]"]
Key = tuple[str, str, str]  # mode, family, case


@dataclass(frozen=True)
class Share:
    """What one process runs: cases number `first`, `first + step`, ... of `source()`, but those that are `done`."""

    source: Callable[[], Families]
    modes: tuple[str, ...]
    device: str | None
    backend: str | None
    first: int
    step: int
    done: frozenset[Key] = frozenset()


def default_jobs(kind: str) -> int:
    """Processes for a device of this kind: a software driver has the cores for itself, a GPU shares them."""
    return 1 if kind == "cpu" else max(1, min(8, (os.cpu_count() or 1) // 2))


def most_jobs() -> int:
    """Processes that --jobs may ask for: more only take memory."""
    return max(8, 2 * (os.cpu_count() or 1))


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Keep Ctrl-C until the end of the block; processes started in it do not get it (they inherit the mask)."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_in_processes(
    check: Check, source: Callable[[], Families], jobs: int, progress: Callable[[int, int], None]
) -> None:
    """Fill `check.results` and `check.header` from `jobs` processes. `source` gives the families; it is pickled.

    Raises whatever kept the first device from opening.
    """
    context = multiprocessing.get_context("spawn")
    found: dict[Key, Result] = {}
    running: dict[Connection, tuple[SpawnProcess, Share, list[Key]]] = {}

    def start(share: Share) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, share), daemon=True)
        with _held_back():
            process.start()
            running[ours] = (process, share, [])
        theirs.close()

    try:
        for first in range(jobs):
            start(Share(source, check.modes, check.device_name, check.backend, first, jobs))
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                process, share, under_way = running[connection]
                try:
                    kind, value = connection.recv()
                except EOFError:
                    del running[connection]
                    process.join()
                    if process.exitcode and not under_way:
                        reason = f"check: a process ended with code {process.exitcode} before its first case"
                        raise GpuError(reason) from None
                    if process.exitcode:
                        found.setdefault(under_way[-1], _died(under_way[-1], process.exitcode))
                        start(_rest(share, found))
                    continue
                if kind == "error":
                    raise value
                if kind == "header":
                    check.header = check.header or value
                elif kind == "start":
                    under_way.append(value)
                else:
                    found[value.mode, value.family, value.case] = value
                    progress(len(found), check.total)
    except KeyboardInterrupt:
        if not check.header:
            raise
        check.interrupted = True
    finally:
        for process, _, _ in running.values():
            process.kill()
            process.join()
        order = [(m, f, c.name) for m in check.modes for f, cases in check.families.items() for c in cases]
        check.results += [found[key] for key in order if key in found]


def _died(key: Key, code: int) -> Result:
    mode, family, case = key
    reason = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Result(family, case, mode, "failed", f"the process that ran this case ended {reason}")


def _rest(share: Share, found: dict[Key, Result]) -> Share:
    return Share(share.source, share.modes, share.device, share.backend, share.first, share.step, frozenset(found))


def _work(connection: Connection, share: Share) -> None:
    """Of a process: run a share, send ("header", ...), then ("start", key) and ("result", Result) of each case."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        for mode in share.modes:
            check = Check(_part(share, mode), (mode,), share.device, share.backend)
            if not check.total:
                continue
            check.on_start = lambda family, case, mode=mode: connection.send(("start", (mode, family, case.name)))
            check.on_open = lambda header: connection.send(("header", header))
            check.run(lambda done, total, check=check: connection.send(("result", check.results[-1])))
    except Exception as error:
        connection.send(("error", error))


def _part(share: Share, mode: str) -> Families:
    part: Families = {}
    number = 0
    for family, cases in share.source().items():
        for case in cases:
            if number % share.step == share.first and (mode, family, case.name) not in share.done:
                part.setdefault(family, []).append(case)
            number += 1
    return part


def as_source(word: str | None) -> Callable[[], Families]:
    """The families that a --filter word leaves, as something another process can be given."""
    return _Selected(word)


@dataclass(frozen=True)
class _Selected:
    word: str | None

    def __call__(self) -> dict[str, Any]:
        from apps.check import select

        return select(self.word)
