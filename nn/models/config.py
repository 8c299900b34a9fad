"""What a decoder-only language model is made of: one frozen record, filled from GGUF metadata or from config.json.

Everything that a model file, a kernel choice or `anygpu info --model` needs is a field here; nothing else reads the
metadata of a file. The readers are in config_read.py, the names of the parameters in names.py, sizes and costs below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")
SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3", "factors")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
KV_BYTES = {"f32": 4, "f16": 2}
PARTS = ("embedding", "positions", "attention", "mlp", "norms", "head", "rope_factors")
PART_OF = {"embed": "embedding", "positions": "positions", "head": "head"} | {
    leaf: part for part, leaves in (("attention", "qkvo"), ("mlp", ("gate", "up", "down"))) for leaf in leaves
}


class ConfigError(ValueError):
    """A model description that is not supported or contradicts itself; the message names the key."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary angles are stretched past the trained context. Unused numbers keep their defaults.

    kind: "linear" (positions / factor), "ntk" (base * factor^(R/(R-2))), "dynamic" (the same, growing with the context
    past `original_context`), "yarn", "llama3", or "factors" (each frequency divided by a stored number).
    `attention_factor` multiplies cos and sin; None means the kind's own rule (YaRN: 0.1 ln(factor) + 1, else 1).
    """

    kind: str
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise ConfigError(f"rope scaling: kind {self.kind!r} is not supported; supported: {', '.join(SCALINGS)}")
        if not 1e-6 <= self.factor <= 1e6:
            raise ConfigError(f"rope scaling: factor must be a positive number up to 1e6, got {self.factor}")
        if self.attention_factor is not None and not 1e-6 <= self.attention_factor <= 1e6:
            raise ConfigError(
                f"rope scaling: the attention factor must be a positive number up to 1e6, got {self.attention_factor}"
            )
        if self.kind == "yarn" and not (0.0 < self.beta_slow < math.inf and 0.0 < self.beta_fast < math.inf):
            raise ConfigError(
                f"rope scaling: beta_fast and beta_slow must be positive numbers, got {self.beta_fast} and "
                f"{self.beta_slow}"
            )
        if (bad := next((f for f in self.factors if not 1e-6 <= f < math.inf), None)) is not None:
            raise ConfigError(f"rope scaling: frequency factors must be positive numbers, one is {bad}")
        if self.kind in ("dynamic", "yarn", "llama3") and self.original_context < 1:
            raise ConfigError(
                f"rope scaling: kind {self.kind!r} needs the context length of the original training, "
                f"got {self.original_context}"
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0.0:
            raise ConfigError(
                f"rope scaling: llama3 needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `dims` = R, rotated features of a head (the first R); the rest pass through.

    pairing: "neox" pairs feature i with i + R/2, "interleaved" pairs 2i with 2i + 1. Rows of q and k in `llama` GGUF
    files are stored for "interleaved"; every other file is "neox". `local_base`: the base of sliding layers where it
    differs (Gemma 3; those layers are not scaled), else None.
    """

    base: float
    dims: int
    pairing: str = "neox"
    local_base: float | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.pairing not in ("neox", "interleaved"):
            raise ConfigError(f"rope: pairing must be 'neox' or 'interleaved', got {self.pairing!r}")
        if self.dims < 2 or self.dims % 2:
            raise ConfigError(f"rope: rotated dimensions must be even and at least 2, got {self.dims}")
        for name, base in (("base", self.base), ("local base", self.local_base)):
            if base is not None and not (base > 1.0 and math.isfinite(base)):
                raise ConfigError(f"rope: {name} must be a number over 1, got {base}")
        if self.scaling is not None and self.scaling.kind == "factors" and len(self.scaling.factors) != self.dims // 2:
            raise ConfigError(
                f"rope: {len(self.scaling.factors)} frequency factors for {self.dims} rotated dimensions; "
                f"expected {self.dims // 2}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model, family by family the same fields.

    Lengths are element counts. `context_max` is the longest context, with "dynamic" rope scaling the stretched one;
    `window` is how many positions a sliding layer sees, itself included. `norm_offset` is added to the stored norm
    weights on loading (Gemma's safetensors hold w where the model multiplies by 1 + w; GGUF files hold 1 + w); modules
    and `nn.check.reference` always hold the final factor.
    """

    family: str
    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_max: int
    norm_eps: float
    rope: Rope | None  # None: learned positions (gpt2)
    norm: str = "rms"  # or "layer" (mean subtracted, with bias)
    activation: str = "silu"
    gated_mlp: bool = True  # down(act(gate x) * up x); False: down(act(up x))
    attention_scale: float = 0.0  # multiplies q.k; 0 is replaced by 1 / sqrt(head_dim)
    window: int | None = None
    sliding: tuple[bool, ...] = field(default=())  # per layer; () is replaced by all full
    attention_softcap: float | None = None  # c * tanh(score / c)
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each q and k head, before rope
    sandwich_norm: bool = False  # norms after attention and MLP too
    norm_offset: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"model family {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        for key in ("layers", "dim", "ffn_dim", "heads", "kv_heads", "head_dim", "vocab", "context_max"):
            value = getattr(self, key)
            if not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(f"{self.family}: {key} must be a whole number from 1 to 2^31 - 1, got {value!r}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.family}: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if not 0.0 < self.norm_eps < 1.0:
            raise ConfigError(f"{self.family}: norm eps must lie between 0 and 1, got {self.norm_eps}")
        if self.norm not in ("rms", "layer"):
            raise ConfigError(f"{self.family}: norm must be 'rms' or 'layer', got {self.norm!r}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"{self.family}: activation {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        if self.rope is not None and self.rope.dims > self.head_dim:
            raise ConfigError(
                f"{self.family}: {self.rope.dims} rotated dimensions do not fit a head of {self.head_dim}"
            )
        for key in ("attention_softcap", "final_softcap"):
            cap = getattr(self, key)
            if cap is not None and not (cap > 0.0 and math.isfinite(cap)):
                raise ConfigError(f"{self.family}: {key} must be a positive number or absent, got {cap}")
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", 1.0 / math.sqrt(self.head_dim))
        if not self.sliding:
            object.__setattr__(self, "sliding", (False,) * self.layers)
        if len(self.sliding) != self.layers:
            raise ConfigError(f"{self.family}: {len(self.sliding)} layer kinds for {self.layers} layers")
        if any(self.sliding) and (self.window is None or self.window < 1):
            raise ConfigError(f"{self.family}: sliding layers need a window of at least 1, got {self.window}")

    @property
    def q_dim(self) -> int:
        """Columns of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    def layer_window(self, layer: int) -> int | None:
        """Positions that a query of this layer sees, itself included; None: all before it."""
        return self.window if self.sliding[layer] else None

    def layer_local_rope(self, layer: int) -> bool:
        """Whether this layer takes the local rope table (`rope_table(config, n, local=True)`)."""
        return self.sliding[layer] and self.rope is not None and self.rope.local_base is not None

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Sequence[int]],
        *,
        rope_factors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """The config of a GGUF file.

        Args:
            metadata: keys to values (numbers, strings, lists).
            tensors: names to shapes in NumPy order, (rows, columns): the reverse of the order in the file.
            rope_factors: values of the tensor `rope_freqs.weight` where the file has it (Llama 3 scaling).
        Raises: ConfigError naming the key or tensor that is unknown, missing or inconsistent.
        """
        from nn.models.config_read import from_gguf

        return from_gguf(metadata, tensors, rope_factors=rope_factors)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The config of a Hugging Face config.json (old `rope_scaling` and new `rope_parameters` spelling).

        Raises: ConfigError naming the key that is unknown, missing or inconsistent.
        """
        from nn.models.config_read import from_json

        return from_json(config)


def tensor_table(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical parameter names (names.py) and their shapes, (rows, columns) with y = W x; a tied head is absent."""
    c = config
    biased_norm = c.norm == "layer"
    table: dict[str, tuple[int, ...]] = {"embed": (c.vocab, c.dim)}
    if c.rope is None:
        table["positions"] = (c.context_max, c.dim)

    def norm(name: str, size: int, bias: bool = biased_norm) -> None:
        table[name] = (size,)
        if bias:
            table[f"{name}_bias"] = (size,)

    def linear(name: str, rows: int, cols: int, bias: bool) -> None:
        table[name] = (rows, cols)
        if bias:
            table[f"{name}_bias"] = (rows,)

    for i in range(c.layers):
        block = f"blocks.{i}."
        norm(block + "attn_norm", c.dim)
        linear(block + "q", c.q_dim, c.dim, c.qkv_bias)
        linear(block + "k", c.kv_dim, c.dim, c.qkv_bias)
        linear(block + "v", c.kv_dim, c.dim, c.qkv_bias)
        if c.qk_norm:
            norm(block + "q_norm", c.head_dim, False)
            norm(block + "k_norm", c.head_dim, False)
        linear(block + "o", c.dim, c.q_dim, c.out_bias)
        if c.sandwich_norm:
            norm(block + "attn_post_norm", c.dim)
        norm(block + "ffn_norm", c.dim)
        if c.gated_mlp:
            linear(block + "gate", c.ffn_dim, c.dim, c.mlp_bias)
        linear(block + "up", c.ffn_dim, c.dim, c.mlp_bias)
        linear(block + "down", c.dim, c.ffn_dim, c.mlp_bias)
        if c.sandwich_norm:
            norm(block + "ffn_post_norm", c.dim)
    norm("norm", c.dim)
    if not c.tied_head:
        table["head"] = (c.vocab, c.dim)
    return table


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Element counts: embedding, positions, attention, mlp, norms, head (0 if tied), rope factors, total.

    The total equals the number of elements stored in the model's file.
    """
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, shape in tensor_table(config).items():
        leaf = name.rsplit(".", 1)[-1].removesuffix("_bias")
        parts["norms" if leaf.endswith("norm") else PART_OF[leaf]] += math.prod(shape)
    if config.rope is not None and config.rope.scaling is not None:
        parts["rope_factors"] = len(config.rope.scaling.factors)
    return {**parts, "total": sum(parts.values())}


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _seen_sum(context: int, window: int | None) -> int:
    """Sum over the positions 0..context-1 of how many keys each sees."""
    w = _seen(context, window)
    return w * (w + 1) // 2 + (context - w) * w


def flops_per_token(config: ModelConfig, *, phase: str, context: int) -> float:
    """Multiplications and additions of the matrix products of one token.

    phase "decode": one token that sees `context` keys (itself included), with its logits. "prefill": the mean over a
    prompt of `context` tokens with logits for the last one only. Norms, activations and softmax are left out (< 1 %).
    """
    if phase not in ("decode", "prefill"):
        raise ValueError(f"flops_per_token: phase must be 'decode' or 'prefill', got {phase!r}")
    if context < 1:
        raise ValueError(f"flops_per_token: context must be at least 1, got {context}")
    c = config
    weights = c.layers * (2 * c.q_dim * c.dim + 2 * c.kv_dim * c.dim + (3 if c.gated_mlp else 2) * c.ffn_dim * c.dim)
    head = c.vocab * c.dim
    windows = [c.layer_window(i) for i in range(c.layers)]
    if phase == "decode":
        keys = sum(_seen(context, w) for w in windows)
        return float(2 * (weights + head) + 4 * c.q_dim * keys)
    keys_mean = sum(_seen_sum(context, w) for w in windows) / context
    return 2.0 * weights + 2.0 * head / context + 4.0 * c.q_dim * keys_mean


def kv_bytes(config: ModelConfig, context: int, dtype: str = "f16") -> int:
    """Bytes of the key and value caches of all layers for `context` positions; dtype "f16" or "f32"."""
    if dtype not in KV_BYTES:
        raise ValueError(f"kv_bytes: dtype {dtype!r} is not a cache type; use one of {', '.join(KV_BYTES)}")
    return 2 * config.layers * context * config.kv_dim * KV_BYTES[dtype]
