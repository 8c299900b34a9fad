"""A roofline: every row by FLOPs a byte and FLOPs a second, under the ceilings; and the rows that only move bytes."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

from gpu.folders import write_whole

COLOURS = {"gemm": "#1f77b4", "gemv": "#ff7f0e", "attention": "#2ca02c", "memory": "#9467bd", "llm": "#d62728"}
BARS = 40  # rows of the right half


def require() -> Any:
    """matplotlib, drawing without a window. Raises ModuleNotFoundError where it is missing."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    return matplotlib


def check(path: str) -> None:
    """Whether a picture can be written in the format that the ending of `path` names. Raises ValueError, as require."""
    require()
    formats = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    ending = Path(path).suffix[1:].lower()
    if ending not in formats:
        raise ValueError(f"--plot {path}: no picture format has this ending; expected .png, .svg or .pdf")


def draw(report: dict[str, Any], path: str) -> None:
    """Write the picture of a run (the object that --json gives) to a file whose ending says the format."""
    require()
    pyplot = importlib.import_module("matplotlib.pyplot")
    rows = [row for row in report.get("rows", []) if row.get("status") == "ok"]
    ceilings = report["ceilings"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 7), width_ratios=(3, 2))
    try:
        _roofline(left, rows, ceilings)
        _bars(right, rows)
        figure.suptitle(f"{report['device']}, {report['backend']}, driver {report['driver']}", fontsize=10)
        figure.tight_layout()
        picture = io.BytesIO()
        figure.savefig(picture, dpi=110, format=Path(path).suffix[1:].lower())
        write_whole(path, picture.getvalue())
    finally:
        pyplot.close(figure)


def _roofline(axes: Any, rows: list[dict[str, Any]], ceilings: dict[str, float]) -> None:
    points = [(row, row["flops"] / row["nbytes"], row["flops"] / row["seconds"]) for row in rows if row.get("flops")]
    intensities = [x for _, x, _ in points] or [1.0]
    low, high = min(*intensities, 0.25) / 2, max(*intensities, ceilings["fma"] / ceilings["copy"]) * 2
    steps = [low * (high / low) ** (i / 200) for i in range(201)]
    roofs = [("fma", "f32 multiply-add", "-"), ("matrix", "f16 matrix units", "--")]
    for key, label, line in roofs:
        if peak := ceilings.get(key):
            roof = [min(peak, x * ceilings["copy"]) for x in steps]
            axes.plot(steps, roof, line, color="black", linewidth=1, label=f"{label}, {peak * 1e-12:,.3g} TFLOP/s")
    for suite, colour in COLOURS.items():
        mine = [(x, y) for row, x, y in points if row["suite"] == suite]
        if mine:
            axes.plot(*zip(*mine, strict=True), "o", markersize=4, alpha=0.7, color=colour, label=suite)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="FLOP a second")
    axes.set_title(f"copy {ceilings['copy'] * 1e-9:,.4g} GB/s", fontsize=9)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    moving = [row for row in rows if row.get("ceiling") == "copy"]
    chosen = [row for row in moving if row["suite"] in ("memory", "llm", "attention")]
    chosen += [row for row in moving if row["suite"] == "gemv" and row["key"].endswith("batch 1")]
    chosen = (chosen or moving)[:BARS][::-1]
    axes.barh([row["key"] for row in chosen], [100 * row["share"] for row in chosen], color="#9467bd")
    axes.axvline(100, color="black", linewidth=1)
    axes.set_xlabel("% of the copied bytes a second")
    axes.tick_params(axis="y", labelsize=6)
