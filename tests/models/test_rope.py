"""Rotary tables against transformers' frequencies (stored, and live with torch) and by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest

from nn.models.config import ConfigError, ModelConfig, Rope, RopeScaling
from nn.models.rope import plain_frequencies, rope_frequencies, rope_table
from tests.fixtures import tiny

with np.load(tiny.FOLDER / "rope.npz") as _file:
    STORED = {key: _file[key] for key in _file.files}
NAMES = [key for key in STORED if not key.endswith(".json")]


def check(config_json, length, frequencies, factor):
    config = ModelConfig.from_json(config_json)
    assert config.rope is not None
    ours, our_factor = rope_frequencies(config.rope, length)
    np.testing.assert_allclose(ours, frequencies, rtol=2e-6)  # theirs are f32
    assert our_factor == pytest.approx(factor, rel=1e-7)
    table = rope_table(config, length)
    assert table.shape == (length, config.rope.dims // 2, 2) and table.dtype == np.float32
    at = length - 1
    np.testing.assert_allclose(table[at, :, 0], np.cos(at * ours) * factor, atol=1e-7)
    np.testing.assert_allclose(table[at, :, 1], np.sin(at * ours) * factor, atol=1e-7)
    np.testing.assert_allclose(table[0], [[factor, 0.0]] * len(ours), atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_matches_transformers(name):
    config_json, length = json.loads(str(STORED[name + ".json"]))
    check(config_json, length, STORED[name][:-1], STORED[name][-1])


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_matches_transformers_live(name):
    pytest.importorskip("transformers", reason="needs transformers: ./run test --oracle")
    pytest.importorskip("torch", reason="needs torch: ./run test --oracle")
    config_json, length = json.loads(str(STORED[name + ".json"]))
    check(config_json, length, *tiny.hf_rope(config_json, length))


def test_dynamic_ntk_grows_with_the_context():
    scaling = RopeScaling("dynamic", factor=2.0, original_context=1000)
    rope = Rope(base=1e4, dims=64, scaling=scaling)
    np.testing.assert_array_equal(rope_frequencies(rope, 1000)[0], plain_frequencies(1e4, 64))
    assert rope_frequencies(rope, 2000)[0][-1] < rope_frequencies(rope, 1500)[0][-1] < plain_frequencies(1e4, 64)[-1]
    # Fixed NTK by a factor is dynamic NTK at the length where factor * length / original - (factor - 1) equals it.
    fixed = dataclasses.replace(rope, scaling=RopeScaling("ntk", factor=2.0))
    np.testing.assert_allclose(rope_frequencies(fixed, 5)[0], rope_frequencies(rope, 1500)[0], rtol=1e-12)


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    plain = plain_frequencies(1e4, 64)
    scaled, factor = rope_frequencies(Rope(base=1e4, dims=64, scaling=RopeScaling("ntk", factor=8.0)), 10)
    assert scaled[0] == plain[0] and factor == 1.0
    assert scaled[-1] == pytest.approx(plain[-1] / 8.0, rel=1e-12)


def test_stored_factors_equal_llama3():
    llama3 = Rope(base=5e5, dims=64, scaling=RopeScaling("llama3", factor=32.0, original_context=8192))
    wanted = rope_frequencies(llama3, 1)[0]
    stored = RopeScaling("factors", factors=tuple(plain_frequencies(5e5, 64) / wanted))
    np.testing.assert_allclose(rope_frequencies(dataclasses.replace(llama3, scaling=stored), 1)[0], wanted, rtol=1e-14)


def test_local_table_has_its_own_base_and_no_scaling():
    config = tiny.load("gemma3_scaled").config
    local = rope_table(config, 50, local=True)
    np.testing.assert_allclose(local[:, 1, 0], np.cos(np.arange(50) * 100.0 ** (-2 / 32)), atol=1e-6)
    slow = rope_table(config, 50)
    np.testing.assert_allclose(slow[:, 0, 1], np.sin(np.arange(50) / 8.0), atol=1e-6)


def test_far_positions_are_exact():
    rope = Rope(base=1e6, dims=4)
    config = dataclasses.replace(tiny.load("llama").config, rope=rope)
    row = rope_table(config, 131_072)[131_071]
    assert row[0, 0] == np.float32(math.cos(131_071.0)) and row[1, 1] == np.float32(math.sin(131_071.0 / 1000.0))


def test_errors():
    with pytest.raises(ConfigError, match="gpt2 has learned positions"):
        rope_table(tiny.load("gpt2").config, 8)
    with pytest.raises(ConfigError, match="no local base"):
        rope_table(tiny.load("llama").config, 8, local=True)
    with pytest.raises(ValueError, match="at least 1 position, got 0"):
        rope_table(tiny.load("llama").config, 0)
    with pytest.raises(ConfigError, match="'su' is not supported; supported: linear, ntk"):
        RopeScaling("su")
    with pytest.raises(ConfigError, match="needs the context length of the original training"):
        RopeScaling("yarn", factor=2.0)
