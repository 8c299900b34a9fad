"""ModelConfig from GGUF metadata and config.json, errors by name, exact shapes and costs."""

import dataclasses
import math

import numpy as np
import pytest

from nn.models.config import (
    ConfigError,
    ModelConfig,
    flops_per_token,
    kv_bytes,
    parameters_by_part,
    tensor_table,
)
from nn.models.names import gguf_canonical, gguf_source, gguf_sources, hf_canonical, hf_source, hf_sources
from tests.fixtures import tiny

# What the three files that `anygpu pull` fetches say, and their sums of elements (counted from their tensor lists).
SMOLLM2 = {
    "general.architecture": "llama",
    "general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
}
GEMMA3 = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.attention.sliding_window": 512,
    "gemma3.attention.head_count_kv": 1,
}
QWEN2 = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 24,
    "qwen2.context_length": 32768,
    "qwen2.embedding_length": 896,
    "qwen2.feed_forward_length": 4864,
    "qwen2.attention.head_count": 14,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.rope.freq_base": 1000000.0,
    "qwen2.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
}
SMOLLM2_TENSORS = {"token_embd.weight": (49152, 576)}
GEMMA3_TENSORS = {"token_embd.weight": (262144, 640)}
QWEN2_TENSORS = {"token_embd.weight": (151936, 896), "output.weight": (151936, 896), "blk.0.attn_q.bias": (896,)}
FILES = {
    "smollm2": (SMOLLM2, SMOLLM2_TENSORS, 134_515_008, 272),
    "gemma3": (GEMMA3, GEMMA3_TENSORS, 268_098_176, 236),
    "qwen2": (QWEN2, QWEN2_TENSORS, 630_167_424, 291),
}


@pytest.mark.parametrize("name", FILES)
def test_counts_equal_the_real_files(name):
    metadata, tensors, elements, count = FILES[name]
    config = ModelConfig.from_gguf(metadata, tensors)
    assert parameters_by_part(config)["total"] == elements
    assert len(tensor_table(config)) == count


def test_gguf_fields():
    llama = ModelConfig.from_gguf(SMOLLM2, SMOLLM2_TENSORS)
    assert llama.rope is not None and llama.rope.pairing == "interleaved" and llama.rope.base == 1e5
    assert (llama.head_dim, llama.tied_head, llama.qkv_bias, llama.activation) == (64, True, False, "silu")
    gemma = ModelConfig.from_gguf(GEMMA3, GEMMA3_TENSORS)
    assert gemma.rope is not None and (gemma.rope.pairing, gemma.rope.base, gemma.rope.local_base) == ("neox", 1e6, 1e4)
    assert [i for i in range(18) if not gemma.sliding[i]] == [5, 11, 17]
    assert (gemma.layer_window(0), gemma.layer_window(5)) == (512, None)
    assert (gemma.layer_local_rope(4), gemma.layer_local_rope(5)) == (True, False)
    assert gemma.embedding_scale == math.sqrt(640) and gemma.attention_scale == 1 / 16
    assert gemma.qk_norm and gemma.sandwich_norm and gemma.norm_offset == 0.0 and gemma.activation == "gelu_tanh"
    qwen = ModelConfig.from_gguf(QWEN2, QWEN2_TENSORS)
    assert qwen.qkv_bias and not qwen.out_bias and not qwen.tied_head and qwen.head_dim == 64
    numpy_values = {k: np.uint32(v) if isinstance(v, int) else v for k, v in QWEN2.items()}
    assert ModelConfig.from_gguf(numpy_values, QWEN2_TENSORS) == qwen


def test_gguf_gpt2():
    metadata = {"general.architecture": "gpt2"} | {
        f"gpt2.{key}": value
        for key, value in {
            "block_count": 1,
            "context_length": 64,
            "embedding_length": 72,
            "feed_forward_length": 288,
            "attention.head_count": 2,
            "attention.layer_norm_epsilon": 1e-5,
        }.items()
    }
    shapes = {
        "token_embd.weight": (101, 72),
        "position_embd.weight": (64, 72),
        "blk.0.attn_norm.weight": (72,),
        "blk.0.attn_norm.bias": (72,),
        "blk.0.attn_qkv.weight": (216, 72),
        "blk.0.attn_qkv.bias": (216,),
        "blk.0.attn_output.weight": (72, 72),
        "blk.0.attn_output.bias": (72,),
        "blk.0.ffn_norm.weight": (72,),
        "blk.0.ffn_norm.bias": (72,),
        "blk.0.ffn_up.weight": (288, 72),
        "blk.0.ffn_up.bias": (288,),
        "blk.0.ffn_down.weight": (72, 288),
        "blk.0.ffn_down.bias": (72,),
        "output_norm.weight": (72,),
        "output_norm.bias": (72,),
    }
    config = ModelConfig.from_gguf(metadata, shapes)
    json_config = tiny.load("gpt2").config
    assert dataclasses.replace(config, layers=2, sliding=()) == json_config
    sources = gguf_sources(config, shapes)
    assert set(sources) == set(tensor_table(config))
    assert sources["blocks.0.k"].rows == (72, 144) and not sources["blocks.0.k"].transpose
    assert sources["blocks.0.v_bias"].name == "blk.0.attn_qkv.bias"
    for name, shape in tensor_table(config).items():
        assert sources[name].take(np.zeros(shapes[sources[name].name])).shape == shape, name


def test_gguf_rope_scaling():
    def rope(extra, tensors=SMOLLM2_TENSORS, **options):
        config = ModelConfig.from_gguf(
            SMOLLM2 | {f"llama.rope.scaling.{k}": v for k, v in extra.items()}, tensors, **options
        )
        assert config.rope is not None
        return config.rope.scaling

    assert rope({"type": "none"}) is None
    assert rope({"type": "linear", "factor": 8.0}).factor == 8.0
    yarn = rope({"type": "yarn", "factor": 4.0, "original_context_length": 2048})
    assert (yarn.kind, yarn.original_context) == ("yarn", 2048)
    assert yarn.attention_factor == pytest.approx(1 + 0.1 * math.log(4))
    factors = rope({}, SMOLLM2_TENSORS | {"rope_freqs.weight": (32,)}, rope_factors=[1.0] * 16 + [8.0] * 16)
    assert factors.kind == "factors" and factors.factors[31] == 8.0
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        rope({}, SMOLLM2_TENSORS | {"rope_freqs.weight": (32,)})
    with pytest.raises(ConfigError, match=r"3 frequency factors.*expected 32"):
        rope({}, SMOLLM2_TENSORS | {"rope_freqs.weight": (3,)}, rope_factors=[1.0] * 3)
    with pytest.raises(ConfigError, match=r"llama\.rope\.scaling\.type is 'longrope'"):
        rope({"type": "longrope"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"general.architecture": "mamba"}, r"general.architecture is 'mamba'.*supported: llama, qwen2"),
        ({"general.architecture": None}, r"general.architecture is missing"),
        ({"llama.block_count": None}, r"llama.block_count is missing; expected a whole number"),
        ({"llama.block_count": 0}, r"llama.block_count is 0; expected a whole number from 1"),
        ({"llama.block_count": 2**40}, r"llama.block_count is \d+; expected a whole number from 1 to 4096"),
        ({"llama.block_count": "30"}, r"llama.block_count is '30'"),
        ({"llama.embedding_length": 577}, r"token_embd.weight has shape \(49152, 576\).*embedding_length is 577"),
        ({"llama.attention.head_count": 7}, r"llama.attention.head_count is 7; expected a divisor"),
        ({"llama.attention.head_count_kv": 2}, r"9 heads cannot share 2"),
        ({"llama.attention.head_count_kv": [3, 1]}, r"head_count_kv is \[3, 1\]; expected the same"),
        ({"llama.attention.key_length": 64, "llama.attention.value_length": 32}, r"value_length is 32; expected 64"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, r"layer_norm_rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, r"layer_norm_rms_epsilon is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, r"norm eps"),
        ({"llama.rope.freq_base": 0.0}, r"base must be a number over 1"),
        ({"llama.rope.dimension_count": 65}, r"even and at least 2, got 65"),
        ({"llama.rope.dimension_count": 66}, r"66 rotated dimensions do not fit a head of 64"),
        ({"llama.vocab_size": 49000}, r"llama.vocab_size is 49000; expected 49152"),
        ({"llama.expert_count": 8}, r"mixtures of experts are not supported"),
        ({"llama.context_length": None}, r"llama.context_length is missing"),
    ],
)
def test_gguf_errors_name_the_key(change, text):
    metadata = {key: value for key, value in (SMOLLM2 | change).items() if value is not None}
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_gguf(metadata, SMOLLM2_TENSORS)


def test_gguf_without_embedding_table():
    with pytest.raises(ConfigError, match=r"token_embd\.weight is missing"):
        ModelConfig.from_gguf(SMOLLM2, {})


@pytest.mark.parametrize("name", tiny.NAMES)
def test_json_old_and_new_spelling_agree(name):
    case = tiny.load(name)
    new = ModelConfig.from_json(case.json_new)
    assert dataclasses.replace(new, name="") == case.config


def test_json_gemma3_with_pictures_and_defaults():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = ModelConfig.from_json({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (8, 4, 256, 262_208)
    assert config.rope is not None and config.rope.scaling is not None and config.rope.scaling.factor == 8.0
    assert config.rope.local_base == 1e4 and config.tied_head and config.norm_offset == 1.0
    with pytest.raises(ConfigError, match="text_config is missing"):
        ModelConfig.from_json({"model_type": "gemma3"})


LLAMA_JSON = tiny.load("llama").json


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "bert"}, r"model_type is 'bert'.*supported: llama, mistral, qwen2"),
        ({"model_type": None}, r"model_type is missing"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"hidden_size": 72.5}, r"hidden_size is 72.5; expected a whole number"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; expected one of silu"),
        ({"rms_norm_eps": None}, r"rms_norm_eps is missing"),
        ({"rope_scaling": {"type": "su"}}, r"rope_type is 'su'; expected default, linear"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor is missing"),
        ({"rope_scaling": "yarn"}, r"rope_scaling is 'yarn'; expected an object or null"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes'; expected true or false"),
        ({"num_local_experts": 8}, r"mixtures of experts"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}, r"max_window_layers is None"),
        (
            {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"]},
            r"layer_types is .*2 entr",
        ),
    ],
)
def test_json_errors_name_the_key(change, text):
    with pytest.raises(ConfigError, match=text):
        ModelConfig.from_json({key: value for key, value in (LLAMA_JSON | change).items() if value is not None})


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_hf_tensor_has_its_place(name):
    case = tiny.load(name)
    table, sources = tensor_table(case.config), hf_sources(case.config, case.hf_shapes)
    assert sources.keys() == table.keys()
    for canonical, source in sources.items():
        assert source.take(np.zeros(case.hf_shapes[source.name], np.float32)).shape == table[canonical], canonical
    stored = {
        n: math.prod(s) for n, s in case.hf_shapes.items() if not (case.config.tied_head and n == "lm_head.weight")
    }
    assert parameters_by_part(case.config)["total"] == sum(stored.values())


def test_names_both_ways():
    for name in ("llama_biased", "gemma3", "gpt2"):
        config = tiny.load(name).config
        for canonical in tensor_table(config):
            assert canonical in gguf_canonical(config, gguf_source(config, canonical).name)
            assert canonical in hf_canonical(config, hf_source(config, canonical).name)
    gemma = tiny.load("gemma3").config
    assert hf_canonical(gemma, "model.layers.6.post_attention_layernorm.weight") == ("blocks.6.attn_post_norm",)
    assert gguf_canonical(gemma, "blk.6.post_ffw_norm.weight") == ("blocks.6.ffn_post_norm",)
    assert hf_source(gemma, "blocks.0.q_norm").offset == 1.0 and hf_source(gemma, "blocks.0.q").offset == 0.0
    llama = tiny.load("llama").config
    assert hf_canonical(llama, "model.layers.0.post_attention_layernorm.weight") == ("blocks.0.ffn_norm",)
    assert hf_canonical(llama, "model.layers.0.mlp.experts.0.w1") == ()
    gpt2 = tiny.load("gpt2").config
    assert gguf_canonical(gpt2, "blk.1.attn_qkv.bias") == ("blocks.1.q_bias", "blocks.1.k_bias", "blocks.1.v_bias")


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_hf_prefixes(prefix):
    case = tiny.load("gemma3")
    names = {n.replace("model.", prefix, 1) for n in case.hf_shapes if n != "lm_head.weight"}
    names |= {"vision_tower.vision_model.post_layernorm.weight"} if prefix else set()
    assert hf_sources(case.config, names)["norm"].name == prefix + "norm.weight"


def test_tensor_lists_that_do_not_match():
    config = tiny.load("llama").config
    names = set(tiny.load("llama").hf_shapes)
    with pytest.raises(ConfigError, match=r"1 missing: model.layers.1.self_attn.k_proj.weight; 1 unexpected: extra"):
        hf_sources(config, names - {"model.layers.1.self_attn.k_proj.weight"} | {"extra"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):  # not tied: its absence is not filled in
        hf_sources(config, names - {"lm_head.weight"})
    with pytest.raises(ConfigError, match=r"found 0; is this a llama model"):
        hf_sources(config, {"bert.embeddings.word_embeddings.weight"})
    gguf = {gguf_source(config, canonical).name for canonical in tensor_table(config)}
    assert len(gguf_sources(config, gguf | {"rope_freqs.weight"})) == len(gguf)
    with pytest.raises(ConfigError, match=r"unexpected: blk.0.ffn_gate_exps.weight"):
        gguf_sources(config, gguf | {"blk.0.ffn_gate_exps.weight"})


def test_costs_by_hand():
    config = ModelConfig.from_gguf(SMOLLM2, SMOLLM2_TENSORS)
    weights = 30 * (576 * 576 * 2 + 192 * 576 * 2 + 3 * 1536 * 576)
    assert weights == parameters_by_part(config)["attention"] + parameters_by_part(config)["mlp"]
    head = 49152 * 576
    assert flops_per_token(config, phase="decode", context=100) == 2 * (weights + head) + 30 * 9 * 64 * 100 * 4
    whole = 2 * weights * 100 + 2 * head + 30 * 9 * 64 * 4 * (100 * 101 // 2)
    assert flops_per_token(config, phase="prefill", context=100) * 100 == pytest.approx(whole, rel=1e-12)
    assert kv_bytes(config, 8192) == 2 * 30 * 3 * 64 * 8192 * 2 == kv_bytes(config, 8192, "f32") // 2
    gemma = ModelConfig.from_gguf(GEMMA3, GEMMA3_TENSORS)  # three global layers see everything, fifteen 512 at most
    more = flops_per_token(gemma, phase="decode", context=2000) - flops_per_token(gemma, phase="decode", context=1000)
    assert more == 3 * 1000 * 4 * 1024 * 4 / 4
    with pytest.raises(ValueError, match="phase must be"):
        flops_per_token(gemma, phase="train", context=5)
    with pytest.raises(ValueError, match="'q8_0' is not a cache type"):
        kv_bytes(gemma, 10, "q8_0")
