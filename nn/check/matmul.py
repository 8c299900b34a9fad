"""Checks of shaders/matmul/gemm*.wgsl, the dense matrix products, against float64 NumPy.

All four transposed forms, sizes around every tile edge, empty axes, batches that repeat in either operand, f32 and f16;
the kernels of both kinds of device run on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.base import Case, Outcome
from nn.ops.base import Array, Epilogue
from nn.ops.matmul import MatMul, record_matmul
from nn.ops.matmul_block import SUM
from nn.ops.matmul_variants import BLOCK, EVERY, PACKED, SERIAL, TILED, Variant

if TYPE_CHECKING:
    from gpu import Device

SCALE = """@group(0) @binding(5) var<storage, read> e0: array<f32>;
@group(0) @binding(6) var<storage, read_write> also: array<f32>;
fn epilogue(value: f32, row: u32, col: u32) -> f32 {
  let i = p.out_offset + row * p.n + col;
  also[i] = value;
  return value * p.f_scale + e0[i] + f32(row) - 3.0 * f32(col);
}"""


def scaled(device: Device, more: np.ndarray) -> Epilogue:
    """value * 2 + more + row - 3 col, and the value itself in `also`."""
    also = device.upload(np.full(more.shape, np.nan, np.float32))
    return Epilogue(SCALE, "f_scale: f32, ", {"f_scale": 2.0}, {"e0": device.upload(more), "also": also})


def scaled_outcome(device: Device, epilogue: Epilogue, want: np.ndarray, bound: float) -> Outcome:
    """What `scaled` left in `also`: the product itself, in f32."""
    got = device.read(epilogue.buffers["also"], np.float32, want.shape).astype(np.float64)
    return Outcome(got, want, 1e-6, bound, label="the product beside")


def _product(
    device: Device,
    rng: np.random.Generator,
    *,
    chosen: Variant | None,
    a: tuple[int, ...],
    b: tuple[int, ...],
    trans_a: bool = False,
    trans_b: bool = False,
    dtype: str = "f32",
    bias: bool = False,
    fused: bool = False,
) -> Iterator[Outcome]:
    """a, b: shapes (..., M, K) and (..., K, N), before an operand is stored transposed. chosen None: the operation."""
    numpy = np.float32 if dtype == "f32" else np.float16
    left, right = (rng.standard_normal(shape).astype(numpy) for shape in (a, b))
    added = rng.standard_normal(b[-1]).astype(numpy)
    wide = [x.astype(np.float64) for x in (left, right)]
    want = wide[0] @ wide[1] + (added if bias else 0.0)
    largest = float((np.abs(wide[0]) @ np.abs(wide[1])).max(initial=0.0))
    stored = [x.swapaxes(-1, -2) if swap else x for x, swap in ((left, trans_a), (right, trans_b))]
    arrays = [Array(device.upload(np.ascontiguousarray(x)), x.shape, dtype) for x in stored]
    out = Array(device.upload(np.full(want.shape, np.nan, numpy)), want.shape, dtype)
    extra = Array(device.upload(added), added.shape, dtype) if bias else None
    record = device.recorder()
    epilogue, more = None, rng.standard_normal(want.shape).astype(np.float32)
    if chosen is None:
        op = MatMul(trans_a=trans_a, trans_b=trans_b, bias=bias)
        op.lower(record, *arrays, *([] if extra is None else [extra]), out)
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
    # 32 units of f32 rounding at the largest sum of |a b|; an f16 result rounds by at most 2^-11 of its value.
    yield Outcome(
        device.read(out.buffer, numpy, want.shape).astype(np.float64),
        want,
        1e-6 if dtype == "f32" else 2.0**-11 + 1e-6,
        2e-6 * largest * (2 if fused else 1) + (0.0 if dtype == "f32" else 1e-7),
    )


def _small_integers(device: Device, rng: np.random.Generator, *, chosen: Variant) -> Iterator[Outcome]:
    """A[i,k] = (i+k) % 3, B[k,j] = (k*j) % 5, 32x32x32: exact, and the same bits every time."""
    i = np.arange(32)
    a, b = ((i[:, None] + i) % 3).astype(np.float32), ((i[:, None] * i) % 5).astype(np.float32)
    arrays = [Array(device.upload(x), (32, 32)) for x in (a, b)]
    for _ in range(2):
        out = Array(device.upload(np.full((32, 32), np.nan, np.float32)), (32, 32))
        record = device.recorder()
        record_matmul(record, chosen, arrays[0], arrays[1], out)
        record.submit()
        got = device.read(out.buffer, np.float32, (32, 32))
        yield Outcome(got, a.astype(np.float64) @ b)
        yield Outcome(np.array([got[0, 1], got[31, 31], got.sum()]), np.array([61.0, 62.0, 50013.0]), label="by hand")


def _files(chosen: Variant) -> tuple[str, ...]:
    if chosen.path == BLOCK:
        pieces = [f"{name}_{kind}" for name in ("a", "b", "out") for kind in ("vec4", "any")]
        pieces += ["parts_vec4", "parts_any"] if chosen.split > 1 else []
        sums = (SUM,) if chosen.split > 1 else ()
        return (BLOCK, *sums, "matmul/block.wgsl", *(f"matmul/block_{piece}.wgsl" for piece in pieces))
    return (chosen.path, "matmul/pack.wgsl" if chosen.path == PACKED else "matmul/dense.wgsl")


def _needs(chosen: Variant | None) -> frozenset[str]:
    return frozenset({"wide_subgroups"} if chosen is not None and chosen.path == PACKED else ())


def _add_block(add: Callable[..., None], chosen: Variant) -> None:
    """Each form with lines of whole vectors and of any length, tiles that end beside an edge, broken steps of k.

    Kernels of large tiles take software drivers long to compile: they have fewer cases.
    """
    tm, tn, step = chosen.rows, chosen.cols, dict(chosen.constants)["BK"]
    f16 = frozenset({"f16"})

    def case(
        m: int, k: int, n: int, *, batch: tuple[int, ...] = (), needs: frozenset[str] = frozenset(), **options
    ) -> None:
        marks = "f16 " * (options.get("dtype") == "f16") + "x".join(str(size) for size in (*batch, m, k, n))
        marks += " A^T" * options.get("trans_a", False) + " B^T" * options.get("trans_b", False)
        marks += " epilogue" * options.get("fused", False)
        name = f"matmul/matmul{'_bias' * options.get('bias', False)}: {chosen.name}, {marks}"
        add(name, needs, chosen=chosen, a=(*batch, m, k), b=(*batch, k, n), **options)

    if chosen.split > 1:
        case(tm + 1, step * chosen.split + 4, tn - 4, trans_b=True, bias=True)
        if chosen.split == 4 and chosen.rows * chosen.cols <= 4096:
            case(5, 3 * step + 1, 7, trans_a=True, batch=(2,), fused=True)
            case(9, 2 * step + 8, 8, dtype="f16", needs=f16, bias=True)
            case(3, step - 1, 5)  # three parts without any k
        return
    case(tm + 1, 2 * step + 4, tn + 4, trans_b=True, bias=True)
    case(tm - 1, step + 1, tn - 1, trans_a=True)
    case(9, 20, 8, dtype="f16", needs=f16)
    if chosen.rows * chosen.cols > 4096:
        return
    case(2 * tm, 60, 2 * tn, batch=(2,))
    case(1, 1, 1)
    case(tm - 1, 33, tn + 1, trans_b=True)
    case(tm + 4, 31, tn + 4, trans_a=True)
    case(tm + 4, 12, 5, trans_a=True, trans_b=True)
    case(2, 0, 4, bias=True)
    case(5, 8, 12, batch=(2,), fused=True, bias=True)
    case(17, 65, 19, dtype="f16", needs=f16, bias=True, trans_b=True)


def cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, needs: frozenset[str] = frozenset(), **options) -> None:
        chosen = options["chosen"]
        files = _files(chosen) if chosen else (TILED, SERIAL, PACKED, "matmul/dense.wgsl")
        found.append(Case(name, partial(_product, **options), files, needs | _needs(chosen)))

    for chosen in EVERY:
        if chosen.path == BLOCK:
            _add_block(add, chosen)
            continue
        label = chosen.name
        tm, tn = chosen.rows, chosen.cols
        shapes = [(1, 1, 1), (tm - 1 or 2, 33, tn + 1), (tm + 1, 31, tn - 1)]
        for i, (trans_a, trans_b) in enumerate([(False, False), (False, True), (True, False), (True, True)]):
            m, k, n = shapes[i % 3]
            name = f"matmul/matmul: {label}, {m}x{k}x{n}{' A^T' * trans_a}{' B^T' * trans_b}"
            add(name, chosen=chosen, a=(m, k), b=(k, n), trans_a=trans_a, trans_b=trans_b)
        add(f"matmul/matmul_bias: {label}, 5x7x9", chosen=chosen, a=(5, 7), b=(7, 9), bias=True)
        add(f"matmul/matmul: {label}, 2x5x7x9 epilogue", chosen=chosen, a=(2, 5, 7), b=(2, 7, 9), fused=True)
        # Whole tiles only, several each way: the last one is not part of one. k of whole vectors, not of whole steps.
        name = f"matmul/matmul: {label}, 2x{2 * tm}x60x{2 * tn}"
        add(name, chosen=chosen, a=(2, 2 * tm, 60), b=(2, 60, 2 * tn))
        add(f"matmul/matmul: {label}, 2x0x3", chosen=chosen, a=(2, 0), b=(0, 3))
        f16 = {"dtype": "f16", "bias": True, "trans_b": True}
        name = f"matmul/matmul_bias: {label}, f16 17x65x19 B^T"
        add(name, frozenset({"f16"}), chosen=chosen, a=(17, 65), b=(65, 19), **f16)
        case = partial(_small_integers, chosen=chosen)
        found.append(Case(f"matmul/matmul: {label}, small integers", case, _files(chosen), _needs(chosen)))
        if chosen.path == PACKED:  # pieces of k; an operand shared by all batches
            add(f"matmul/matmul: {label}, 3x17x515x33", chosen=chosen, a=(3, 17, 515), b=(515, 33))
            add(f"matmul/matmul: {label}, 2x3x9x260x5", chosen=chosen, a=(9, 260), b=(2, 3, 260, 5))
    for a, b in (
        ((3, 5, 7), (3, 7, 2)),
        ((5, 7), (3, 7, 2)),
        ((3, 5, 7), (7, 2)),
        ((2, 1, 5, 7), (1, 3, 7, 2)),
        ((2, 1, 2, 1, 5, 7), (1, 3, 1, 2, 7, 2)),
        ((2, 3, 4, 5, 7), (2, 3, 1, 7, 2)),
        ((0, 5, 7), (0, 7, 2)),
        ((0, 4), (4, 3)),
        ((1, 300), (300, 70)),
        ((20, 64), (64, 40)),
        ((150, 64), (64, 130)),
    ):
        for swap in (False, True):
            name = f"ops/matmul: {a} x {b}{' both transposed' * swap}"
            add(name, chosen=None, a=a, b=b, trans_a=swap, trans_b=swap)
    return found
