"""How near work comes to what a device can do: for one event, and summed up over many.

The roof over a piece of work is the larger of bytes / copy bandwidth and operations / multiply-add rate, in seconds;
`share` is the roof over the time that it took. Over 1 means that bytes came out of a cache. What bounds an event:

    launch      it took at most twice what a dispatch costs that does nothing
    bandwidth   it reaches a quarter of the roof or more, and bytes are the higher part of it
    compute     the same, operations are
    latency     it does not reach a quarter of its roof: too little of the device is at work, or it waits for itself
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu.work import Cost

if TYPE_CHECKING:
    from gpu.ceilings import Ceilings
    from gpu.tracing import Event, Profile

NEAR = 0.25  # of the roof: below it neither bytes nor operations are what holds the work up
BOUNDS = ("bandwidth", "compute", "launch", "latency")


@dataclass(frozen=True)
class Roof:
    """share: of the roof, 1 is all of it. seconds: what the roof allows. bound: one of BOUNDS."""

    share: float
    seconds: float
    bound: str


@dataclass(frozen=True)
class Row:
    """Events of one name summed up. seconds: of all of them. share, bound, cost: None where a cost is missing."""

    name: str
    kind: str
    count: int
    seconds: float
    cost: Cost | None
    share: float | None
    bound: str | None
    kernels: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]


def roof_of(event: Event, ceilings: Ceilings) -> Roof | None:
    """The roof over an event; None where nobody said what it costs."""
    cost = event.cost
    if cost is None:
        return None
    peak = (event.matrix and ceilings.matrix_flops) or ceilings.f32_flops
    moving, computing = cost.bytes / ceilings.copy_bytes_per_s, cost.flops / peak
    roof = max(moving, computing)
    share = roof / event.seconds if event.seconds > 0 else 0.0
    if event.seconds <= 2 * ceilings.launch_s * event.dispatches:
        bound = "launch"
    elif share < NEAR:
        bound = "latency"
    else:
        bound = "bandwidth" if moving >= computing else "compute"
    return Roof(share, roof, bound)


def place_of(event: Event) -> str:
    """Path and name with numbers of layers left out: layers.*.attention qkv_rope."""
    path = re.sub(r"\b\d+\b", "*", event.path)
    return f"{path} {event.name}".strip()


def rows_of(
    events: Iterable[Event], roof: Callable[[Event], Roof | None], *, by: Callable[[Event], Any] | None = None
) -> list[Row]:
    """Rows in the order in which they first ran.

    by: events with equal keys are one row, named by the key; None takes `place_of`.
    """
    groups: dict[Any, list[Event]] = {}
    for event in events:
        groups.setdefault((by or place_of)(event), []).append(event)
    return [_row(str(key), group, roof) for key, group in groups.items()]


def _row(name: str, events: Sequence[Event], roof: Callable[[Event], Roof | None]) -> Row:
    seconds = sum(event.seconds for event in events)
    known = [(event, found) for event in events if (found := roof(event)) is not None]
    cost = share = bound = None
    if len(known) == len(events):
        cost = sum((event.cost for event in events if event.cost is not None), Cost())
        share = sum(found.seconds for _, found in known) / seconds if seconds > 0 else 0.0
        spent: dict[str, float] = dict.fromkeys(BOUNDS, 0.0)
        for event, found in known:
            spent[found.bound] += event.seconds
        bound = max(spent, key=lambda which: spent[which])
    first = events[0]
    same = all((e.operands, e.results) == (first.operands, first.results) for e in events)
    return Row(
        name=name,
        kind=first.kind if all(e.kind == first.kind for e in events) else "several",
        count=sum(event.dispatches for event in events),
        seconds=seconds,
        cost=cost,
        share=share,
        bound=bound,
        kernels=tuple(dict.fromkeys(e.kernel for e in events if e.kernel)),
        operands=first.operands if same else (),
        results=first.results if same else (),
    )


# --- as text ---------------------------------------------------------------------------------------------------------


def quantity(value: float, unit: str = "") -> str:
    """Three digits and a prefix: 1.23 M, 45.6 k; with the unit behind it."""
    size, prefix = abs(value), ""
    for step, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * step:
            size, prefix = size / step, letter
            break
    digits = 0 if size >= 99.95 or (not prefix and size == int(size)) else 1 if size >= 9.995 else 2
    return f"{'-' if value < 0 else ''}{size:.{digits}f} {prefix}{unit}".rstrip()


def microseconds(seconds: float) -> str:
    """Seconds as a number of microseconds, without the unit."""
    return f"{seconds * 1e6:,.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.1f}"


def percent(share: float | None) -> str:
    """A share as text; nothing where there is none."""
    if share is None:
        return ""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


HEADER = ("what", "n", "us", "time", "read", "written", "FLOP", "roofline", "bound")
RIGHT = (1, 2, 3, 4, 5, 6, 7)


def cells(row: Row, total: float) -> tuple[str, ...]:
    """A row of the table. total: seconds that its share of the time is of."""
    cost = row.cost
    amounts = ("", "", "") if cost is None else (quantity(cost.read, "B"), quantity(cost.written, "B"), flop_text(cost))
    share = percent(row.seconds / total if total > 0 else 0.0)
    return (
        row.name, str(row.count), microseconds(row.seconds), share, *amounts, percent(row.share), row.bound or "",
    )  # fmt: skip


def flop_text(cost: Cost) -> str:
    """Operations of a cost as text."""
    return quantity(cost.flops) if cost.flops else "0"


def table_of(profile: Profile, *, by: Callable[[Event], Any] | None = None, limit: int | None = 40) -> str:
    """Rows of a profile, the dearest first, and lines about the device and the host below them."""
    rows = sorted(profile.rows(by=by), key=lambda row: -row.seconds)
    total = sum(row.seconds for row in rows)
    shown = [cells(row, total) for row in rows[:limit]]
    if limit is not None and len(rows) > limit:
        rest = rows[limit:]
        shown.append((f"{len(rest)} more", str(sum(r.count for r in rest)), microseconds(sum(r.seconds for r in rest))))
    lines = [aligned([HEADER, *shown])] if rows else ["nothing ran on the device"]
    host = ", ".join(f"{name} {microseconds(s)} us" for name, s in profile.host().items() if s > 0)
    gaps = sum(gap.seconds for gap in profile.gaps())
    lines += [
        "",
        f"{len(profile.submits)} submits in {microseconds(profile.seconds)} us: the device was busy for "
        f"{microseconds(profile.busy_s)} us and waited {microseconds(gaps)} us between submits",
        f"host: {host or 'nothing'}",
        f"times: {profile.note}",
    ]
    if profile.ceilings is not None:
        lines.append(f"roofline: {ceiling_text(profile.ceilings)}")
    return "\n".join(lines)


def ceiling_text(ceilings: Ceilings) -> str:
    """The ceilings in one line."""
    matrix = "" if ceilings.matrix_flops is None else f", matrix units {quantity(ceilings.matrix_flops, 'FLOP/s')}"
    return (
        f"copies {quantity(ceilings.copy_bytes_per_s, 'B/s')}, f32 {quantity(ceilings.f32_flops, 'FLOP/s')}{matrix}, "
        f"a launch {ceilings.launch_s * 1e6:.2f} us; measured on this device"
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, those in RIGHT aligned to the right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return "\n".join(
        "  ".join(
            f"{cell:>{widths[i]}}" if i in RIGHT else f"{cell:<{widths[i]}}" for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    )
