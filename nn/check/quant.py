"""Checks of shaders/quant: every storage format decodes on the device to the bits of the NumPy decoder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.quant import FORMATS, Weight, dequantize, format_of

if TYPE_CHECKING:
    from gpu import Device

# Where the f16 scales lie in a stored block.
SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
# Zero of both signs, subnormal, smallest normal, one, and the largest f16.
_EXTREMES = np.array([0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14 - 2.0**-24, 2.0**-14, 1.0, -1.0, 65504.0, -65504.0])


def random_raw(rng: np.random.Generator, format: str, rows: int, cols: int, *, extreme: bool = False) -> np.ndarray:
    """Stored rows (rows, row_bytes) uint8 with every field random and all values finite.

    Quants take every value; weights are of the order of 0.1, or of anything that f16 scales allow where `extreme`.
    """
    fmt = format_of(format)
    if fmt.dense:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        if extreme:
            values = (values * 2.0 ** rng.integers(-14, 14, values.shape)).astype(np.float32)
        raw = np.zeros((rows, fmt.row_bytes(cols)), np.uint8)
        assert fmt.encode is not None
        raw[:] = fmt.encode(np.ascontiguousarray(values).reshape(-1, 1)).reshape(rows, -1)
        return raw
    raw = rng.integers(0, 256, (rows, fmt.row_bytes(cols)), dtype=np.uint8)
    blocks = raw.reshape(-1, fmt.nbytes)
    for at in SCALES[format]:
        if extreme:
            scale = rng.choice(_EXTREMES, len(blocks))
        else:
            scale = rng.uniform(-0.2, 0.2, len(blocks)) * (32.0 if fmt.block == 32 else 1.0) / 64.0
        blocks[:, at : at + 2] = scale.astype(np.float16).reshape(-1, 1).view(np.uint8)
    return raw


def cases() -> list[Case]:
    found = []
    for format, fmt in FORMATS.items():
        # One block; rows whose count is no multiple of anything, cut into windows; extreme scales (dense: no padding).
        wide = 45 if fmt.dense else fmt.block * 3
        even = 64 if fmt.dense else wide
        for rows, cols, extreme, pieces in ((1, fmt.block, False, 1), (37, wide, False, 3), (29, even, True, 1)):
            variant = f"{format}{' extreme' if extreme else ''}{f' {pieces} windows' if pieces > 1 else ''}"
            found.append(
                Case(
                    f"quant/decode: {variant}, {rows}x{cols}",
                    partial(_decode, format=format, rows=rows, cols=cols, extreme=extreme, pieces=pieces),
                    ("quant/decode.wgsl", f"quant/{format}.wgsl", *(() if fmt.dense else ("quant/planes.wgsl",))),
                )
            )
    return found


def _decode(
    device: Device, rng: np.random.Generator, *, format: str, rows: int, cols: int, extreme: bool, pieces: int
) -> Iterator[Outcome]:
    raw = random_raw(rng, format, rows, cols, extreme=extreme)
    weight = upload_in(device, raw, (rows, cols), format, pieces)
    yield Outcome(np.array(len(weight.windows)), np.array(pieces), label="windows")
    yield Outcome(weight.to_numpy(device).view(np.uint32), dequantize(raw, format).view(np.uint32), label="bits")


def upload_in(device: Device, raw: np.ndarray, shape: tuple[int, int], format: str, pieces: int) -> Weight:
    """Upload a small matrix in `pieces` row windows."""
    from nn.quant.repack import plane_offsets

    rows = -(-shape[0] // pieces)
    return Weight.upload(device, raw, shape, format, window_bytes=plane_offsets(format, rows, shape[1])[1])
