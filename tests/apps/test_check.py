"""`anygpu check`: what it counts, and that no case, lost device or Ctrl-C ends it without a report."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from apps import check, cli, term
from gpu import Device, DeviceLost, GpuError, NoAdapter
from nn.check import Case, Outcome, run_case


def case(name, run, needs=()):
    return Case(name, run, ("cache/cache.wgsl",), frozenset(needs))


def right(device, rng):
    yield Outcome(np.arange(3), np.arange(3))


def wrong(device, rng):
    yield Outcome(np.arange(3), np.array([0, 1, 7]), label="third")


def breaks(device, rng):
    yield from ()
    raise ZeroDivisionError("by hand")


def writes_behind(device, rng):
    buffer = device.alloc(256)
    device.raw.queue.write_buffer(buffer.raw, buffer.offset + 256, np.zeros(1, np.uint32))
    yield Outcome(np.zeros(1), np.zeros(1))


def drifts(device, rng):
    drifts.calls += 1
    yield Outcome(np.array([1.0, 1.0 + 1e-9 * drifts.calls]), np.ones(2), rtol=1e-3)


drifts.calls = 0


def loses(device, rng):
    yield from ()
    raise DeviceLost("pulled out")


@pytest.fixture
def given(monkeypatch):
    """Makes these cases, by family, the only ones there are."""

    def give(**families):
        monkeypatch.setattr("nn.check.cases_by_family", lambda: families)
        opened.clear()

    opened = []
    real = Device.open.__func__

    def counting(cls, *args, **kwargs):
        opened.append(kwargs)
        return real(cls, *args, **kwargs)

    monkeypatch.setattr(Device, "open", classmethod(counting))
    give.opened = opened
    return give


def report(capsys, *argv):
    code = cli.main(["check", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_counts_by_family_and_mode(given, monkeypatch, capsys):
    monkeypatch.setenv("ANYGPU_FEATURES", "none")
    given(
        one=[case("a", right), case("b", wrong), case("c", right, ["f16", "subgroups"])],
        two=[case("d", breaks), case("e", writes_behind), case("f", right)],
    )
    code, said = report(capsys)
    assert code == 1
    assert said["families"]["one"] == {"passed": 2, "failed": 2, "skipped": 2, "same_bits": 1}
    assert said["families"]["two"] == {"passed": 2, "failed": 4, "skipped": 0, "same_bits": 1}
    assert said["counts"] == {"passed": 4, "failed": 6, "skipped": 2, "same_bits": 2}
    assert said["total"] == len(said["results"]) == 12 and said["interrupted"] is False
    assert [(o["checked"], o["canary"]) for o in given.opened] == [(True, True), (False, True)]
    messages = {r["case"]: r["message"] for r in said["results"] if r["mode"] == "trusted"}
    assert messages["a"] == "" and messages["b"] == "third: 1 of 3 wrong, worst at (2,): got 2, expected 7"
    assert messages["c"] == "the device has no f16 and no subgroups"
    assert messages["d"] == "ZeroDivisionError: by hand"
    assert "a kernel wrote behind the end of its buffer: 256 bytes asked for" in messages["e"]
    assert said["device"]["backend_version"] in said["backends"].values()
    assert said["switches"]["ANYGPU_FEATURES"] == "none"


def test_text_is_a_header_a_table_and_the_failures(given, capsys):
    given(one=[case("a", right), case("b", wrong)])
    assert cli.main(["check"]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for name in ("adapter", "driver", "backend", "versions", "features", "probed", "limits"):
        assert re.search(rf"^  {name} +\S", said, re.MULTILINE), name
    assert re.search(r"^one +2 +2 +0 +1$", said, re.MULTILINE) and re.search(r"^total +2 +2 +0 +1$", said, re.MULTILINE)
    assert "failed: 4 of 4 runs in " in said
    assert "b (checked)\n  third: 1 of 3 wrong" in said and said.index("b (checked)") < said.index("b (trusted)")


def test_all_passed(given, capsys):
    given(one=[case("a", right)])
    assert cli.main(["check"]) == 0
    said = capsys.readouterr().out
    assert "all passed: 2 of 2 runs in 0:0" in said and "failures" not in said


def test_other_bits_in_a_second_run_are_a_failure(given, capsys):
    given(one=[case("a", drifts)])
    code, said = report(capsys)
    assert code == 1 and said["counts"] == {"passed": 1, "failed": 1, "skipped": 0, "same_bits": 0}
    (result,) = (r for r in said["results"] if r["status"] == "failed")
    assert result["mode"] == "trusted"
    assert result["message"].startswith("out: a second run gave other bits: 1 of 2, first at 1: 1.0")


def test_minus_zero_and_nan_payloads_are_other_bits(device):
    values = [np.float32([0.0]), np.float32([-0.0])]

    def run(device, rng):
        yield Outcome(values[0], np.zeros(1))
        values.reverse()

    assert run_case(case("a", run), device) is None
    assert "0.0 then" in (run_case(case("a", run), device, twice=True) or "")


def test_a_lost_device_is_opened_again(given, capsys):
    given(one=[case("a", loses), case("b", right)], two=[case("c", right)])
    code, said = report(capsys, "--mode", "trusted")
    assert code == 1 and [r["status"] for r in said["results"]] == ["failed", "passed", "passed"]
    assert said["results"][0]["message"] == "DeviceLost: pulled out"
    assert len(given.opened) == 2


def test_a_device_that_stays_lost_ends_its_mode_with_a_reason(given, monkeypatch, capsys):
    given(one=[case(str(i), loses) for i in range(check.LOSSES)], two=[case("x", right)])
    code, said = report(capsys, "--mode", "checked")
    assert code == 1 and said["counts"] == {"passed": 0, "failed": check.LOSSES, "skipped": 1, "same_bits": 0}
    assert said["results"][-1]["message"] == f"the device was lost {check.LOSSES} times"

    given(one=[case("a", loses), case("b", right)])
    opening = Device.open.__func__

    def once(cls, *args, **kwargs):
        if given.opened:
            raise GpuError("the driver is gone")
        return opening(cls, *args, **kwargs)

    monkeypatch.setattr(Device, "open", classmethod(once))
    code, said = report(capsys, "--mode", "checked")
    assert [r["status"] for r in said["results"]] == ["failed", "skipped"]
    assert said["results"][1]["message"] == "the device was lost and cannot be opened again: the driver is gone"


def test_ctrl_c_prints_what_there_is(given, capsys):
    def interrupted(device, rng):
        yield from ()
        raise KeyboardInterrupt

    given(one=[case("a", right), case("b", interrupted), case("c", right)])
    assert cli.main(["check"]) == term.INTERRUPTED
    said = capsys.readouterr().out
    assert "interrupted: 1 of 6 runs in " in said and re.search(r"^one +1 +0 +0 +0$", said, re.MULTILINE)


def test_filter_takes_names_files_and_families(given, capsys):
    given(norm=[case("rows", right)], sample=[case("Top_k", right), case("other", right)])
    for word, left in (("top_K", ["Top_k"]), ("NORM", ["rows"]), ("cache.wgsl", ["rows", "Top_k", "other"])):
        code, said = report(capsys, "--filter", word, "--mode", "trusted")
        assert code == 0 and [r["case"] for r in said["results"]] == left
    assert cli.main(["check", "--filter", "nothing"]) == 2
    assert (
        "--filter nothing: no case, shader file or family holds it. Families: norm, sample" in capsys.readouterr().err
    )


def test_no_adapter_is_an_error_not_a_report(given, monkeypatch, capsys):
    given(one=[case("a", right)])

    def none(cls, *args, **kwargs):
        raise NoAdapter("no WebGPU adapter found")

    monkeypatch.setattr(Device, "open", classmethod(none))
    assert cli.main(["check"]) == 2
    assert capsys.readouterr() == ("", "anygpu: no WebGPU adapter found\n")


def test_a_real_family_passes(capsys):
    code, said = report(capsys, "--filter", "cache/cache positions")
    assert code == 0 and said["counts"] == {"passed": 2, "failed": 0, "skipped": 0, "same_bits": 1}
