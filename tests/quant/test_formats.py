"""The NumPy side of the storage formats, against the gguf package. Needs no adapter."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from nn.check.quant import random_raw
from nn.quant import FORMATS, dequantize, format_of, quantize

BLOCKED = [name for name, fmt in FORMATS.items() if not fmt.dense]
MADE = [name for name, fmt in FORMATS.items() if fmt.encode]


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    return getattr(gguf.GGMLQuantizationType, name.upper())


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_gguf(name):
    assert gguf.GGML_QUANT_SIZES[ggml_type(name)] == (FORMATS[name].block, FORMATS[name].nbytes)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_gives_the_bits_of_gguf(name, extreme, rng):
    raw = random_raw(rng, name, 37, 768, extreme=extreme)
    want = quants.dequantize(raw, ggml_type(name))
    got = dequantize(raw, name)
    assert got.shape == (37, 768) and np.isfinite(got).all()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_works_through_large_matrices_in_parts(name, rng, monkeypatch):
    monkeypatch.setattr("nn.quant.formats._ROWS_AT_ONCE", 1000)
    raw = random_raw(rng, name, 11, 256)
    np.testing.assert_array_equal(dequantize(raw, name), quants.dequantize(raw, ggml_type(name)))


def test_dequantize_keeps_infinite_scales_without_a_warning():
    raw = np.zeros((1, 34), np.uint8)
    raw[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    raw[0, 2] = 1
    got = dequantize(raw, "q8_0")
    assert got[0, 0] == np.inf and np.isnan(got[0, 1:]).all()


@pytest.mark.parametrize("name", MADE)
def test_quantize_gives_the_bytes_of_gguf(name, rng):
    x = rng.standard_normal((37, 512)).astype(np.float32)
    x[3, 32:64] = 0.0
    x[4, :32] = 1.5
    x[5] *= 1e-3
    with np.errstate(all="ignore"):
        want = quants.quantize(x, ggml_type(name)).view(np.uint8)
    np.testing.assert_array_equal(quantize(x, name), want)


@pytest.mark.parametrize(("name", "steps"), [("q4_0", 8), ("q4_1", 15), ("q5_0", 16), ("q5_1", 31), ("q8_0", 127)])
def test_quantize_round_trip_is_within_half_a_step(name, steps, rng):
    x = rng.uniform(-1.0, 1.0, (5, 64))
    # The scale is an f16 (relative error 2^-11); the symmetric formats lose one step at the end opposite the peak.
    step = (2.0 if name.endswith("_1") else 1.0) / steps
    slack = 1.0 if name in ("q4_0", "q5_0") else 0.5
    assert np.abs(dequantize(quantize(x, name), name) - x).max() <= slack * step + 2.0**-9


def test_bf16_rounds_to_nearest_even_and_keeps_nan():  # CASES 15
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001]], np.uint32)
    got = quantize(bits.view(np.float32), "bf16").view(np.uint16)[0]
    assert [hex(v) for v in got[:4]] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80"]
    assert np.isnan(dequantize(got[None, 4:].view(np.uint8), "bf16")).all()


@pytest.mark.parametrize("name", [name for name in BLOCKED if FORMATS[name].block == 256])
def test_rows_of_896_are_refused_by_the_k_formats(name):  # CASES 17
    with pytest.raises(
        ValueError, match=f"format {name}: rows of 896 weights do not divide into its blocks of 256; use"
    ):
        quantize(np.zeros((2, 896), np.float32), name)


def test_errors_say_what_was_given_and_what_to_do():
    with pytest.raises(ValueError, match="'iq2_xs' is not known; known are f32, f16"):
        format_of("iq2_xs")
    with pytest.raises(ValueError, match="rows of 33 weights do not divide into its blocks of 32"):
        quantize(np.zeros((1, 33), np.float32), "q8_0")
    with pytest.raises(ValueError, match="q4_k: this format can be read but not made here; use one of f32"):
        quantize(np.zeros((1, 256), np.float32), "q4_k")
    with pytest.raises(ValueError, match=r"dequantize q8_0: got uint8 of shape \(1, 33\); .* a multiple of 34"):
        dequantize(np.zeros((1, 33), np.uint8), "q8_0")
    with pytest.raises(ValueError, match="expected a matrix"):
        quantize(np.zeros(32, np.float32), "q8_0")
