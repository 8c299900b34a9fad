"""Two runs beside each other: old seconds over new seconds, row by row; above 1 this run is the faster one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps import term

MADE_BY = "it takes what `anygpu bench SUITE --json FILE` writes"
LOSS = 0.05  # a row that lost more is flagged
SAME = ("device", "driver", "backend", "checked", "tuning")  # what ratios depend on besides the code


@dataclass(frozen=True)
class Pair:
    """One row of both runs. apart: whether the ranges from lowest to highest do not meet."""

    suite: str
    key: str
    old: float
    new: float
    apart: bool

    @property
    def ratio(self) -> float:
        """Old seconds over new seconds: above 1 the new run is faster."""
        return self.old / self.new

    @property
    def loss(self) -> float:
        """Share of the speed that is gone; 0 where it rose."""
        return max(0.0, 1.0 - self.ratio)


def load(path: str) -> dict[str, Any]:
    """An earlier run. Raises ValueError where the file is none."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--compare {path}: this is no JSON ({error})") from error
    if not isinstance(report, dict) or not isinstance(report.get("rows"), list):
        raise ValueError(f"--compare {path}: no rows in it; {MADE_BY}")
    for number, row in enumerate(report["rows"], 1):
        if not _is_row(row):
            raise ValueError(f"--compare {path}: row {number} is not one of a benchmark; {MADE_BY}")
    return report


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("suite", "key", "status")):
        return False
    times = [row.get(name) for name in ("low", "seconds", "high")] if row["status"] == "ok" else []
    return all(isinstance(t, int | float) and not isinstance(t, bool) and 0 < t < 1e9 for t in times)


def pairs(old: dict[str, Any], new: dict[str, Any]) -> list[Pair]:
    """The rows that both runs measured, in the new one's order."""
    before = {(row["suite"], row["key"]): row for row in old["rows"] if row.get("status") == "ok"}
    found = []
    for row in new.get("rows", []):
        other = before.get((row["suite"], row["key"]))
        if other is None or row.get("status") != "ok":
            continue
        apart = row["low"] > other["high"] or row["high"] < other["low"]
        found.append(Pair(row["suite"], row["key"], other["seconds"], row["seconds"], apart))
    return found


def text_of(old: dict[str, Any], new: dict[str, Any], found: Sequence[Pair]) -> str:
    """A table, what differs between the runs besides the code, and how many rows have no partner."""
    from apps.bench.rows import time_text

    lines = [
        f"{name}: {old.get(name)} then, {new.get(name)} now: ratios show more than the code"
        for name in SAME
        if old.get(name) != new.get(name)
    ]
    rows = []
    for pair in found:
        flag = ""
        if pair.loss > LOSS:
            flag = f"LOST {100 * pair.loss:.0f} %" + ("" if pair.apart else ", ranges meet")
        rows.append((pair.suite, pair.key, time_text(pair.old), time_text(pair.new), f"{pair.ratio:.2f}x", flag))
    if rows:
        lines.append(term.table(rows, header=("suite", "shape", "old", "new", "old/new", ""), right=(2, 3, 4)))
    missing = sum(row.get("status") == "ok" for row in old["rows"]) - len(found)
    lost = [pair for pair in found if pair.loss > LOSS]
    lines.append(f"{len(found)} rows compared, {missing} of the old ones not measured now, {len(lost)} lost over 5 %")
    return "\n".join(lines)


def as_json(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """For machines."""
    return [
        {"suite": p.suite, "key": p.key, "old": p.old, "new": p.new, "ratio": round(p.ratio, 4), "apart": p.apart}
        for p in found
    ]
