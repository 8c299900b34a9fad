"""Choosing the next token on the device: penalties, bias, temperature, top-k, top-p, min-p, and a seeded draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nn.ops.base import Array, Op, ShapeError, Spec
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from gpu import Recorder
    from nn.generate.options import SamplingOptions

SHADER = "sample/sample.wgsl"
WG = 256
IN_PROMPT = np.uint32(0x80000000)
FLAGS = {
    1: "every token is ruled out (all logits are -inf)",
    2: "the model's numbers are broken (NaN or infinity in the logits)",
}


def settings_bytes(options: SamplingOptions) -> bytes:
    """The `settings` buffer of the sampler: 32 bytes, as struct Settings in shaders/sample/sample.wgsl."""
    numbers = np.zeros(8, np.float32)
    numbers[[0, 2, 3, 4, 5, 6]] = (
        options.temperature,
        options.top_p,
        options.min_p,
        options.repeat_penalty,
        options.presence_penalty,
        options.frequency_penalty,
    )
    words = numbers.view(np.uint32)
    words[1], words[7] = options.top_k, options.logprobs
    return words.tobytes()


@dataclass(frozen=True)
class SampleToken(Op):
    """logits (1, V) f32, settings (8,), step (4,), seen (V,) u32 [, bias (V,) f32] -> (4,) u32: see `sample_token`."""

    mutates = (3,)

    def infer(self, logits: Spec, settings: Spec, step: Spec, seen: Spec, bias: Spec | None = None) -> Spec:
        vocab = logits.shape[-1]
        if logits.size != vocab or seen.shape != (vocab,) or (bias is not None and bias.shape != (vocab,)):
            raise ShapeError(
                f"sample_token: logits {logits.shape}, seen {seen.shape}, bias {bias and bias.shape}; expected "
                "logits of one row (1, V) and the others (V,)"
            )
        if settings.shape != (8,) or step.shape != (4,):
            raise ShapeError(f"sample_token: settings {settings.shape} and step {step.shape}; expected (8,) and (4,)")
        return Spec((4,), "u32")

    def lower(self, record: Recorder, logits: Array, settings: Array, step: Array, seen: Array, *rest: Array) -> None:
        *bias, result = rest
        vocab, device = logits.cols, record.device
        work, kept = record.temp(4 * vocab), record.temp(8 * vocab)
        entry, extra = ("adjust_biased", {"bias": bias[0].buffer}) if bias else ("adjust", {})
        state = {"settings": settings.buffer, "seen": seen.buffer}
        record(
            device.kernel(SHADER, entry, constants={"WG": WG}),
            -(-vocab // WG),
            logits=logits.buffer,
            work=work,
            vocab=vocab,
            **state,
            **extra,
        )
        record(
            device.kernel(SHADER, "select_token", constants={"WG": WG}),
            1,
            logits=logits.buffer,
            adjusted=work,
            kept=kept,
            step=step.buffer,
            result=result.buffer,
            vocab=vocab,
            **state,
        )


def sample_token(logits: Tensor, settings: Tensor, step: Tensor, seen: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Choose one token from a row of logits.

    Args:
        logits: (1, V) f32.
        settings: (8,) u32, the bytes of `settings_bytes`.
        step: (4,) u32: position, tokens, seed, draw; the same seed and draw give the same token.
        seen: (V,) u32, bit 31 set for tokens of the prompt, below it how often the answer holds the token; the chosen
            token is counted.
        bias: (V,) f32 added to the logits after the penalties.
    Returns: (4,) u32: token, flag (0, or a key of FLAGS), bits of the f32 log-probability under the raw logits (0
        unless asked for), number of tokens that were kept.
    Sources: arXiv:1909.05858 (repetition penalty), arXiv:1904.09751 (top-p), Salmon et al. 2011 (Philox).
    """
    operands = (logits, settings, step, seen) if bias is None else (logits, settings, step, seen, bias)
    return apply(SampleToken(), *operands)


__all__ = ["sample_token", "settings_bytes"]
