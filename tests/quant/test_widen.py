"""Widening: the same values in a format with more bits."""

from __future__ import annotations

import numpy as np
import pytest

from nn.quant.formats import dequantize, quantize
from nn.quant.widen import common_format, widen


@pytest.mark.parametrize("format", ["q4_0", "q5_0"])
def test_values_stay_the_same_bit_for_bit(format, rng):
    values = rng.standard_normal((7, 96)).astype(np.float32) * rng.choice([1e-6, 1.0, 3e4], (7, 1)).astype(np.float32)
    raw = quantize(values, format)
    wide = widen(raw, format, "q8_0")
    np.testing.assert_array_equal(dequantize(wide, "q8_0").view(np.uint32), dequantize(raw, format).view(np.uint32))


@pytest.mark.parametrize("format", ["q4_0", "q5_0"])
def test_every_stored_number_and_special_scales(format):
    raw = np.arange(256, dtype=np.uint8)[:, None].repeat(18 if format == "q4_0" else 22, axis=1)
    raw[:, :2] = np.array([0x3C00, 0x0001, 0x8000, 0x7BFF], np.uint16).view(np.uint8).reshape(4, 2)[np.arange(256) % 4]
    want, got = dequantize(raw, format), dequantize(widen(raw, format, "q8_0"), "q8_0")
    np.testing.assert_array_equal(got, want)


def test_which_formats_have_one_in_common():
    assert common_format(["q5_0", "q8_0"]) == "q8_0" == common_format(["q4_0", "q5_0"])
    assert common_format(["q4_k", "q4_k"]) == "q4_k"
    assert common_format(["q4_k", "q6_k"]) is None and common_format(["q4_1", "q8_0"]) is None


def test_a_pair_that_is_not_exact_is_refused():
    with pytest.raises(ValueError, match="q4_1 to q8_0 is not known to be exact"):
        widen(np.zeros((1, 20), np.uint8), "q4_1", "q8_0")
