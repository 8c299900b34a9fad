"""README.md says what is there: its example runs, its commands parse, its numbers are the stored ones."""

import argparse
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from apps.cli import COMMANDS
from nn.io import registry

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def example():
    """The Python block between the markers."""
    marked = re.search(r"<!-- example:.*?-->\n```python\n(.*?)```\n<!-- /example -->", TEXT, re.DOTALL)
    assert marked, "README.md has lost the markers of its example"
    return marked[1]


def test_the_example_is_six_lines_of_our_interface():
    lines = example().splitlines()
    assert len(lines) == 6 and lines[0] == "from nn import LLM"


@pytest.mark.weights
def test_the_example_runs_with_the_real_model(monkeypatch, capsys):
    if registry.resolve("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `anygpu pull smollm2` fetches it")
    monkeypatch.setattr("nn.generate.engine.secrets.randbits", lambda bits: 7)  # unseeded answers may end after a word
    exec(compile(example(), "README.md", "exec"), {})
    first, second = capsys.readouterr().out.split("\n", 1)
    assert len(first.split()) > 5  # an answer of up to 40 tokens, in one line or more
    assert len(second.split()) > 5


def commands():
    """Arguments of every `anygpu` and `./run` line in the README's shell blocks."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in ("anygpu", "./run"):
                found.append(words)
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_understood(words):
    program, command, *rest = words
    if program == "./run" and command in ("test", "setup"):
        return
    module = importlib.import_module(f"apps.{command}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(rest)  # raises for an option that is not there


def test_every_command_is_shown():
    assert {command for _, command, *_ in commands()} >= set(COMMANDS)


def test_models_are_those_of_the_registry():
    rows = re.findall(r"^\| `([\w.-]+)`[^|]*\|[^|]*\| (\d+) MB \| ([^,|]+?)(?:, [^|]*)? \|$", TEXT, re.MULTILINE)
    assert rows == [(m.name, f"{m.nbytes / 1e6:.0f}", m.licence) for m in registry.MODELS.values()]


def test_the_measured_table_is_that_of_the_stored_runs():
    assert runpy.run_path(str(ROOT / "docs/bench/table.py"))["table"]() in TEXT
    done = subprocess.run([sys.executable, ROOT / "docs/bench/table.py", "--check"], check=False)
    assert done.returncode == 0, "python docs/bench/table.py writes it again"


@pytest.mark.parametrize("name", ["chat.gif", "trace.png"])
def test_pictures_are_small(name):
    assert 10_000 < (ROOT / "docs/img" / name).stat().st_size < 500_000


def test_the_training_example_learns(capsys):
    marked = re.search(
        r"<!-- training example:.*?-->\n```python\n(.*?)```\n<!-- /training example -->", TEXT, re.DOTALL
    )
    assert marked is not None
    exec(compile(marked.group(1), "README.md", "exec"), {"__name__": "example"})
    loss = float(capsys.readouterr().out.split()[1])
    assert loss < 0.2
