"""docs/bench: the tables say what stored runs hold, and mark what falls short."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs/bench"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_table", FOLDER / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("targets", None)


def row(suite, key, **more):
    return {"suite": suite, "key": key, "status": "ok", **more}


def run(rows, backend="wgpu 0.32.0 (wgpu-native 29)", **more):
    return {"device": "NVIDIA H200", "driver": "1", "backend": backend, "rows": rows, **more}


def lines(table, text):
    return [line for line in table.targets().splitlines() if line.startswith(f"| {text} |")]


def test_figures_are_the_least_and_marked_where_they_fall_short(table, monkeypatch, tmp_path):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    assert table.targets() == ""
    rows = [
        row("gemm", "f32 nn 4096x4096x4096", rate=46_000.0),
        row("gemm", "f32 tn 1x2x3  gpt-char up dW", rate=43_000.0),
        row("gemm", "f32 nt 1x2x3  gpt2-124m up forward", rate=41_000.0),
        row("gemm", "f32 nn 4095x4097x4093", rate=1.0, beside=0.91, rule=0.8),
        row("gemm", "f16 nn 4095x4097x4093", status="wrong", beside=0.1, rule=0.8),
        row("gemm", "f32 nn 4096x4096x4096 + bias", rate=1.0, beside=0.99, rule=0.95),
        row("attention", "f16 1x1x262144x64 causal", rate=1.0, extra={"bytes_taken": 1.001}),
    ]
    (tmp_path / "h200-wgpu.json").write_text(json.dumps(run(rows)))
    (tmp_path / "h200-dawn.json").write_text(json.dumps(run([], "wgpudawn 0.32")))
    assert lines(table, "f32 product 4096^3") == ["| f32 product 4096^3 | 45 TFLOP/s | 46 |  |"]
    (trained,) = lines(table, "f32 products of gpt-char and GPT-2 training")
    assert trained.endswith("| 42 TFLOP/s | *41 (least of 2)* |  |")
    assert lines(table, "odd shapes over the next multiple of the tile")[0].endswith("| 80 % | 91 |  |")
    assert lines(table, "attention's bytes at 256k tokens over its operands'")[0].endswith("| at most 1.05 x | 1 |  |")
    assert lines(table, "Llama 7B Q4_0 (random weights) decode")[0].endswith("| not measured |  |")


def test_a_target_answers_to_rows_that_bench_has(table, device):
    """A key that no suite makes would read "not measured" for ever."""
    from dataclasses import replace

    from apps.bench import attention, gemm, gemv, memory

    made = []
    for kind in ("gpu", "cpu"):
        caps = replace(device.caps, kind=kind, max_binding=2**31 - 4, max_buffer=2**32 - 4)
        for module in (gemm, gemv, attention, memory):
            made += list(module.cases(caps, dtypes=None, shape=None))
    for targeted in table.DEVICES.values():
        for target in targeted:
            rows = [row(c.suite, c.key, rule=c.beside[1] if c.beside else 0.0, **{target.field: 1.0}) for c in made]
            assert target.suite == "llm" or target.found({"rows": rows}), target.text


def test_the_rows_of_models_are_in_the_table(table, monkeypatch, tmp_path):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    decode = {"model": "m.gguf", "prompt_tokens": 5, "answer_tokens": 6, "prompt_rate": 1234.0, "answer_rate": 98.7}
    record = [{"bindings": 4, "us": 1.5, "paused_us": 2.5, "busy_us": 3.5}]
    stored = run([], decode=[decode, {**decode, "model": "n.gguf"}], record=record, peer="torch 2")
    (tmp_path / "here.json").write_text(json.dumps(stored))
    first, second = table.table().splitlines()[2:]
    assert "| wgpu 0.32.0 (wgpu-native 29) | m.gguf | 5 + 6 | 1,234 | 98.7 |  | 1.5 / 2.5 / 3.5 |" in first
    assert "n.gguf" in second and second.endswith("| [here](docs/bench/here.json) |")
