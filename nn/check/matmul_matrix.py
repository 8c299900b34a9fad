"""Checks of shaders/matmul/gemm_matrix.wgsl, the dense f16 products on matrix units, against float64 NumPy.

Every variant in all four transposed forms, at sizes around its tile edges and in the middle of tiles, of rows of even
and of odd length, with batches, bias and fused code. They need a device whose matrix units were found to work; the
shader's own text is run everywhere by tests/check/test_emulated.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.check.matmul import scaled, scaled_outcome
from nn.ops.base import Array
from nn.ops.matmul import MatMul, record_matmul
from nn.ops.matmul_matrix import MATRIX
from nn.ops.matmul_variants import MATRICES, PACKED, SERIAL, TILED, Variant

if TYPE_CHECKING:
    from gpu import Device

NEEDS = frozenset({"matrix_f16"})
PARTS = (
    "matmul/halves_pairs.wgsl",
    "matmul/halves_single.wgsl",
    "matmul/halves_odd.wgsl",
    "movement/even_lines.wgsl",
    "matmul/dense_params.wgsl",
)


def product(
    device: Device,
    rng: np.random.Generator,
    *,
    chosen: Variant | None,
    a: tuple[int, ...],
    b: tuple[int, ...],
    trans_a: bool = False,
    trans_b: bool = False,
    bias: bool = False,
    fused: bool = False,
) -> Iterator[Outcome]:
    """a, b: shapes (..., M, K) and (..., K, N), before an operand is stored transposed. chosen None: the operation."""
    left, right = (rng.standard_normal(shape).astype(np.float16) for shape in (a, b))
    added = rng.standard_normal(b[-1]).astype(np.float16)
    wide = [x.astype(np.float64) for x in (left, right)]
    want = wide[0] @ wide[1] + (added.astype(np.float64) if bias else 0.0)
    largest = float((np.abs(wide[0]) @ np.abs(wide[1])).max(initial=0.0)) + 4.0 * bias
    stored = [x.swapaxes(-1, -2) if swap else x for x, swap in ((left, trans_a), (right, trans_b))]
    arrays = [Array(device.upload(np.ascontiguousarray(x)), x.shape, "f16") for x in stored]
    out = Array(device.upload(np.full(want.shape, np.nan, np.float16)), want.shape, "f16")
    extra = Array(device.upload(added), added.shape, "f16") if bias else None
    record = device.recorder()
    epilogue, more = None, rng.standard_normal(want.shape).astype(np.float32)
    if chosen is None:
        MatMul(trans_a=trans_a, trans_b=trans_b, bias=bias).lower(record, *arrays, *([extra] if extra else []), out)
    else:
        epilogue = scaled(device, more) if fused else None
        record_matmul(
            record, chosen, arrays[0], arrays[1], out, trans_a=trans_a, trans_b=trans_b, bias=extra, epilogue=epilogue
        )
    record.submit()
    if epilogue is not None:
        yield scaled_outcome(device, epilogue, want, 2e-6 * largest)
        rows = np.arange(want.size // want.shape[-1]).reshape(*want.shape[:-1], 1)
        want = want * 2.0 + more + rows - 3.0 * np.arange(want.shape[-1])
    # 32 units of f32 rounding at the largest sum of |a b|; the f16 result rounds by at most 2^-11 of its value.
    got = device.read(out.buffer, np.float16, want.shape).astype(np.float64)
    yield Outcome(got, want, 2.0**-11 + 1e-6, 2e-6 * largest * (2 if fused else 1) + 1e-7)


def sums_are_f32(device: Device, rng: np.random.Generator, *, chosen: Variant) -> Iterator[Outcome]:
    """4096 small products after one of 4096, less 4096: sums in f16, or of fewer digits than f32, lose them."""
    m, n, k = 17, 18, 4098
    a, b = np.ones((m, k), np.float16), np.ones((k, n), np.float16)
    a[:, 0], a[:, k - 1] = 4096, -4096
    a[:, 1 : k - 1] *= (np.arange(m)[:, None] % 3 + 1) / 4
    arrays = [Array(device.upload(x), x.shape, "f16") for x in (a, b)]
    out = Array(device.upload(np.full((m, n), np.nan, np.float16)), (m, n), "f16")
    record = device.recorder()
    record_matmul(record, chosen, arrays[0], arrays[1], out)
    record.submit()
    want = a.astype(np.float64) @ b.astype(np.float64)  # 1024, 2048 or 3072: exact in every order
    yield Outcome(device.read(out.buffer, np.float16, (m, n)).astype(np.float64), want)


def _shapes(tm: int, tn: int) -> list[tuple[int, int, int]]:
    """Even ones (pairs of halves are copied) and odd ones: a corner, over and under an edge, whole tiles."""
    return [(1, 1, 1), (2, 2, 2), (tm - 1, 33, tn + 1), (tm + 2, 62, tn - 2), (tm, 64, tn), (2 * tm + 17, 95, tn + 63)]


def cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, **options) -> None:
        files = (MATRIX, *PARTS) if options["chosen"] else (MATRIX, *PARTS, TILED, SERIAL, PACKED)
        found.append(Case(name, partial(product, **options), files, NEEDS))

    for chosen in MATRICES:
        label, tm, tn = chosen.name, chosen.rows, chosen.cols
        for trans_a in (False, True):
            for trans_b in (False, True):
                for m, k, n in _shapes(tm, tn):
                    name = f"matmul/matmul: {label}, {m}x{k}x{n}{' A^T' * trans_a}{' B^T' * trans_b}"
                    add(name, chosen=chosen, a=(m, k), b=(k, n), trans_a=trans_a, trans_b=trans_b)
        for n in (9, 130):
            add(f"matmul/matmul_bias: {label}, 5x7x{n}", chosen=chosen, a=(5, 7), b=(7, n), bias=True)
            name = f"matmul/matmul: {label}, 2x5x8x{n} epilogue"
            add(name, chosen=chosen, a=(2, 5, 8), b=(2, 8, n), fused=True)
        # Nine rows of tiles and more: groups of tiles, the last one of them not whole.
        name = f"matmul/matmul_bias: {label}, 3x{9 * tm - 5}x48x{2 * tn + 2}"
        add(name, chosen=chosen, a=(3, 9 * tm - 5, 48), b=(48, 2 * tn + 2), bias=True)
        add(f"matmul/matmul: {label}, 2x0x3", chosen=chosen, a=(2, 0), b=(0, 3))
        # Large enough for odd lines to be copied to even ones first: both, and one of them.
        add(f"matmul/matmul: {label}, 515x517x509", chosen=chosen, a=(515, 517), b=(517, 509))
        name = f"matmul/matmul_bias: {label}, 517x512x509 B^T"
        add(name, chosen=chosen, a=(517, 512), b=(512, 509), trans_b=True, bias=True)
        case = partial(sums_are_f32, chosen=chosen)
        found.append(Case(f"matmul/matmul: {label}, sums are f32", case, (MATRIX, *PARTS), NEEDS))
    for a, b in (
        ((2, 1, 2, 1, 40, 34), (1, 3, 1, 2, 34, 22)), ((2, 1, 2, 1, 17, 7), (1, 3, 1, 2, 7, 5)), ((0, 5, 7), (0, 7, 2)),
        ((16, 300), (300, 70)), ((17, 300), (300, 70)), ((700, 64), (64, 1500)), ((1500, 65), (65, 1501)),
        ((3, 411, 333), (3, 333, 391)), ((2, 1, 301, 513), (3, 513, 512)), ((290, 1030), (1030, 517)),
    ):  # fmt: skip
        for swap in (False, True):
            name = f"ops/matmul: f16, {a} x {b}{' both transposed' * swap}"
            add(name, chosen=None, a=a, b=b, trans_a=swap, trans_b=swap)
    return found
