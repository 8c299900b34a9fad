"""Which WebGPU implementation, where nobody has said: wgpu, or what was measured to be faster at this workload here.

`anygpu tune --backends` measures; what it found lies beside the tuning files and counts for one adapter and these
versions of both implementations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from gpu import tune_store
from gpu.backend import NAMES, default_name
from gpu.errors import GpuError
from gpu.tune import mode_from_environment

WORKLOADS = {
    "chat": "a chat, 128 tokens read and 256 written",
    "prompt": "prompts",
    "decode": "answers",
    "gemm_f16": "f16 products",
}
_PACKAGES = {"wgpu": "wgpu", "dawn": "wgpudawn"}
_CODE = "1"  # of how it is measured


def choose_backend(workload: str | None, adapter: str) -> tuple[str, str]:
    """The implementation and why: ANYGPU_BACKEND, or the measured one, or wgpu.

    adapter: the name of the adapter that wgpu takes. Raises GpuError for an unknown workload.
    """
    if workload is not None and workload not in WORKLOADS:
        raise GpuError(f"workload '{workload}' is unknown: expected one of {', '.join(WORKLOADS)}")
    if os.environ.get("ANYGPU_BACKEND", "").strip():
        return default_name(), "asked for by ANYGPU_BACKEND"
    entry = None
    if workload is not None and mode_from_environment() != "off":
        entry = recorded(adapter).get(("backend", workload, _CODE))
    if entry is None or entry.winner not in NAMES or workload is None:
        return "wgpu", "the default"
    if entry.winner == "wgpu":
        return "wgpu", f"the default, and not slower here for {WORKLOADS[workload]}"
    return entry.winner, f"{entry.ratio:.1f}x faster here for {WORKLOADS[workload]}, measured by anygpu tune"


def installed() -> dict[str, str]:
    """Implementations that are installed, and their versions."""
    found = {}
    for name, package in _PACKAGES.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def identity(adapter: str) -> dict[str, Any]:
    """What a choice holds for."""
    return {"name": adapter, "backend": "choice", **{f"{name}_version": v for name, v in installed().items()}}


def recorded(adapter: str) -> tune_store.Table:
    """What was measured on this adapter; nothing unless both implementations are installed."""
    if len(installed()) < len(NAMES):
        return {}
    try:
        return tune_store.read(tune_store.path_of(identity(adapter)), identity(adapter))
    except RuntimeError:  # no home folder
        return {}


def remember(adapter: str, seconds: Mapping[str, Mapping[str, float]]) -> tune_store.Table:
    """Keep the faster implementation of every workload. seconds: by implementation, then by workload.

    Another one than wgpu wins only by more than 5 %: its first answers take longer and it has seen fewer devices.
    """
    table: tune_store.Table = {}
    for workload in WORKLOADS:
        times = {name: s[workload] for name, s in seconds.items() if workload in s}
        if "wgpu" not in times or len(times) < 2:
            continue
        best = min(times, key=lambda name: times[name])
        winner = best if times["wgpu"] > 1.05 * times[best] else "wgpu"
        entry = tune_store.Entry(
            "backend", workload, _CODE, winner, "wgpu", round(times["wgpu"] / times[winner], 4), round(time.time(), 3)
        )
        table[entry.key] = entry
    try:
        return tune_store.save(tune_store.path_of(identity(adapter)), identity(adapter), table)
    except RuntimeError:
        return table
