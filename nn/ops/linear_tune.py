"""The products with stored weights as a family of the tuner: shape classes, and how a call is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpu.tune import Family, Result, Trial
from nn.ops.linear_variants import BROADCAST, DIGITS, F32, GEMM, GEMV, ROW, WIDE, Shape, Variant, default, variants
from nn.ops.trials import bucket, empty_array, shrunk
from nn.quant.fill import random_weight, uniform
from nn.quant.repack import plane_offsets

if TYPE_CHECKING:
    from gpu import Device, Recorder
    from gpu.device import Capabilities

_MOST = {"gpu": 150_000_000_000, "cpu": 100_000_000}  # floating-point operations of a timed call
_ROTATED = 48 << 20  # bytes of further matrices: in a model it is another one every time
_FEW = 8  # tokens up to which a product is bound by reading the weights


def shape_class(shape: Shape) -> str:
    """Tokens and rows by powers of two; few tokens as they are, and columns, which kernels are made for."""
    tokens = shape.tokens if shape.tokens <= _FEW else bucket(shape.tokens)
    paired = " paired" if shape.paired else ""
    return f"{shape.format} t{tokens} n{bucket(shape.rows)} k{shape.cols}{paired}"


def nbytes(shape: Shape) -> int:
    """Of x, the weights and the result."""
    return plane_offsets(shape.format, shape.rows, shape.cols)[1] + 4 * shape.tokens * (shape.cols + shape.rows)


def trial(device: Device, shape: Shape) -> Trial[Variant]:
    """Random weights of the shape, or of a part of its rows where the whole takes long."""
    from nn.ops.linear import multiply

    sizes = shrunk(
        {"rows": shape.rows, "tokens": shape.tokens}, 2 * shape.cols, most=_MOST[device.caps.kind], smallest=2
    )
    given = replace(shape, **sizes)
    one = plane_offsets(given.format, given.rows, given.cols)[1]
    sets = max(1, min(8, 1 + _ROTATED // one)) if given.tokens <= _FEW and device.caps.kind == "gpu" else 1
    weights = [random_weight(device, (given.rows, given.cols), given.format, seed=i) for i in range(sets)]
    x = uniform(device, (given.tokens, -(-given.cols // 32) * 32), seed=99)
    width = given.rows // 2 if given.paired else given.rows
    out = empty_array(device, (given.tokens, width))
    entry = "gated_linear" if given.paired else "linear"

    def record(recorder: Recorder, variant: Variant, turn: int) -> None:
        multiply(
            recorder, variant, entry, weights[turn], tokens=given.tokens, out=out.buffer, out_cols=width, x=x.buffer
        )

    # Products of numbers of the order of 1; a gated result is a product of two sums of them, each some sqrt(cols).
    # Where matrix units take part, factors are rounded to 11 bits.
    each = 2e-6 * given.cols + (2.0**-10 * given.cols**0.5 if device.caps.matrix_f16 else 0.0)
    atol = each * (4.0 * given.cols**0.5 if given.paired else 1.0)
    return Trial(record, [Result(out.buffer, rtol=1e-5, atol=atol)], turns=sets)


def standard(caps: Capabilities) -> Sequence[Shape]:
    """Matrices of a small and of a large language model, one token and a prompt's chunk."""
    if caps.kind == "cpu":
        return [Shape(tokens, 576, 576, "q4_1") for tokens in (1, 32)]
    found = []
    for rows, cols in ((576, 576), (3072, 576), (576, 1536), (4096, 4096), (22_016, 4096), (4096, 11_008)):
        format = "q4_1" if rows < 4096 else "q4_0"
        found += [Shape(tokens, rows, cols, format) for tokens in (1, 8, 64, 512)]
    return found


LINEAR = Family(
    name="linear",
    variants=variants,
    default=default,
    shape_class=shape_class,
    trial=trial,
    nbytes=nbytes,
    standard=standard,
    shaders=(ROW, BROADCAST, GEMV, GEMM, WIDE, F32, DIGITS, "quant"),
)
