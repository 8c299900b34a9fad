"""`anygpu bench` on a tiny model: what it reports, not how fast that is."""

from __future__ import annotations

import json

import pytest

from apps import cli
from tests.fixtures import tiny_chat


def test_dispatches_as_json(capsys):
    assert cli.main(["bench", "dispatch", "--runs", "1", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [row["bindings"] for row in out["record"]] == [2, 4, 6, 8]
    assert all(row[key] > 0 for row in out["record"] for key in ("us", "paused_us", "busy_us"))
    assert all(out["ceilings"][key] > 0 for key in ("copy", "fma", "launch"))


def test_a_model_as_json(capsys, tmp_path):
    folder = tiny_chat.write(tmp_path)
    arguments = ["--model", str(folder), "--prompt", "5", "--tokens", "4", "--runs", "1"]
    assert cli.main(["bench", "llm", *arguments, "--json"]) == 0
    (decode,) = json.loads(capsys.readouterr().out)["decode"]
    assert (decode["prompt_tokens"], decode["answer_tokens"], decode["runs"]) == (5, 4, 1)
    assert decode["prompt_rate"] > 0 and decode["answer_rate"] > 0 and decode["dispatches"] > 5


def test_profile_names_every_dispatch(capsys, device, tmp_path):
    if not device.caps.timestamps:
        return
    folder = tiny_chat.write(tmp_path)
    arguments = ["--prompt", "5", "--tokens", "3", "--runs", "1", "--profile", "--json"]
    assert cli.main(["bench", "decode", "--model", str(folder), *arguments]) == 0
    (decode,) = json.loads(capsys.readouterr().out)["decode"]
    assert sum(kernel["dispatches"] for kernel in decode["kernels"]) == decode["dispatches"]
    assert any("select_token" in kernel["kernel"] for kernel in decode["kernels"])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--runs", "0"], "--runs must be a whole number over 0, got 0"),
        (["--tokens", "-1"], "--tokens must be a whole number over 0, got -1"),
        (["--prompt", "0"], "--prompt must be a whole number over 0, got 0"),
        (
            ["--prompt", "128", "--tokens", "2000"],
            "--prompt 128 and --tokens 2,000 are more than the 2,048 tokens that model was made for",
        ),
    ],
)
def test_lengths_that_cannot_be_measured(capsys, tmp_path, arguments, words):
    folder = tiny_chat.write(tmp_path / "model")
    assert cli.main(["bench", "decode", "--model", str(folder), *arguments]) == 2
    assert words in capsys.readouterr().err
