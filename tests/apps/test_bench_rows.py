"""The kernel suites of `anygpu bench`: rows are checked, printed and stored; times are nobody's business here."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from apps import cli
from apps.bench import attention, case, gemm, gemv, memory
from apps.bench.case import Case, Row, Run, Work, differ
from apps.bench.ceilings import Ceilings
from apps.bench.measure import Sample, Stopwatch, repeat, spread
from apps.bench.rows import Budget, Runner, row_line

SUITES = {"gemm": gemm, "gemv": gemv, "attention": attention, "memory": memory}
SHAPES = {"gemm": "33x65x47", "gemv": "3x64x512", "attention": "1x2x33x16", "memory": "37x130"}
CEILINGS = Ceilings(copy=1e9, fma=1e10, matrix=0.0, launch=1e-5)


@pytest.fixture
def runner(device):
    return Runner(device, Stopwatch(device), CEILINGS)


def quick(monkeypatch):
    """One batch a row: results are what is looked at."""
    monkeypatch.setattr("apps.bench.rows.ROW_SECONDS", {"gpu": 0.0, "cpu": 0.0})


@pytest.mark.parametrize("suite", SUITES)
def test_every_operation_is_right_at_odd_sizes(runner, monkeypatch, suite):
    quick(monkeypatch)
    shape = tuple(int(n) for n in SHAPES[suite].split("x"))
    rows = runner.suite(suite, dtypes=None, shape=shape, budget=Budget(None), seconds=None)
    assert len(rows) >= 4
    not_right = [row for row in rows if row.status != "ok" and "gather" not in row.key]
    if not runner.device.caps.f16:
        not_right = [row for row in not_right if row.dtype != "f16"]
    assert not not_right, [f"{row.key}: {row.note}" for row in not_right]
    assert all(row.seconds > 0 and row.rate > 0 and row.share > 0 for row in rows if row.status == "ok")


@pytest.mark.parametrize("suite", SUITES)
def test_built_in_rows_have_their_own_names_and_sizes(device, suite):
    for kind in ("gpu", "cpu"):
        caps = replace(device.caps, kind=kind)
        cases = list(SUITES[suite].cases(caps, dtypes=None, shape=None))
        keys = {c.key for c in cases}
        assert len(keys) >= 8
        for c in cases:
            assert c.suite == suite and c.need >= c.largest > 0 and c.nbytes > 0 and c.level in (1, 2)
            assert c.beside is None or c.beside[0] in keys, c.key
        by_key = {c.key: (c.flops, c.nbytes, c.dtype) for c in cases}
        assert all(by_key[c.key] == (c.flops, c.nbytes, c.dtype) for c in cases)  # a name means one thing


def broken(kind):
    """A case whose result is off in one value, or whose operation raises."""

    def make(run: Run) -> Work:
        if kind == "raises":
            raise ValueError("the operation refuses")
        good = gemm.case(gemm.Product(8, 8, 8)).make(run)
        return Work(good.plans, lambda: differ(np.array([1.0, 2.0]), np.array([1.0, 2.5]), atol=1e-3))

    return Case("gemm", "broken", "f32", make, flops=1e3, nbytes=1e3, need=8, largest=8)


def test_a_wrong_result_has_no_time_and_fails(runner, monkeypatch, capsys):
    row = runner.case(broken("wrong"), {})
    assert (row.status, row.seconds, row.rate) == ("wrong", 0.0, 0.0)
    assert row.note == "1 of 2 sampled values are wrong, one is 2 instead of 2.5"
    assert "WRONG: 1 of 2" in row_line(row)
    monkeypatch.setattr(gemm, "cases", lambda caps, **_: [broken("wrong")])
    assert cli.main(["bench", "gemm", "--against", "none"]) == 1
    assert "WRONG" in capsys.readouterr().err


def test_an_error_is_a_failed_row(runner):
    row = runner.case(broken("raises"), {})
    assert (row.status, row.note) == ("failed", "ValueError: the operation refuses")


def test_a_spoiled_kernel_is_seen(runner, monkeypatch):
    """The check looks at what the device computed: weights of another seed give another result."""
    quick(monkeypatch)
    made = gemv.case(runner.device.caps, "q4_0", 2, 64, 64, level=1, before="")
    work = made.make(runner.made)
    work.plans[-1].replay()
    assert len(work.plans) > 1 and work.check() is not None  # the last weight's product is not the first one's
    work.plans[0].replay()
    assert work.check() is None


def test_what_does_not_fit_is_skipped_with_the_reason(runner):
    huge = replace(broken("wrong"), largest=1 << 62, need=1 << 62)
    assert runner.case(huge, {}).note.startswith("a buffer of ")
    wide = replace(broken("wrong"), need=1 << 62)
    assert re.match(r"takes .*, this device is given", runner.case(wide, {}).note)
    runner.device.caps, before = replace(runner.device.caps, f16=False, kind="gpu"), runner.device.caps
    try:
        endless = replace(broken("wrong"), flops=1e10)
        assert runner.case(endless, {}).note.startswith("takes 1 s or more here in one go")
        assert runner.case(replace(broken("wrong"), dtype="f16"), {}).note == "the device has no f16"
    finally:
        runner.device.caps = before


def test_rows_of_level_two_wait_for_the_others(runner, monkeypatch):
    ran = []

    def make(name):
        def of(run):
            ran.append(name)
            raise case.Skip("seen")

        return of

    cases = [
        Case("gemm", n, "f32", make(n), nbytes=1.0, need=8, largest=8, level=at) for n, at in zip("abc", (2, 1, 1))
    ]
    monkeypatch.setattr(gemm, "cases", lambda caps, **_: cases)
    rows = runner.suite("gemm", dtypes=None, shape=None, budget=Budget(None), seconds=None)
    assert ran == ["b", "c", "a"] and [row.key for row in rows] == ["a", "b", "c"]
    ran.clear()
    rows = runner.suite("gemm", dtypes=None, shape=None, budget=Budget(None), seconds=0.0)
    assert ran == [] and {row.note for row in rows} == {"no time left (--budget)"}


def test_rates_stand_beside_each_other(runner):
    first = Row("gemm", "one", "f32", rate=100.0)
    second = Row("gemm", "two", "f32", rate=70.0)
    runner._compare(replace(broken("wrong"), beside=("one", 0.8)), second, {"one": first})
    assert second.beside == pytest.approx(0.7) and second.beside_key == "one"
    second.batches, second.seconds = 5, 1.0
    assert "70 % of one (under 80 %)" in row_line(second)


def test_the_sum_of_errors_is_no_error_and_a_missing_product_is():
    """What `rounding` allows: f32 sums in any order pass, a product left out does not."""
    rng = np.random.default_rng(0)
    for k in (64, 1000, 16384):
        a, b = rng.uniform(-1, 1, (2, 50, k)).astype(np.float32)
        want = (a.astype(np.float64) * b).sum(1)
        got = np.zeros(50, np.float32)
        for i in range(k):  # the worst order
            got += a[:, i] * b[:, i]
        assert differ(got.astype(np.float64), want, atol=gemm.rounding(k)) is None
        missing = want - a[:, 7].astype(np.float64) * b[:, 7]
        assert differ(missing, want, atol=gemm.rounding(k)) is not None


def test_batches_repeat_until_they_agree():
    given = iter([1.0, 2.0, 1.0, 3.0, 1.0, *[1.0] * 50])
    sample = repeat(lambda: next(given), 10.0, clock="gpu")
    assert 5 < sample.batches < 30 and sample.spread < 0.02
    assert (sample.median, sample.low, sample.high) == (1.0, 1.0, 3.0)
    assert repeat(lambda: 1.0, 0.0, clock="wall") == Sample(1.0, 1.0, 1.0, 1.0, 1, "wall")
    assert spread([1.0, 1.0, 1.0]) == 0.0 and spread([1.0]) == 1.0


def test_the_hosts_clock_stands_in_for_timestamps(device):
    device.caps, before = replace(device.caps, timestamps=False), device.caps
    try:
        watch = Stopwatch(device)
        work = gemm.case(gemm.Product(8, 8, 8)).make(Run(device, watch, CEILINGS, np.random.default_rng(0)))
        sample = watch.time(work.plans, limit=0.05)
        assert sample.clock == "wall" and sample.median > 0
    finally:
        device.caps = before


def test_bounds_are_the_larger_of_two_times():
    assert CEILINGS.bound(1e10, 1e9) == (1.0, "copy")
    assert CEILINGS.bound(3e10, 1e9) == (3.0, "fma")
    assert replace(CEILINGS, matrix=1e11).bound(3e11, 1e9, matrix=True) == (3.0, "matrix")
    assert replace(CEILINGS, matrix=1e11).bound(3e10, 1e9) == (3.0, "fma")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["gemm", "--shape", "4096"], "--shape for gemm is MxNxK or BATCHxMxNxK, got 4096"),
        (["gemv", "--shape", "4x4x4x4"], "--shape for gemv is NxK or BATCHxNxK"),
        (["gemm", "--shape", "4x-1x4"], "expected whole numbers over 0 with x between them"),
        (["all", "--shape", "4x4x4"], "--shape goes with one of gemm, gemv, attention and memory, not with all"),
        (["gemm", "--shape", "²x3x4"], "--shape ²x3x4: expected whole numbers over 0"),
        (["gemm", "--shape", "9" * 5000 + "x1x1"], "no extent may be over 2,147,483,647"),
        (["memory", "--shape", "3"], "--shape for memory is ROWSxCOLUMNS, got 3"),
        (["gemm", "--dtype", "f64"], "--dtype f64: known are f32, f16, bf16"),
        (["memory", "--dtype", "q4_0"], "bench memory: nothing is left of it"),
        (["gemm", "--against", "cublas"], "--against cublas: expected torch, numpy, none, llama.cpp"),
        (["llm", "--against", "llama.cpp=nowhere"], "neither the URL of a llama-server nor a folder"),
        (["gemm", "--budget", "0"], "--budget must be seconds over 0, got 0"),
        (["gemm", "--fail-over", "5"], "--fail-over is percent, 0 or more, and goes with --compare OLD.json"),
        (["llm", "--model", "synthetic:gpt5"], "synthetic:gpt5 is not known; there are smollm2-135m-q4_1"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, arguments, words):
    assert cli.main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "this is no JSON"),
        ("\xff", "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        ('{"rows": [1]}', "row 1 is not one of a benchmark"),
        ('{"rows": [{"suite": "gemm", "key": "a", "status": "ok"}]}', "row 1 is not one of a benchmark"),
        (
            '{"rows": [{"suite": "gemm", "key": "a", "status": "ok", "low": 1, "seconds": 0, "high": 1}]}',
            "row 1 is not one of a benchmark",
        ),
    ],
)
def test_a_foreign_file_is_refused_before_anything_is_measured(capsys, tmp_path, text, words):
    (tmp_path / "old.json").write_bytes(text.encode("latin-1"))
    assert cli.main(["bench", "gemm", "--compare", str(tmp_path / "old.json")]) == 2
    err = capsys.readouterr().err
    assert f"--compare {tmp_path / 'old.json'}: " in err and words in err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(capsys, tmp_path, option):
    assert cli.main(["bench", "gemm", option, str(tmp_path / "none" / "x.png")]) == 2
    assert f"there is no folder {tmp_path / 'none'}; make it first" in capsys.readouterr().err


def test_a_picture_of_an_unknown_format_is_refused(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs anygpu[bench]")
    assert cli.main(["bench", "gemm", "--plot", str(tmp_path / "x.doc")]) == 2
    assert "no picture format has this ending; expected .png, .svg or .pdf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_json_compare_and_status(capsys, tmp_path, monkeypatch):
    quick(monkeypatch)
    arguments = ["bench", "memory", "--dtype", "f32", "--shape", "8x64", "--against", "numpy"]
    old = tmp_path / "old.json"
    assert cli.main([*arguments, "--json", str(old)]) == 0
    report = json.loads(old.read_text())
    assert {"device", "driver", "backend", "anygpu", "python", "peer", "ceilings", "rows"} <= report.keys()
    assert all(row["ratio"] > 0 for row in report["rows"] if "softmax" in row["key"])
    capsys.readouterr()
    for row in report["rows"]:  # as if everything had been a thousand times as fast, but for one row
        factor = 1e3 if row["key"] == "f32 softmax 8x64" else 1e-3
        row["seconds"], row["low"], row["high"] = (row[k] * factor for k in ("seconds", "low", "high"))
    old.write_text(json.dumps(report))
    compared = [*arguments, "--compare", str(old)]
    assert cli.main([*compared, "--fail-over", "50"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("LOST" in line for line in lines) == len(report["rows"]) - 1
    assert any("f32 softmax 8x64" in line and "LOST" not in line for line in lines[-len(report["rows"]) - 2 :])
    assert cli.main(compared) == 0  # shown, but not asked to fail
    (tmp_path / "bad.json").write_text("{}")
    capsys.readouterr()
    assert cli.main([*arguments, "--compare", str(tmp_path / "bad.json")]) == 2
    assert "no rows in it" in capsys.readouterr().err


def test_what_was_measured_outlives_an_interruption(tmp_path, monkeypatch):
    quick(monkeypatch)
    good = gemm.case(gemm.Product(8, 8, 8))

    def stop(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm, "cases", lambda caps, **_: [good, replace(good, key="stops", make=stop)])
    arguments = ["bench", "gemm", "--against", "none", "--json", str(tmp_path / "part.json")]
    assert cli.main(arguments) == 130
    report = json.loads((tmp_path / "part.json").read_text())
    assert report["interrupted"] and [row["key"] for row in report["rows"]] == [good.key]


def test_bad_options_leave_an_earlier_file_alone(tmp_path):
    file = tmp_path / "good.json"
    file.write_text("as it was")
    assert cli.main(["bench", "gemm", "--shape", "4", "--against", "none", "--json", str(file)]) == 2
    assert file.read_text() == "as it was"


def test_a_picture_needs_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "gemm", "--plot", str(tmp_path / "x.png")]) == 2
    assert "needs matplotlib: pip install 'anygpu[bench]'" in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs anygpu[bench]")
    from apps.bench import plot

    row = {"status": "ok", "seconds": 1e-3, "share": 0.5}
    report = {
        "device": "a device",
        "backend": "a backend",
        "driver": "1",
        "ceilings": {"copy": 1e9, "fma": 1e10, "matrix": 1e11, "launch": 1e-5},
        "rows": [
            {**row, "suite": "gemm", "key": "product", "flops": 1e7, "nbytes": 1e5, "ceiling": "fma"},
            {**row, "suite": "memory", "key": "softmax", "nbytes": 5e5, "ceiling": "copy"},
        ],
    }
    plot.draw(report, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_attention_takes_no_memory_beside_its_operands(runner, monkeypatch):
    """The row of 256k tokens, shorter; and what it says where scores are kept."""
    if not runner.device.caps.f16:
        pytest.skip("the row is f16")
    quick(monkeypatch)
    heads = attention.Heads(1, 1, 1024, 64, "f16", True)
    row = runner.case(attention.flash(heads, memory=True), {})
    assert row.status == "ok", row.note
    assert 1.0 <= row.extra["bytes_taken"] <= attention.MEMORY
    row = runner.case(attention.flash(replace(heads, causal=False), unfused=True, memory=True), {})
    assert row.status == "wrong" and "times the bytes of inputs and outputs are taken" in row.note


def test_a_gpu_that_idled_is_heated_until_known_work_takes_its_least_time(device, monkeypatch):
    """A clock that is low but steady is not taken for a warm one, and a device that stays slow ends the wait."""
    watch = Stopwatch(device)
    watch.heat()  # nothing learnt: nothing to do
    watch.learn("spin", 3, 0.010)
    seconds = iter([0.057] * 6 + [0.0104])
    monkeypatch.setattr(watch, "batch", lambda plans, rounds: next(seconds))
    watch.heat()
    with pytest.raises(StopIteration):
        next(seconds)
    watch.learn("spin", 3, 0.010)
    ticks = iter(np.arange(0.0, 5.0, 0.3))
    monkeypatch.setattr("apps.bench.measure.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(watch, "batch", lambda plans, rounds: 0.057)
    watch.heat()
    assert next(ticks) < 4.0
