"""Checks of the generated element-wise kernels and of shaders/elementwise/math.wgsl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nn import functional as ops
from nn.check.arrays import STORE_ERROR, STORE_FLOOR
from nn.check.base import Case, Outcome
from nn.graph import codegen
from nn.graph.expr import Apply, Load, Value
from nn.graph.ir import Strided
from nn.ops.base import Array, Spec
from nn.ops.elementwise import ADD
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device

SHADER = ("elementwise/math.wgsl",)
SIZES = [1, 3, 4, 255, 1028]  # one; less than a vector; a vector; not a multiple of 4; several workgroups of vectors
THOROUGH = ("neg", "exp", "gelu")  # in every size and dtype: loads and stores do not depend on the function
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Function:
    """A function of one operand: its truth, where to draw inputs, and the error that WGSL allows its built-ins."""

    truth: Callable[[np.ndarray], np.ndarray]
    low: float = -8.0
    high: float = 8.0
    rtol: float = 0.0
    atol: float = 0.0


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


UNARY: dict[str, Function] = {
    "neg": Function(np.negative),
    "abs": Function(np.abs),
    "sign": Function(np.sign),
    "square": Function(np.square, rtol=1e-7),
    "reciprocal": Function(np.reciprocal, rtol=3e-7),
    "floor": Function(np.floor),
    "ceil": Function(np.ceil),
    "trunc": Function(np.trunc),
    "round": Function(np.round),
    "exp": Function(np.exp, -80.0, 80.0, rtol=1.2e-5),  # (3 + 2 |x|) ulp
    "exp2": Function(np.exp2, -100.0, 100.0, rtol=1.4e-5),
    "expm1": Function(np.expm1, -2.0, 2.0, rtol=1.5e-6),
    "log": Function(np.log, 1e-4, 100.0, rtol=4e-7, atol=5e-7),
    "log2": Function(np.log2, 1e-4, 100.0, rtol=4e-7, atol=5e-7),
    "log1p": Function(np.log1p, -0.9, 3.0, rtol=4e-7, atol=5e-7),
    "sqrt": Function(np.sqrt, 0.0, 100.0, rtol=4e-7),
    "rsqrt": Function(lambda x: 1 / np.sqrt(x), 1e-3, 100.0, rtol=4e-7),
    "sin": Function(np.sin, -3.14, 3.14, atol=2.0**-11),
    "cos": Function(np.cos, -3.14, 3.14, atol=2.0**-11),
    "tan": Function(np.tan, -1.0, 1.0, rtol=2.0**-9, atol=2.0**-10),
    "tanh": Function(np.tanh, rtol=2e-6),
    "sigmoid": Function(sigmoid, rtol=4e-6),
    "relu": Function(lambda x: np.maximum(x, 0)),
    "silu": Function(lambda x: x * sigmoid(x), rtol=4e-6),
    "erf": Function(erf, -5.0, 5.0, rtol=5e-7, atol=5e-7),
    "gelu": Function(lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))), rtol=1e-6, atol=3e-6),
    "softplus": Function(lambda x: np.logaddexp(0, x), rtol=3e-6, atol=1e-6),
}

BINARY: dict[str, tuple[Callable[..., np.ndarray], float]] = {
    "add": (np.add, 1e-7),
    "sub": (np.subtract, 1e-7),
    "mul": (np.multiply, 1e-7),
    "div": (np.divide, 4e-7),
    "maximum": (np.maximum, 0.0),
    "minimum": (np.minimum, 0.0),
    "remainder": (np.mod, 1e-6),
    "fmod": (np.fmod, 1e-6),
    "floor_divide": (np.floor_divide, 0.0),
    "eq": (np.equal, 0.0),
    "ne": (np.not_equal, 0.0),
    "lt": (np.less, 0.0),
    "le": (np.less_equal, 0.0),
    "gt": (np.greater, 0.0),
    "ge": (np.greater_equal, 0.0),
}

SPECIAL: dict[str, tuple[list[float], list[float]]] = {  # by hand: ends of the range, infinities, NaN, ties
    "tanh": ([100, -100, 0, INF, -INF, NAN, 1e-20], [1, -1, 0, 1, -1, NAN, 1e-20]),
    "exp": ([-200, -INF, 100, INF, NAN, 0], [0, 0, INF, INF, NAN, 1]),
    "exp2": ([-200, -INF, 200, INF, NAN, 0, 10], [0, 0, INF, INF, NAN, 1, 1024]),
    "expm1": ([-INF, 1e-20, INF, NAN], [-1, 1e-20, INF, NAN]),
    "log": ([0, -1, INF, NAN, 1], [-INF, NAN, INF, NAN, 0]),
    "log2": ([0, -1, INF, NAN, 1], [-INF, NAN, INF, NAN, 0]),
    "log1p": ([-1, -2, INF, NAN, 1e-20], [-INF, NAN, INF, NAN, 1e-20]),
    "sigmoid": ([-1000, 1000, -INF, INF, NAN, 0], [0, 1, 0, 1, NAN, 0.5]),
    "silu": ([-1000, 1000, INF, NAN], [0, 1000, INF, NAN]),
    "softplus": ([-1000, 1000, INF, NAN], [0, 1000, INF, NAN]),
    "erf": ([-100, 100, INF, -INF, NAN, 0], [-1, 1, 1, -1, NAN, 0]),
    "gelu": ([-20, 40, NAN], [0, 40, NAN]),
    "sign": ([NAN, -INF, 0, 1e-30], [NAN, -1, 0, 1]),
    "relu": ([NAN, -INF, INF, -1, 2], [NAN, 0, INF, 0, 2]),
    "round": ([0.5, 1.5, 2.5, -0.5, -1.5], [0, 2, 2, 0, -2]),
}

SPECIAL_BINARY: dict[str, tuple[list[float], list[float], list[float]]] = {
    "pow": (
        [-3, -2, 0, 2, 0, -8, 1, NAN, -1, -0.5, 4, 0, -2],
        [2, 3, 0, -1, 3, 0.5, NAN, 0, INF, INF, 0.5, -1, 0],
        [9, -8, 1, 0.5, 0, NAN, 1, 1, 1, 0, 2, INF, 1],
    ),
    "mul": ([2, -2], [INF, INF], [INF, -INF]),
    "remainder": ([-4, -1, 5, 5, -5, 7.5, 0], [3, 3, 3, -3, -3, -2, 3], [2, 2, 2, -1, -2, -0.5, 0]),
    "fmod": ([-4, -1, 5, 5, 7.5], [3, 3, 3, -3, INF], [-1, -1, 2, 2, 7.5]),
    "floor_divide": ([-4, -1, 5, 7, -7], [3, 3, 3, -2, 7], [-2, -1, 1, -4, -1]),
    "maximum": ([NAN, 1, INF, -INF], [1, NAN, 1, 1], [NAN, NAN, INF, 1]),
    "minimum": ([NAN, 1, INF, -INF], [1, NAN, 1, 1], [NAN, NAN, 1, -INF]),
}


def cases() -> list[Case]:
    """Every function in f32 and f16, special values, integers, casts, layouts, and windows of large operands."""
    found = []
    for dtype in ("f32", "f16"):
        needs = frozenset({"f16"} if dtype == "f16" else ())
        for name, function in UNARY.items():
            if dtype == "f32" or name in THOROUGH:
                run = partial(unary, name=name, function=function, dtype=dtype)
                found.append(Case(f"elementwise {name}: {dtype}", run, SHADER, needs))
        found.append(Case(f"elementwise binary: {dtype}", partial(binary, dtype=dtype), SHADER, needs))
        found.append(Case(f"elementwise layouts: {dtype}", partial(layouts, dtype=dtype), SHADER, needs))
        found.append(Case(f"elementwise poisoned output: {dtype}", partial(whole_output, dtype=dtype), SHADER, needs))
        found.append(Case(f"elementwise cat: {dtype}", partial(joined, dtype=dtype), SHADER, needs))
    found += [
        Case("elementwise special values", special, SHADER),
        Case("elementwise pow", powers, SHADER),
        Case("elementwise gelu tanh form", gelu_tanh, SHADER),
        Case("elementwise integers: i32", partial(integers, dtype="i32"), SHADER),
        Case("elementwise integers: u32", partial(integers, dtype="u32"), SHADER),
        Case("elementwise bools", bools, SHADER),
        Case("elementwise casts", casts, SHADER),
        Case("elementwise casts: f16", casts_f16, SHADER, frozenset({"f16"})),
        Case("elementwise classification by bits", classified, SHADER),
        Case("elementwise where, clamp, masked_fill", chosen, SHADER),
        Case("elementwise sources: arange, full, eye, tril", sources, SHADER),
        Case("elementwise twelve operands", twelve, SHADER),
        Case("elementwise windows of large operands", windowed, SHADER),
    ]
    return found


def put(device: Device, values: np.ndarray, dtype: str) -> tuple[Tensor, np.ndarray]:
    """The tensor, and its values in float64 after rounding to dtype."""
    t = Tensor(np.asarray(values), device, dtype=dtype)
    kind = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}[dtype]
    stored = np.asarray(values).astype(kind)
    return t, stored if np.dtype(kind).kind in "iub" else stored.astype(np.float64)


def outcome(got: Tensor, want: np.ndarray, rtol: float, label: str, atol: float = 0.0) -> Outcome:
    more, floor = STORE_ERROR.get(got.dtype, 0.0), STORE_FLOOR.get(got.dtype, 0.0)
    if got.dtype == "f16":
        with np.errstate(invalid="ignore"):
            want = np.where(np.abs(want) > 65504, np.sign(want) * INF, want)
    return Outcome(got.numpy(), np.asarray(want), rtol + more, atol + floor, label)


def unary(device: Device, rng: np.random.Generator, *, name: str, function: Function, dtype: str) -> Iterator[Outcome]:
    low, high = function.low, function.high
    if dtype == "f16":
        low, high = max(low, -10.0), min(high, 10.0)
    for size in SIZES if name in THOROUGH else [255]:
        x, x64 = put(device, rng.uniform(low, high, size), dtype)
        yield outcome(getattr(ops, name)(x), function.truth(x64), function.rtol, f"{name} of {size}", function.atol)


def binary(device: Device, rng: np.random.Generator, *, dtype: str) -> Iterator[Outcome]:
    for name, (truth, rtol) in BINARY.items():
        if dtype == "f16" and name not in ("add", "div", "lt"):
            continue
        for size in (5, 256) if name == "add" else (77,):
            x, x64 = put(device, rng.uniform(-8, 8, size), dtype)
            y, y64 = put(device, rng.uniform(0.5, 4, size) * rng.choice([-1, 1], size), dtype)
            x64[::3] = y64[::3]  # ties
            x, _ = put(device, x64, dtype)
            exact = name in ("remainder", "fmod")  # an absolute error of the operands' rounding
            yield outcome(getattr(ops, name)(x, y), truth(x64, y64), rtol, f"{name} of {size}", 2e-6 if exact else 0.0)


def special(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    for name, (given, want) in SPECIAL.items():
        x = Tensor(np.array(given, np.float32), device)
        yield Outcome(getattr(ops, name)(x).numpy(), np.array(want), 1e-6, 1e-30, f"{name} of {given}")
    for name, (a, b, want) in SPECIAL_BINARY.items():
        x, y = Tensor(np.array(a, np.float32), device), Tensor(np.array(b, np.float32), device)
        yield Outcome(getattr(ops, name)(x, y).numpy(), np.array(want), 1e-6, 1e-6, f"{name} of {a} and {b}")


def powers(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    x64, y64 = f32(rng.uniform(0.1, 5, 300)), f32(rng.uniform(-4, 4, 300))
    x, y = Tensor(x64, device), Tensor(y64, device)
    yield Outcome((x**y).numpy(), x64.astype(np.float64) ** y64.astype(np.float64), 2e-5, 0.0, "pow")
    for exponent in (2, 3, -1, 0.5, -0.5, 1, 0, 2.5):
        want = x64.astype(np.float64) ** exponent
        yield Outcome((x**exponent).numpy(), want, 2e-5, 0.0, f"pow {exponent}")
    whole = np.arange(-5, 6, dtype=np.int32)
    yield Outcome((Tensor(whole, device) ** 3).numpy(), whole**3, label="i32 pow 3")
    yield Outcome((2.0**y).numpy(), 2.0 ** y64.astype(np.float64), 2e-5, 0.0, "number ** tensor")


def gelu_tanh(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    x64 = f32(np.concatenate([rng.uniform(-6, 6, 300), [-20, 40, 1e10, -1e10, 0]])).astype(np.float64)
    with np.errstate(over="ignore"):
        want = 0.5 * x64 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x64 + 0.044715 * x64**3)))
    got = ops.gelu(Tensor(x64.astype(np.float32), device), "tanh")
    yield Outcome(got.numpy(), want, 1e-5, 2e-6, "gelu tanh")


def integers(device: Device, rng: np.random.Generator, *, dtype: str) -> Iterator[Outcome]:
    kind = np.dtype({"i32": np.int32, "u32": np.uint32}[dtype])
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    a = rng.integers(low, high, 259, kind, endpoint=True)
    b = rng.integers(1, 1000, 259, kind) * (rng.choice([-1, 1], 259).astype(kind) if dtype == "i32" else kind.type(1))
    x, y = Tensor(a, device), Tensor(b, device)
    pairs: list[tuple[str, Any]] = [
        ("add", a + b), ("sub", a - b), ("mul", a * b), ("floor_divide", a // b), ("remainder", a % b),
        ("fmod", np.fmod(a, b)),
        ("maximum", np.maximum(a, b)), ("minimum", np.minimum(a, b)), ("bitwise_and", a & b), ("bitwise_or", a | b),
        ("bitwise_xor", a ^ b), ("lt", a < b), ("ge", a >= b), ("eq", a == b),
    ]  # fmt: skip
    for name, want in pairs:
        yield Outcome(getattr(ops, name)(x, y).numpy(), want, label=f"{name} {dtype}")
    yield Outcome((~x).numpy(), ~a, label="not")
    yield Outcome((x << 3).numpy(), a << kind.type(3), label="left shift")
    yield Outcome((x >> 5).numpy(), a >> kind.type(5), label="right shift")
    yield Outcome((x / y).numpy(), a.astype(np.float64) / b.astype(np.float64), 6e-7, 0.0, "div gives f32")
    if dtype == "i32":
        yield Outcome(abs(x).numpy(), np.abs(a), label="abs")
        yield Outcome((-x).numpy(), -a, label="neg")
    a[:5] = (0, 1, 0, 2, 3)
    yield Outcome(Tensor(a, device).sign().numpy(), np.sign(a), label="sign")


def bools(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    a, b = rng.random(77) < 0.5, rng.random(77) < 0.5
    x, y = Tensor(a, device), Tensor(b, device)
    for got, want, label in (
        (x & y, a & b, "and"), (x | y, a | b, "or"), (x ^ y, a ^ b, "xor"), (~x, ~a, "not"), (x == y, a == b, "eq"),
        (x != y, a != b, "ne"), (x.logical_and(y), a & b, "logical_and"), (x.logical_xor(y), a ^ b, "logical_xor"),
        (x.logical_not(), ~a, "logical_not"), (x.logical_or(y), a | b, "logical_or"),
    ):  # fmt: skip
        yield Outcome(got.numpy(), want, label=label)


def casts(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    x = Tensor(np.array([1.9, -1.9, 3e9, -3e9, 5e9, NAN, INF, -INF, 0.0, -0.5], np.float32), device)
    top, low = 2**31 - 1, -(2**31)
    yield Outcome(
        x.to("i32").numpy(), np.array([1, -1, top, low, top, 0, top, low, 0, 0], np.int32), label="f32 -> i32"
    )
    edges = Tensor(f32([2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**32 - 256]), device)
    yield Outcome(edges.to("i32").numpy(), np.array([top, low, top - 127, top, top], np.int32), label="edges of i32")
    whole = np.array([2**31, 0, 2**31 - 128, 2**32 - 1, 2**32 - 256], np.uint32)
    yield Outcome(edges.to("u32").numpy(), whole, label="edges of u32")
    unsigned = np.array([1, 0, 3_000_000_000, 0, 2**32 - 1, 0, 2**32 - 1, 0, 0, 0], np.uint32)
    yield Outcome(x.to("u32").numpy(), unsigned, label="f32 -> u32")
    yield Outcome(x.to("bool").numpy(), np.array([1, 1, 1, 1, 1, 1, 1, 1, 0, 1], np.bool_), label="f32 -> bool")
    ints = rng.integers(-(2**24), 2**24, 99).astype(np.int32)
    y = Tensor(ints, device)
    yield Outcome(y.to("f32").numpy(), ints.astype(np.float32), label="i32 -> f32")
    yield Outcome(y.to("u32").numpy(), ints.astype(np.uint32), label="i32 -> u32")
    yield Outcome((y > 0).to("i32").numpy(), (ints > 0).astype(np.int32), label="bool -> i32")
    yield Outcome((y > 0).to("f32").numpy(), (ints > 0).astype(np.float32), label="bool -> f32")


def casts_f16(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    values = f32(rng.uniform(-4, 4, 101))
    x = Tensor(values, device)
    yield outcome(x.to("f16"), values.astype(np.float64), 0.0, "f32 -> f16")
    # Rounded inside a fused kernel: a value, halfway cases, subnormals, the ends of the range.
    hard = f32(
        [1 / 3, 1 + 2**-11, 1 + 3 * 2**-11, 3e-6, 2**-25, 3 * 2**-25, 6e-5, 65504, 65519.9, 65520, -1e9, INF, -0.1]
    )
    with np.errstate(over="ignore"):
        want = hard.astype(np.float16).astype(np.float32) * f32(2)
    yield Outcome((Tensor(hard, device).to("f16").to("f32") * 2).numpy(), want, label="rounding to f16")
    for length in (1, 3):
        odd, want = put(device, np.arange(1, length + 1), "f16")
        yield outcome(odd * 2, want * 2, 0.0, f"f16 of length {length}")


def classified(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    values = np.array([NAN, INF, -INF, 1, 0, 3.4e38], np.float32)
    x = Tensor(values, device)
    yield Outcome(x.isnan().numpy(), np.isnan(values), label="isnan")
    yield Outcome(x.isinf().numpy(), np.isinf(values), label="isinf")
    yield Outcome(x.isfinite().numpy(), np.isfinite(values), label="isfinite")
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        want = {
            "eq": values == 1,
            "ne": values != 1,
            "lt": values < 1,
            "le": values <= 1,
            "gt": values > 1,
            "ge": values >= 1,
        }
        yield Outcome(getattr(ops, name)(x, 1.0).numpy(), want[name], label=name)
    yield Outcome((x == x).numpy(), ~np.isnan(values), label="NaN differs from itself")


def chosen(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    a = f32(rng.standard_normal((5, 7)))
    x = Tensor(a, device)
    yield Outcome(ops.where(x > 0, x, 0.0).numpy(), np.where(a > 0, a, f32(0)), label="where number")
    yield Outcome(ops.where(x > 0, 1, 2).numpy(), np.where(a > 0, 1, 2).astype(np.int32), label="where two numbers")
    row = f32(rng.standard_normal((1, 7)))
    yield Outcome(ops.where(x > 0, Tensor(row, device), x).numpy(), np.where(a > 0, row, a), label="where broadcast")
    yield Outcome(x.clamp(-0.5, 0.5).numpy(), np.clip(a, f32(-0.5), f32(0.5)), label="clamp")
    yield Outcome(x.clamp(min=0.1).numpy(), np.maximum(a, f32(0.1)), label="clamp below")
    yield Outcome(x.masked_fill(x < 0, -INF).numpy(), np.where(a < 0, f32(-INF), a), label="masked_fill")


def sources(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    yield Outcome(ops.arange(7, device=device).numpy(), np.arange(7, dtype=np.int32), label="arange")
    yield Outcome(ops.arange(8, 20, 3, device=device).numpy(), np.arange(8, 20, 3, dtype=np.int32), label="arange step")
    yield Outcome(ops.arange(1.0, 0.0, -0.25, device=device).numpy(), f32([1, 0.75, 0.5, 0.25]), label="arange down")
    wide = ops.arange(64, device=device).reshape(16, 4).T + 0
    yield Outcome(wide.numpy(), np.arange(64, dtype=np.int32).reshape(16, 4).T, label="arange transposed")
    grid = ops.arange(64, device=device).reshape(4, 16) * 2
    yield Outcome(grid.numpy(), np.arange(64, dtype=np.int32).reshape(4, 16) * 2, label="arange in vectors")
    yield Outcome(ops.full((3, 5), 2.5, device=device).numpy(), np.full((3, 5), f32(2.5)), label="full")
    yield Outcome(ops.eye(3, 5, device=device).numpy(), np.eye(3, 5, dtype=np.float32), label="eye")
    a = f32(rng.standard_normal((2, 5, 7)))
    yield Outcome(ops.tril(Tensor(a, device), 1).numpy(), np.tril(a, 1), label="tril")
    yield Outcome(ops.triu(Tensor(a, device), -1).numpy(), np.triu(a, -1), label="triu")


def twelve(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    total = Tensor(np.full(9, 1, np.float32), device)
    for i in range(2, 13):
        total = total + Tensor(np.full(9, i, np.float32), device)
    yield Outcome(total.numpy(), np.full(9, 78, np.float32), label="1 + 2 + ... + 12")


def layouts(device: Device, rng: np.random.Generator, *, dtype: str) -> Iterator[Outcome]:
    """Strides, broadcast rows and columns, offsets, reversed axes, vectors where they are possible and where not."""
    for b, n, m in ((2, 3, 5), (2, 4, 8), (1, 7, 4)):
        x, x64 = put(device, rng.standard_normal((b, n, m)), dtype)
        wide, wide64 = put(device, rng.standard_normal((b, n, m + 2)), dtype)
        row, row64 = put(device, rng.standard_normal(m), dtype)
        col, col64 = put(device, rng.standard_normal((n, 1)), dtype)
        for got, want, label in (
            (x + row, x64 + row64, "row"),
            (x * col, x64 * col64, "column"),
            (x.transpose(1, 2) + col.T, x64.transpose(0, 2, 1) + col64.T, "transposed"),
            (x.permute(2, 0, 1) - row.reshape(m, 1, 1), x64.transpose(2, 0, 1) - row64.reshape(m, 1, 1), "permuted"),
            (x[:, 1:, :] * 2, x64[:, 1:] * 2, "offset rows"),
            (x * wide[:, :, :-2], x64 * wide64[:, :, :-2], "part of wider rows"),
            (wide.reshape(-1)[1 : 1 + m * n] * 3, wide64.reshape(-1)[1 : 1 + m * n] * 3, "odd start"),
            (x[:, :, 1::2] * 2, x64[:, :, 1::2] * 2, "every second"),
            (x.flip(1) + x, x64[:, ::-1] + x64, "reversed"),
            ((x + row).reshape(b * n, m)[1:].T * 3, (x64 + row64).reshape(b * n, m)[1:].T * 3, "views of a sum"),
            ((x * col).transpose(0, 2).reshape(-1) + 1, (x64 * col64).transpose(2, 1, 0).reshape(-1) + 1, "copied"),
            # (the copy rounds the product to f16 before 1 is added)
        ):
            stored = 4 * STORE_ERROR[dtype] if label == "copied" else 0.0
            yield outcome(got, want, 3e-7, f"{label} {b}x{n}x{m}", 3e-7 + stored)


def whole_output(device: Device, rng: np.random.Generator, *, dtype: str) -> Iterator[Outcome]:
    """Every element of the result is written, none beside it: the output starts as NaN and has a border."""
    for shape in ((5, 7), (3, 8), (1, 1)):
        x, x64 = put(device, rng.standard_normal(shape), dtype)
        rows, cols = shape[0] + 2, shape[1] + 4
        border = Tensor(np.full((rows, cols), NAN), device, dtype=dtype)
        value = Value(Spec((rows, cols), dtype))
        leaf = x.node.value
        assert isinstance(leaf, Array)
        load = Load(dtype, Value(leaf.spec, array=leaf), Strided.dense(shape))
        doubled = Apply(dtype, ADD, (load, load))
        step = codegen.MapStep(device.caps, doubled, value, Strided(shape, (cols, 1), cols + 4))
        record = device.recorder()
        target = border.array()
        step.record(record, lambda v, leaf=leaf, target=target, value=value: target if v is value else leaf)
        record.submit()
        want = np.full((rows, cols), NAN)
        want[1:-1, 4:] = x64 * 2
        yield outcome(border, want, 0.0, f"border {shape}")


def joined(device: Device, rng: np.random.Generator, *, dtype: str) -> Iterator[Outcome]:
    """Concatenation and padding along each axis; 33 operands at once."""
    pieces = [put(device, rng.standard_normal((2, n, 3)), dtype) for n in (1, 4, 2)]
    yield outcome(ops.cat([t for t, _ in pieces], 1), np.concatenate([v for _, v in pieces], 1), 0.0, "cat axis 1")
    many = [put(device, np.full((2, 1 + i % 3), i), dtype) for i in range(33)]
    yield outcome(ops.cat([t for t, _ in many], 1), np.concatenate([v for _, v in many], 1), 0.0, "cat of 33")
    x, x64 = put(device, rng.standard_normal((3, 4)), dtype)
    yield outcome(ops.stack([x, x * 2], 1), np.stack([x64, x64 * 2], 1), 0.0, "stack")
    yield outcome(ops.pad(x, (1, 2, 0, 3), value=7), np.pad(x64, ((0, 3), (1, 2)), constant_values=7), 0.0, "pad")
    yield outcome(ops.pad(x, (-1, 1)), np.pad(x64[:, 1:], ((0, 0), (0, 1))), 0.0, "pad and cut")


def windowed(device: Device, rng: np.random.Generator) -> Iterator[Outcome]:
    """A device that binds 8 KiB at a time: operands are bound in windows; rows, reversed and transposed reads too."""
    small = replace(device.caps, max_binding=8192)
    for shape in ((9000,), (37, 259), (3, 5, 600)):
        a, row = f32(rng.standard_normal(shape)), f32(rng.standard_normal(shape[-1:]))
        source, line = (Value(Spec(h.shape), array=Array(device.upload(h), h.shape)) for h in (a, row))
        dense = Strided.dense(shape)
        back = Strided(shape, (-dense.strides[0], *dense.strides[1:]), (shape[0] - 1) * dense.strides[0])
        spread = Strided(shape, (0,) * (len(shape) - 1) + (1,))
        both = Apply("f32", ADD, (Load("f32", source, dense), Load("f32", source, back)))
        expr = Apply("f32", ADD, (both, Load("f32", line, spread)))
        want = a.astype(np.float64) + a[::-1] + row
        for turn in (False, True) if len(shape) == 2 else (False,):
            out = Array(device.upload(np.full(shape, NAN, np.float32)), shape[::-1] if turn else shape)
            value = Value(out.spec)
            at = Strided(shape, (1, shape[0]), 0) if turn else dense
            record = device.recorder()
            codegen.MapStep(small, expr, value, at).record(
                record, lambda v, value=value, out=out: out if v is value else v.array
            )
            count = len(record)
            record.submit()
            got = device.read(out.buffer, np.float32, out.shape)
            yield Outcome(got.T if turn else got, want, 2e-7, 3e-7, f"{shape}, turned {turn}")
            yield Outcome(np.array([count > 1]), np.array([True]), label="more than one window")
