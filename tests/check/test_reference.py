"""The float64 truth of the models against transformers (stored logits; live with torch), and part by part by hand."""

import dataclasses

import numpy as np
import pytest

from nn.check import reference
from nn.models.config import Rope
from tests.fixtures import tiny

TOLERANCE = 2e-5  # x the logits' standard deviation; transformers computes in f32 and is off by up to 9e-6


@pytest.mark.parametrize("name", tiny.NAMES)
def test_matches_transformers(name):
    case = tiny.load(name)
    logits = reference.forward(case.config, case.weights(), case.ids)
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, case.logits, rtol=0, atol=TOLERANCE * case.logits.std())


@pytest.mark.oracle
@pytest.mark.parametrize("name", tiny.NAMES)
def test_matches_transformers_live(name):
    pytest.importorskip("transformers", reason="needs transformers: ./run test --oracle")
    pytest.importorskip("torch", reason="needs torch: ./run test --oracle")
    case = tiny.load(name)
    weights = reference.random_weights(case.config, case.seed + 1000)
    ids = np.random.default_rng(5).integers(0, case.config.vocab, 33)
    theirs = tiny.hf_logits(tiny.hf_model(case.json, tiny.hf_state(case.config, weights, case.hf_shapes)), ids)
    ours = reference.forward(case.config, weights, ids)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * theirs.std())


# Every number of a config has to matter, or the fixtures would not notice it being ignored.
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"norm_eps": 1e-2}),
        ("llama", {"attention_scale": 0.2}),
        ("llama", {"activation": "gelu"}),
        ("llama", {"rope": Rope(base=1e4, dims=32, pairing="interleaved")}),
        ("llama", {"rope": Rope(base=1e4, dims=30)}),
        ("llama", {"rope": Rope(base=1.2e4, dims=32)}),
        ("llama_biased", {"activation": "gelu_tanh"}),
        ("llama_biased", {"qkv_bias": False}),
        ("llama_biased", {"out_bias": False}),
        ("llama_biased", {"mlp_bias": False}),
        ("mistral", {"window": 9}),
        ("qwen2_sliding", {"sliding": (True, True)}),
        ("qwen3", {"qk_norm": False}),
        ("gemma3", {"sandwich_norm": False}),
        ("gemma3", {"embedding_scale": 1.0}),
        ("gemma3", {"sliding": (True,) * 7}),
        ("gemma3", {"activation": "gelu"}),
        ("gemma3_scaled", {"final_softcap": None}),
        ("gpt2", {"norm": "rms"}),
    ],
    ids=str,
)
def test_fixtures_notice_every_field(name, change):
    case = tiny.load(name)
    logits = reference.forward(dataclasses.replace(case.config, **change), case.weights(), case.ids)
    assert np.abs(logits - case.logits).max() > 2 * TOLERANCE * case.logits.std()


@pytest.mark.parametrize("name", ["llama", "llama_biased"])
def test_interleaved_rows_give_the_same_logits(name):
    """llama GGUF files store q and k rows so that the pair (i, i + R/2) lies at (2i, 2i + 1)."""
    case = tiny.load(name)
    config, weights = case.config, case.weights()
    assert config.rope is not None

    def interleave(rows, heads):
        parts = rows.reshape(heads, 2, config.head_dim // 2, *rows.shape[1:])
        return parts.swapaxes(1, 2).reshape(rows.shape)

    permuted = dict(weights)
    for key, value in weights.items():
        leaf = key.rsplit(".", 1)[-1].removesuffix("_bias")
        if leaf in ("q", "k"):
            permuted[key] = interleave(value, config.heads if leaf == "q" else config.kv_heads)
    other = dataclasses.replace(config, rope=dataclasses.replace(config.rope, pairing="interleaved"))
    np.testing.assert_allclose(
        reference.forward(other, permuted, case.ids), reference.forward(config, weights, case.ids), rtol=0, atol=1e-11
    )


def test_causal_and_chosen_rows():
    case = tiny.load("gemma3")
    weights = case.weights()
    whole = reference.forward(case.config, weights, case.ids)
    np.testing.assert_allclose(reference.forward(case.config, weights, case.ids[:11]), whole[:11], rtol=0, atol=1e-11)
    chosen = reference.forward(case.config, weights, case.ids, rows=[0, 47])
    np.testing.assert_allclose(chosen, whole[[0, 47]], rtol=0, atol=1e-12)


def test_gqa_mapping():
    """Six query heads on two key/value heads: 1 1 1 2 2 2, not 1 2 1 2 1 2."""
    q, k = np.zeros((3, 6, 4)), np.zeros((3, 2, 4))
    v = np.stack([np.full((3, 4), 1.0), np.full((3, 4), 2.0)], axis=1)
    np.testing.assert_array_equal(reference.attend(q, k, v, scale=1.0)[2, :, 0], [1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("head_dim", [80, 96, 256, 63])
def test_attention_of_one_query_on_77_keys(head_dim):
    v = np.broadcast_to(np.arange(77.0)[:, None, None], (77, 1, head_dim))
    out = reference.attend(np.zeros((1, 1, head_dim)), np.zeros((77, 1, head_dim)), v, scale=1.0)
    np.testing.assert_allclose(out, 38.0, rtol=1e-14)


def test_window_counts_the_own_position():
    v = np.arange(10.0)[:, None, None]
    out = reference.attend(np.zeros((10, 1, 1)), np.zeros((10, 1, 1)), v, scale=1.0, window=3)
    np.testing.assert_allclose(out[:, 0, 0], [0, 0.5, 1, 2, 3, 4, 5, 6, 7, 8], atol=1e-14)


def test_softcap_and_activations():
    assert reference.softcap(np.array([1e6]), 50.0)[0] == 50.0
    x = np.array([-1000.0, -20.0, 0.0, 1.0, 40.0, 1000.0])
    np.testing.assert_allclose(reference.activate("silu", x), [0, -4.1223072e-08, 0, 0.7310585786, 40, 1000], rtol=1e-6)
    np.testing.assert_allclose(reference.activate("gelu", x), [0, 0, 0, 0.8413447461, 40, 1000], rtol=1e-9, atol=1e-30)
    np.testing.assert_allclose(reference.activate("gelu_tanh", x), [0, 0, 0, 0.8411919906, 40, 1000], rtol=1e-9)


def test_layer_norm_with_a_large_mean():
    x = np.array([8192.0, 8192.25, 8192.5, 8193.0])
    got = reference.layer_norm(x, np.ones(4), np.zeros(4), eps=1e-5)
    np.testing.assert_allclose(got, [-1.183173, -0.507074, 0.169025, 1.521222], rtol=0, atol=5e-7)


def test_errors():
    case = tiny.load("llama")
    with pytest.raises(ValueError, match="numbers from 0 to 100"):
        reference.forward(case.config, case.weights(), [3, 101])
    with pytest.raises(KeyError, match=r"1 parameters are missing: blocks\.1\.q"):
        reference.forward(case.config, {k: v for k, v in case.weights().items() if k != "blocks.1.q"}, [3])
