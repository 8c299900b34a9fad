"""Writes the table of README.md from the runs in this folder. With --check: exit code 1 if the table is out of date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
README = FOLDER.parent.parent / "README.md"
BEGIN = "<!-- bench: docs/bench/table.py writes this part once there are stored runs -->\n"
END = "<!-- /bench -->\n"
HEADER = (
    "| device, driver | program | model | prompt + answer | prompt tokens/s | answer tokens/s | first token, s "
    "| host, us a dispatch: back to back / after a pause / beside a busy thread | run |\n"
    "|--|--|--|--|--:|--:|--:|--:|--|\n"
)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rows(name: str, run: dict[str, Any]) -> str:
    """The lines of one stored run: one a model, or one where only recording was measured."""
    record = next((r for r in run.get("record", []) if r["bindings"] == 4), None)
    cost = " / ".join(number(record[key]) for key in ("us", "paused_us", "busy_us")) if record else ""
    where = f"{run['device']}, {run['driver']}" if run.get("driver") else run["device"]
    program = run.get("peer") or run["backend"]
    decodes = run.get("decode") or {}
    lines = ""
    for decode in decodes if isinstance(decodes, list) else [decodes]:
        tokens = f"{decode['prompt_tokens']} + {decode['answer_tokens']}" if decode else ""
        cells = [where, program, decode.get("model", ""), tokens, number(decode.get("prompt_rate"))]
        cells += [number(decode.get("answer_rate")), number(decode.get("first_token_seconds"))]
        lines += f"| {' | '.join([*cells, cost])} | [{name}](docs/bench/{name}.json) |\n"
    return lines


def table() -> str:
    """The table of all stored runs; empty while there are none."""
    files = sorted(FOLDER.glob("*.json"))
    body = "".join(rows(file.stem, json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return HEADER + body if body else ""


def main() -> int:
    text, new = README.read_text(encoding="utf-8"), table()
    if not new:
        return 0
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    wanted = text[:start] + new + text[end:]
    if "--check" in sys.argv:
        return int(text != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
