"""The tuner with families of tiny kernels and a made-up stopwatch: what is picked, struck off and remembered."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpu import Device, DeviceLost, Family, GpuError, LimitExceeded, Result, Trial
from gpu import tune as tune_module
from gpu.profile import Stopwatch
from gpu.tune_run import _warm, compare

COUNT = 1000
TEXT = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(64)
fn run(@builtin(global_invocation_id) id: vec3<u32>) { if (id.x < COUNT) { out[id.x] = VALUE; } }
"""
BODIES = {
    "plain": "x[id.x] * 2.0",
    "fast": "x[id.x] + x[id.x]",
    "middling": "2.0 * x[id.x]",
    "slow": "x[id.x] / 0.5",
    "wrong": "select(x[id.x] * 2.0, 7.0, id.x == 999u)",
    "not a number": "x[id.x] * 2.0 + log(-1.0 - abs(x[id.x]))",
    "broken": "x[id.x] *",
    "greedy": "x[id.x] * 2.0",
    "raises": "0.0",
}


@dataclass(frozen=True)
class Size:
    n: int = COUNT


@dataclass(frozen=True)
class Choice:
    name: str


def record(recorder, variant, out, x, n):
    if variant.name == "raises":
        raise KeyError("a bug in the family")
    if variant.name == "greedy":
        recorder.temp(tune_module.EXTRA_BYTES + 1)
    text = TEXT.replace("VALUE", BODIES[variant.name]).replace("COUNT", f"{n}u")
    kernel = recorder.device.kernel_source(text, "run", label=variant.name)
    recorder(kernel, grid=-(-n // 64), x=x, out=out)


def trial(device, shape):
    values = np.linspace(-4, 4, shape.n, dtype=np.float32)
    x, out = device.upload(values), device.alloc(values.nbytes)
    return Trial(lambda recorder, variant, turn: record(recorder, variant, out, x, shape.n), [Result(out, rtol=1e-6)])


def family(*names, **changes):
    options = {
        "name": "fake",
        "variants": lambda caps, shape: [Choice(name) for name in names],
        "default": lambda caps, shape: Choice(names[0]),
        "shape_class": lambda shape: f"n{shape.n.bit_length()}",
        "trial": trial,
        "nbytes": lambda shape: 8 * shape.n,
    }
    return Family(**{**options, **changes})


SECONDS = {"plain": 10e-3, "fast": 5e-3, "middling": 9.8e-3, "slow": 100e-3}


class Watch:
    """A stopwatch that knows beforehand how long each kernel takes, and the clock that it turns."""

    now = 0.0
    asked: list[str] = []

    def __init__(self, device):
        assert isinstance(device, Device)

    def seconds(self, plan, *, runs=1):
        name = plan.kernels[0].label
        Watch.asked.append(name)
        Watch.now += SECONDS[name] * runs * len(plan)
        return SECONDS[name] * len(plan)


@pytest.fixture
def watch(monkeypatch):
    Watch.now, Watch.asked = 0.0, []
    monkeypatch.setattr("gpu.tune_run.Stopwatch", Watch)
    monkeypatch.setattr("gpu.tune_run.LONG", 1e9)  # what a call really takes here is of no interest
    return Watch


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("ANYGPU_TUNE", "full")
    return tmp_path / "tune"


def race(device, *names, budget=1.0, **changes):
    given = family(*names, **changes)
    shape = Size()
    variants = given.variants(device.caps, shape)
    return compare(device, given, shape, variants, variants[0], budget=budget, clock=lambda: Watch.now)


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "use", ""])
def test_without_measurements_the_default_is_taken(monkeypatch, cache, mode):
    monkeypatch.setenv("ANYGPU_TUNE", mode)
    given = family("plain", "fast", default=lambda caps, shape: Choice("fast" if shape.n > 8 else "plain"))
    with Device.open() as device:
        assert given.pick(device, Size(4)).name == "plain"
        assert given.pick(device, Size(9)).name == "fast"
        assert device.tuner.hash() == "default"
    assert not cache.exists()


def test_a_mode_that_is_none(monkeypatch):
    monkeypatch.setenv("ANYGPU_TUNE", "yes")
    with pytest.raises(GpuError, match="ANYGPU_TUNE=yes: expected one of off, use, full; unset it for use"):
        Device.open()


def test_full_measures_once_and_use_takes_it(monkeypatch, cache, watch):
    given = family("plain", "slow", "fast")
    with Device.open() as device:
        assert given.pick(device, Size()).name == "fast"
        asked = len(watch.asked)
        assert asked > 3
        assert given.pick(device, Size(COUNT - 1)).name == "fast"  # of the same class
        assert len(watch.asked) == asked
        tuned = device.tuner.hash()
        assert len(tuned) == 12
    for mode, name, code in (("use", "fast", tuned), ("full", "fast", tuned), ("off", "plain", "default")):
        monkeypatch.setenv("ANYGPU_TUNE", mode)
        with Device.open() as device:
            assert (given.pick(device, Size()).name, device.tuner.hash()) == (name, code), mode
            assert given.pick(device, Size(3)).name == ("plain" if mode != "full" else "fast"), mode
    with Device.open(checked=True) as device:  # bounds checks make another machine of it
        device.tuner.mode = "use"
        assert given.pick(device, Size()).name == "plain"


def test_a_winner_counts_for_its_shaders_and_variants_only(monkeypatch, cache, watch):
    given = family("plain", "fast")
    with Device.open() as device:
        assert given.pick(device, Size()).name == "fast"
    monkeypatch.setenv("ANYGPU_TUNE", "use")
    with Device.open() as device:
        assert family("plain", "fast", "middling").pick(device, Size()).name == "plain"  # one came
        assert family("plain").pick(device, Size()).name == "plain"  # it went
        assert family("plain", "fast", name="other").pick(device, Size()).name == "plain"
        assert given.pick(device, Size()).name == "fast"
        monkeypatch.setattr(tune_module, "_shader_hash", lambda paths: "changed")
        assert given.pick(device, Size()).name == "plain"


def test_what_a_process_took_stays(cache, watch, monkeypatch):
    """Another process may finish tuning meanwhile; one model must not be half of each."""
    given = family("plain", "fast")
    with Device.open() as device, Device.open() as other:
        device.tuner.mode = "use"
        assert given.pick(device, Size()).name == "plain"
        assert given.pick(other, Size()).name == "fast"
        assert given.pick(device, Size()).name == "plain"


def test_a_class_whose_default_stays_keeps_the_default_of_each_shape(cache, watch):
    given = family("plain", "middling", default=lambda caps, shape: Choice("plain" if shape.n % 2 == 0 else "middling"))
    with Device.open() as device:
        assert given.pick(device, Size(1000)).name == "plain"
        assert given.pick(device, Size(999)).name == "middling"
        assert device.tuner.hash() == "default"


def test_the_code_of_a_family_follows_its_shaders_and_names():
    one, two = Choice("one"), Choice("two")
    given = family("one", "two", shaders=("norm",))
    code = given.code((one, two))
    assert code == given.code((two, one))  # their order is no difference
    others = [given.code((one,)), family(shaders=("matmul",)).code((one, two)), family().code((one, two))]
    assert len({code, *others}) == 4
    with_include = family(shaders=("norm/rms_norm.wgsl",)).code((one,))
    assert with_include != family(shaders=("lib/reduce.wgsl",)).code((one,))


def test_included_shaders_are_part_of_the_code(monkeypatch, tmp_path):
    monkeypatch.setattr("gpu.wgsl.SHADERS", tmp_path)
    (tmp_path / "lib").mkdir()
    texts = {
        "a.wgsl": "// include lib/b.wgsl as part\n",
        "lib/b.wgsl": "fn b() {}",
        "lib/b_subgroup.wgsl": "",
        "c.wgsl": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    seen = set()
    for changed in (None, "a.wgsl", "lib/b.wgsl", "lib/b_subgroup.wgsl"):
        if changed:
            (tmp_path / changed).write_text(texts[changed] + "// more\n")
        tune_module._shader_hash.cache_clear()
        seen.add(tune_module._shader_hash(("a.wgsl",)))
    (tmp_path / "c.wgsl").write_text("of no interest")
    tune_module._shader_hash.cache_clear()
    assert tune_module._shader_hash(("a.wgsl",)) in seen
    assert len(seen) == 4
    tune_module._shader_hash.cache_clear()


# --- the race ---------------------------------------------------------------------------------------------------------


def left_out(verdict):
    return {t.name: t.left_out for t in verdict.timings}


def test_the_fastest_wins_and_the_slow_is_left_early(device, watch):
    verdict = race(device, "plain", "slow", "fast", "middling")
    assert (verdict.winner, verdict.default, verdict.ratio) == ("fast", "plain", 2.0)
    assert left_out(verdict)["slow"] == "slow: 20.0 times the best"
    assert watch.asked.count("slow") == 1
    assert {t.name: t.seconds for t in verdict.timings} == SECONDS


def test_the_default_stays_unless_it_loses_by_three_percent(device, watch):
    assert race(device, "plain", "middling").winner == "plain"
    verdict = race(device, "plain", "middling", "slow")
    assert (verdict.winner, verdict.ratio) == ("plain", 1.0)


def test_what_does_not_work_is_struck_off_with_a_line_each(device, watch, caplog):
    with caplog.at_level(logging.WARNING, "anygpu"):
        verdict = race(device, "plain", "broken", "wrong", "not a number", "greedy", "raises", "fast")
    assert verdict.winner == "fast"
    said = left_out(verdict)
    assert said["fast"] == "" and said["plain"].startswith("slow")
    assert said["wrong"].startswith("wrong: 1 of 1,000 values differ, the first is 7, expected 8")
    assert said["not a number"].startswith("wrong: 1,000 of 1,000 values differ, the first is nan")
    assert said["broken"].startswith("failed: broken:") and "over what may be allocated here" in said["greedy"]
    assert said["raises"] == "failed: 'a bug in the family'"
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 5 and all(line.startswith("anygpu: fake n10: ") for line in lines), lines
    assert not {"broken", "wrong", "not a number", "greedy", "raises"} & set(watch.asked)


def test_a_result_that_is_not_written_is_wrong(device, watch):
    """What an earlier variant wrote is not there any more."""

    def short(device, shape):
        given = trial(device, shape)

        def record_less(recorder, variant, turn):
            record(recorder, variant, given.results[0].buffer, x, shape.n - (variant.name == "fast"))

        x = device.upload(np.linspace(-4, 4, shape.n, dtype=np.float32))
        return Trial(record_less, given.results)

    verdict = race(device, "plain", "fast", trial=short)
    assert left_out(verdict)["fast"].startswith("wrong: 1 of 1,000 values differ, the first is nan, expected 8")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(list(BODIES)), min_size=1, max_size=6, unique=True), st.data())
def test_the_winner_works_and_is_not_slower_than_the_default(device, names, data):
    seconds = {name: data.draw(st.floats(1e-4, 1e-2), name) for name in names}
    works = [n for n in names if n in ("plain", "fast", "middling", "slow")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu.tune_run.Stopwatch", Watch)
        patch.setitem(globals(), "SECONDS", seconds)
        Watch.now = 0.0
        runs = [n for n in names if n not in ("broken", "greedy", "raises")]
        assume(
            len(names) > 1 and works and runs[0] == works[0]
        )  # the first that runs is what the others are compared with
        verdict = race(device, *names, budget=10.0)
    fastest = min(works, key=lambda n: seconds[n])
    assert verdict.winner in works
    if names[0] in works:
        assert verdict.winner == (fastest if seconds[names[0]] > 1.03 * seconds[fastest] else names[0])
        assert verdict.ratio == pytest.approx(seconds[names[0]] / seconds[verdict.winner])
    else:
        assert (verdict.winner, verdict.ratio) == (fastest, 1.0)


def test_one_alone_is_not_timed(device, watch):
    verdict = race(device, "plain", trial=None)
    assert (verdict.winner, verdict.ratio, left_out(verdict)) == ("plain", 1.0, {"plain": "the only one"})
    assert not watch.asked


def test_a_call_of_nothing(device):
    """An empty product records no dispatch."""
    nothing = Trial(lambda recorder, variant, turn: None, [Result(device.alloc(0))])
    verdict = race(device, "plain", "fast", trial=lambda device, shape: nothing)
    assert (verdict.winner, verdict.ratio) == ("plain", 1.0)


def test_a_broken_default_is_replaced(device, watch, caplog):
    verdict = race(device, "broken", "slow", "fast")
    assert (verdict.winner, verdict.ratio) == ("fast", 1.0)
    assert "broken is struck off" in caplog.text


def test_nothing_works(device, watch, cache, caplog):
    with pytest.raises(GpuError, match="not one of 2 variants works; broken failed: broken:"):
        race(device, "broken", "raises")
    with Device.open() as full:
        given = family("broken", "raises")
        assert given.pick(full, Size()).name == "broken"
        assert "fake n10 is not tuned: not one of 2 variants works" in caplog.text
        caplog.clear()
        assert given.pick(full, Size()).name == "broken"  # asked for again, not tried again
        assert not caplog.records and not cache.exists()


def test_the_budget_ends_the_race(device, watch, monkeypatch):
    verdict = race(device, "plain", "slow", "fast", "middling", budget=0.18)
    said = left_out(verdict)
    assert said["slow"] == "slow: 10.0 times the best"
    assert said["fast"] == said["middling"] == "not timed: the time was over"
    assert verdict.winner == "plain"
    assert watch.now < 0.18


def test_slow_compilers_end_the_trying(device, watch, monkeypatch):
    def slow_to_compile(device, shape):
        given = trial(device, shape)

        def record_slowly(recorder, variant, turn):
            Watch.now += 4.0
            given.record(recorder, variant, turn)

        return Trial(record_slowly, given.results)

    verdict = race(device, "plain", "middling", "slow", "fast", budget=1.0, trial=slow_to_compile)
    assert left_out(verdict)["fast"] == "not tried: the time was over"
    assert "not tried" not in left_out(verdict)["slow"]


def test_a_gpu_is_kept_busy_until_its_clock_is_up(device, watch, monkeypatch):
    """A clock that rises for 0.6 s and is four times as high then."""

    def seconds(self, plan, *, runs=1):
        took = 1e-3 * max(1.0, 4.0 - 5.0 * Watch.now)
        Watch.now += runs * took
        return took

    monkeypatch.setattr(Watch, "seconds", seconds)
    recorder = device.recorder()
    given = trial(device, Size())
    given.record(recorder, Choice("plain"), 0)
    _warm(Watch(device), recorder.plan(), lambda: Watch.now)
    assert 0.55 <= watch.now < 0.8
    Watch.now = 10.0
    _warm(Watch(device), recorder.plan(), lambda: Watch.now)
    assert 10.3 <= watch.now < 10.35


def test_turns_are_timed_together_and_compared_alone(device, watch):
    turns = []

    def many(device, shape):
        given = trial(device, shape)

        def record_turn(recorder, variant, turn):
            turns.append(turn)
            given.record(recorder, variant, turn)

        return Trial(record_turn, given.results, turns=3)

    verdict = race(device, "plain", "fast", trial=many)
    assert turns[:5] == [0, 0, *(range(3))] if device.caps.kind == "cpu" else turns[:2] == [0, 0]
    assert {t.name: t.seconds for t in verdict.timings} == pytest.approx({n: SECONDS[n] for n in ("plain", "fast")})


def test_no_more_memory_than_the_call_and_64_mb(device, watch):
    live = device.counters.bytes_live
    with pytest.raises(LimitExceeded, match="over what may be allocated here"):
        race(device, "plain", "fast", trial=lambda device, shape: device.alloc(COUNT * 9 + tune_module.EXTRA_BYTES + 1))
    with pytest.raises(LimitExceeded, match="over what may be allocated here"):
        race(
            device, "plain", "fast", nbytes=None, trial=lambda device, shape: device.alloc(tune_module.EXTRA_BYTES + 1)
        )
    assert device.counters.bytes_live <= live
    device.alloc(tune_module.EXTRA_BYTES + 1).release()  # the limit is gone


def test_large_results_are_compared_in_windows(device, watch):
    """3 M values: the ends and places in between are seen."""
    count = 3_000_000

    def spoilt(at):
        def large(device, shape):
            out = device.alloc(4 * count)

            def record_fill(recorder, variant, turn):
                bad = f"select(1.5, 7.0, {at})" if variant.name == "fast" else "1.5"
                text = TEXT.replace("COUNT", f"{count}u").replace("VALUE", f"x[0] * 0.0 + {bad}")
                kernel = recorder.device.kernel_source(text, "run", label=variant.name)
                recorder(kernel, grid=-(-count // 64), x=x, out=out)

            x = device.upload(np.ones(1, np.float32))
            return Trial(record_fill, [Result(out)])

        return left_out(race(device, "plain", "fast", trial=large, nbytes=lambda shape: 4 * count))["fast"]

    assert spoilt("id.x == 0u").startswith("wrong: 1 of 2,097,152")
    assert spoilt(f"id.x == {count - 1}u").startswith("wrong: 1 of 2,097,152")
    assert spoilt("id.x / 30000u == 50u").startswith("wrong: ")
    assert spoilt("false") == ""


@pytest.mark.parametrize("dtype, values", [(np.float16, [1, -2, 0.5, 3]), ("bf16", [0x3F80, 0xC000, 0x3F00, 0x4040])])
def test_other_types_of_results(device, watch, dtype, values):
    host = np.array(values, np.float16 if dtype is np.float16 else np.uint16)
    copy = TEXT.replace("f32", "u32").replace("COUNT", "2u")

    def packed(device, shape):
        x, out = device.upload(host), device.alloc(host.nbytes)

        def record_copy(recorder, variant, turn):
            added = {"plain": "0u", "fast": "1u", "middling": "64u"}[variant.name]  # in units of the last place
            kernel = recorder.device.kernel_source(
                copy.replace("VALUE", f"x[id.x] + {added}"), "run", label=variant.name
            )
            recorder(kernel, grid=1, x=x, out=out)

        return Trial(record_copy, [Result(out, dtype, rtol=0.02)])

    said = left_out(race(device, "plain", "fast", "middling", trial=packed))
    assert said["fast"] == "" and said["middling"].startswith("wrong: 2 of 4 values differ, the first is 1.")


def test_a_lost_device_is_not_hidden(cache, watch):
    def lost(device, shape):
        raise DeviceLost("pulled out")

    with Device.open() as device, pytest.raises(DeviceLost, match="pulled out"):
        family("plain", "fast", trial=lost).pick(device, Size())


def test_a_trial_may_use_tuned_operations(cache, watch):
    inner = family("plain", "fast", name="inner")

    def nested(device, shape):
        assert inner.pick(device, shape).name == "plain"  # not measured within another measurement
        return trial(device, shape)

    with Device.open() as device:
        assert family("plain", "fast", trial=nested).pick(device, Size()).name == "fast"
        assert inner.pick(device, Size()).name == "fast"


@pytest.mark.parametrize("timestamps", [True, False])
def test_the_real_stopwatch(device, timestamps, cache):
    with Device.open(features="all" if timestamps else "none") as own:
        given = family("plain", "fast")
        verdict = own.tuner.measure(given, Size(), budget=20.0)
        assert verdict is not None
        assert all(t.seconds is not None and 0 < t.seconds < 1.0 for t in verdict.timings)
        recorder = own.recorder()
        assert Stopwatch(own).seconds(recorder.plan()) == 0.0


def test_timestamps_that_stand_still_are_not_believed(monkeypatch):
    with Device.open() as device:
        given = trial(device, Size())
        recorder = device.recorder()
        given.record(recorder, Choice("plain"), 0)
        plan, watch = recorder.plan(), Stopwatch(device)
        watch._period = 0.0
        assert 0.0 < watch.seconds(plan, runs=3) < 1.0
        assert not watch.timestamps


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_says_what_it_is_of(cache, watch):
    with Device.open() as device:
        family("plain", "fast").pick(device, Size())
        path, identity = device.tuner.path, device.tuner.identity
        data = json.loads(path.read_text())
    assert path.parent == cache and data["format"] == 1 and data["device"] == identity
    (entry,) = data["entries"]
    assert (entry["family"], entry["shape_class"], entry["winner"], entry["ratio"]) == ("fake", "n10", "fast", 2.0)
    assert [p.name for p in cache.iterdir() if p.suffix not in (".json", ".lock")] == []


@pytest.mark.parametrize("damage", ["not json", "[]", '{"format": 1}', "\x00\xff", '{"format": 2, "entries": []}'])
def test_a_damaged_file_is_ignored_and_replaced(cache, watch, damage, caplog):
    given = family("plain", "fast")
    with Device.open() as device:
        path = device.tuner.path
        path.parent.mkdir(parents=True)
        path.write_bytes(damage.encode("latin-1"))
        device.tuner.mode = "use"
        assert given.pick(device, Size()).name == "plain"
        assert f"the tuning file {path} is ignored" in caplog.text
    with Device.open() as device:
        assert given.pick(device, Size()).name == "fast"
        assert json.loads(path.read_text())["format"] == 1


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who is kept out")
def test_a_folder_that_cannot_be_written(cache, watch, caplog):
    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with Device.open() as device:
        assert family("plain", "fast").pick(device, Size()).name == "fast"
    assert "what was tuned could not be kept in" in caplog.text


def test_a_cache_folder_that_is_a_file(cache, watch, caplog):
    cache.write_text("in the way")
    with Device.open() as device:
        assert family("plain", "fast").pick(device, Size()).name == "fast"
        assert family("plain", "fast").pick(device, Size()).name == "fast"
    assert "what was tuned could not be kept in" in caplog.text


def test_a_full_disk(cache, watch, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with Device.open() as device:
        monkeypatch.setattr("gpu.tune_store.os.replace", full)
        assert family("plain", "fast").pick(device, Size()).name == "fast"
    assert "could not be kept in" in caplog.text and "No space left on device" in caplog.text
    assert [p for p in cache.iterdir() if p.suffix != ".lock"] == []


def test_no_home_folder(monkeypatch, cache, watch):
    monkeypatch.setenv("ANYGPU_CACHE", "~nobody of this name/x")
    with Device.open() as device:
        assert device.tuner.path is None
        assert family("plain", "fast").pick(device, Size()).name == "fast"


def test_clear(cache, watch):
    given = family("plain", "fast")
    with Device.open() as device:
        given.pick(device, Size())
        device.tuner.clear()
        assert not device.tuner.path.exists() and device.tuner.hash() == "default"
        device.tuner.mode = "use"
        assert given.pick(device, Size()).name == "plain"
        device.tuner.clear()  # nothing to remove
