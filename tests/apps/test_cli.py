"""The command line as a whole, without a device: help, versions, wrong words, and what is imported when."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from pathlib import Path

import pytest

from apps import cli

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture
def probe(monkeypatch):
    """A command `probe` that records the arguments it is run with."""
    seen: list[argparse.Namespace] = []
    module = types.ModuleType("apps.probe", "First line of the help.\n\nMore.")

    def add_arguments(parser):
        parser.add_argument("words", nargs="*")
        parser.add_argument("--flag", action="store_true")

    def run(args):
        seen.append(args)
        return 7

    module.add_arguments, module.run = add_arguments, run
    monkeypatch.setitem(sys.modules, "apps.probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", "records its arguments")
    return seen


def test_no_arguments_is_short_help(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: anygpu")
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert out.count("\n") < 30


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("anygpu ")


@pytest.mark.parametrize(
    ("argv", "device", "backend"),
    [
        (["probe", "--flag", "a"], None, None),
        (["--device", "1", "probe", "--flag", "a"], "1", None),
        (["probe", "--flag", "a", "--device", "nvidia", "--backend", "dawn"], "nvidia", "dawn"),
        (["--device", "1", "--backend=wgpu", "probe", "a", "--flag", "--device=2"], "2", "wgpu"),
    ],
)
def test_device_options_stand_before_or_after_the_command(probe, argv, device, backend):
    assert cli.main(argv) == 7
    assert vars(probe[0]) == {"words": ["a"], "flag": True, "device": device, "backend": backend}


def test_command_help_is_the_modules_first_line(probe, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["probe", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "usage: anygpu probe" in out and "First line of the help." in out
    assert "More." not in out and not probe


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["pul"], "no command 'pul'; did you mean 'pull'?"),
        (["frobnicate"], "no command 'frobnicate': chat, pull, info, check"),
        (["--backend", "cuda", "pull"], "invalid choice: 'cuda'"),
        (["--nope"], "unrecognized arguments: --nope"),
    ],
)
def test_wrong_words(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_starting_imports_nothing_heavy():
    code = "import sys, apps.cli; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heavy = {"numpy", "wgpu", "gpu", "nn", "tokenizers", "jinja2", "huggingface_hub", "asyncio", "importlib.metadata"}
    assert not heavy & set(loaded.split())
