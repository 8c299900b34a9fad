"""Which WebGPU implementation is taken where nobody has said: wgpu, or the measured one."""

from __future__ import annotations

import json

import pytest

from apps import cli, workloads
from gpu import Device, GpuError, backend_choice
from gpu.backend_choice import choose_backend, remember
from tests.fixtures import tiny_chat


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("ANYGPU_TUNE", "use")
    monkeypatch.delenv("ANYGPU_BACKEND", raising=False)
    return tmp_path / "tune"


def name():
    with Device.open(backend="wgpu") as device:
        return device.caps.name


def test_wgpu_unless_it_was_measured_slower(monkeypatch):
    assert choose_backend("chat", "a card") == ("wgpu", "the default")
    remember("a card", {"wgpu": {"chat": 1.6, "decode": 1.0, "prompt": 1.0}, "dawn": {"chat": 1.0, "decode": 0.97}})
    faster = "1.6x faster here for a chat, 128 tokens read and 256 written, measured by anygpu tune"
    assert choose_backend("chat", "a card") == ("dawn", faster)
    assert choose_backend("decode", "a card") == ("wgpu", "the default, and not slower here for answers")
    assert choose_backend("prompt", "a card") == choose_backend("gemm_f16", "a card") == ("wgpu", "the default")
    assert choose_backend(None, "a card") == choose_backend("chat", "another") == ("wgpu", "the default")
    monkeypatch.setenv("ANYGPU_TUNE", "off")
    assert choose_backend("chat", "a card") == ("wgpu", "the default")
    monkeypatch.setenv("ANYGPU_TUNE", "use")
    monkeypatch.setenv("ANYGPU_BACKEND", "wgpu")
    assert choose_backend("chat", "a card") == ("wgpu", "asked for by ANYGPU_BACKEND")


def test_it_counts_for_these_versions_only(monkeypatch):
    remember("a card", {"wgpu": {"chat": 2.0}, "dawn": {"chat": 1.0}})
    assert choose_backend("chat", "a card")[0] == "dawn"
    monkeypatch.setattr(backend_choice, "installed", lambda: {"wgpu": "0.32.0", "dawn": "99"})
    assert choose_backend("chat", "a card")[0] == "wgpu"
    monkeypatch.setattr(backend_choice, "installed", lambda: {"wgpu": "0.32.0"})
    assert choose_backend("chat", "a card")[0] == "wgpu"


def test_an_unknown_workload():
    with pytest.raises(GpuError, match="workload 'games' is unknown: expected one of chat, prompt, decode, gemm_f16"):
        Device.open(workload="games")


def test_no_home_folder(monkeypatch):
    monkeypatch.setenv("ANYGPU_CACHE", "~nobody of this name/x")
    remember("a card", {"wgpu": {"chat": 2.0}, "dawn": {"chat": 1.0}})
    assert choose_backend("chat", "a card") == ("wgpu", "the default")


def test_an_open_device_follows_and_says_why(capsys, monkeypatch):
    remember(name(), {"wgpu": {"chat": 2.0}, "dawn": {"chat": 1.0}})
    with Device.open(workload="chat") as device:
        assert device.caps.backend == "dawn" and device.backend_why.startswith("2.0x faster here for a chat")
    with Device.open() as device:
        assert (device.caps.backend, device.backend_why) == ("wgpu", "the default")
    with Device.open(workload="chat", backend="wgpu") as device:
        assert (device.caps.backend, device.backend_why) == ("wgpu", "asked for")
    assert cli.main(["info"]) == 0
    assert "dawn, 2.0x faster here for a chat" in capsys.readouterr().out
    assert cli.main(["info", "--backend", "wgpu"]) == 0
    assert "wgpu, asked for" in capsys.readouterr().out


def test_one_that_cannot_be_opened_any_more(monkeypatch, caplog):
    from gpu import device as device_module

    remember(name(), {"wgpu": {"chat": 2.0}, "dawn": {"chat": 1.0}})
    real = device_module.open_backend

    def without_dawn(backend=None):
        if backend == "dawn":
            raise GpuError("backend 'dawn' needs a package")
        return real(backend)

    monkeypatch.setattr(device_module, "open_backend", without_dawn)
    with Device.open(workload="chat") as device:
        assert device.caps.backend == "wgpu"
        assert device.backend_why == "dawn is faster here, but cannot open this adapter now"
    assert "dawn is faster here, but does not open" in caplog.text


def test_the_workloads_are_measured(device, tmp_path):
    folder = tiny_chat.write(tmp_path / "model")
    found = workloads.measure(device, str(folder))
    wanted = {"chat", "prompt", "decode"} | ({"gemm_f16"} if device.caps.f16 else set())
    assert found.keys() == wanted and all(0 < seconds < 1000 for seconds in found.values())


def test_both_in_processes_of_their_own(tmp_path, capsys, cache):
    folder = tiny_chat.write(tmp_path / "model")
    assert cli.main(["tune", "--backends", "--model", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["failed"] == {} and said["adapter"] == name()
    rows = {row["workload"]: row for row in said["workloads"]}
    assert {"chat", "prompt", "decode"} <= rows.keys()
    for row in rows.values():
        assert row["seconds"].keys() == {"wgpu", "dawn"} and row["winner"] in ("wgpu", "dawn")
        assert choose_backend(row["workload"], said["adapter"])[0] == row["winner"]


def test_one_that_fails_is_named_and_loses(monkeypatch, capsys):
    def run(backend, model, adapter):
        if backend == "dawn":
            raise ValueError("no driver")
        return {"chat": 1.0, "gemm_f16": 2e-3}

    monkeypatch.setattr(workloads, "_in_a_process", run)
    assert cli.main(["tune", "--backends"]) == 0
    said = capsys.readouterr().out
    assert "dawn gave no result: no driver" in said
    assert choose_backend("chat", name()) == ("wgpu", "the default")


def test_a_process_that_ends_badly(monkeypatch):
    with pytest.raises(ValueError, match="no adapter matches 'nothing of this name'"):
        workloads._in_a_process("wgpu", "synthetic:smollm2-135m-q4_1", "nothing of this name")
    monkeypatch.setattr(workloads, "LIMIT", 0.01)
    with pytest.raises(ValueError, match="it did not end within 0 s"):
        workloads._in_a_process("wgpu", "synthetic:smollm2-135m-q4_1", None)


@pytest.mark.parametrize("option", [["--family", "matmul"], ["--budget", "1"], ["--backend", "dawn"]])
def test_options_that_do_not_go_together(capsys, option):
    assert cli.main(["tune", "--backends", *option]) == 2
    assert "--backends compares wgpu and dawn" in capsys.readouterr().err
    assert cli.main(["tune", "--backends", "--show"]) == 2
    assert "--show tunes nothing; it does not go with --backends" in capsys.readouterr().err
