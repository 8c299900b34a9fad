"""A profile as a trace for chrome://tracing and ui.perfetto.dev.

Format: "Trace Event Format" (the JSON object form), complete events ("X") on these tracks, times in microseconds:

    device   the dispatches; above them the parts of the model that they belong to, nested (layers.3 > attention)
    host     what Python did: spans, nested, with encode, submit, wait, upload and compile inside them
    gaps     where the device waited for the host

Slices of one track are nested or apart, and sorted by their beginning, as the viewers expect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.folders import write_whole

if TYPE_CHECKING:
    from gpu.tracing import Event, Profile

DEVICE, HOST = 1, 2  # processes
PARTS, DISPATCHES, GAPS = 1, 2, 3  # threads of the device
PYTHON = 1  # thread of the host


def trace_of(profile: Profile, *, title: str = "anygpu", facts: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace as an object. facts: what else to note about it."""
    caps = profile.device.caps
    events = [
        *named(DEVICE, f"{caps.name} ({caps.backend})", {PARTS: "model", DISPATCHES: "dispatches", GAPS: "gaps"}, 0),
        *named(HOST, f"host: {title}", {PYTHON: "Python"}, 1),
        *sorted(
            [*part_slices(profile.events), *dispatch_slices(profile), *gap_slices(profile), *span_slices(profile)],
            key=lambda e: (e["ts"], e["pid"], e["tid"], -e["dur"]),
        ),
    ]
    known: dict[str, Any] = {
        "device": caps.name,
        "driver": caps.driver,
        "backend": caps.backend_version,
        "times": profile.note,
    }
    if profile.ceilings is not None:
        known["ceilings"] = profile.ceilings.as_dict()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title, **known, **(facts or {})}}


def write(profile: Profile, path: Path, **options: Any) -> None:
    """Write trace_of(profile, ...) to a file. Raises OSError."""
    write_whole(path, json.dumps(trace_of(profile, **options)))


def named(process: int, name: str, threads: dict[int, str], order: int) -> list[dict[str, Any]]:
    """Names of a process and its tracks."""
    found = [meta(process, 0, "process_name", name=name), meta(process, 0, "process_sort_index", sort_index=order)]
    for thread, title in threads.items():
        found.append(meta(process, thread, "thread_name", name=title))
        found.append(meta(process, thread, "thread_sort_index", sort_index=thread))
    return found


def meta(process: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    """A metadata event: the name or the place of a track."""
    return {"ph": "M", "pid": process, "tid": thread, "ts": 0, "name": what, "args": args}


def piece(
    process: int, thread: int, name: str, category: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    """A slice; times in seconds. Whole nanoseconds, so that neighbours that touch do not overlap by rounding."""
    first, last = round(start * 1e9), round(end * 1e9)
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, "ts": first / 1e3,
        "dur": max(last - first, 0) / 1e3, "args": args,
    }  # fmt: skip


def laid_out(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Begin and end of each event, cut so that none begins before the last one ended: passes may overlap a little."""
    found, until = [], float("-inf")
    for event in events:
        start = max(event.start, until)
        until = max(start, event.end)
        found.append((start, until))
    return found


def dispatch_slices(profile: Profile) -> list[dict[str, Any]]:
    """One slice an event of the device."""
    found = []
    for event, (start, end) in zip(profile.events, laid_out(profile.events), strict=True):
        found.append(piece(DEVICE, DISPATCHES, event.name, event.kind, start, end, details(profile, event)))
    return found


def details(profile: Profile, event: Event) -> dict[str, Any]:
    """What is known about an event, for the viewer's panel."""
    known: dict[str, Any] = {"kernel": event.kernel, "grid": "x".join(map(str, event.grid)), "us": event.seconds * 1e6}
    if event.path:
        known["path"] = event.path
    for name, value in (("operands", event.operands), ("results", event.results)):
        if value:
            known[name] = ", ".join(value)
    if event.buffers:
        known["buffers"] = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in event.buffers)
    if event.cost is not None:
        known |= {"flops": event.cost.flops, "bytes read": event.cost.read, "bytes written": event.cost.written}
    if (roof := profile.roof(event)) is not None:
        known |= {"roofline": round(roof.share, 4), "bound by": roof.bound}
    return known


def part_slices(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Slices around runs of dispatches of one part of the model: "layers.3" around "attention" and "mlp"."""
    found: list[dict[str, Any]] = []
    running: list[tuple[str, float]] = []
    last = 0.0
    submit = -1
    for event, (start, end) in zip(events, laid_out(events), strict=True):
        parts = parts_of(event.path)
        same = 0
        while same < min(len(parts), len(running)) and running[same][0] == parts[same]:
            same += 1
        if event.submit != submit and parts[:1] != [name for name, _ in running[:1]]:
            same = 0
        while len(running) > same:
            name, began = running.pop()
            found.append(piece(DEVICE, PARTS, name, "part", began, last, {}))
        running += [(name, start) for name in parts[same:]]
        last, submit = end, event.submit
    while running:
        name, began = running.pop()
        found.append(piece(DEVICE, PARTS, name, "part", began, last, {}))
    return found


def parts_of(path: str) -> list[str]:
    """A path in the pieces that are shown: "layers.3.attention" as "layers.3", "attention"."""
    parts: list[str] = []
    for word in path.split(".") if path else []:
        if word.isdigit() and parts:
            parts[-1] += f".{word}"
        else:
            parts.append(word)
    return parts


def gap_slices(profile: Profile) -> list[dict[str, Any]]:
    """Slices where the device waited, with what the host did meanwhile."""
    found = []
    for gap in profile.gaps():
        doing = {name: f"{seconds * 1e6:.1f} us" for name, seconds in gap.doing.items()}
        found.append(piece(DEVICE, GAPS, "waits for the host", "gap", gap.start, gap.start + gap.seconds, doing))
    return found


def span_slices(profile: Profile) -> list[dict[str, Any]]:
    """The host's spans; a child is cut to its parent, from which the clock's resolution may let it stick out."""
    found = []
    around: list[tuple[float, float]] = []
    for span in profile.spans:
        del around[span.depth :]
        start, end = span.start, span.end
        if around:
            start, end = max(start, around[-1][0]), min(end, around[-1][1])
        around += [(start, end)] * (span.depth + 1 - len(around))
        found.append(piece(HOST, PYTHON, span.name, "host", start, max(start, end), jsonable(span.details)))
    return found


def jsonable(details: dict[str, Any]) -> dict[str, Any]:
    """The same with everything as text that JSON has no type for."""
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in details.items()}
