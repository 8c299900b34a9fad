"""Adapters and what they can do; with --model, a model's size and cost.

The device part needs no model, the model part needs no device. Exit code 1: no adapter, or the device cannot be opened.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from gpu import Device

SWITCHES = (
    "ANYGPU_DEVICE", "ANYGPU_BACKEND", "ANYGPU_CHECKED", "ANYGPU_LIMITS", "ANYGPU_FEATURES", "ANYGPU_TUNE",
    "ANYGPU_CACHE", "VK_DRIVER_FILES", "VK_ICD_FILENAMES",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME|PATH", help="this model instead of the adapters (see pull --list)")
    parser.add_argument("--context", type=int, metavar="N", help="with --model: tokens of prompt and answer together")
    parser.add_argument("--json", action="store_true", help="one object")


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        from apps import info_model

        return info_model.run(args.model, context=args.context, as_json=args.json)
    if args.context is not None:
        raise ValueError("--context goes with --model: it is what the model's costs are counted for")
    report = collect(args.device, args.backend)
    print(json.dumps(report, indent=2, ensure_ascii=False) if args.json else as_text(report))
    return 0 if report["error"] is None else 1


# --- what there is -----------------------------------------------------------------------------------------------


def collect(device: str | None = None, backend: str | None = None) -> dict[str, Any]:
    """Everything that `anygpu info` shows, as plain values. Sizes in bytes.

    `error` is None, or why no device could be opened; then `device` is None and the rest is there all the same.
    """
    from gpu import GpuError
    from gpu.device import Device, choose, list_adapters

    report: dict[str, Any] = {
        **versions(), "adapters": [], "taken": None, "why": None, "device": None, "error": None,
    }  # fmt: skip
    try:
        from gpu.backend import default_name

        report["backend"] = backend or default_name()
        adapters = list_adapters(backend)
        report["adapters"] = [asdict(adapter) for adapter in adapters]
        chosen, report["why"] = choose(adapters, device if device is not None else os.environ.get("ANYGPU_DEVICE"))
        report["taken"] = chosen.index
        with Device.open(device, backend=backend, workload="chat") as opened:
            report["device"] = describe(opened)
    except GpuError as error:
        report["error"] = str(error)
    report["caches"] = caches()
    return report


def versions() -> dict[str, Any]:
    """Versions of everything below: anygpu, Python, system, NumPy, and the WebGPU bindings (None: not installed); and
    the environment variables that are set (`switches`)."""
    import numpy as np

    from apps.cli import version
    from gpu import GpuError
    from gpu.backend import NAMES, open_backend

    backends: dict[str, str | None] = {}
    for name in NAMES:
        try:
            backends[name] = open_backend(name).version
        except GpuError:
            backends[name] = None
    return {
        "anygpu": version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "numpy": np.__version__,
        "backends": backends,
        "switches": {name: os.environ[name] for name in SWITCHES if os.environ.get(name)},
    }


def describe(device: Device) -> dict[str, Any]:
    """What an open device was granted (`features`, `limits`) and what probe kernels found to work (`probed`)."""
    caps = device.caps
    return {
        "name": caps.name, "kind": caps.kind, "driver": caps.driver, "api": caps.api,
        "backend": caps.backend, "backend_version": caps.backend_version, "backend_why": device.backend_why,
        "checked": caps.checked,
        "features": sorted(str(feature) for feature in device.raw.features),
        "limits": {
            "storage binding": caps.max_binding, "buffer": caps.max_buffer,
            "storage buffers a shader": caps.max_storage_buffers, "workgroup memory": caps.max_workgroup_bytes,
            "workgroup invocations": caps.max_invocations, "workgroups a dimension": caps.max_workgroups,
        },
        "tuning": {
            "mode": device.tuner.mode, "classes": len(device.tuner.table), "hash": device.tuner.hash(),
            "file": None if device.tuner.path is None else str(device.tuner.path),
        },
        "probed": {
            "f16": caps.f16, "subgroups": caps.subgroups, "subgroup_size": caps.subgroup_size,
            "timestamps": timestamps_work(device), "matrices": matrix_shapes(device),
            "matrix_f16": caps.matrix_f16, "matrix_i8": caps.matrix_i8,
        },
    }  # fmt: skip


_TICK = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(64)
fn tick(@builtin(local_invocation_index) lane: u32) {
  var x = lane;
  for (var i = 0u; i < 4096u; i++) { x = x * 1664525u + 1013904223u; }
  out[lane] = x;
}
"""


def timestamps_work(device: Device) -> bool:
    """Whether the two timestamps around a dispatch come out in order, not equal and within 10 s, without an error."""
    from gpu import GpuError
    from gpu.profile import profile_plan

    if not device.caps.timestamps:
        return False
    record = device.recorder()
    record(device.kernel_source(_TICK, "tick", label="probe timestamps"), grid=1, out=device.alloc(256))
    try:
        (timed,) = profile_plan(record.plan(), repeats=1)
    except GpuError:
        return False
    return 0.0 < timed.seconds < 10.0


def matrix_shapes(device: Device) -> list[str]:
    """Matrix units of the device's adapter as Dawn lists them: "f16 x f16 -> f32 16x16x16". Empty without Dawn."""
    from gpu import GpuError
    from gpu.backend import open_backend

    try:
        dawn = open_backend("dawn")
        found = [a for a in dawn.adapters() if a.info.get("device") == device.caps.name]
        configs = dawn.matrix_configs(found[0]) if found else []
    except (GpuError, RuntimeError, OSError):
        return []
    kinds = ((c, c["component_type"], c["result_component_type"]) for c in configs)
    return sorted({f"{inner} x {inner} -> {result} {c['m']}x{c['n']}x{c['k']}" for c, inner, result in kinds})


def caches() -> dict[str, Any]:
    """The cache folder, its size in bytes, and the models in it."""
    from nn.io import registry

    folder = registry.cache_dir()
    models = []
    for model in registry.MODELS.values():
        path = registry.resolve(model.name)
        models.append({"name": model.name, "bytes": model.nbytes, "path": None if path is None else str(path)})
    return {"folder": str(folder), "bytes": _folder_bytes(folder), "models": models}


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                total += (Path(path) / file).lstat().st_size
            except OSError:  # gone meanwhile
                continue
    return total


# --- how it reads ------------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    """The report for people: sections of aligned lines, coloured only on a terminal."""
    backends = [version or f"{name}: not installed" for name, version in report["backends"].items()]
    blocks = [
        section(
            f"anygpu {report['anygpu']}",
            [
                ("python", f"{report['python']}, numpy {report['numpy']}, {report['system']}"),
                ("backends", "; ".join(backends)),
                *(("switch", f"{name}={value}") for name, value in report["switches"].items()),
            ],
        )
    ]
    if report["adapters"]:
        from gpu.device import UNUSED_APIS

        rows = []
        for a in report["adapters"]:
            mark = ">" if a["index"] == report["taken"] else " "
            api = f"{a['api']} (not used)" if a["api"] in UNUSED_APIS else a["api"]
            rows.append((mark, a["index"], a["name"], a["type"], api, a["driver"]))
        blocks.append(
            term.style(f"adapters of {report['backend']}", "bold")
            + "\n"
            + term.table(rows, header=("", "n", "name", "type", "api", "driver"))
        )
    if report["device"] is not None:
        blocks += device_text(report["device"], report["why"])
    cache = report["caches"]
    models = [(m["name"], term.size_text(m["bytes"]) if m["path"] else "not fetched") for m in cache["models"]]
    blocks.append(section("cache", [("folder", f"{cache['folder']} ({term.size_text(cache['bytes'])})"), *models]))
    if report["error"] is not None:
        blocks.append(f"{term.style('no device:', 'red')} {report['error']}")
    return "\n\n".join(blocks)


def device_text(device: dict[str, Any], why: str) -> list[str]:
    """The device's section, and one of its limits."""
    probed = device["probed"]
    shader_checks = "in shaders (checked)" if device["checked"] else "left out of shaders (trusted)"
    size = probed["subgroup_size"]
    facts = [
        ("name", f"{device['name']}, taken as {why}"),
        ("driver", f"{device['driver']}, {device['api']} through {device['backend_version']}"),
        ("backend", f"{device['backend']}, {device['backend_why']}"),
        ("kind", "a software driver: runs on the CPU" if device["kind"] == "cpu" else "a GPU"),
        ("bounds checks", shader_checks),
        ("f16", works(probed["f16"])),
        ("subgroups", f"{works(True)}, {size} invocations, numbered in order" if probed["subgroups"] else works(False)),
        ("timestamps", works(probed["timestamps"])),
        ("matrix units", f"f16 {works(probed['matrix_f16'])}, i8 {works(probed['matrix_i8'])}"),
        ("listed", "; ".join(probed["matrices"]) or "no matrix units"),
        ("tuning", tuning_text(device["tuning"])),
        ("features", ", ".join(device["features"]) or "none"),
    ]
    limits = [
        (name, binary_size(value) if name in ("storage binding", "buffer", "workgroup memory") else f"{value:,}")
        for name, value in device["limits"].items()
    ]
    return [section("device", facts), section("limits", limits)]


def tuning_text(tuning: dict[str, Any]) -> str:
    """Which variants of kernels are taken: the mode, and what is known."""
    if tuning["mode"] == "off":
        return "off: the shipped kernels"
    known = f"{tuning['classes']} shape classes measured, {tuning['file']}"
    return f"{tuning['mode']}: {known if tuning['classes'] else 'nothing measured yet (anygpu tune)'}"


def works(yes: bool) -> str:
    """How a probed fact reads."""
    return term.style("works", "green") if yes else term.style("no", "yellow")


def binary_size(nbytes: int) -> str:
    """Limits are powers of two, or a few bytes less: 128 MiB, 2 GiB - 4."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= unit - 4:
            whole = round(nbytes / unit)
            short = whole * unit - nbytes
            return f"{whole} {name}{f' - {short}' * (short > 0)}" if 0 <= short < 64 else f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def section(title: str, rows: list[tuple[str, str]]) -> str:
    """A bold title and aligned lines under it."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([term.style(title, "bold"), *(f"  {name:<{width}}  {text}" for name, text in rows)])
