"""Runs cases without a device's work: nothing is compiled or submitted, but every kernel that would be is seen.

What a case is about is learned in milliseconds so: which shader files its kernels are made of, and which entry points.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import gpu.kernel
import gpu.recorder
from gpu import Device, wgsl
from gpu.kernel import Kernel
from nn.check import Case, lacking


@dataclass(frozen=True)
class Seen:
    """What a case would run: files that its kernels are made of, and (file, name) of the functions they reach."""

    files: frozenset[str]
    functions: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Function:
    """A function of a WGSL text without comments: its lines (from 1) and the words in it."""

    name: str
    first: int
    last: int
    words: frozenset[str]
    entry: bool


@functools.cache
def functions_of(file: str) -> tuple[Function, ...]:
    """The functions of a file below shaders/."""
    return _functions(wgsl.strip_comments((wgsl.SHADERS / file).read_text(encoding="utf-8")))


def entries_of(file: str) -> list[str]:
    """Entry points of a file below shaders/."""
    return [function.name for function in functions_of(file) if function.entry]


def _functions(bare: str) -> tuple[Function, ...]:
    found = []
    for m in re.finditer(r"(@compute\b[^{;]*?)?\bfn\s+(\w+)\s*\(", bare):
        depth, at = 0, bare.index("{", m.end())
        for at in range(at, len(bare)):  # noqa: B020
            depth += {"{": 1, "}": -1}.get(bare[at], 0)
            if depth == 0:
                break
        first, last = (bare[:i].count("\n") + 1 for i in (m.start(2), at))
        found.append(Function(m[2], first, last, frozenset(re.findall(r"\w+", bare[m.end() : at])), m[1] is not None))
    return tuple(found)


def shader_files() -> list[str]:
    """Every file below shaders/."""
    return sorted(path.relative_to(wgsl.SHADERS).as_posix() for path in wgsl.SHADERS.rglob("*.wgsl"))


def look(cases: list[Case], device: Device) -> dict[str, Seen]:
    """By name, what each case that this device can run would run."""
    seen = {}
    with _dry() as kernels:
        for case in cases:
            if lacking(case, device):
                continue
            kernels.clear()
            # Results are the poison that cases fill their outputs with; one that uses it as an index ends there.
            with contextlib.suppress(IndexError), np.errstate(all="ignore"):
                for _ in case.run(device, np.random.default_rng(0)):
                    pass
            seen[case.name] = _seen(case, kernels)
        device.kernels.clear()
    return seen


def _seen(case: Case, kernels: list[Kernel]) -> Seen:
    files: set[str] = set()
    functions: set[tuple[str, str]] = set()
    for kernel in dict.fromkeys(kernels):
        source = kernel.source
        pasted = {file for file, _ in source.lines if file.endswith(".wgsl")}
        known = {f.name: f for f in _functions(wgsl.strip_comments(source.code))}  # with its lines where they were
        reached, todo = {kernel.entry}, [kernel.entry]
        while todo:
            new = {word for word in known[todo.pop()].words if word in known} - reached
            reached |= new
            todo += new
        if pasted:
            functions |= {(source.lines[known[name].first - 1][0], name) for name in reached}
        else:  # generated: what it took from files is in those that the case names
            pasted = set(case.shaders)
            functions |= {(file, f.name) for file in pasted for f in functions_of(file) if f.name in reached}
        files |= pasted
    return Seen(frozenset(files), frozenset(functions))


@contextlib.contextmanager
def _dry() -> Iterator[list[Kernel]]:
    kernels: list[Kernel] = []
    record = gpu.recorder.Recorder.__call__

    def call(self, kernel, grid, **operands):
        kernels.append(kernel)
        record(self, kernel, grid, **operands)  # names, types and limits are looked at as always

    class Nothing:
        def __init__(self, *_, **__):
            pass

        def replay(self, **_):
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.kernel, "_build", lambda *_: ([], None))
        patch.setattr(gpu.recorder.Recorder, "__call__", call)
        patch.setattr(gpu.recorder, "Plan", Nothing)
        yield kernels
