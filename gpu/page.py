"""A profile as one HTML page that needs nothing else: no network, no library.

Everything that is shown travels as JSON in a script element that no browser runs, with <, > and & as escapes, and gets
onto the page as text (textContent), never as markup: a token such as </script> is shown, and does nothing.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import chrome, roofline

if TYPE_CHECKING:
    from gpu.roofline import Row
    from gpu.tracing import Event, Profile

TEMPLATE = Path(__file__).with_suffix(".html")
HOST_ROWS = 5  # of nested spans that are shown
MODEL_ROWS = 3


class Page:
    """What the page shows; `profile` fills the pictures and tables, the rest is put in beside it."""

    def __init__(self, title: str, *, subtitle: str = "") -> None:
        texts, numbers = ("story", "prompt", "answer", "notes"), ("tiles", "header", "rows", "kinds", "bounds")
        self.data: dict[str, Any] = {name: [] for name in (*texts, *numbers, "tracks", "details", "views")}
        self.data |= {"title": title, "subtitle": subtitle, "quote": None, "span": 0.0, "roof": None, "rowsTitle": ""}

    def tile(self, value: str, label: str, hint: str = "") -> None:
        """A figure at the top."""
        self.data["tiles"].append({"value": value, "label": label, "hint": hint})

    def view(self, name: str, start: float, end: float) -> None:
        """A button that shows [start, end] (seconds) of the timeline; the first one is what is shown at first."""
        margin = 0.03 * (end - start)
        self.data["views"].append([name, (start - margin) * 1e6, (end + margin) * 1e6])

    def note(self, text: str) -> None:
        """A line at the bottom."""
        self.data["notes"].append(text)

    def profile(
        self,
        profile: Profile,
        *,
        events: Sequence[Event] | None = None,
        by: Callable[[Event], Any] | None = None,
        rows_title: str = "Kernels",
    ) -> Page:
        """Timeline of the whole profile; roofline, kinds and rows of `events` (None: all of them), grouped by `by`."""
        data, caps = self.data, profile.device.caps
        chosen = profile.events if events is None else events
        data["subtitle"] = data["subtitle"] or f"{caps.name}, {caps.driver}, {caps.backend_version}"
        data["span"] = profile.seconds * 1e6
        data["tracks"] = self._tracks(profile)
        rows = roofline.rows_of(chosen, profile.roof, by=by)
        total = sum(row.seconds for row in rows)
        data["rowsTitle"], data["header"] = rows_title, list(roofline.HEADER)
        data["rows"] = [
            {"cells": roofline.cells(row, total), "kind": row.kind, "share": row.share, "hint": hint_of(row)}
            for row in rows
        ]
        kinds = roofline.rows_of(chosen, profile.roof, by=lambda e: e.kind)
        data["kinds"] = [
            {"kind": row.name, "n": row.count, "us": row.seconds * 1e6}
            for row in sorted(kinds, key=lambda row: -row.seconds)
        ]
        bounds: dict[str, float] = {}
        for event in chosen:
            if (roof := profile.roof(event)) is not None:
                bounds[roof.bound] = bounds.get(roof.bound, 0.0) + event.seconds * 1e6
        data["bounds"] = [{"name": name, "us": spent} for name, spent in sorted(bounds.items(), key=lambda b: -b[1])]
        if profile.ceilings is not None:
            found = profile.ceilings
            data["roof"] = {
                "bytes": found.copy_bytes_per_s, "flops": found.f32_flops, "matrix": found.matrix_flops,
                "dots": [dot for row in rows if (dot := dot_of(row)) is not None],
            }  # fmt: skip
            self.note(f"Roofline: {roofline.ceiling_text(found)}. Over 100 %: the bytes came out of a cache.")
        if not data["tiles"]:
            self.tile(seconds_text(profile.seconds), "in all")
            busy = profile.busy_s / profile.seconds if profile.seconds > 0 else 0.0
            self.tile(roofline.percent(busy), "of it the device is busy")
            self.tile(f"{sum(e.dispatches for e in profile.events):,}", "dispatches")
            self.tile(f"{len(profile.submits):,}", "submits")
        self.note(f"Times: {profile.note}.")
        return self

    def _tracks(self, profile: Profile) -> list[dict[str, Any]]:
        """Items are [start us, lasts us, label, kind, row, number of the details or -1]."""
        texts: dict[str, int] = self._texts()
        numbers = [texts.setdefault(detail_text(profile, event), len(texts)) for event in profile.events]
        host = [
            [*us(span.start, span.end), span.name, "host", span.depth, self._spoken(texts, span.details)]
            for span in profile.spans
            if span.depth < HOST_ROWS
        ]
        pieces = chrome.part_slices(profile.events)
        depths = nesting([(piece["ts"], piece["ts"] + piece["dur"]) for piece in pieces])
        model = [
            [piece["ts"], piece["dur"], piece["name"], "part", depth, -1]
            for piece, depth in zip(pieces, depths, strict=True)
            if depth < MODEL_ROWS
        ]
        places = chrome.laid_out(profile.events)
        device = [
            [*us(start, end), event.name, event.kind, 0, number]
            for event, (start, end), number in zip(profile.events, places, numbers, strict=True)
        ]
        gaps = [
            [*us(gap.start, gap.start + gap.seconds), "waits for the host", "gap", 0, self._spoken(texts, gap.doing)]
            for gap in profile.gaps()
        ]
        self.data["details"] = list(texts)
        tracks = [("host", host), ("model", model), ("device", device), ("idle", gaps)]
        return [
            {"name": name, "items": sorted(items), "rows": 1 + max((item[4] for item in items), default=0)}
            for name, items in tracks
        ]

    def _texts(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.data["details"])}

    def _spoken(self, texts: dict[str, int], details: dict[str, Any]) -> int:
        """The number of a text that lists details; -1 for none. Seconds of a gap are shown as microseconds."""
        if not details:
            return -1
        words = [f"{k}: {v * 1e6:.1f} µs" if isinstance(v, float) else f"{k}: {v}" for k, v in details.items()]
        return texts.setdefault("\n".join(words), len(texts))

    def html(self) -> str:
        """The page."""
        text = json.dumps(self.data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        for mark in "<>&":
            text = text.replace(mark, f"\\u{ord(mark):04x}")
        page = TEMPLATE.read_text(encoding="utf-8")
        title, data = "{{title}}", "{{data}}"
        return page.replace(title, html.escape(self.data["title"]), 1).replace(data, text, 1)


def us(start: float, end: float) -> tuple[float, float]:
    """Begin and length in microseconds, to the nanosecond."""
    return round(start * 1e6, 3), round((end - start) * 1e6, 3)


def nesting(pieces: Sequence[tuple[float, float]]) -> list[int]:
    """How many other pieces each lies in, for pieces that are nested or apart."""
    order = sorted(range(len(pieces)), key=lambda i: (pieces[i][0], -pieces[i][1], -i))
    depths, around = [0] * len(pieces), []
    for i in order:
        while around and pieces[around[-1]][1] <= pieces[i][0]:
            around.pop()
        depths[i] = len(around)
        around.append(i)
    return depths


def detail_text(profile: Profile, event: Event) -> str:
    """What the timeline shows about a dispatch."""
    lines = [event.path] if event.path else []
    if event.operands:
        lines.append(f"{', '.join(event.operands)} → {', '.join(event.results) or 'in place'}")
    if event.kernel:
        lines.append(f"{event.kernel}, {'×'.join(map(str, event.grid))} workgroups")
    if event.cost is not None:
        read, written = (roofline.quantity(value, "B") for value in (event.cost.read, event.cost.written))
        lines.append(f"reads {read}, writes {written}, {roofline.quantity(event.cost.flops, 'FLOP')}")
    if (roof := profile.roof(event)) is not None:
        lines.append(f"{roofline.percent(roof.share)} of the roofline, bound by {roof.bound}")
    return "\n".join(lines)


def hint_of(row: Row) -> str:
    """What the page shows beside a row: kernels, operands and results."""
    lines = [", ".join(row.kernels)]
    if row.operands or row.results:
        lines.append(f"{', '.join(row.operands)} → {', '.join(row.results) or 'in place'}")
    return "\n".join(line for line in lines if line)


def dot_of(row: Row) -> dict[str, Any] | None:
    """A row's place in the roofline; None where it has no operations, bytes or time."""
    cost = row.cost
    if cost is None or not (cost.bytes > 0 and cost.flops > 0 and row.seconds > 0):
        return None
    work, moved = cost.flops / row.seconds, cost.bytes / row.seconds
    rate = f"{roofline.quantity(work, 'FLOP/s')}, {roofline.quantity(moved, 'B/s')}"
    text = f"{row.name}\n{rate}\n{roofline.percent(row.share)} of the roofline, bound by {row.bound}"
    place = {"x": cost.flops / cost.bytes, "y": cost.flops / row.seconds, "us": row.seconds * 1e6}
    return None if not all(map(math.isfinite, place.values())) else place | {"kind": row.kind, "text": text}


def seconds_text(seconds: float) -> str:
    """1.23 s, 45.6 ms, 7.89 us."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{float(f'{seconds / size:.3g}'):g} {unit}"
    return f"{float(f'{seconds * 1e6:.3g}'):g} µs"
