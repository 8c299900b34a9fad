"""`anygpu info`: the device report with and without an adapter, and what a model's file adds up to."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from apps import cli, info, info_model, pull
from gpu import backend, memory
from nn.io import registry
from nn.models.config import flops_per_token, kv_bytes
from nn.models.load import ModelFile
from tests.fixtures import tiny


@pytest.fixture
def tiny_folder(tmp_path):
    """A safetensors model folder of a fixture by name."""

    def make(name):
        fixture = tiny.load(name)
        folder = tmp_path / name
        folder.mkdir()
        save_file(tiny.hf_state(fixture.config, fixture.weights(), fixture.hf_shapes), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(fixture.json))
        return folder

    return make


def test_report_agrees_with_the_device(device, capsys):
    assert cli.main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    caps = device.caps
    assert report["error"] is None and report["backend"] == caps.backend
    assert report["backends"][caps.backend] == caps.backend_version
    assert [a["index"] for a in report["adapters"]] == list(range(len(report["adapters"])))
    assert report["adapters"][report["taken"]]["name"] == report["device"]["name"] == caps.name
    assert report["device"]["limits"]["storage binding"] == caps.max_binding
    probed = report["device"]["probed"]
    assert (probed["f16"], probed["subgroups"], probed["subgroup_size"]) == (
        caps.f16,
        caps.subgroups,
        caps.subgroup_size,
    )
    assert (probed["matrix_f16"], probed["matrix_i8"]) == (caps.matrix_f16, caps.matrix_i8)
    assert probed["timestamps"] == caps.timestamps  # a driver that lies here shows in the report, and fails this
    assert report["numpy"] == np.__version__
    assert ("shader-f16" in report["device"]["features"]) == caps.f16


def test_text_is_aligned_plain_and_complete(monkeypatch, capsys):
    monkeypatch.setenv("ANYGPU_FEATURES", "none")
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and max(map(len, said.splitlines())) < 400
    assert re.search(r"^  switch +ANYGPU_FEATURES=none$", said, re.MULTILINE)
    assert re.search(r"^> +\d+ +\S", said, re.MULTILINE)
    assert re.search(r"^  f16 +no$", said, re.MULTILINE) and re.search(r"^  subgroups +no$", said, re.MULTILINE)
    assert re.search(r"^  matrix units +f16 no, i8 no$", said, re.MULTILINE)
    assert re.search(r"^  features +(core-features-and-limits|none)$", said, re.MULTILINE)
    for title in ("device", "limits", "cache"):
        assert re.search(rf"^{title}$", said, re.MULTILINE)


def test_without_an_adapter_it_says_what_to_install(monkeypatch, capsys):
    for kind in (backend.WgpuBackend, backend.DawnBackend):
        monkeypatch.setattr(kind, "adapters", lambda self: [])
    assert cli.main(["info"]) == 1
    said = capsys.readouterr().out
    assert "no device: no WebGPU adapter found" in said and "apt-get install mesa-vulkan-drivers" in said
    assert "backends" in said and "folder" in said
    assert cli.main(["info", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["device"] is None and report["adapters"] == [] and report["taken"] is None


def test_an_adapter_that_is_not_there_is_named_beside_those_that_are(capsys):
    assert cli.main(["info", "--device", "no such card"]) == 1
    said = capsys.readouterr().out
    assert "no device: no adapter matches 'no such card'. Here are: 0:" in said and "adapters of" in said


def test_a_backend_that_is_not_installed(monkeypatch, capsys):
    def missing(self):
        raise ImportError("No module named 'wgpudawn'")

    monkeypatch.setattr(backend.DawnBackend, "__init__", missing)
    assert cli.main(["info", "--backend", "dawn"]) == 1
    assert "pip install 'anygpu[dawn]'" in capsys.readouterr().out
    assert cli.main(["info", "--backend", "wgpu"]) == 0
    assert "dawn: not installed" in capsys.readouterr().out


def test_timestamps_that_stand_still_do_not_work(device, monkeypatch):
    if not device.caps.timestamps:
        pytest.skip("the device has no timestamps")
    for ticks in ([7, 7], [7, 6], [0, 2**60]):  # standing still, running backwards, years
        monkeypatch.setattr(memory.Memory, "read_raw", lambda self, *_, t=ticks: np.array(t, np.uint64).tobytes())
        assert info.timestamps_work(device) is False


def test_matrix_shapes_come_from_dawn(device, monkeypatch):
    pytest.importorskip("wgpudawn")
    configs = [
        {"component_type": "f16", "result_component_type": "f32", "m": 16, "n": 16, "k": 16},
        {"component_type": "u8", "result_component_type": "u32", "m": 16, "n": 8, "k": 32},
    ]
    monkeypatch.setattr(backend.DawnBackend, "matrix_configs", lambda self, adapter: configs)
    assert info.matrix_shapes(device) == ["f16 x f16 -> f32 16x16x16", "u8 x u8 -> u32 16x8x32"]
    monkeypatch.setattr(backend.DawnBackend, "adapters", lambda self: [])
    assert info.matrix_shapes(device) == []


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (128 << 20, "128 MiB"), ((2 << 30) - 4, "2 GiB - 4"), (16384, "16 KiB"), (48 << 10, "48 KiB"),
        (100, "100 B"), (3 << 29, "1.5 GiB"), ((1 << 20) - 4, "1 MiB - 4"),
    ],
)  # fmt: skip
def test_binary_size(nbytes, text):
    assert info.binary_size(nbytes) == text


def test_context_without_a_model_is_refused(capsys):
    assert cli.main(["info", "--context", "10"]) == 2
    assert "--context goes with --model" in capsys.readouterr().err


# --- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_folder_adds_up(tiny_folder, name, capsys):
    folder = tiny_folder(name)
    assert cli.main(["info", "--model", str(folder), "--context", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    stored = tiny.load(name)
    tied = {"lm_head.weight"} if stored.config.tied_head else set()  # in the file again, but no parameter of its own
    names = set(stored.hf_shapes) - tied
    elements = sum(math.prod(stored.hf_shapes[n]) for n in names)
    assert report["parameters"]["total"] == elements
    assert sum(math.prod(s["shape"]) * s["count"] for s in report["shapes"]) == elements
    assert sum(f["elements"] for f in report["formats"].values()) == elements
    assert sum(f["tensors"] for f in report["formats"].values()) == len(names)
    assert report["kv_bytes"]["f16"] == kv_bytes(stored.config, 8, "f16")
    assert report["flops_per_token"]["decode"] == flops_per_token(stored.config, phase="decode", context=8)
    weights = sum(f["device_bytes"] for f in report["formats"].values())
    assert report["device_bytes"] == {t: weights + report["kv_bytes"][t] for t in ("f16", "f32")}
    assert cli.main(["info", "--model", str(folder)]) == 0
    assert f"{elements:,}" in capsys.readouterr().out


def test_a_context_out_of_range_and_an_unknown_model(tiny_folder, capsys):
    folder = tiny_folder("llama")
    longest = tiny.load("llama").config.context_max
    for context in (0, longest + 1):
        assert cli.main(["info", "--model", str(folder), "--context", str(context)]) == 2
        assert f"--context must be from 1 to {longest:,} tokens" in capsys.readouterr().err
    assert cli.main(["info", "--model", "smolm2"]) == 2
    assert "no model is called 'smolm2'" in capsys.readouterr().err


def test_a_known_name_is_fetched_first(tiny_folder, monkeypatch, capsys):
    folder = tiny_folder("gpt2")
    monkeypatch.setattr(pull, "ensure", lambda name, **_: folder if name == "smollm2" else None)
    assert cli.main(["info", "--model", "smollm2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"]["family"] == "gpt2"


def test_layers_are_grouped():
    assert info_model.ranges([0, 1, 2, 4, 6, 7]) == "0..2,4,6..7"
    assert info_model.ranges([5]) == "5"


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "smollm2",
            [r"blocks\.0\.\.29\.q +\(576, 576\) +q4_1 +9,953,280", "30 of width 576, MLP 1536"],
        ),
        ("gemma3", [r"embed +\(262144, 640\) +q8_0 +167,772,160", "15 layers see 512 tokens, 3 all"]),
        ("qwen2.5-coder", [r"blocks\.0\.\.23\.k_bias +\(128\) +f32 +3,072", "output head of its own"]),
    ],
)
def test_real_files_add_up(name, lines, capsys):
    path = registry.resolve(name)
    if path is None:
        pytest.skip(f"anygpu pull {name}")
    file = ModelFile(path)
    try:
        report = info_model.collect(file, 1000)
        names = file.source.names()
        elements = sum(file.source.spec(n).size for n in names)
        assert report["parameters"]["total"] == elements
        assert sum(math.prod(s["shape"]) * s["count"] for s in report["shapes"]) == elements
        assert sum(f["tensors"] for f in report["formats"].values()) == len(names)
        assert sum(f["file_bytes"] for f in report["formats"].values()) == sum(map(file.source.nbytes, names))
        for s in report["shapes"]:  # one of each group, looked up in the file itself
            block = re.sub(r"(\d+)[.,\d]*\.(?=[a-z])", r"\1.", s["name"])
            source = file.sources[block]
            assert tuple(s["shape"]) == file.source.spec(source.name).shape
            assert s["format"] == file.source.spec(source.name).dtype
    finally:
        file.close()
    assert cli.main(["info", "--model", name]) == 0
    said = capsys.readouterr().out
    for line in lines:
        assert re.search(line, said), line
