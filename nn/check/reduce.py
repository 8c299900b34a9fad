"""Checks of shaders/reduce/fold.wgsl: every kind, layouts of rows and columns, one and several passes, both entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nn import functional as ops
from nn.check.arrays import poisoned
from nn.check.base import Case, Outcome
from nn.check.elementwise import f32
from nn.graph import fold
from nn.graph.expr import Load, Value
from nn.graph.ir import Reduce, Strided
from nn.ops.base import DTYPES, Array, Spec
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device

# (rows, columns), folded along columns: one; odd; around 64 and 256; fours; two passes; many rows
SHAPES = [(1, 1), (3, 5), (5, 64), (2, 257), (4, 260), (72, 300), (3, 4099), (1, 70_001), (70_001, 3), (4, 16_400)]
FEW = [(3, 5), (4, 260), (3, 4099), (4, 16_400)]
FOLDED = (65_600, 64)  # more workgroups of a row each than one dimension of a grid holds
NUMPY: dict[str, Callable[..., Any]] = {
    "sum": np.sum, "mean": np.mean, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any, "all": np.all,
    "argmax": np.argmax, "argmin": np.argmin,
}  # fmt: skip


def i32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def cases() -> list[Case]:
    """Kinds x (rows, rows with subgroups, columns, serial), dtypes, layouts, and the values that others got wrong."""
    found = []
    for how in ("serial", "rows", "rows subgroups", "columns"):
        files = ("reduce/fold.wgsl", "elementwise/math.wgsl")
        files += (f"lib/fold_run{'_subgroup' if 'subgroups' in how else ''}.wgsl",) if "rows" in how else ()
        needs = frozenset({"subgroups"} if "subgroups" in how else ())
        for kind in ("sum", "mean", "prod", "max", "min", "any", "argmax", "argmin"):
            found.append(Case(f"reduce/fold {kind}: {how}", partial(rows, kind=kind, how=how), files, needs))
    files = ("reduce/fold.wgsl", "elementwise/math.wgsl")
    found += [
        Case("reduce/fold axes and views", axes, files),
        Case("reduce/fold fused producers", fused, files),
        Case("reduce/fold integers and bools", integers, files),
        Case("reduce/fold ties, NaN, empty", special, files),
        Case("reduce/fold f16", f16, files, frozenset({"f16"})),
        Case("reduce/fold var, std, logsumexp", composed, files),
    ]
    return found


def ways(device: Device, how: str, kind: str, matrix: fold.Matrix, shape: tuple[int, int]) -> list[fold.FoldVariant]:
    """The variants to check at a shape: most of them for sums, else packs among few and single elements among many."""
    entry = f"fold_{how.split()[0]}"
    found = [v for v in fold.variants(device.caps, matrix) if v.entry == entry]
    found = [v for v in found if v.subgroups == ("subgroups" in how) and v.wg <= device.caps.max_invocations]
    if kind != "sum":
        return [v for v in found if entry == "fold_serial" or v.lanes == (4 if v.pack == 4 else 32)]
    found = [v for v in found if entry == "fold_serial" or v.lanes in ((1, 32) if v.pack == 4 else (4, 256))]
    gpu = fold.default(replace(device.caps, kind="gpu", subgroups="subgroups" in how), matrix, *shape)
    return list(dict.fromkeys([*found, *([gpu] if gpu.entry == entry else [])]))


def rows(device: Device, rng: np.random.Generator, *, kind: str, how: str) -> Iterator[Outcome]:
    """One kind over rows in every variant of an entry; the outputs are poisoned before."""
    caps = replace(device.caps, kind="cpu" if how == "serial" else "gpu", subgroups="subgroups" in how)
    for shape in (SHAPES if kind == "sum" else FEW) + ([FOLDED] if kind == "sum" and how == "rows" else []):
        wide = shape[1] > 1000
        host = f32(1 + rng.uniform(-1, 1, shape) * (1e-3 if kind == "prod" and wide else 1))
        if kind == "any":
            host = f32(rng.random(shape) < 1.5 / shape[1])
        if kind.startswith("arg"):
            host = f32(np.round(host, 1))  # many ties
        kind_in = "bool" if kind == "any" else "f32"
        dense = Strided.dense(shape) if how != "columns" else Strided(shape, (1, shape[0]), 0)
        stored = np.ascontiguousarray(host if how != "columns" else host.T).astype(DTYPES[kind_in][1])
        source = Value(Spec(shape, kind_in), array=Array(device.upload(stored), shape, kind_in))
        dtype = "i32" if kind.startswith("arg") else "bool" if kind == "any" else "f32"
        want = NUMPY[kind](host.astype(np.float64), axis=1)
        exact = kind in ("max", "min", "any") or kind.startswith("arg")
        # A sum of n values in parts of at most 1024: each addition is wrong by 2^-24 of a partial sum at most.
        error = 0.0 if exact else 1e-6 if not wide else 4e-5
        op, expr = Reduce(kind, (1,), dtype), Load(kind_in, source, dense)
        chosen = ways(device, how, kind, fold.Matrix.of(expr, shape, (0,), (1,)), shape)
        for variant in chosen if shape != FOLDED else [fold.FoldVariant("fold_rows", 4, 64, 64)]:
            out = Value(Spec((shape[0], 1), dtype))
            steps = fold.reduce_steps(caps, op, expr, shape, out, variant=variant)
            memory: dict[Value, Array] = {
                out: poisoned(device, (shape[0], 1), dtype),
                source: source.array,  # pyright: ignore[reportAssignmentType]
            }
            record = device.recorder()
            for step in steps:
                for value in step.writes:
                    memory.setdefault(value, poisoned(device, value.spec.shape, value.spec.dtype))
                step.record(record, memory.__getitem__)
            record.submit()
            got = device.read(memory[out].buffer, DTYPES[dtype][1], shape[:1])
            label = f"{kind} {shape}, {variant.name}, {len(steps)} passes"
            yield Outcome(got.astype(np.bool_) if kind == "any" else got, want, error, error, label)


def axes(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Which axes are folded, and operands that are permuted, sliced, reversed, expanded."""
    a = f32(rng.standard_normal((3, 1, 5, 7)))
    x = Tensor(a, device)
    a64 = a.astype(np.float64)
    choices: list[Any] = [None, 0, 1, -1, (0, 2), (1, 3), (0, 1, 2, 3)]
    for dim in choices:
        for keep in (False, True):
            want = a64.sum(axis=dim, keepdims=keep)
            yield Outcome(x.sum(dim, keep).numpy(), want, 1e-6, 2e-6, f"sum over {dim}, keepdim {keep}")
    yield Outcome(
        x.permute(3, 0, 2, 1).sum((0, 2)).numpy(), a64.transpose(3, 0, 2, 1).sum((0, 2)), 1e-6, 2e-6, "permuted"
    )
    yield Outcome(x[1:, :, ::2].amax(2).numpy(), a[1:, :, ::2].max(2), label="sliced")
    yield Outcome(x.flip(3).argmax(3).numpy(), a[..., ::-1].argmax(3).astype(np.int32), label="argmax reversed")
    yield Outcome(x.argmax().numpy(), i32(a.argmax()), label="argmax of all")
    b = f32(rng.standard_normal((2050, 9)))
    yield Outcome(Tensor(b, device).sum(0).numpy(), b.astype(np.float64).sum(0), 1e-5, 1e-4, "long columns")
    spread = Tensor(b[:1], device).expand((50, 9))
    yield Outcome(spread.sum(0).numpy(), b[0].astype(np.float64) * 50, 1e-5, 1e-5, "expanded")


def fused(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Folds of expressions that are computed on the way."""
    a, b = f32(rng.standard_normal((2, 33, 130)))
    x, y = Tensor(a, device), Tensor(b, device)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    yield Outcome(((x * y + 1).square()).sum(1).numpy(), ((a64 * b64 + 1) ** 2).sum(1), 3e-6, 1e-4, "sum of a square")
    yield Outcome((x - y.T.T[0]).mean(0).numpy(), (a64 - b64[0]).mean(0), 1e-5, 1e-6, "mean of a difference")
    yield Outcome((x > y).sum(1).numpy(), (a > b).sum(1).astype(np.int32), label="count")
    yield Outcome((x.T * 2).amax(0).numpy(), (a * 2).max(1), label="max of a transposed product")
    centred = a64 - a64.mean(1, keepdims=True)
    yield Outcome((x - x.mean(1, keepdim=True)).square().mean(1).numpy(), (centred**2).mean(1), 1e-5, 1e-6, "variance")
    top = np.exp(a64 - a64.max(1, keepdims=True))
    e = (x - x.amax(1, keepdim=True)).exp()
    yield Outcome((e / e.sum(1, keepdim=True)).numpy(), top / top.sum(1, keepdims=True), 1e-5, 1e-8, "softmax by hand")


def integers(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """i32, u32 and bool: exact, sums wrap."""
    a = rng.integers(-(10**6), 10**6, (7, 301)).astype(np.int32)
    x = Tensor(a, device)
    for name in ("sum", "amax", "amin", "argmax", "argmin"):
        want = getattr(np, name)(a, 1).astype(np.int32)
        yield Outcome(getattr(x, name)(1).numpy(), want, label=f"i32 {name}")
    u = rng.integers(0, 2**32 - 1, (7, 301), np.uint32)
    y = Tensor(u, device)
    yield Outcome(y.sum(1).numpy(), u.sum(1, dtype=np.uint32), label="u32 sum wraps")
    yield Outcome(y.amax(1).numpy(), u.max(1), label="u32 max")
    for name in ("argmax", "argmin"):
        yield Outcome(getattr(y, name)(1).numpy(), getattr(u, name)(1).astype(np.int32), label=f"u32 {name}")
    small = rng.integers(-2, 3, (5, 9)).astype(np.int32)
    small[small == 0] = 1
    yield Outcome(Tensor(small, device).prod(1).numpy(), small.prod(1, dtype=np.int32), label="i32 prod")
    t = rng.random((6, 70)) < 0.98
    z = Tensor(t, device)
    for name in ("any", "all"):
        yield Outcome(getattr(z, name)(1).numpy(), getattr(t, name)(1), label=f"bool {name}")
    yield Outcome(z.sum(1).numpy(), t.sum(1).astype(np.int32), label="bool sum")
    yield Outcome((~z).all().numpy(), np.asarray((~t).all()), label="all of all")
    yield Outcome(z.argmax(1).numpy(), t.argmax(1).astype(np.int32), label="bool argmax")


def special(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Ties take the lower index, NaN wins, and folds of nothing give the neutral element."""

    def t(values: Any) -> Tensor:
        return Tensor(np.array(values, np.float32), device)

    long = np.zeros(1000, np.float32)
    long[[3, 700]] = 7
    nan, inf = math.nan, math.inf
    by_hand: list[tuple[Any, int, int]] = [
        ([1, 5, 5, 2], 1, 0), (long, 3, 0), ([3, nan, 1, 5], 1, 1), ([-0.0, 0.0], 0, 0), ([-inf, -inf], 0, 0),
        ([-3, -1, -1, -7], 1, 3), ([nan, nan], 0, 0),
    ]  # fmt: skip
    for values, top, bottom in by_hand:
        yield Outcome(t(values).argmax().numpy(), i32(top), label=f"argmax {values}"[:60])
        yield Outcome(t(values).argmin().numpy(), i32(bottom), label=f"argmin {values}"[:60])
    yield Outcome(t([3, nan, 1]).amax().numpy(), f32(nan), 1e-9, label="max with NaN")
    yield Outcome(t([3, nan, 1]).amin().numpy(), f32(nan), 1e-9, label="min with NaN")
    yield Outcome(t([-inf, -inf]).amax().numpy(), f32(-inf), 1e-9, label="max of -inf")
    values, where = t([[1, 5, 5], [9, 2, 3]]).max(1)
    yield Outcome(values.numpy(), f32([5, 9]), label="max values")
    yield Outcome(where.numpy(), i32([1, 0]), label="max indices")
    empty = Tensor(np.zeros((0, 3), np.float32), device)
    yield Outcome(empty.sum(0).numpy(), np.zeros(3, np.float32), label="sum of nothing")
    yield Outcome(empty.prod(0).numpy(), np.ones(3, np.float32), label="product of nothing")
    yield Outcome(empty.mean(0).numpy(), np.full(3, nan, np.float32), 1e-9, label="mean of nothing")
    yield Outcome(empty.to("bool").all(0).numpy(), np.ones(3, np.bool_), label="all of nothing")
    yield Outcome(empty.sum(1).numpy(), np.zeros(0, np.float32), label="no rows")
    full = ops.full((5, 70), 0.5, device=device)
    yield Outcome(full.sum().numpy(), f32(175), 1e-6, label="sum of a filled tensor")
    yield Outcome(ops.arange(100, device=device).sum().numpy(), i32(4950), label="sum of a range")


def f16(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Sums go on past what f16 can hold or tell apart."""
    hundred = Tensor(np.full(4096, 100.0, np.float16), device)
    yield Outcome(hundred.mean().numpy(), f32(100), 1e-3, label="mean of 4096 x 100")
    ones = Tensor(np.ones(20000, np.float16), device)
    yield Outcome(ones.sum().numpy(), f32(20000), 1e-3, label="sum of 20000 ones")
    a = np.float16(rng.standard_normal((7, 301)))
    x, a64 = Tensor(a, device), a.astype(np.float64)
    yield Outcome(x.sum(1).numpy(), a64.sum(1), 2.0**-10, 1e-4, "rows")
    yield Outcome(x.sum(0).numpy(), a64.sum(0), 2.0**-10, 1e-4, "columns")
    yield Outcome(x.amax(1).numpy(), a.max(1).astype(np.float64), 1e-9, label="max")
    yield Outcome(x.argmax(1).numpy(), a.argmax(1).astype(np.int32), label="argmax")


def composed(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """Operations made of several folds."""
    a = f32(rng.standard_normal((9, 130)) + 8192)
    x, a64 = Tensor(a, device), a.astype(np.float64)
    yield Outcome(x.var(1).numpy(), a64.var(1, ddof=1), 1e-4, label="variance around 8192")
    yield Outcome(x.std(1, correction=0).numpy(), a64.std(1), 1e-4, label="std")
    b = f32(rng.uniform(-200, 200, (5, 77)))
    b[1] = -math.inf
    top = b.astype(np.float64).max(1, keepdims=True)
    top[1] = 0
    with np.errstate(divide="ignore"):
        want = np.log(np.exp(b - top).sum(1)) + top[:, 0]
    yield Outcome(Tensor(b, device).logsumexp(1).numpy(), want, 2e-6, 1e-5, "logsumexp")
