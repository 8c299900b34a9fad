"""SamplingOptions: what is refused, and in which words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nn.generate.options import SamplingOptions


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -0.1}, "temperature must be from 0 to 100, got -0.1; 0 takes the most likely token"),
        ({"temperature": 101}, "temperature must be from 0 to 100, got 101"),
        ({"temperature": math.nan}, "temperature must be a number, got nan"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_k": -1}, "top_k must be from 0 to 2.14748e+09, got -1; 0 is off"),
        ({"top_k": 2**31}, "top_k must be from 0 to 2.14748e+09, got 2147483648"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_p": 0.0}, "top_p must be over 0, got 0: it would keep no token"),
        ({"top_p": 1.01}, "top_p must be from 0 to 1, got 1.01; 1 is off"),
        ({"min_p": -0.5}, "min_p must be from 0 to 1, got -0.5; 0 is off"),
        ({"min_p": math.inf}, "min_p must be a number, got inf"),
        ({"repeat_penalty": 0}, "repeat_penalty must be from 0.001 to 1000, got 0; 1 is off"),
        ({"presence_penalty": 1000}, "presence_penalty must be from -100 to 100, got 1000; 0 is off"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty must be a number, got -inf"),
        ({"max_tokens": 0}, "max_tokens must be a whole number over 0, got 0; None is until the context is full"),
        ({"max_tokens": 2.0}, "max_tokens must be a whole number over 0, got 2.0"),
        ({"max_tokens": True}, "max_tokens must be a whole number over 0, got True"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2^32 - 1, got -1; None draws one from the system"),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 2^32 - 1, got 4294967296"),
        ({"seed": "x"}, "seed must be a whole number from 0 to 2^32 - 1, got 'x'"),
        ({"seed": False}, "seed must be a whole number from 0 to 2^32 - 1, got False"),
        ({"stop": ""}, "stop must be a non-empty string or several, got ''; () is none"),
        ({"stop": ("a", "")}, "stop must be a non-empty string or several, got ('a', '')"),
        ({"stop": ("a", 5)}, "stop must be a non-empty string or several, got ('a', 5)"),
        ({"stop": 5}, "stop must be a non-empty string or several, got 5"),
        ({"stop": b"ab"}, "stop must be a non-empty string or several, got b'ab'"),
        ({"stop": None}, "stop must be a non-empty string or several, got None"),
        ({"logprobs": 1}, "logprobs must be True or False, got 1"),
        ({"logit_bias": [3]}, "logit_bias must map token ids to numbers, got [3]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: -1: 1.0 is not a token id with a finite number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: 'a': 1.0 is not a token id"),
        ({"logit_bias": {3: math.inf}}, "logit_bias: 3: inf is not a token id with a finite number"),
        ({"logit_bias": {3: "x"}}, "logit_bias: 3: 'x' is not a token id with a finite number"),
    ],
    ids=str,
)
def test_refused(given, words):
    with pytest.raises(ValueError) as error:
        SamplingOptions(**given)
    assert str(error.value).startswith(words)


def test_limits_are_allowed():
    SamplingOptions(0, 0, 1, 0)
    SamplingOptions(100, 2**31 - 1, 1e-9, 1.0, 1e-3, -100, 100, {0: -5}, 2**32 - 1, 1)
    assert SamplingOptions(stop="END").stop == ("END",)
    assert SamplingOptions(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingOptions(stop=(text for text in "ab")).stop == ("a", "b")
    numbers = SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(7), max_tokens=np.int32(2))
    assert (numbers.temperature, numbers.top_k, numbers.seed, numbers.max_tokens) == (0.5, 3, 7, 2)
