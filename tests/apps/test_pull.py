"""`anygpu pull` around the registry, whose own tests are in tests/io/test_registry.py."""

from __future__ import annotations

import pytest

from apps import cli, pull
from nn.io import registry


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Instead of downloading, writes files of the right size and records the names."""
    names: list[str] = []

    def fetch(name, progress=None, *, notice=None, force=False):
        names.append(name)
        if name.startswith("hf:"):
            return tmp_path / name
        model = registry.lookup(name)
        if model.terms:
            notice(model.terms)
        progress(model.download, model.download)
        path = registry.cache_dir() / "models" / model.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(model.nbytes)  # sparse
        return path

    monkeypatch.setattr(registry, "fetch", fetch)
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path))
    return names


def test_pull_prints_the_path_and_fetches_once(fetched, tmp_path, capsys):
    want = str(tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf") + "\n"
    assert cli.main(["pull", "smollm2"]) == 0
    said = capsys.readouterr()
    assert said.out == want
    assert said.err == "Fetching SmolLM2-135M-Instruct, Q4_1: chats, the default (92.9 MB, Apache-2.0)\n"
    assert cli.main(["pull", "smollm2"]) == 0
    assert capsys.readouterr() == (want, "")
    assert cli.main(["pull", "smollm2", "--force"]) == 0
    assert fetched == ["smollm2", "smollm2"]


def test_terms_are_shown_once(fetched, capsys):
    pull.ensure("gemma3")
    assert "Gemma Terms of Use found at ai.google.dev/gemma/terms" in capsys.readouterr().err
    pull.ensure("gemma3")
    assert capsys.readouterr().err == ""


def test_a_wrong_name_stops_before_the_first_download(fetched, capsys):
    assert cli.main(["pull", "smollm2", "smolm3"]) == 2
    assert capsys.readouterr().err.startswith("anygpu: no model is called 'smolm3'. Known names: smollm2,")
    assert fetched == []


def test_list_names_every_model_and_what_is_there(fetched, capsys):
    cli.main(["pull", "smollm2"])
    capsys.readouterr()
    for argv in (["pull"], ["pull", "--list"]):
        assert cli.main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["name", *registry.MODELS]
        assert lines[1].endswith("SmolLM2-135M-Instruct.Q4_1.gguf") and lines[2].endswith("not fetched")


def test_hub_names_go_to_the_hub(fetched, monkeypatch, capsys):
    monkeypatch.setattr(registry, "resolve", lambda name: None)
    assert cli.main(["pull", "hf:org/name"]) == 0
    assert fetched == ["hf:org/name"]
