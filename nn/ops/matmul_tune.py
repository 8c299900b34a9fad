"""The dense products as a family of the tuner: shape classes, and how a call is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpu.tune import Family, Result, Trial
from nn.ops.base import DTYPES
from nn.ops.matmul_variants import Shape, Variant, default, variants
from nn.ops.trials import bucket, empty_array, shrunk

if TYPE_CHECKING:
    from gpu import Device, Recorder
    from gpu.device import Capabilities

_MOST = {"gpu": 150_000_000_000, "cpu": 200_000_000}  # floating-point operations of a timed call
_ROTATED = 48 << 20  # bytes of further matrices where a call is bound by reading one


def shape_class(shape: Shape) -> str:
    """Sizes by powers of two, and whether rows begin at whole vectors of four."""
    stored = f"{'t' if shape.trans_a else 'n'}{'t' if shape.trans_b else 'n'}"
    inner = (shape.m if shape.trans_a else shape.k, shape.k if shape.trans_b else shape.n, shape.n)
    odd = "" if all(size % 4 == 0 for size in inner) else " odd"
    sizes = " ".join(f"{name}{bucket(size)}" for name, size in (("m", shape.m), ("n", shape.n), ("k", shape.k)))
    return f"{shape.dtype} {stored} {sizes} b{bucket(shape.batches)}{odd}"


def nbytes(shape: Shape) -> int:
    """Of both operands and the result."""
    elements = shape.m * shape.k + shape.k * shape.n + shape.m * shape.n
    return shape.batches * elements * DTYPES[shape.dtype][0]


def trial(device: Device, shape: Shape) -> Trial[Variant]:
    """Random matrices of the shape, or of a part of it where the whole takes long."""
    from nn.ops.matmul import record_matmul
    from nn.quant.fill import uniform

    sizes = {"batches": shape.batches, "m": shape.m, "n": shape.n, "k": shape.k}
    sizes |= shrunk(
        {"batches": shape.batches}, 2 * shape.m * shape.n * shape.k, most=_MOST[device.caps.kind], smallest=1
    )
    sizes |= shrunk({name: sizes[name] for name in ("m", "n", "k")}, 2 * sizes["batches"], most=_MOST[device.caps.kind])
    given = replace(shape, **sizes)
    batch = (given.batches,) if given.batches > 1 else ()
    a_shape = (*batch, *((given.k, given.m) if given.trans_a else (given.m, given.k)))
    b_shape = (*batch, *((given.n, given.k) if given.trans_b else (given.k, given.n)))
    a = uniform(device, a_shape, given.dtype, seed=1)
    sets = 1
    if given.m <= 16 and device.caps.kind == "gpu":  # bound by reading b, which in a model is another one every time
        one = given.batches * given.k * given.n * DTYPES[given.dtype][0]
        sets = max(1, min(8, 1 + _ROTATED // max(one, 1)))
    b = [uniform(device, b_shape, given.dtype, seed=2 + i) for i in range(sets)]
    out = empty_array(device, (*batch, given.m, given.n), given.dtype)

    def record(recorder: Recorder, variant: Variant, turn: int) -> None:
        record_matmul(recorder, variant, a, b[turn], out, trans_a=given.trans_a, trans_b=given.trans_b)

    # Two orders of a sum of k products below 1 differ by some units of rounding of its largest part.
    atol, rtol = 1e-6 * given.k, 1e-6 if given.dtype == "f32" else 2.0**-9
    return Trial(record, [Result(out.buffer, np.dtype(DTYPES[given.dtype][1]), rtol=rtol, atol=atol)], turns=sets)


def standard(caps: Capabilities) -> Sequence[Shape]:
    """Squares, and the products of a transformer of GPT-2's width in training: forward, dX and dW."""
    if caps.kind == "cpu":
        return [Shape(m, 1024, 1024, trans_b=True) for m in (1, 32)] + [Shape(256, 256, 256), Shape(1024, 1024, 1024)]
    shapes = [Shape(n, n, n) for n in (512, 1024, 2048, 4096)]
    for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072)):
        shapes += [Shape(8192, n, k, trans_b=True), Shape(8192, k, n), Shape(n, k, 8192, trans_a=True)]
    shapes += [Shape(m, 4096, 4096, trans_b=True) for m in (1, 8, 64)]
    return [replace(shape, dtype=dtype) for dtype in ("f32", *(["f16"] if caps.f16 else [])) for shape in shapes]


MATMUL = Family(
    name="matmul",
    variants=variants,
    default=default,
    shape_class=shape_class,
    trial=trial,
    nbytes=nbytes,
    standard=standard,
    shaders=("matmul",),
)
