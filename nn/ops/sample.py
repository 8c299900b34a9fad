"""Choosing the next token on the device: penalties, bias, temperature, top-k, top-p, min-p, and a seeded draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpu.work import Cost
from nn.ops.base import Array, Op, Progress, ShapeError, Spec, check_step, stored_bytes
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder
    from nn.generate.options import SamplingOptions

SHADER = "sample/sample.wgsl"
WG = 256
BLOCKS = 1024  # most blocks a vocabulary is cut into; the selecting workgroup holds a list of them
IN_PROMPT = np.uint32(0x80000000)
LEAST_TEMPERATURE = 1e-6  # below it logits / temperature leaves f32; one token has all the probability long before
FLAGS = {
    1: "every token is ruled out (all logits are -inf)",
    2: "the model's numbers are broken (NaN or infinity in the logits)",
}


def settings_bytes(options: SamplingOptions) -> bytes:
    """The `settings` buffer of the sampler: 32 bytes, as struct Settings in shaders/sample/sample.wgsl."""
    numbers = np.zeros(8, np.float32)
    numbers[[0, 2, 3, 4, 5, 6]] = (
        options.temperature if options.temperature >= LEAST_TEMPERATURE else 0.0,
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
    """Operands: logits, settings, step, seen, chosen and, optionally, bias; no results. See `sample_token`."""

    group = "sampling"
    mutates = (2, 3, 4)

    def infer(self, *inputs: Spec) -> tuple[Spec, ...]:
        logits, settings, step, seen, chosen, *bias = inputs
        vocab = logits.shape[-1]
        if logits.size != vocab or any(spec.shape != (vocab,) for spec in (seen, *bias)):
            raise ShapeError(
                f"sample_token: logits {logits.shape}, the others {[spec.shape for spec in (seen, *bias)]}; "
                "expected logits of one row (1, V), seen and bias (V,)"
            )
        check_step("sample_token", step)
        if settings.shape != (8,) or len(chosen.shape) != 1 or chosen.size < 4 or chosen.size % 4:
            raise ShapeError(
                f"sample_token: settings {settings.shape}, chosen {chosen.shape}; expected (8,), and (4,) or (4 + 4 R,)"
            )
        return ()

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        """Penalties and temperature over the vocabulary, whose result is written and read once more; the passes of the
        selection over it are not counted. Of `seen` one word is written."""
        logits, settings, step, seen, chosen, *bias = operands
        row = stored_bytes(logits)
        adjusting = row + sum(stored_bytes(spec) for spec in (settings, seen, *bias))
        selecting = row + stored_bytes(settings) + stored_bytes(step)
        told = min(stored_bytes(chosen), 32)  # the token, and its place among the last ones
        return Cost(6 * logits.size, adjusting + selecting, row + told + stored_bytes(step) + 4)

    def lower(self, record: Recorder, *arrays: Array) -> None:
        logits, settings, step, seen, chosen, *bias = arrays
        vocab, device = logits.cols, record.device
        span = -(-vocab // (WG * BLOCKS))  # values an invocation adjusts
        blocks = -(-vocab // (WG * span))
        constants = {"WG": WG, "SPAN": span, "BLOCKS": BLOCKS}
        work, kept = record.temp(4 * (vocab + blocks)), record.temp(8 * vocab)
        entry, extra = ("adjust_biased", {"bias": bias[0].buffer}) if bias else ("adjust", {})
        state = {"settings": settings.buffer, "seen": seen.buffer}
        record(
            device.kernel(SHADER, entry, constants=constants),
            blocks,
            logits=logits.buffer,
            work=work,
            vocab=vocab,
            kept_results=0,
            **state,
            **extra,
        )
        record(
            device.kernel(SHADER, "select_token", constants=constants),
            1,
            logits=logits.buffer,
            adjusted=work,
            kept=kept,
            step=step.buffer,
            result=chosen.buffer,
            vocab=vocab,
            kept_results=chosen.size // 4 - 1,
            **state,
        )


def sample_token(
    logits: Tensor, settings: Tensor, step: Tensor, seen: Tensor, chosen: Tensor, *, bias: Tensor | None = None
) -> None:
    """Choose one token from a row of logits; `chosen`, `seen` and `step` are written in place.

    Args:
        logits: (1, V) f32.
        settings: (8,) u32, the bytes of `settings_bytes`.
        step: (4,) u32: position, tokens, seed, draw; the same seed and draw give the same token. Position and draw go
            up by 1, ready for the next token.
        seen: (V,) u32, bit 31 set for tokens of the prompt, below it how often the answer holds the token; the chosen
            token is counted.
        chosen: (4,) u32: becomes the token, a flag (0, or a key of FLAGS), the bits of the f32 log-probability under
            the unadjusted logits (0 unless asked for), and the number of tokens that were kept. Of (4 + 4 R,) the
            rest are the last R results, that of draw d at 4 + 4 (d % R).
        bias: (V,) f32 added to the logits after the penalties.
    Raises: ShapeError.
    Sources: arXiv:1909.05858 (repetition penalty), arXiv:1904.09751 (top-p), Salmon et al. 2011 (Philox).
    """
    apply(SampleToken(), logits, settings, step, seen, chosen, *(() if bias is None else (bias,)))


__all__ = ["sample_token", "settings_bytes"]
