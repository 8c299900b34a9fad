"""The truth for language models: every family's forward pass in float64 NumPy, written from the formulas, no cache.

It is slow and plain on purpose. Weights are the canonical parameters of `nn.models.names` in any NumPy float type.
Itself checked against Hugging Face transformers: tests/check/test_reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from nn.models.config import ModelConfig, Rope, tensor_table
from nn.models.rope import plain_frequencies, rope_frequencies

Weights = Mapping[str, np.ndarray]


def forward(
    config: ModelConfig,
    weights: Weights,
    ids: Sequence[int] | np.ndarray,
    *,
    context: int | None = None,
    rows: Sequence[int] | None = None,
) -> np.ndarray:
    """Logits after every token, or after those whose positions are in `rows`.

    Args:
        weights: canonical name -> array, as `tensor_table(config)` lists them (missing biases are an error).
        ids: (T,) token ids.
        context: length that "dynamic" rope scaling stretches for; T if not given.
    Returns: (T, vocab) float64, or (len(rows), vocab).
    """
    x = hidden(config, weights, ids, context=context)
    if rows is not None:
        x = x[list(rows)]
    head = weights["embed" if config.tied_head else "head"]
    return softcap(_matmul(x, head), config.final_softcap)


def hidden(
    config: ModelConfig, weights: Weights, ids: Sequence[int] | np.ndarray, *, context: int | None = None
) -> np.ndarray:
    """The last layer's output after the final norm: (T, dim) float64. Arguments as for `forward`."""
    ids = np.asarray(ids, dtype=np.int64)
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0 or ids.max() >= config.vocab:
        raise ValueError(f"reference: ids must be a row of numbers from 0 to {config.vocab - 1}, got {ids}")
    missing = tensor_table(config).keys() - weights.keys()
    if missing:
        raise KeyError(f"reference: {len(missing)} parameters are missing: {', '.join(sorted(missing)[:5])}")
    x = np.asarray(weights["embed"][ids], dtype=np.float64) * config.embedding_scale  # (T, C)
    if config.rope is None:
        x = x + np.asarray(weights["positions"][: len(ids)], dtype=np.float64)
    for layer in range(config.layers):
        x = block(config, weights, layer, x, context=context or len(ids))
    return _norm(config, weights, "norm", x)


def block(config: ModelConfig, weights: Weights, layer: int, x: np.ndarray, *, context: int) -> np.ndarray:
    """One layer on x (T, C): x + attention(norm x), then x + mlp(norm x), with Gemma's norms after each."""
    name = f"blocks.{layer}."
    a = attention(config, weights, layer, _norm(config, weights, name + "attn_norm", x), context=context)
    if config.sandwich_norm:
        a = _norm(config, weights, name + "attn_post_norm", a)
    x = x + a
    m = mlp(config, weights, layer, _norm(config, weights, name + "ffn_norm", x))
    if config.sandwich_norm:
        m = _norm(config, weights, name + "ffn_post_norm", m)
    return x + m


def attention(config: ModelConfig, weights: Weights, layer: int, x: np.ndarray, *, context: int) -> np.ndarray:
    """Causal grouped-query attention of one layer on normed x (T, C), output projection included."""
    c, name, tokens = config, f"blocks.{layer}.", len(x)
    q = _linear(weights, name + "q", x, c.qkv_bias).reshape(tokens, c.heads, c.head_dim)
    k = _linear(weights, name + "k", x, c.qkv_bias).reshape(tokens, c.kv_heads, c.head_dim)
    v = _linear(weights, name + "v", x, c.qkv_bias).reshape(tokens, c.kv_heads, c.head_dim)
    if c.qk_norm:
        q = rms_norm(q, weights[name + "q_norm"], eps=c.norm_eps)
        k = rms_norm(k, weights[name + "k_norm"], eps=c.norm_eps)
    if c.rope is not None:
        cos, sin = _angles(c.rope, tokens, context, local=c.layer_local_rope(layer))
        q = rotate(q, cos, sin, pairing=c.rope.pairing)
        k = rotate(k, cos, sin, pairing=c.rope.pairing)
    out = attend(
        q, k, v, scale=c.attention_scale, window=c.layer_window(layer), cap=c.attention_softcap
    )  # (T, heads, head_dim)
    return _linear(weights, name + "o", out.reshape(tokens, c.q_dim), c.out_bias)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, window: int | None = None, cap: float | None = None
) -> np.ndarray:
    """Causal softmax(scale q.k) v. q (T, H, D), k and v (S, Hkv, D), S >= T: query t sits at position S - T + t.

    Query head h reads key/value head h // (H / Hkv). A window of W lets a query see its own position and W - 1 before.
    """
    positions = np.arange(len(k) - len(q), len(k))[:, None]  # of the queries, (T, 1)
    keys = np.arange(len(k))[None, :]
    seen = keys <= positions
    if window is not None:
        seen &= keys > positions - window
    out = np.empty((len(q), q.shape[1], v.shape[2]))
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        scores = np.where(seen, softcap(scale * (q[:, h] @ k[:, g].T), cap), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = weights / weights.sum(axis=1, keepdims=True) @ v[:, g]
    return out


def mlp(config: ModelConfig, weights: Weights, layer: int, x: np.ndarray) -> np.ndarray:
    """down(act(gate x) * up x), or down(act(up x)) without a gate; x (T, C) is normed."""
    name = f"blocks.{layer}."
    up = _linear(weights, name + "up", x, config.mlp_bias)
    if config.gated_mlp:
        inner = activate(config.activation, _linear(weights, name + "gate", x, config.mlp_bias)) * up
    else:
        inner = activate(config.activation, up)
    return _linear(weights, name + "down", inner, config.mlp_bias)


def rms_norm(x: np.ndarray, weight: np.ndarray, *, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(weight, dtype=np.float64)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, eps: float) -> np.ndarray:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(centred, weight, eps=eps) + np.asarray(bias, dtype=np.float64)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, pairing: str) -> np.ndarray:
    """Turn pairs (a, b) of the first R features to (a cos - b sin, b cos + a sin). x (T, H, D); cos, sin (T, R/2).

    "neox": a, b are features i and i + R/2; "interleaved": 2i and 2i + 1.
    """
    half = cos.shape[1]
    a_at, b_at = (slice(0, half), slice(half, 2 * half))
    if pairing == "interleaved":
        a_at, b_at = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = x[..., a_at], x[..., b_at]
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[..., a_at] = a * cos - b * sin
    out[..., b_at] = b * cos + a * sin
    return out


def activate(kind: str, x: np.ndarray) -> np.ndarray:
    """silu: x / (1 + e^-x); gelu: x Phi(x); gelu_tanh: its tanh approximation (Hendrycks & Gimpel 2016)."""
    if kind == "silu":
        return x * 0.5 * (1.0 + np.tanh(0.5 * x))  # the sigmoid, without overflow
    if kind == "gelu":
        return x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0)))
    if kind == "gelu_tanh":
        return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    raise ValueError(f"reference: activation {kind!r} is not known")


def softcap(x: np.ndarray, cap: float | None) -> np.ndarray:
    """cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * np.tanh(x / cap)


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 parameters for a small test model: the same numbers for the same config and seed on every machine.

    Matrices keep the size of what passes through them, norm factors scatter around 1, so that no term of a formula
    can be left out unnoticed.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_table(config).items():
        values = rng.standard_normal(shape)
        if name.endswith("_bias"):
            values *= 0.3
        elif name.endswith("norm"):
            values = 1.0 + 0.3 * values
        elif name not in ("embed", "positions"):
            values *= 1.5 / math.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def _angles(rope: Rope, tokens: int, context: int, *, local: bool) -> tuple[np.ndarray, np.ndarray]:
    if local and rope.local_base is not None:
        frequencies, scale = plain_frequencies(rope.local_base, rope.dims), 1.0
    else:
        frequencies, scale = rope_frequencies(rope, context)
    angles = np.arange(tokens, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles) * scale, np.sin(angles) * scale


def _norm(config: ModelConfig, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    if config.norm == "layer":
        return layer_norm(x, weights[name], weights[name + "_bias"], eps=config.norm_eps)
    return rms_norm(x, weights[name], eps=config.norm_eps)


def _linear(weights: Weights, name: str, x: np.ndarray, bias: bool) -> np.ndarray:
    y = _matmul(x, weights[name])
    return y + np.asarray(weights[name + "_bias"], dtype=np.float64) if bias else y


def _matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x W^T in float64, a few thousand rows of W at a time: a whole vocabulary in float64 would take gigabytes."""
    parts = [x @ np.asarray(weight[i : i + 8192], dtype=np.float64).T for i in range(0, len(weight), 8192)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
