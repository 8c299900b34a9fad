"""How the next token is chosen: the settings of one request, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real


@dataclass(frozen=True)
class SamplingOptions:
    """Settings of one generation. Order of use: penalties, logit bias, temperature, top-k, top-p, min-p, one draw.

    temperature: divides the logits; 0 (or under 1e-6) takes the most likely token.
    top_k: keep the k most likely, 0 is off. top_p: keep the smallest set with this much probability, 1 is off.
    min_p: keep tokens at least this fraction as likely as the most likely one, 0 is off.
    repeat_penalty: logits of tokens seen in prompt or answer are divided (positive) or multiplied (negative) by it, 1
    is off. presence_penalty, frequency_penalty: subtracted once, and once a time, from tokens of the answer.
    logit_bias: token id -> added logit.
    seed: None draws one from the system. max_tokens: None is until the context is full.
    stop: one string or several that end the answer (and are not part of it); kept as a tuple.
    logprobs: report each token's log-probability.
    Raises ValueError naming the option.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name, low, high, meaning in (
            ("temperature", 0.0, 100.0, "0 takes the most likely token"),
            ("top_k", 0, 2**31 - 1, "0 is off"),
            ("top_p", 0.0, 1.0, "1 is off"),
            ("min_p", 0.0, 1.0, "0 is off"),
            ("repeat_penalty", 1e-3, 1e3, "1 is off"),
            ("presence_penalty", -100.0, 100.0, "0 is off"),
            ("frequency_penalty", -100.0, 100.0, "0 is off"),
        ):
            value = getattr(self, name)
            if not _is_number(value):
                raise ValueError(f"{name} must be a number, got {value!r}; {meaning}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low:g} to {high:g}, got {value!r}; {meaning}")
        if self.top_p == 0.0:
            raise ValueError(
                "top_p must be over 0, got 0: it would keep no token; use temperature 0 for the most likely token"
            )
        if not _is_whole(self.top_k):
            raise ValueError(f"top_k must be a whole number, got {self.top_k!r}; 0 is off")
        if self.max_tokens is not None and not (_is_whole(self.max_tokens) and self.max_tokens > 0):
            raise ValueError(
                f"max_tokens must be a whole number over 0, got {self.max_tokens!r}; None is until the context is full"
            )
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed < 2**32):
            raise ValueError(
                f"seed must be a whole number from 0 to 2^32 - 1, got {self.seed!r}; None draws one from the system"
            )
        one = isinstance(self.stop, str) or not isinstance(self.stop, Iterable)
        stop = (self.stop,) if one else tuple(self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop must be a non-empty string or several, got {self.stop!r}; () is none")
        object.__setattr__(self, "stop", stop)
        if not isinstance(self.logprobs, bool):
            raise ValueError(f"logprobs must be True or False, got {self.logprobs!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}; {{}} is none")
        for token, value in self.logit_bias.items():
            if not (_is_whole(token) and token >= 0 and _is_number(value)):
                raise ValueError(f"logit_bias: {token!r}: {value!r} is not a token id with a finite number")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
