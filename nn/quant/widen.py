"""Storing a matrix in a format with more bits that holds exactly the same values.

Files mix formats within one layer: a matrix of values in q8_0 beside queries and keys in q5_0. Matrices of one format
can be read by one dispatch, and on a GPU small matrices cost dispatches, not bytes.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from nn.quant.formats import format_of

# weight = d * (q - middle) with an f16 d for every 32 weights: what q8_0 stores as d and q - middle
_NARROW = ("q4_0", "q5_0")
_WIDE = "q8_0"


def common_format(formats: Collection[str]) -> str | None:
    """The format that holds the values of all of these exactly, with what is known here; None where there is none."""
    kinds = set(formats)
    if len(kinds) == 1:
        return kinds.pop()
    return _WIDE if kinds <= {*_NARROW, _WIDE} else None


def widen(raw: np.ndarray, format: str, to: str) -> np.ndarray:
    """Stored rows in another format, value for value: raw (rows, row_bytes) uint8 -> (rows, row_bytes of `to`) uint8.

    Raises ValueError for a pair of formats that `common_format` does not give.
    """
    if format == to:
        return raw
    if to != _WIDE or format not in _NARROW:
        raise ValueError(f"widen: {format} to {to} is not known to be exact; {' and '.join(_NARROW)} go to {_WIDE}")
    fmt = format_of(format)
    blocks = np.ascontiguousarray(raw).reshape(-1, fmt.nbytes)
    scale = blocks[:, :2].copy()
    unit = blocks.copy()
    unit[:, :2] = np.frombuffer(np.float16(1.0).tobytes(), np.uint8)
    out = np.empty((len(blocks), format_of(to).nbytes), np.uint8)
    out[:, :2] = scale
    out[:, 2:] = fmt.decode(unit).astype(np.int8).view(np.uint8)
    return out.reshape(raw.shape[0], -1)
