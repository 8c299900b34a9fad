"""Rearranges stored rows into the planes that the kernels read (shaders/quant/).

A GGUF block is 18 to 210 bytes, so its fields straddle words. On the device a matrix is one buffer of planes: the
quants of every block, 16-byte aligned, then further bits, then scales, each plane starting at a multiple of 16 bytes.
Within a plane, blocks lie in row order. The order inside a block of 32 weights is chosen so that four weights come out
of a word as four bytes by one shift and one mask:

    nibbles   word i holds weights 8i+c in the low and 8i+4+c in the high half of byte c (c = 0..3)
    pairs     word i holds weight 16i+4j+c in bits 2j, 2j+1 of byte c (j = 0..3)
    bits      weight 4j+c is bit j of byte c (j = 0..7)

Dense formats have one plane: rows padded with zeros to a multiple of 32 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from nn.quant.formats import Format, format_of, q3_k_scales, q4_k_scales

BLOCK = 32  # weights that a kernel reads at a time; dense rows are padded to a multiple of it
_CHUNK = 2 << 20  # bytes of stored rows rearranged at a time: the temporaries stay in the cache
_LOW, _HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
_TWO, _ONE = np.uint32(0x03030303), np.uint32(0x01010101)
# Where the bits of one byte (weights 8b..8b+7) go in the word of a "bits" plane, for b = 0; b adds 2 to the position.
_SPREAD = np.array([sum(((v >> t) & 1) << (8 * (t & 3) + (t >> 2)) for t in range(8)) for v in range(256)], np.uint32)


def plane_offsets(format: str, rows: int, cols: int) -> tuple[list[int], int]:
    """Byte offset of each plane of a (rows, cols) matrix, and the bytes of all of them (a multiple of 16)."""
    fmt = format_of(format)
    if fmt.dense:
        return [0], _up(rows * _padded(cols) * fmt.nbytes, 16)
    blocks = rows * (fmt.row_bytes(cols) // fmt.nbytes)
    offsets, at = [], 0
    for nbytes in _PLANES[format][0]:
        offsets.append(at)
        at += _up(blocks * nbytes, 16)
    return offsets, at


def planes(raw: np.ndarray, format: str, cols: int) -> Iterator[tuple[int, np.ndarray]]:
    """Rearrange stored rows piece by piece: raw (rows, row_bytes) uint8 -> (byte offset, uint8 array) to be written.

    Offsets and sizes are multiples of 4. All bytes of `plane_offsets` are given once; the pieces are fresh arrays.
    """
    fmt = format_of(format)
    yield from _dense(raw, fmt, cols) if fmt.dense else _blocks(raw, fmt, cols)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _padded(cols: int) -> int:
    return _up(cols, BLOCK)


def _dense(raw: np.ndarray, fmt: Format, cols: int) -> Iterator[tuple[int, np.ndarray]]:
    width, wide = cols * fmt.nbytes, _padded(cols) * fmt.nbytes
    step = max(1, _CHUNK // wide)
    for at in range(0, len(raw), step):
        part = raw[at : at + step]
        piece = np.zeros((len(part), wide), np.uint8)
        piece[:, :width] = part
        yield at * wide, piece.reshape(-1)


def _blocks(raw: np.ndarray, fmt: Format, cols: int) -> Iterator[tuple[int, np.ndarray]]:
    sizes, split = _PLANES[fmt.name]
    offsets, _ = plane_offsets(fmt.name, len(raw), cols)
    row_bytes = raw.shape[1]
    step = max(8, _CHUNK // row_bytes // 8 * 8)  # rows; eight of them keep the 2-byte planes on 16-byte boundaries
    for row in range(0, len(raw), step):
        part = np.ascontiguousarray(raw[row : row + step]).reshape(-1, fmt.nbytes)
        first = row * (row_bytes // fmt.nbytes)
        for start, nbytes, plane in zip(offsets, sizes, split(part), strict=True):
            data = np.ascontiguousarray(plane).view(np.uint8).reshape(-1)
            if tail := -data.size % 16:
                data = np.concatenate([data, np.zeros(tail, np.uint8)])
            yield start + first * nbytes, data


def _words(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view("<u4")


def _nibbles(o: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words (..., 2m) of bytes: the low nibbles in order, and the high ones, as "nibbles" words (..., m) each."""
    even, odd = o[..., 0::2], o[..., 1::2]
    return (even & _LOW) | ((odd & _LOW) << 4), ((even >> 4) & _LOW) | (odd & _HIGH)


def _nibbles_32(b: np.ndarray) -> np.ndarray:
    """16 bytes: low nibbles are weights 0..15, high ones 16..31 -> (n, 4) words."""
    return np.concatenate(_nibbles(_words(b)), axis=1)


def _nibbles_k(b: np.ndarray) -> np.ndarray:
    """128 bytes in runs of 32: low nibbles one block of 32 weights, high ones the next -> (n, 4, 2, 4) words."""
    return np.stack(_nibbles(_words(b).reshape(-1, 4, 8)), axis=2)


def _pairs_k(b: np.ndarray) -> np.ndarray:
    """64 bytes in runs of 32, bits 2t of a run are block t of four -> (n, 2, 4, 2) words."""
    o = _words(b).reshape(-1, 2, 8)
    out = np.zeros((len(o), 2, 4, 2), np.uint32)
    for t in range(4):
        v = ((o >> np.uint32(2 * t)) & _TWO).reshape(-1, 2, 2, 4)
        for j in range(4):
            out[:, :, t] |= v[..., j] << np.uint32(2 * j)
    return out


def _bits_k(b: np.ndarray) -> np.ndarray:
    """32 bytes, bit s of byte i is weight i of block s -> (n, 8) words."""
    o = np.ascontiguousarray(_words(b).T)  # (8, n)
    out = np.zeros((8, o.shape[1]), np.uint32)
    for s in range(8):
        for j in range(8):
            out[s] |= ((o[j] >> np.uint32(s)) & _ONE) << np.uint32(j)
    return out.T


def _bits_32(b: np.ndarray) -> np.ndarray:
    """4 bytes, bit i is weight i -> (n,) words."""
    return _SPREAD[b[:, 0]] | (_SPREAD[b[:, 1]] << 2) | (_SPREAD[b[:, 2]] << 4) | (_SPREAD[b[:, 3]] << 6)


def _scale_pairs(b: np.ndarray) -> np.ndarray:
    """The 12 packed bytes of q4_k and q5_k -> (n, 8, 2): scale and minimum of each block of 32, a byte each."""
    return np.stack(q4_k_scales(b), axis=2)


_Split = Callable[[np.ndarray], tuple[np.ndarray, ...]]
# Per format: bytes of each plane for one stored block, and the function that takes (n, nbytes) blocks apart.
_PLANES: dict[str, tuple[tuple[int, ...], _Split]] = {
    "q4_0": ((16, 2), lambda b: (_nibbles_32(b[:, 2:]), b[:, :2])),
    "q4_1": ((16, 4), lambda b: (_nibbles_32(b[:, 4:]), b[:, :4])),
    "q5_0": ((16, 4, 2), lambda b: (_nibbles_32(b[:, 6:]), _bits_32(b[:, 2:6]), b[:, :2])),
    "q5_1": ((16, 4, 4), lambda b: (_nibbles_32(b[:, 8:]), _bits_32(b[:, 4:8]), b[:, :4])),
    "q8_0": ((32, 2), lambda b: (b[:, 2:], b[:, :2])),
    "q2_k": ((64, 16, 4), lambda b: (_pairs_k(b[:, 16:80]), b[:, :16], b[:, 80:84])),
    "q3_k": (
        (64, 32, 16, 2),
        lambda b: (_pairs_k(b[:, 32:96]), _bits_k(b[:, :32]), q3_k_scales(b[:, 96:108]), b[:, 108:110]),
    ),
    "q4_k": ((128, 16, 4), lambda b: (_nibbles_k(b[:, 16:]), _scale_pairs(b[:, 4:16]), b[:, :4])),
    "q5_k": (
        (128, 32, 16, 4),
        lambda b: (_nibbles_k(b[:, 48:]), _bits_k(b[:, 16:48]), _scale_pairs(b[:, 4:16]), b[:, :4]),
    ),
    "q6_k": (
        (128, 64, 16, 2),
        lambda b: (
            np.stack(_nibbles(_words(b[:, :128]).reshape(-1, 2, 2, 8)), axis=2),
            _pairs_k(b[:, 128:192]),
            b[:, 192:208],
            b[:, 208:210],
        ),
    ),
}
