"""Writes README.md's tables from the runs in this folder. With --check: exit code 1 if they are out of date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent.parent / "README.md"
sys.path.insert(0, str(FOLDER))

from targets import DEVICES  # noqa: E402

HEADER = (
    "| device, driver | program | model | prompt + answer | prompt tokens/s | answer tokens/s | first token, s "
    "| host, us a dispatch: back to back / after a pause / beside a busy thread | run |\n"
    "|--|--|--|--|--:|--:|--:|--:|--|\n"
)
BACKENDS = {"wgpu": "wgpu ", "dawn": "wgpudawn "}  # how the field "backend" of a run begins


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def stored() -> dict[str, dict[str, Any]]:
    """Name -> run, for every stored run."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}


def rows(name: str, run: dict[str, Any]) -> str:
    """The lines of one stored run: one a model, or one where only recording was measured."""
    record = next((r for r in run.get("record", []) if r["bindings"] == 4), None)
    cost = " / ".join(number(record[key]) for key in ("us", "paused_us", "busy_us")) if record else ""
    where = f"{run['device']}, {run['driver']}" if run.get("driver") else run["device"]
    program = run.get("backend") or run["peer"]
    decodes = run.get("decode") or {}
    lines = ""
    for decode in decodes if isinstance(decodes, list) else [decodes]:
        tokens = f"{decode['prompt_tokens']} + {decode['answer_tokens']}" if decode else ""
        cells = [where, program, decode.get("model", ""), tokens, number(decode.get("prompt_rate"))]
        cells += [number(decode.get("answer_rate")), number(decode.get("first_token_seconds"))]
        lines += f"| {' | '.join([*cells, cost])} | [{name}](docs/bench/{name}.json) |\n"
    return lines


def table() -> str:
    """The table of tokens and dispatches of all stored runs; empty while there are none."""
    body = "".join(rows(name, run) for name, run in stored().items())
    return HEADER + body if body else ""


def targets() -> str:
    """What was aimed at and what was reached, a table a device; empty while no run has rows."""
    text = ""
    for device, targeted in DEVICES.items():
        runs = {backend: latest(device, start) for backend, start in BACKENDS.items()}
        if not any(runs.values()):
            continue
        text += f"| {device} | aim | wgpu | Dawn |\n|--|--:|--:|--:|\n"
        for target in targeted:
            cells = [cell(target, backend, runs[backend]) for backend in BACKENDS]
            wanted = f"{'at most ' if target.most else ''}{number(target.wanted)} {target.unit}"
            text += f"| {target.text} | {wanted} | {' | '.join(cells)} |\n"
        text += "\n"
    return text


def latest(device: str, start: str) -> dict[str, Any]:
    """The run of a device and backend that has rows, or {}: there is one at most (the last by name)."""
    found: dict[str, Any] = {}
    for run in stored().values():
        if device in run["device"] and run.get("backend", "").startswith(start) and run.get("rows"):
            found = run
    return found


def cell(target: Any, backend: str, run: dict[str, Any]) -> str:
    """The figure, how many rows it is the least of, and whether it is enough."""
    if backend not in target.backends or not run:
        return ""
    if (found := target.found(run)) is None:
        return "not measured"
    value, count = found
    text = number(value) + (f" (least of {count})" if count > 1 else "")
    return text if target.met(value) else f"*{text}*"


PARTS = {
    "<!-- bench: docs/bench/table.py writes this part once there are stored runs -->\n": ("<!-- /bench -->\n", table),
    "<!-- targets: docs/bench/table.py writes this part too -->\n": ("<!-- /targets -->\n", targets),
}


def main() -> int:
    """Write README.md's tables again; with --check, 1 if they would change."""
    text = wanted = README.read_text(encoding="utf-8")
    for begin, (end, make) in PARTS.items():
        start, stop = wanted.index(begin) + len(begin), wanted.index(end)
        wanted = wanted[:start] + make() + wanted[stop:]
    if "--check" in sys.argv:
        return int(text != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
