"""Readers that fill a ModelConfig: GGUF metadata (llama.cpp's keys) and config.json (Hugging Face's keys).

Every key is asked for by name, so that a missing or contradictory one is named in the error. Sources: the GGUF
specification's key list and transformers' configuration classes (defaults where a config.json may leave a key out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nn.models.config import ConfigError, ModelConfig, Rope, RopeScaling

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")
JSON_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "gpt2")
JSON_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
# What transformers assumes where a Gemma 3 config.json is silent (the 4b file leaves out most of these).
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
MAX_NUMBER = 1e37  # float32 ends soon after
GEMMA3_PATTERN = 6  # five sliding layers, then a global one
GEMMA3_LOCAL_BASE = 1e4
GEMMA3_27B_LAYERS = 62  # the one size whose query scale is not 1 / sqrt(head size), and GGUF has no key for it


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value from a file as an error may show it, however large it is."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class _Keys:
    """A mapping whose lookups check presence and type and name the key when they fail."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def fail(self, key: str, got: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.prefix + key} is {shown(got)}; expected {wanted}")

    def raw(self, key: str) -> Any:
        value: Any = self.values.get(self.prefix + key)
        return value.tolist() if hasattr(value, "tolist") else value  # NumPy numbers and arrays

    def _need(self, key: str, default: Any, wanted: str) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {self.prefix + key} is missing; expected {wanted}")
        return value

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        wanted = f"a whole number from 1 to {most}"
        value = self._need(key, default, wanted)
        if isinstance(value, (list, tuple)):  # one for each layer
            if not value or any(v != value[0] for v in value):
                raise self.fail(key, value, "the same whole number for every layer")
            value = value[0]
        if not _is_number(value) or not 1 <= value <= most or int(value) != value:
            raise self.fail(key, value, wanted)
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._need(key, default, "a number")
        if not _is_number(value) or not abs(value) < MAX_NUMBER:
            raise self.fail(key, value, "a finite number")
        return float(value)

    def optional(self, key: str) -> float | None:
        return None if self.raw(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise self.fail(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._need(key, default, "a text")
        if not isinstance(value, str):
            raise self.fail(key, value, "a text")
        return value


# ---------------------------------------------------------------------------------------------------------------- GGUF


def from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], *, rope_factors: Sequence[float] | None = None
) -> ModelConfig:
    """See ModelConfig.from_gguf."""
    arch = _Keys(metadata, "GGUF").text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"GGUF: general.architecture is {arch!r}, which is not supported; "
            f"supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    keys = _Keys(metadata, "GGUF", arch + ".")
    if keys.raw("expert_count"):
        raise keys.fail("expert_count", keys.raw("expert_count"), "none: mixtures of experts are not supported")
    vocab, dim = _gguf_embedding(keys, tensors)
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    head_dim = _gguf_head_dim(keys, dim, heads)
    layers = keys.integer("block_count", most=4096)
    gpt2, gemma = arch == "gpt2", arch == "gemma3"
    window = None if keys.raw("attention.sliding_window") in (None, 0) else keys.integer("attention.sliding_window")
    if gemma and window is None:
        raise ConfigError("GGUF: gemma3.attention.sliding_window is missing; expected a whole number over 0")
    qk_scale = head_dim
    if gemma and layers == GEMMA3_27B_LAYERS:
        qk_scale = dim // heads
    return ModelConfig(
        family=arch,
        layers=layers,
        dim=dim,
        ffn_dim=keys.integer("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        context_max=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"),
        rope=None if gpt2 else _gguf_rope(keys, arch, head_dim, tensors, rope_factors),
        norm="layer" if gpt2 else "rms",
        activation="gelu_tanh" if gpt2 or gemma else "silu",
        gated_mlp=not gpt2,
        attention_scale=1.0 / math.sqrt(qk_scale),
        window=window,
        sliding=_gguf_sliding(keys, gemma, layers, window),
        attention_softcap=keys.optional("attn_logit_softcapping"),
        final_softcap=keys.optional("final_logit_softcapping"),
        embedding_scale=math.sqrt(dim) if gemma else 1.0,
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=arch in ("qwen3", "gemma3"),
        sandwich_norm=gemma,
        name=str(metadata.get("general.name") or ""),
    )


def _gguf_embedding(keys: _Keys, tensors: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """(vocabulary, width), checked against the embedding table and the vocabulary key."""
    dim = keys.integer("embedding_length")
    shape = tensors.get("token_embd.weight")
    if shape is None:
        raise ConfigError("GGUF: tensor token_embd.weight is missing; a language model needs its embedding table")
    if len(shape) != 2 or shape[1] != dim:
        raise ConfigError(
            f"GGUF: token_embd.weight has shape {tuple(shape)}, but {keys.prefix}embedding_length is {dim}; "
            f"expected (vocabulary, {dim})"
        )
    vocab = int(shape[0])
    if keys.raw("vocab_size") is not None and keys.integer("vocab_size") != vocab:
        raise keys.fail("vocab_size", keys.raw("vocab_size"), f"{vocab}, the rows of token_embd.weight")
    return vocab, dim


def _gguf_head_dim(keys: _Keys, dim: int, heads: int) -> int:
    if keys.raw("attention.key_length") is None:
        if dim % heads:
            raise keys.fail("attention.head_count", heads, f"a divisor of embedding_length {dim}, or a key_length")
        return dim // heads
    head_dim = keys.integer("attention.key_length")
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise keys.fail("attention.value_length", value_dim, f"{head_dim}, as attention.key_length")
    return head_dim


def _gguf_sliding(keys: _Keys, gemma: bool, layers: int, window: int | None) -> tuple[bool, ...]:
    pattern = keys.raw("attention.sliding_window_pattern")
    if window is None:
        return (False,) * layers
    if pattern is None:
        pattern = GEMMA3_PATTERN if gemma else 0
    if isinstance(pattern, (list, tuple)):
        if len(pattern) != layers or any(p not in (0, 1) for p in pattern):
            raise keys.fail("attention.sliding_window_pattern", pattern, f"{layers} entries, one a layer, each 0 or 1")
        return tuple(bool(p) for p in pattern)
    if not _is_number(pattern) or pattern not in range(4097):
        raise keys.fail("attention.sliding_window_pattern", pattern, "a whole number up to 4096, or one entry a layer")
    return tuple(_is_sliding(i, int(pattern)) for i in range(layers))


def _is_sliding(layer: int, pattern: int) -> bool:
    """Whether a layer slides when every `pattern`-th one is global; 0: all slide."""
    return pattern == 0 or (layer + 1) % pattern != 0


def _gguf_rope(
    keys: _Keys, arch: str, head_dim: int, tensors: Mapping[str, Sequence[int]], factors: Sequence[float] | None
) -> Rope:
    scaling = None
    kind = keys.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        if factors is None:
            raise ConfigError(
                "GGUF: the file scales its rotary frequencies by the tensor rope_freqs.weight; "
                "pass its values as rope_factors"
            )
        if kind not in ("none", "linear", "llama3"):
            raise keys.fail("rope.scaling.type", kind, "none: the file has rope_freqs.weight as well")
        scaling = RopeScaling("factors", factors=tuple(float(f) for f in factors))
    elif kind == "linear":
        scaling = RopeScaling("linear", factor=keys.number("rope.scaling.factor"))
    elif kind == "yarn":
        factor = keys.number("rope.scaling.factor")
        attention = keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0))
        scaling = RopeScaling(
            "yarn",
            factor=factor,
            original_context=keys.integer("rope.scaling.original_context_length"),
            attention_factor=attention * (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    elif kind != "none":
        raise keys.fail("rope.scaling.type", kind, "none, linear, yarn, or the tensor rope_freqs.weight")
    local = keys.number("rope.freq_base_swa", GEMMA3_LOCAL_BASE) if arch == "gemma3" else None
    return Rope(
        base=keys.number("rope.freq_base", 1e6 if arch == "gemma3" else 1e4),
        dims=keys.integer("rope.dimension_count", head_dim),
        pairing="interleaved" if arch == "llama" else "neox",
        local_base=local,
        scaling=scaling,
    )


# --------------------------------------------------------------------------------------------------------- config.json


def from_json(config: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_json."""
    kind = _Keys(config, "config.json").text("model_type")
    if kind not in JSON_TYPES:
        raise ConfigError(
            f"config.json: model_type is {kind!r}, which is not supported; supported: {', '.join(JSON_TYPES)}"
        )
    if kind == "gpt2":
        return _gpt2_json(_Keys(config, "config.json"))
    if kind == "gemma3":  # with pictures: the language part has its own section
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: text_config is missing; a gemma3 model describes its language part there")
        config = {"architectures": config.get("architectures"), **text}
    if kind.startswith("gemma3"):
        config = GEMMA3_DEFAULTS | {key: value for key, value in config.items() if value is not None}
    keys = _Keys(config, "config.json")
    if keys.raw("num_local_experts") or keys.raw("num_experts"):
        raise ConfigError("config.json: num_experts is set; mixtures of experts are not supported")
    family = {"mistral": "llama", "gemma3_text": "gemma3"}.get(kind, kind)
    gemma = family == "gemma3"
    dim, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers", most=4096)
    head_dim = _json_head_dim(keys, dim, heads)
    window, sliding = _json_sliding(keys, kind, layers)
    # The only biases that are not switchable by key: Qwen2 has them on q, k, v.
    attention_bias = keys.flag("attention_bias", False)
    return ModelConfig(
        family=family,
        layers=layers,
        dim=dim,
        ffn_dim=keys.integer("intermediate_size"),
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab=keys.integer("vocab_size"),
        context_max=_json_context(keys),
        norm_eps=keys.number("rms_norm_eps"),
        rope=_json_rope(keys, head_dim, gemma),
        activation=_json_activation(keys, "hidden_activation" if gemma else "hidden_act", None if gemma else "silu"),
        attention_scale=1.0 / math.sqrt(keys.number("query_pre_attn_scalar") if gemma else head_dim),
        window=window,
        sliding=sliding,
        attention_softcap=keys.optional("attn_logit_softcapping"),
        final_softcap=keys.optional("final_logit_softcapping"),
        embedding_scale=math.sqrt(dim) if gemma else 1.0,
        tied_head=keys.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=keys.flag("mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norm=gemma,
        norm_offset=1.0 if gemma else 0.0,
        name=str(config.get("_name_or_path") or ""),
    )


def _json_head_dim(keys: _Keys, dim: int, heads: int) -> int:
    if keys.raw("head_dim") is not None:
        return keys.integer("head_dim")
    if dim % heads:
        raise keys.fail("num_attention_heads", heads, f"a divisor of hidden_size {dim}, or a head_dim")
    return dim // heads


def _json_activation(keys: _Keys, key: str, default: str | None) -> str:
    name = keys.text(key, default)
    if name not in JSON_ACTIVATIONS:
        raise keys.fail(key, name, f"one of {', '.join(JSON_ACTIVATIONS)}")
    return JSON_ACTIVATIONS[name]


def _json_sliding(keys: _Keys, kind: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    if kind == "llama" or keys.raw("sliding_window") is None:
        return None, (False,) * layers
    if kind in ("qwen2", "qwen3") and not keys.flag("use_sliding_window", False):
        return None, (False,) * layers
    window = keys.integer("sliding_window")
    types = keys.raw("layer_types")
    if types is not None:
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, (list, tuple)) or len(types) != layers or any(t not in [*known] for t in types):
            raise keys.fail("layer_types", types, f"{layers} entries of sliding_attention or full_attention")
        return window, tuple(known[t] for t in types)
    if kind in ("qwen2", "qwen3"):
        first = keys.raw("max_window_layers")
        if not isinstance(first, int) or first < 0:
            raise keys.fail("max_window_layers", first, "a whole number, with use_sliding_window")
        return window, tuple(i >= first for i in range(layers))
    if kind == "mistral":
        return window, (True,) * layers
    pattern = keys.integer("sliding_window_pattern")
    return window, tuple(_is_sliding(i, pattern) for i in range(layers))


def _rope_section(keys: _Keys, section: str | None) -> dict[str, Any]:
    """rope_type, rope_theta and the scaling's numbers in one dict, from the new or the old spelling."""
    new = keys.raw("rope_parameters")
    if isinstance(new, Mapping) and section is not None and isinstance(new.get(section), Mapping):
        new = new[section]
    elif section == "sliding_attention":
        return {"rope_theta": keys.raw("rope_local_base_freq")}
    elif isinstance(new, Mapping) and section is not None:
        new = None if any(isinstance(value, Mapping) for value in new.values()) else new
    found: dict[str, Any] = {
        "rope_theta": keys.raw("rope_theta"),
        "partial_rotary_factor": keys.raw("partial_rotary_factor"),
    }
    old = keys.raw("rope_scaling")
    for part in (old, new):
        if isinstance(part, Mapping):
            found |= {key: value for key, value in part.items() if value is not None}
        elif part is not None:
            raise keys.fail("rope_scaling", part, "an object or null")
    if "rope_type" not in found:
        found["rope_type"] = found.get("type", "default")
    return found


def _json_context(keys: _Keys) -> int:
    """Positions the model is meant for; "dynamic" states the trained length and stretches it by its factor."""
    context = keys.integer("max_position_embeddings")
    section = _rope_section(keys, None)
    if section["rope_type"] == "dynamic":
        factor = _Keys(section, "config.json rope_scaling").number("factor")
        context = int(min(context * factor, 2.0**31))  # ModelConfig refuses what is out of range
    return context


def _json_rope(keys: _Keys, head_dim: int, gemma: bool) -> Rope:
    section = _rope_section(keys, "full_attention" if gemma else None)
    part = _Keys(section, "config.json rope_scaling")
    local = None
    if gemma:
        sliding = _Keys(_rope_section(keys, "sliding_attention"), "config.json rope_parameters.sliding_attention")
        if sliding.text("rope_type", "default") != "default":
            raise sliding.fail("rope_type", sliding.raw("rope_type"), "default")
        local = sliding.number("rope_theta", GEMMA3_LOCAL_BASE)
    return Rope(
        base=part.number("rope_theta", 1e4),
        dims=int(head_dim * _rotary_part(part)),
        local_base=local,
        scaling=_json_scaling(part, keys),
    )


def _rotary_part(part: _Keys) -> float:
    value = part.number("partial_rotary_factor", 1.0)
    if not 0.0 < value <= 1.0:
        raise part.fail("partial_rotary_factor", value, "a number over 0, up to 1")
    return value


def _json_scaling(part: _Keys, keys: _Keys) -> RopeScaling | None:
    kind = part.text("rope_type")
    context = keys.integer("max_position_embeddings")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=part.number("factor"))
    if kind == "ntk":
        return RopeScaling("ntk", factor=part.number("factor"))
    if kind == "dynamic":
        return RopeScaling("dynamic", factor=part.number("factor"), original_context=context)
    original = part.integer("original_max_position_embeddings", keys.raw("original_max_position_embeddings") or context)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=part.number("factor"),
            original_context=original,
            low_freq_factor=part.number("low_freq_factor"),
            high_freq_factor=part.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = part.number("factor", context / original)
        attention = part.optional("attention_factor")
        mscale, mscale_all = part.optional("mscale"), part.optional("mscale_all_dim")
        if attention is None and mscale and mscale_all:
            log = 0.1 * math.log(factor) if factor > 1.0 else 0.0
            below = mscale_all * log + 1.0
            if below <= 0.0:
                raise part.fail("mscale_all_dim", mscale_all, "a number over 0")
            attention = (mscale * log + 1.0) / below
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context=original,
            attention_factor=attention,
            beta_fast=part.optional("beta_fast") or 32.0,
            beta_slow=part.optional("beta_slow") or 1.0,
            truncate=part.flag("truncate", True),
        )
    raise part.fail("rope_type", kind, "default, linear, ntk, dynamic, yarn or llama3")


def _gpt2_json(keys: _Keys) -> ModelConfig:
    if keys.flag("scale_attn_by_inverse_layer_idx", False):
        raise keys.fail("scale_attn_by_inverse_layer_idx", True, "false: this variant is not supported")
    if keys.flag("add_cross_attention", False):
        raise keys.fail("add_cross_attention", True, "false: this variant is not supported")
    dim, heads = keys.integer("n_embd"), keys.integer("n_head")
    if dim % heads:
        raise keys.fail("n_head", heads, f"a divisor of n_embd {dim}")
    return ModelConfig(
        family="gpt2",
        layers=keys.integer("n_layer", most=4096),
        dim=dim,
        ffn_dim=keys.integer("n_inner", 4 * dim),
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        vocab=keys.integer("vocab_size"),
        context_max=keys.integer("n_positions", keys.raw("n_ctx")),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        rope=None,
        norm="layer",
        activation=_json_activation(keys, "activation_function", "gelu_new"),
        gated_mlp=False,
        attention_scale=1.0 / math.sqrt(dim // heads) if keys.flag("scale_attn_weights", True) else 1.0,
        tied_head=keys.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        name=str(keys.raw("_name_or_path") or ""),
    )
