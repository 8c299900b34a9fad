"""`anygpu tune` on made-up families: what it measures, prints, keeps and forgets."""

from __future__ import annotations

import json

import pytest

from apps import cli, tune
from gpu import Device
from tests.fixtures import tiny_chat
from tests.gpu.test_tune import Size, Watch, family


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("ANYGPU_TUNE", "use")
    return tmp_path / "tune"


@pytest.fixture
def families(monkeypatch):
    """Two families of made-up speed are all that there are."""
    first = family("plain", "fast", "broken", name="first", standard=lambda caps: [Size(1000), Size(9)])
    second = family("plain", "middling", name="second", standard=lambda caps: [Size(100)])
    found = {"first": first, "second": second}
    monkeypatch.setattr("nn.ops.families", lambda: found)
    monkeypatch.setattr("gpu.tune_run.Stopwatch", Watch)
    monkeypatch.setattr("gpu.tune_run.LONG", 1e9)
    return found


def test_the_standard_shapes(families, capsys, cache):
    assert cli.main(["tune"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == ["family", "shape", "class", "default", "winner", "times", "faster"]
    rows = [line.split() for line in out[2:5]]
    assert rows == [
        ["first", "n10", "plain", "fast", "2.00"],
        ["first", "n4", "plain", "fast", "2.00"],
        ["second", "n7", "plain", "-", "1.00"],
    ]
    (path,) = cache.glob("*.json")
    assert out[5].startswith(f"{path} (")
    with Device.open() as device:
        assert families["first"].pick(device, Size()).name == "fast"
        assert out[5] == f"{path} ({device.tuner.hash()})"


def test_show_and_clear(families, capsys, cache):
    assert cli.main(["tune", "--show"]) == 0
    assert "Nothing is measured yet: anygpu tune does it." in capsys.readouterr().out
    assert cli.main(["tune", "--family", "second"]) == 0
    capsys.readouterr()
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "second  n7" in shown and "first" not in shown
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "use: 1 shape classes measured" in said
    assert cli.main(["tune", "--clear"]) == 0
    assert "1 shape classes forgotten" in capsys.readouterr().err
    assert not list(cache.glob("*.json"))
    assert cli.main(["info"]) == 0
    assert "use: nothing measured yet (anygpu tune)" in capsys.readouterr().out


def test_json(families, capsys, monkeypatch):
    monkeypatch.setenv("ANYGPU_TUNE", "off")
    assert cli.main(["tune", "--family", "first", "--shapes", "n=50", "n=600", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(m["family"], m["shape_class"]) for m in said["measured"]] == [("first", "n6"), ("first", "n10")]
    by_name = {v["name"]: v for v in said["measured"][0]["variants"]}
    assert by_name["fast"]["seconds"] == 5e-3 and by_name["broken"]["left_out"].startswith("failed: broken:")
    assert {(e["winner"], e["ratio"]) for e in said["entries"]} == {("fast", 2.0)}
    assert (said["mode"], said["hash"]) == ("off", "default")


def test_off_is_said(families, capsys, monkeypatch):
    monkeypatch.setenv("ANYGPU_TUNE", "off")
    assert cli.main(["tune", "--family", "second"]) == 0
    assert "ANYGPU_TUNE=off is set: what is known here is not used." in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    assert "off: the shipped kernels" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done(families, capsys, monkeypatch, cache):
    real = families["first"].trial

    def interrupted(device, shape):
        if shape.n == 9:
            raise KeyboardInterrupt
        return real(device, shape)

    object.__setattr__(families["first"], "trial", interrupted)
    assert cli.main(["tune"]) == 130
    with Device.open() as device:
        assert [key[:2] for key in device.tuner.table] == [("first", "n10")]


def test_the_shapes_of_a_model(capsys, tmp_path, monkeypatch):
    """What the model's operations ask for while it reads and answers is measured; here, only listed."""
    measured = []
    monkeypatch.setattr("gpu.tune.Tuner.measure", lambda self, f, shape, budget: measured.append((f.name, shape)))
    asked = family("plain", "fast", name="asked")

    def lowered(op, record, *arrays):
        asked.pick(record.device, Size(arrays[-1].rows))
        return real(op, record, *arrays)

    from nn.ops.embedding import Embedding

    real = Embedding.lower
    monkeypatch.setattr(Embedding, "lower", lowered)
    folder = tiny_chat.write(tmp_path)
    assert cli.main(["tune", "--model", str(folder), "--budget", "0.01"]) == 0
    assert ("asked", Size(1)) in measured and len({shape for name, shape in measured if name == "asked"}) >= 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--family", "third"], "--family third: there is no such kernel family; there are first, second"),
        (["--shapes", "n=3"], "--shapes goes with --family"),
        (["--family", "first", "--shapes", "n=3", "--model", "x"], "--shapes and --model are two ways"),
        (["--family", "first", "--shapes", "m=3"], "'m=3' is not NAME=VALUE with one of the names n"),
        (["--family", "first", "--shapes", "n"], "'n' is not NAME=VALUE"),
        (["--family", "first", "--shapes", "n=0"], "n=0; expected a whole number over 0"),
        (["--family", "first", "--shapes", "n=x y"], "n=x; expected a whole number over 0"),
        (["--family", "first", "--shapes", "n=99999999999"], "expected a whole number over 0"),
        (["--budget", "0"], "--budget must be a number of seconds over 0, got 0"),
        (["--budget", "nan"], "--budget must be a number of seconds over 0, got nan"),
        (["--show", "--clear"], "--show tunes nothing; it does not go with --clear"),
        (["--clear", "--budget", "2"], "--clear tunes nothing; it does not go with --budget"),
    ],
)
def test_what_cannot_be_meant(families, capsys, arguments, words):
    assert cli.main(["tune", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_shapes_of_every_type():
    from nn import ops

    matmul = ops.families()["matmul"]
    with Device.open() as device:
        shape = tune.parse_shape(matmul, device, "m=3,n=5,k=7,dtype=f16,trans_b=1")
        assert (shape.m, shape.n, shape.k, shape.dtype, shape.trans_a, shape.trans_b) == (3, 5, 7, "f16", False, True)
        with pytest.raises(ValueError, match="n, k not given"):
            tune.parse_shape(matmul, device, "m=3")
        with pytest.raises(ValueError, match="trans_a=2; expected 0 or 1"):
            tune.parse_shape(matmul, device, "m=3,n=5,k=7,trans_a=2")


@pytest.mark.parametrize(
    "name, shape, words",
    [
        ("matmul", "m=8,n=8,k=8,dtype=f64", "dtype=f64; expected one of f32, f16"),
        ("matmul", "m=2000000000,n=2000000000,k=1", "GB, this device is given"),
        ("linear", "tokens=1,rows=8,cols=5,format=q4_0", "rows of 5 weights do not divide into its blocks of 32"),
        ("linear", "tokens=1,rows=8,cols=32,format=q9", "format=q9; expected one of f32, f16, bf16, q4_0"),
        ("attention", "q_len=1,k_len=1,heads=3,kv_heads=2,d=64", "heads=3 is no multiple of kv_heads=2"),
        ("attention", "q_len=1,k_len=1,heads=2,kv_heads=2,d=6400", "d=6400; heads have 1 to 256 features"),
    ],
)
def test_shapes_that_no_call_can_have(capsys, cache, name, shape, words):
    assert cli.main(["tune", "--family", name, "--shapes", shape]) == 2
    err = capsys.readouterr().err
    assert f"--shapes {shape}: " in err and words in err
    assert not list(cache.glob("*.json"))
