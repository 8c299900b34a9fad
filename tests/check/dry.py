"""Runs cases without a device's work: nothing is compiled or submitted, but every kernel that would be is seen.

What a case is about is learned in milliseconds so: which shader files its kernels are made of, and which entry points.
"""

from __future__ import annotations

import contextlib
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
    """What a case would run: files that its kernels are made of, and (file that holds the entry, entry)."""

    files: frozenset[str]
    entries: frozenset[tuple[str, str]]


def entries_of(file: str) -> list[str]:
    """Entry points of a file below shaders/."""
    text = wgsl.strip_comments((wgsl.SHADERS / file).read_text(encoding="utf-8"))
    return re.findall(r"@compute\b[^{;]*?\bfn\s+(\w+)", text)


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
    entries: set[tuple[str, str]] = set()
    for kernel in kernels:
        source = kernel.source
        pasted = {file for file, _ in source.lines if file.endswith(".wgsl")}
        if not pasted:  # generated; files whose text went into it are those that the case names
            pasted = set(case.shaders)
            holders = [file for file in pasted if kernel.entry in entries_of(file)]
        else:
            bare = wgsl.strip_comments(source.code)  # with its lines where they were
            at = re.search(rf"\bfn\s+{kernel.entry}\s*\(", bare)
            assert at is not None, kernel.label
            holders = [source.lines[bare[: at.start()].count("\n")][0]]
        files |= pasted
        entries |= {(file, kernel.entry) for file in holders}
    return Seen(frozenset(files), frozenset(entries))


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
