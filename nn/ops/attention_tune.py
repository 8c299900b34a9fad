"""Attention as a family of the tuner: shape classes, and how a call is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpu.tune import Family, Result, Trial
from nn.ops.attention_variants import Shape, Variant, default, variants
from nn.ops.base import DTYPES
from nn.ops.trials import bucket, empty_array, shrunk

if TYPE_CHECKING:
    from gpu import Device, Recorder
    from gpu.device import Capabilities

_MOST = {"gpu": 50_000_000_000, "cpu": 100_000_000}  # floating-point operations of a timed call
_ROTATED = 48 << 20  # bytes of further keys and values where a call is bound by reading them


def shape_class(shape: Shape) -> str:
    """Lengths by powers of two; heads and features as they are."""
    sees = "cache" if shape.step else "causal" if shape.causal else "all"
    aligned = " by 8" if shape.wide8 and shape.wide else "" if shape.wide else " odd"
    return (
        f"{shape.elem} kv {shape.kv} {sees} b{bucket(shape.batch)} h{shape.heads}/{shape.kv_heads} d{shape.d}{aligned} "
        f"q{bucket(shape.q_len)} k{bucket(shape.bound)}"
    )


def nbytes(shape: Shape) -> int:
    """Of queries, keys, values and results."""
    elem, kv = DTYPES[shape.elem][0], DTYPES[shape.kv][0]
    rows = 2 * shape.heads * shape.q_len * elem + 2 * shape.kv_heads * shape.bound * kv
    return shape.batch * rows * shape.d


def trial(device: Device, shape: Shape) -> Trial[Variant]:
    """Random values: all keys there, the last query sees every key of a cache or causal call."""
    from nn.ops.attention import Heads, record_attention
    from nn.quant.fill import uniform

    sizes = {"batch": shape.batch, "q_len": shape.q_len, "bound": max(shape.bound, 1)}
    cost = 4 * shape.heads * shape.d
    sizes |= shrunk(
        {"batch": shape.batch}, cost * shape.q_len * sizes["bound"], most=_MOST[device.caps.kind], smallest=1
    )
    lengths = {"q_len": shape.q_len, "bound": sizes["bound"]}
    sizes |= shrunk(lengths, cost * sizes["batch"], most=_MOST[device.caps.kind])
    batch, rows, keys = sizes["batch"], sizes["q_len"], max(sizes["bound"], sizes["q_len"] if shape.step else 1)
    q = uniform(device, (batch, shape.heads, rows, shape.d), shape.elem, seed=1)
    pair = 2 * batch * shape.kv_heads * keys * shape.d * DTYPES[shape.kv][0]
    sets = max(1, min(8, 1 + _ROTATED // pair)) if rows <= 16 and device.caps.kind == "gpu" else 1
    kv = [
        [uniform(device, (batch, shape.kv_heads, keys, shape.d), shape.kv, seed=2 + 2 * i + j) for j in range(2)]
        for i in range(sets)
    ]
    out = empty_array(device, q.shape, shape.elem)
    step = device.upload(np.array([keys - rows, rows, 0, 0], np.uint32)) if shape.step else None

    def record(recorder: Recorder, variant: Variant, turn: int) -> None:
        k, v = kv[turn]
        record_attention(
            recorder,
            *(Heads.of(x) for x in (q, k, v, out)),
            scale=shape.d**-0.5,
            step=step,
            causal=shape.causal,
            offset=keys - rows,
            variant=variant,
        )

    # Values lie in -1 to 1. Matrix units take weights rounded to f16.
    result = Result(out.buffer, np.dtype(DTYPES[shape.elem][1]), rtol=0.0, atol=2e-5 if shape.elem == "f32" else 2e-3)
    return Trial(record, [result], turns=sets)


def standard(caps: Capabilities) -> Sequence[Shape]:
    """Long sequences at both usual head sizes; a prompt and single tokens of a small model and of a large one."""
    kinds = ["f32", *(["f16"] if caps.f16 else [])]
    if caps.kind == "cpu":
        return [Shape(n, 256, 9, 3, 64, elem="f32", kv=kv, step=True) for kv in kinds for n in (1, 32)]
    shapes = [Shape(4096, 4096, 16, 16, d, elem=e, kv=e, causal=True) for e in kinds for d in (64, 128)]
    shapes += [Shape(n, 512, 9, 3, 64, kv=kv, step=True) for kv in kinds for n in (1, 128, 512)]
    shapes += [Shape(1, 4096, 9, 3, 64, kv=kv, step=True) for kv in kinds]
    return shapes + [Shape(1, keys, 32, 8, 128, kv=kv, step=True) for kv in kinds for keys in (4096, 32768)]


ATTENTION = Family(
    name="attention",
    variants=variants,
    default=default,
    shape_class=shape_class,
    trial=trial,
    nbytes=nbytes,
    standard=standard,
    shaders=("attention",),
)
