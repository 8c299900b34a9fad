"""Random contents made on the device: dense values, and weights in any storage format, without touching host memory.

For benchmarks and made-up models. The same seed gives the same quants everywhere; scaled values may differ in their
last bit from one compiler to another.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nn.ops.base import DTYPES, Array
from nn.quant.formats import format_of
from nn.quant.repack import BLOCK, plane_offsets
from nn.quant.weight import Weight, Window, window_rows

if TYPE_CHECKING:
    from gpu import Buffer, Device, Recorder

_WG = 256
_ANY = 0xFFFFFFFF
_SIX, _FOUR = 0x3F3F3F3F, 0x0F0F0F0F
# What the planes of nn/quant/repack.py hold, per format: ("bits", mask), or ("halves", even, odd) with each half's
# range in units of the step d = std / `spread`, where `spread` is the standard deviation of a weight whose step is 1.
_BITS = ("bits", _ANY)
_D = (0.75, 1.25)
PLANES: dict[str, tuple[float, tuple[tuple, ...]]] = {
    "q4_0": (4.61, (_BITS, ("halves", _D, _D))),
    "q4_1": (4.61, (_BITS, ("halves", _D, (-9.0, -6.0)))),
    "q5_0": (9.23, (_BITS, _BITS, ("halves", _D, _D))),
    "q5_1": (9.23, (_BITS, _BITS, ("halves", _D, (-18.0, -13.0)))),
    "q8_0": (73.9, (_BITS, ("halves", _D, _D))),
    "q2_k": (13.9, (_BITS, _BITS, ("halves", _D, (1.2, 1.8)))),
    "q3_k": (42.0, (_BITS, _BITS, ("bits", 0x1F1F1F1F), ("halves", _D, _D))),
    "q4_k": (256.0, (_BITS, ("bits", _SIX), ("halves", _D, (6.5, 8.5)))),
    "q5_k": (521.0, (_BITS, _BITS, ("bits", _SIX), ("halves", _D, (14.0, 17.0)))),
    "q6_k": (1360.0, (_BITS, _BITS, _BITS, ("halves", _D, _D))),
}


def uniform(
    device: Device, shape: tuple[int, ...], dtype: str = "f32", *, seed: int, low: float = -1.0, high: float = 1.0
) -> Array:
    """A dense array of uniform values in [low, high), f32, f16 or bf16. Raises ValueError for another dtype."""
    if dtype not in ("f32", "f16", "bf16"):
        raise ValueError(f"uniform: dtype is {dtype!r}; expected f32, f16 or bf16")
    array = Array(device.alloc(math.prod(shape) * DTYPES[dtype][0]), shape, dtype)
    words = -(-array.buffer.nbytes // 4)
    record = device.recorder()
    _fill(record, array.buffer, f"fill_{dtype}", 0, words, seed, even=(low, high), odd=(low, high))
    record.submit()
    return array


def random_weight(device: Device, shape: tuple[int, int], format: str, *, seed: int, std: float = 1.0) -> Weight:
    """A weight (N, K) of random quants and scales whose values have mean about 0 and standard deviation about `std`.

    Raises: ValueError for an unknown format, or a K that does not divide into blocks (dense formats: of 32).
    """
    rows, cols = shape
    fmt = format_of(format)
    if fmt.dense and cols % BLOCK:
        raise ValueError(f"random_weight: {format} rows of {cols} weights; a multiple of {BLOCK} is needed")
    fmt.row_bytes(cols)
    limit = min(device.caps.max_binding, device.caps.max_buffer) - 256
    step = window_rows(format, rows, cols, limit)
    windows, record = [], device.recorder()
    for row0 in range(0, rows, step):
        count = min(step, rows - row0)
        offsets, total = plane_offsets(format, count, cols)
        buffer = device.alloc(total)
        if fmt.dense:
            edge = std * math.sqrt(3.0)
            _fill(record, buffer, f"fill_{format}", 0, total // 4, seed + row0, even=(-edge, edge), odd=(-edge, edge))
        else:
            spread, planes = PLANES[format]
            unit = std / spread
            for i, (kind, *rest) in enumerate(planes):
                end = offsets[i + 1] if i + 1 < len(offsets) else total
                first, words = offsets[i] // 4, (end - offsets[i]) // 4
                plane_seed = seed + row0 + 7919 * (i + 1)
                if kind == "bits":
                    _fill(record, buffer, "fill_bits", first, words, plane_seed, mask=rest[0])
                else:
                    even, odd = ((low * unit, high * unit) for low, high in rest)
                    _fill(record, buffer, "fill_f16", first, words, plane_seed, even=even, odd=odd)
        windows.append(Window(row0, count, buffer))
    record.submit()
    return Weight((rows, cols), format, tuple(windows))


def _fill(
    record: Recorder,
    buffer: Buffer,
    entry: str,
    first: int,
    count: int,
    seed: int,
    *,
    mask: int = _ANY,
    even: tuple[float, float] = (0.0, 0.0),
    odd: tuple[float, float] = (0.0, 0.0),
) -> None:
    record(
        record.device.kernel("random/fill.wgsl", entry),
        grid=-(-count // _WG),
        out=buffer,
        first=first,
        count=count,
        seed=seed % (1 << 32),
        mask=mask,
        low=even[0],
        range=even[1] - even[0],
        low_odd=odd[0],
        range_odd=odd[1] - odd[0],
    )
