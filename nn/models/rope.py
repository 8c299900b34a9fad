"""Rotary angles: tables of cos and sin for every position, computed in float64, for all supported kinds of scaling.

    angle[t, i] = t * f[i],   f[i] = base^(-2i/R) before scaling,   i = 0 .. R/2 - 1

Kernels read the table, so no scaling rule lives in a shader. Sources: Su et al. 2021, arXiv:2104.09864 (plain); Chen et
al. 2023, arXiv:2306.15595 (linear); bloc97 2023 ("NTK-aware" and "dynamic NTK"); Peng et al. 2023, arXiv:2309.00071
(YaRN); Llama 3.1's reference code (llama3).
"""

from __future__ import annotations

import math

import numpy as np

from nn.models.config import ConfigError, ModelConfig, Rope, RopeScaling

BLOCK = 4096  # positions


def rope_table(config: ModelConfig, context: int, *, local: bool = False) -> np.ndarray:
    """Cos and sin of every position's angles, each times the attention factor.

    Args:
        config: a model with rotary positions.
        context: positions 0 .. context - 1. "dynamic" scaling stretches the base for this length, once for all
            positions, so a cache stays valid while it fills.
        local: the table of sliding layers with their own base (Gemma 3), which is never scaled.
    Returns: float32 (context, R/2, 2): [..., 0] cos, [..., 1] sin.
    Raises: ConfigError for a model without rotary positions, or without a local base where `local` is set.
    """
    rope = config.rope
    if rope is None:
        raise ConfigError(f"rope_table: {config.family} has learned positions, not rotary ones")
    if context < 1:
        raise ValueError(f"rope_table: context must be at least 1 position, got {context}")
    if local:
        if rope.local_base is None:
            raise ConfigError(f"rope_table: this {config.family} model has no local base; all layers share one table")
        frequencies, scale = plain_frequencies(rope.local_base, rope.dims), 1.0
    else:
        frequencies, scale = rope_frequencies(rope, context)
    table = np.empty((context, len(frequencies), 2), np.float32)
    for first in range(0, context, BLOCK):  # float64 of a few positions at a time: contexts can be long
        part = table[first : first + BLOCK]
        angles = np.arange(first, first + len(part), dtype=np.float64)[:, None] * frequencies  # (rows, R/2), radians
        part[..., 0], part[..., 1] = np.cos(angles) * scale, np.sin(angles) * scale
    return table


def plain_frequencies(base: float, dims: int) -> np.ndarray:
    """base^(-2i/R) for i = 0 .. R/2 - 1, float64, radians a position."""
    return base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def rope_frequencies(rope: Rope, context: int) -> tuple[np.ndarray, float]:
    """Scaled frequencies (R/2,) float64 of the global layers, and the factor that multiplies cos and sin."""
    scaling, plain = rope.scaling, plain_frequencies(rope.base, rope.dims)
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        frequencies = plain / scaling.factor
    elif scaling.kind == "ntk":
        frequencies = _stretched(rope, scaling.factor)
    elif scaling.kind == "dynamic":
        length = max(context, scaling.original_context)
        frequencies = _stretched(rope, scaling.factor * length / scaling.original_context - (scaling.factor - 1.0))
    elif scaling.kind == "yarn":
        frequencies = _yarn(rope, scaling, plain)
    elif scaling.kind == "llama3":
        frequencies = _llama3(scaling, plain)
    else:
        frequencies = plain / np.asarray(scaling.factors, dtype=np.float64)
    default = 0.1 * math.log(scaling.factor) + 1.0 if scaling.kind == "yarn" and scaling.factor > 1.0 else 1.0
    return frequencies, default if scaling.attention_factor is None else scaling.attention_factor


def _stretched(rope: Rope, factor: float) -> np.ndarray:
    """Base raised so that the slowest pair turns `factor` times slower and the fastest one is unchanged."""
    if rope.dims < 4:
        raise ConfigError(f"rope: NTK scaling needs at least 4 rotated dimensions, got {rope.dims}")
    return plain_frequencies(rope.base * factor ** (rope.dims / (rope.dims - 2)), rope.dims)


def _yarn(rope: Rope, scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Fast pairs keep their frequency, slow ones are interpolated, with a linear ramp over the pair index between."""

    def pair_of(turns: float) -> float:  # which pair turns this often over the original context
        return rope.dims * math.log(scaling.original_context / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.base))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    ramp = np.clip((np.arange(rope.dims // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return plain * (1.0 - ramp) + plain / scaling.factor * ramp


def _llama3(scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Short waves unchanged, long ones slowed by the factor, smooth between the two wavelengths."""
    turns = scaling.original_context * plain / (2.0 * math.pi)  # over the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return plain * smooth + plain / scaling.factor * (1.0 - smooth)
