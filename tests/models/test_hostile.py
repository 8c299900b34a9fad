"""Model descriptions that are wrong: refused by name when the model is opened, before anything goes to a device."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nn.io.safetensors import Checkpoint, save_file
from nn.models.config import ConfigError, ModelConfig, RopeScaling
from nn.models.load import ModelFile
from nn.models.rope import rope_table
from tests.fixtures import tiny, tiny_chat

LAYER = "model.layers.0."
HUGE = 10**400


@pytest.fixture
def folder(tmp_path):
    return tiny_chat.write(tmp_path / "model")


def refused(folder, words):
    with pytest.raises(ConfigError, match=words):
        ModelFile(folder)


CHANGES = ("one row", "doubled", "one more axis", "a scalar", "flat", "turned")
SHAPES = [(n, c) for n in ("lm_head", f"{LAYER}self_attn.k_proj", f"{LAYER}mlp.down_proj") for c in CHANGES]


@pytest.mark.parametrize("name, change", [*SHAPES, *(("model.norm", change) for change in CHANGES[:4])])
def test_tensors_of_another_shape_are_refused(folder, name, change):
    name += ".weight"
    source = Checkpoint.open(folder)
    state = {key: np.array(source.raw(key)) for key in source.names()}
    a = state[name]
    state[name] = {
        "flat": a.reshape(-1),
        "turned": np.ascontiguousarray(a.T),
        "one row": a[:1],
        "doubled": np.concatenate([a, a]),
        "one more axis": a[None],
        "a scalar": np.float32(1.0).reshape(()),
    }[change]
    save_file(state, folder / "model.safetensors")
    refused(folder, f"tensor {name} has shape .*; expected .* do not belong together")


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_family_is_held_to_its_shapes(tmp_path, name):
    model = tiny.load(name)
    save_file(tiny.hf_state(model.config, model.weights(), model.hf_shapes), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.json))
    ModelFile(tmp_path)
    width = "n_inner" if name.startswith("gpt2") else "intermediate_size"
    (tmp_path / "config.json").write_text(json.dumps(model.json | {width: 2 * model.config.ffn_dim}))
    refused(tmp_path, "has shape")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"intermediate_size": 64}, "mlp.gate_proj.weight has shape .32, 128.; expected .64, 128."),
        ({"num_attention_heads": 1}, "q_proj.weight has shape .64, 128.; expected .32, 128."),
        ({"num_key_value_heads": None}, "k_proj.weight has shape .32, 128.; expected .64, 128."),
        ({"vocab_size": 5}, "embed_tokens.weight has shape"),
        ({"hidden_size": HUGE}, "hidden_size is a number of more than 40 digits; expected a whole number"),
        ({"rms_norm_eps": HUGE}, "rms_norm_eps is a number of more than 40 digits; expected a finite number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; expected a finite number"),
        ({"partial_rotary_factor": 1e30}, "partial_rotary_factor is 1e.30; expected a number over 0, up to 1"),
        ({"rope_scaling": {"type": "ntk", "factor": 1e30}}, "factor must be a positive number up to 1e6"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e30}}, "factor must be a positive number up to 1e6"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast and beta_slow must be positive"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": -99}}, "mscale_all_dim is -99"),
        (
            {"model_type": "mistral", "sliding_window": 3, "layer_types": [{}]},
            "layer_types is .{}.; expected 1 entries",
        ),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(folder, change, words):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(folder, words)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"[]", b"5", b"null", b'{"a":"\xff"}', b"[" * 100_000, b'{"hidden_size":' + b"9" * 9999 + b"}"],
)
def test_config_json_that_is_no_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json: (not JSON|a JSON)")


def test_a_large_file_is_no_config_json(folder):
    with open(folder / "config.json", "r+b") as file:
        file.truncate(1 << 30)
    refused(folder, "config.json: 1073741824 bytes; expected at most")


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_frequency_factors_are_positive_numbers(factor):
    with pytest.raises(ConfigError, match="frequency factors must be positive numbers"):
        RopeScaling("factors", factors=(1.0, factor))


@pytest.mark.parametrize("pattern", ["x", float("nan"), float("inf"), -3, 2.5, ["x"]])
def test_sliding_pattern_of_a_gguf_file(pattern):
    key = "gemma3.attention.sliding_window_pattern"
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.embedding_length": 8,
        "gemma3.block_count": 1,
        "gemma3.attention.head_count": 1,
        "gemma3.attention.sliding_window": 4,
        "gemma3.feed_forward_length": 8,
        "gemma3.context_length": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    }
    shapes = {"token_embd.weight": (5, 8)}
    assert ModelConfig.from_gguf(metadata | {key: 1}, shapes).sliding == (False,)
    with pytest.raises(ConfigError, match="sliding_window_pattern is"):
        ModelConfig.from_gguf(metadata | {key: pattern}, shapes)


def test_angle_tables_do_not_depend_on_their_blocks():
    config = ModelConfig.from_json(tiny_chat.config(max_position_embeddings=10_000))
    assert config.rope is not None
    table = rope_table(config, 10_000)
    assert np.array_equal(table[:100], rope_table(config, 100))
    angle = 9999 * 10_000.0 ** (-2 * 3 / config.rope.dims)
    np.testing.assert_allclose(table[9999, 3], [np.cos(angle), np.sin(angle)], atol=1e-7)
