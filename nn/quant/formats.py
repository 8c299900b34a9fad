"""Storage formats of weight matrices: block sizes, decoding and (for the simple ones) encoding in NumPy.

A row of K weights is stored as K / block blocks of `nbytes` bytes each. The block layouts are those of GGUF files
(ggml-common.h of the ggml project describes them); the names are GGUF's type names in lower case. Decoding follows the
formula of each format operation by operation in float32, so the device, whose products are exact as well, gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_NIBBLES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)
_ROWS_AT_ONCE = 1 << 22  # weights decoded or encoded at a time: bounds the temporaries to some 100 MB


@dataclass(frozen=True)
class Format:
    """One storage format: `block` weights in `nbytes` bytes; `decode` turns (n, nbytes) uint8 into (n, block) float32.

    `encode` turns (n, block) float32 into (n, nbytes) uint8, or is None where this package cannot make the format.
    """

    name: str
    block: int
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    encode: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def dense(self) -> bool:
        """True for f32, f16 and bf16, whose blocks are single numbers."""
        return self.block == 1

    def row_bytes(self, cols: int) -> int:
        """Bytes of a stored row of `cols` weights. Raises ValueError where blocks would not fill it."""
        if cols <= 0 or cols % self.block:
            raise ValueError(
                f"format {self.name}: rows of {cols} weights do not divide into its blocks of {self.block}; "
                f"use a width that does, or a format with smaller blocks (q8_0 has 32, f16 any width)"
            )
        return cols // self.block * self.nbytes


def format_of(name: str) -> Format:
    """The format called `name`. Raises ValueError that lists the known ones."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"weight format {name!r} is not known; known are {', '.join(FORMATS)}") from None


def dequantize(raw: np.ndarray, format: str) -> np.ndarray:
    """Decode stored rows: raw (rows, row_bytes) uint8 -> (rows, cols) float32.

    Raises ValueError if the format is unknown or row_bytes is not a whole number of blocks.
    """
    fmt = format_of(format)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] % fmt.nbytes:
        raise ValueError(
            f"dequantize {format}: got {raw.dtype} of shape {raw.shape}; expected uint8 (rows, row_bytes) with "
            f"row_bytes a multiple of {fmt.nbytes}"
        )
    rows, per_row = raw.shape[0], raw.shape[1] // fmt.nbytes
    out = np.empty((rows, per_row * fmt.block), np.float32)
    step = max(1, _ROWS_AT_ONCE // max(1, out.shape[1]))
    with np.errstate(invalid="ignore"):  # infinite scales in a file decode to what they decode to
        for at in range(0, rows, step):
            part = np.ascontiguousarray(raw[at : at + step]).reshape(-1, fmt.nbytes)
            out[at : at + step] = fmt.decode(part).reshape(-1, out.shape[1])
    return out


def quantize(values: np.ndarray, format: str) -> np.ndarray:
    """Encode a float matrix: values (rows, cols) -> (rows, row_bytes) uint8, rounding as ggml's reference code does.

    Raises ValueError if the width does not divide into blocks or the format is decode-only (the K formats).
    """
    fmt = format_of(format)
    if values.ndim != 2:
        raise ValueError(f"quantize {format}: got shape {values.shape}; expected a matrix (rows, cols)")
    out = np.empty((values.shape[0], fmt.row_bytes(values.shape[1])), np.uint8)
    if fmt.encode is None:
        able = ", ".join(f.name for f in FORMATS.values() if f.encode)
        raise ValueError(f"quantize {format}: this format can be read but not made here; use one of {able}")
    step = max(1, _ROWS_AT_ONCE // values.shape[1])
    for at in range(0, values.shape[0], step):
        part = np.ascontiguousarray(values[at : at + step], np.float32).reshape(-1, fmt.block)
        out[at : at + step] = fmt.encode(part).reshape(-1, out.shape[1])
    return out


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 of any shape -> uint16, the upper halves: to nearest with ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(values))


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 -> float32: what the bits of bf16 numbers stand for, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


# Pieces shared by the formats -----------------------------------------------------------------------------------------


def _f16(block_bytes: np.ndarray) -> np.ndarray:
    """(n, 2) bytes of one f16 a block -> (n, 1) float32."""
    return np.ascontiguousarray(block_bytes).view(np.float16).astype(np.float32)


def _split_nibbles(qs: np.ndarray, run: int) -> np.ndarray:
    """Bytes in runs of `run`: the low nibbles of a run, then its high nibbles -> (n, 2 * bytes) uint8."""
    q = qs.reshape(len(qs), -1, 1, run) >> _NIBBLES[:, None]
    return (q & 15).reshape(len(qs), -1)


def _split_pairs(qs: np.ndarray) -> np.ndarray:
    """Bytes in runs of 32, each holding 2 bits of four sub-blocks of 32 weights -> (n, 4 * bytes) uint8."""
    q = qs.reshape(len(qs), -1, 1, 32) >> _PAIRS[:, None]
    return (q & 3).reshape(len(qs), -1)


def _split_bits(mask: np.ndarray) -> np.ndarray:
    """32 bytes, bit s of byte i for weight i of sub-block s -> (n, 256) uint8 of 0 and 1."""
    q = mask.reshape(len(mask), 1, 32) >> _BITS[:, None]
    return (q & 1).reshape(len(mask), -1)


def _signed(q: np.ndarray, zero: int) -> np.ndarray:
    return (q.astype(np.int8) - np.int8(zero)).astype(np.float32)


def q4_k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of q4_k and q5_k: (n, 12) -> scales (n, 8), minimums (n, 8), 6 bits each, uint8."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minimums = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return scales, minimums


def q3_k_scales(packed: np.ndarray) -> np.ndarray:
    """The 12 bytes of q3_k: (n, 12) -> (n, 16) int8 scales in -32..31."""
    low = (packed[:, None, :8] >> _NIBBLES[:, None]).reshape(-1, 16) & 15
    high = (packed[:, None, 8:] >> _PAIRS[:, None]).reshape(-1, 16) & 3
    return (low | (high << 4)).astype(np.int8) - np.int8(32)


# Decoding: (n, nbytes) uint8 -> (n, block) float32 --------------------------------------------------------------------


def _decode_f32(b: np.ndarray) -> np.ndarray:
    return b.view(np.float32)


def _decode_f16(b: np.ndarray) -> np.ndarray:
    return b.view(np.float16).astype(np.float32)


def _decode_bf16(b: np.ndarray) -> np.ndarray:
    return bf16_values(b.view(np.uint16))


def _decode_q4_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * _signed(_split_nibbles(b[:, 2:], 16), 8)


def _decode_q4_1(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * _split_nibbles(b[:, 4:], 16).astype(np.float32) + _f16(b[:, 2:4])


def _q5(qs: np.ndarray, qh: np.ndarray) -> np.ndarray:
    high = np.unpackbits(qh, axis=1, bitorder="little")  # bit i is the fifth bit of weight i
    return _split_nibbles(qs, 16) | (high << 4)


def _decode_q5_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * _signed(_q5(b[:, 6:], b[:, 2:6]), 16)


def _decode_q5_1(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * _q5(b[:, 8:], b[:, 4:8]).astype(np.float32) + _f16(b[:, 2:4])


def _decode_q8_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * b[:, 2:].view(np.int8).astype(np.float32)


def _by_scale(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiply the weights (n, 256) by one scale (n, s) for each run of 256 / s."""
    return (q.reshape(*scale.shape, -1) * scale[..., None]).reshape(len(q), 256)


def _minus(q: np.ndarray, offset: np.ndarray) -> np.ndarray:
    return (q.reshape(*offset.shape, -1) - offset[..., None]).reshape(len(q), 256)


def _decode_q2_k(b: np.ndarray) -> np.ndarray:
    scale = _f16(b[:, 80:82]) * (b[:, :16] & 15).astype(np.float32)
    minimum = _f16(b[:, 82:84]) * (b[:, :16] >> 4).astype(np.float32)
    return _minus(_by_scale(_split_pairs(b[:, 16:80]).astype(np.float32), scale), minimum)


def _decode_q3_k(b: np.ndarray) -> np.ndarray:
    scale = _f16(b[:, 108:110]) * q3_k_scales(b[:, 96:108]).astype(np.float32)
    q = _split_pairs(b[:, 32:96]) | (_split_bits(b[:, :32]) << 2)  # the mask bit set means "do not take 4 off"
    return _by_scale(_signed(q, 4), scale)


def _decode_45_k(b: np.ndarray, q: np.ndarray) -> np.ndarray:
    scales, minimums = q4_k_scales(b[:, 4:16])
    scale, minimum = _f16(b[:, :2]) * scales.astype(np.float32), _f16(b[:, 2:4]) * minimums.astype(np.float32)
    return _minus(_by_scale(q.astype(np.float32), scale), minimum)


def _decode_q4_k(b: np.ndarray) -> np.ndarray:
    return _decode_45_k(b, _split_nibbles(b[:, 16:], 32))


def _decode_q5_k(b: np.ndarray) -> np.ndarray:
    return _decode_45_k(b, _split_nibbles(b[:, 48:], 32) | (_split_bits(b[:, 16:48]) << 4))


def _decode_q6_k(b: np.ndarray) -> np.ndarray:
    scale = _f16(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(np.float32)
    q = _split_nibbles(b[:, :128], 64) | (_split_pairs(b[:, 128:192]) << 4)
    return _by_scale(_signed(q, 32), scale)


# Encoding: (n, block) float32 -> (n, nbytes) uint8 --------------------------------------------------------------------


def _encode_f32(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8)


def _encode_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint8)


def _encode_bf16(x: np.ndarray) -> np.ndarray:
    return bf16_bits(x).view(np.uint8)


def _as_bytes(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint8)


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1.0), d, out=np.zeros_like(d), where=d != 0)


def _join_nibbles(q: np.ndarray) -> np.ndarray:
    return (q[:, :16] & 15) | (q[:, 16:] << 4)


def _symmetric(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of largest magnitude becomes -2^(bits-1): d (n, 1), q (n, 32) uint8 counted from that."""
    zero = 1 << (bits - 1)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = peak / np.float32(-zero)
    q = np.trunc(x * _inverse(d) + np.float32(zero + 0.5)).clip(0, 2 * zero - 1)
    return d, q.astype(np.uint8)


def _affine(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spread min..max over 0..2^bits-1 -> d (n, 1), minimum (n, 1), q (n, 32) uint8."""
    top = (1 << bits) - 1
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(top)
    q = np.trunc((x - low) * _inverse(d) + np.float32(0.5)).clip(0, top)
    return d, low, q.astype(np.uint8)


def _high_bits(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _encode_q4_0(x: np.ndarray) -> np.ndarray:
    d, q = _symmetric(x, 4)
    return np.concatenate([_as_bytes(d), _join_nibbles(q)], axis=1)


def _encode_q4_1(x: np.ndarray) -> np.ndarray:
    d, low, q = _affine(x, 4)
    return np.concatenate([_as_bytes(d), _as_bytes(low), _join_nibbles(q)], axis=1)


def _encode_q5_0(x: np.ndarray) -> np.ndarray:
    d, q = _symmetric(x, 5)
    return np.concatenate([_as_bytes(d), _high_bits(q), _join_nibbles(q)], axis=1)


def _encode_q5_1(x: np.ndarray) -> np.ndarray:
    d, low, q = _affine(x, 5)
    return np.concatenate([_as_bytes(d), _as_bytes(low), _high_bits(q), _join_nibbles(q)], axis=1)


def _encode_q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    v = x * _inverse(d)
    q = np.copysign(np.floor(np.abs(v) + np.float32(0.5)), v)  # halves round away from zero
    return np.concatenate([_as_bytes(d), q.astype(np.int8).view(np.uint8)], axis=1)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("f32", 1, 4, _decode_f32, _encode_f32),
        Format("f16", 1, 2, _decode_f16, _encode_f16),
        Format("bf16", 1, 2, _decode_bf16, _encode_bf16),
        Format("q4_0", 32, 18, _decode_q4_0, _encode_q4_0),
        Format("q4_1", 32, 20, _decode_q4_1, _encode_q4_1),
        Format("q5_0", 32, 22, _decode_q5_0, _encode_q5_0),
        Format("q5_1", 32, 24, _decode_q5_1, _encode_q5_1),
        Format("q8_0", 32, 34, _decode_q8_0, _encode_q8_0),
        Format("q2_k", 256, 84, _decode_q2_k),
        Format("q3_k", 256, 110, _decode_q3_k),
        Format("q4_k", 256, 144, _decode_q4_k),
        Format("q5_k", 256, 176, _decode_q5_k),
        Format("q6_k", 256, 210, _decode_q6_k),
    )
}
