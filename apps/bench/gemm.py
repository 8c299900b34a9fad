"""Suite gemm: products of dense matrices, as large as they come and as training and prompts have them.

Layouts are named by what is stored: "nn" a (M, K) b (K, N); "nt" b is (N, K), as torch.nn.Linear keeps weights; "tn" a
is (K, M). A linear layer runs nt forward, nn for the gradient of its input and tn for that of its weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from apps.bench.case import STORED, Case, Run, Skip, Work, differ, pick, plan_of, rows_of, values
from nn import functional as F
from nn.ops.base import DTYPES
from nn.quant.fill import random_weight, uniform
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu.device import Capabilities

# (name, tokens, [(layer, rows of the weight, columns)])
CHAR = ("gpt-char", 16384, [("qkv", 1152, 384), ("proj", 384, 384), ("up", 1536, 384), ("down", 384, 1536)])
GPT2 = ("gpt2-124m", 8192, [("qkv", 2304, 768), ("proj", 768, 768), ("up", 3072, 768), ("down", 768, 3072)])
HEADS = [("gpt2-124m", 8192, "head", 50257, 768)]
# Rows that run before the others, where time is short: some for everything that docs/bench/targets.py aims at.
FIRST = re.compile(
    r"f(32|16) nn 4096x4096x4096( \+ bias\+gelu)?|bf16 .*|f32 .*  \S+ (qkv|up) .*|f(32|16) nt (16|64)x4096x4096"
    r"|f32 nn (4095x4097x4093|4096x4224x4096|333x4096x4096|384x4096x4096)|q4_0 linear 512x.*"
)
TILE = 128  # what odd shapes are compared with: the next multiple of it
ODD = [(4095, 4097, 4093), (1000, 1000, 1000), (4096, 4096, 4095), (333, 4096, 4096), (4096, 1001, 4096)]


@dataclass(frozen=True)
class Product:
    """(batch) M x N x K in one of the layouts, and what is fused behind it."""

    m: int
    n: int
    k: int
    dtype: str = "f32"
    layout: str = "nn"
    batch: int = 1
    epilogue: str = ""

    @property
    def key(self) -> str:
        """The name of its row."""
        size = f"{self.m}x{self.n}x{self.k}"
        size = f"{self.batch} of {size}" if self.batch > 1 else size
        return f"{self.dtype} {self.layout} {size}{f' + {self.epilogue}' if self.epilogue else ''}"

    def bytes_of(self) -> tuple[int, int, int]:
        """Of a, b and the result."""
        unit = DTYPES[self.dtype][0] * self.batch
        return unit * self.m * self.k, unit * self.k * self.n, unit * self.m * self.n


def cases(caps: Capabilities, *, dtypes: set[str] | None, shape: tuple[int, ...] | None) -> Iterator[Case]:
    """Every row for this device. shape: (M, N, K) or (batch, M, N, K) in place of the built-in ones."""
    small = caps.kind == "cpu"
    if shape is not None:
        batch, m, n, k = (1, *shape) if len(shape) == 3 else shape
        for dtype in sorted(dtypes & set(DTYPES)) if dtypes else ("f32", "f16"):
            for layout in ("nn", "nt", "tn"):
                yield case(Product(m, n, k, dtype, layout, batch))
        return
    for made in _small() if small else _large():
        if dtypes is None or made.dtype in dtypes:
            yield made


def _small() -> Iterator[Case]:
    for size in (256, 512, 1024):
        yield case(Product(size, size, size))
    yield case(Product(512, 512, 512, "f16"), beside="f32 nn 512x512x512", rule=1.0)
    yield case(Product(500, 511, 509), beside="f32 nn 512x512x512", rule=0.8)
    for layout in ("nt", "tn"):
        yield case(Product(512, 512, 512, layout=layout), beside="f32 nn 512x512x512")
    epilogue = Product(512, 512, 512, epilogue="bias+gelu")
    yield case(epilogue, beside="f32 nn 512x512x512", rule=0.95)


def _large() -> Iterator[Case]:
    square = Product(4096, 4096, 4096)
    half = Product(4096, 4096, 4096, "f16")
    yield case(square)
    yield case(half, beside=square.key, rule=1.0)
    yield case(Product(4096, 4096, 4096, "bf16", "nt"), beside=square.key, rule=1.0)
    for dtype, level in (("f32", 1), ("f16", 1)):
        for name, tokens, layers in (CHAR, GPT2):
            for layer, rows, cols in layers:
                lines = [
                    (Product(tokens, rows, cols, dtype, "nt"), "forward"),
                    (Product(tokens, cols, rows, dtype, "nn"), "dX"),
                    (Product(rows, cols, tokens, dtype, "tn"), "dW"),
                ]
                for product, use in lines:
                    yield case(
                        product, level=level if dtype == "f32" or layer == "up" else 2, name=f"{name} {layer} {use}"
                    )
    for name, tokens, layer, rows, cols in HEADS:
        yield case(Product(tokens, rows, cols, "f32", "nt"), name=f"{name} {layer} forward")
        yield case(Product(tokens, cols, rows, "f32", "nn"), name=f"{name} {layer} dX", level=2)
        yield case(Product(rows, cols, tokens, "f32", "tn"), name=f"{name} {layer} dW", level=2)
    for m, n, k in ODD:
        for dtype, level in (("f32", 1), ("f16", 2 if (m, n, k) != ODD[0] else 1)):
            even = Product(*(-(-x // TILE) * TILE for x in (m, n, k)), dtype=dtype)
            if (even.m, even.n, even.k) not in ((4096, 4096, 4096),):
                yield case(even, level=level)
            yield case(Product(m, n, k, dtype), beside=even.key, rule=0.8, level=level)
    for m in (1, 16, 64):
        plain = Product(m, 4096, 4096, layout="nt")
        yield case(plain, level=1 if m > 1 else 2)
        yield case(Product(m, 4096, 4096, "f16", "nt"), beside=plain.key, rule=1.5, level=1 if m > 1 else 2)
    for dtype in ("f32", "f16"):
        for layout in ("nt", "tn"):
            made = Product(4096, 4096, 4096, dtype, layout)
            yield case(made, beside=f"{dtype} nn 4096x4096x4096", level=1 if (dtype, layout) == ("f16", "nt") else 2)
        for epilogue in ("bias", "bias+gelu", "bias+residual"):
            made = Product(4096, 4096, 4096, dtype, epilogue=epilogue)
            yield case(made, beside=f"{dtype} nn 4096x4096x4096", rule=0.95, level=1 if dtype == "f32" else 2)
        for batch, m, n, k in ((64, 512, 512, 512), (384, 256, 256, 64)):
            yield case(Product(m, n, k, dtype, batch=batch))
    yield case(Product(512, 4096, 4096, "f16", "nt"))
    for format in ("q4_0", "q4_k", "q8_0"):
        for tokens in (512, 4096):
            beside = f"f16 nt {tokens}x4096x4096"
            yield stored_case(
                format, tokens, 4096, 4096, beside=beside, level=1 if tokens == 512 or format == "q4_0" else 2
            )


def case(product: Product, *, beside: str = "", rule: float = 0.0, name: str = "", level: int = 1) -> Case:
    """A row of a dense product. name: what it is in a model; beside, rule: see Case."""
    a, b, out = product.bytes_of()
    extra = out if "residual" in product.epilogue else 0
    return Case(
        suite="gemm",
        key=f"{product.key}{f'  {name}' if name else ''}",
        dtype=product.dtype,
        make=partial(_make, product=product),
        flops=2.0 * product.batch * product.m * product.n * product.k,
        nbytes=float(a + b + out + extra),
        need=a + b + out + extra,
        largest=max(a, b, out),
        level=level,
        matrix=product.dtype == "f16",
        unit="GFLOP/s",
        beside=(beside, rule) if beside else None,
        torch=partial(_torch, product=product),
        numpy=partial(_numpy, product=product) if product.dtype == "f32" else None,
    )


def _make(run: Run, *, product: Product) -> Work:
    p, device = product, run.device
    lead = (p.batch,) if p.batch > 1 else ()
    trans_a, trans_b = p.layout[0] == "t", p.layout[1] == "t"
    a = uniform(device, (*lead, p.k, p.m) if trans_a else (*lead, p.m, p.k), p.dtype, seed=run.seed())
    b = uniform(device, (*lead, p.n, p.k) if trans_b else (*lead, p.k, p.n), p.dtype, seed=run.seed())
    left, right = Tensor(a), Tensor(b)
    try:
        y = (left.mT if trans_a else left) @ (right.mT if trans_b else right)
    except TypeError as error:
        raise Skip(str(error)) from error
    bias = residual = None
    if "bias" in p.epilogue:
        bias = uniform(device, (p.n,), p.dtype, seed=run.seed())
        y = y + Tensor(bias)
    if "gelu" in p.epilogue:
        y = F.gelu(y, approximate="tanh")
    if "residual" in p.epilogue:
        residual = uniform(device, (*lead, p.m, p.n), p.dtype, seed=run.seed())
        y = y + Tensor(residual)
    plan, (out,) = plan_of(device, y)
    units = p.dtype == "f16" and device.caps.matrix_f16

    def check() -> str | None:
        rows, cols, batch = pick(run.rng, p.m), pick(run.rng, p.n), int(run.rng.integers(p.batch))
        x = _matrix(device, a, batch, rows, across=trans_a)  # (rows, K)
        w = _matrix(device, b, batch, cols, across=not trans_b)  # (cols, K)
        want = x @ w.T
        if bias is not None:
            want = want + values(device, bias)[cols]
        if "gelu" in p.epilogue:
            want = 0.5 * want * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (want + 0.044715 * want**3)))
        stored = np.abs(want) * (STORED[p.dtype] / 2 if len(plan) > 1 else 0.0)  # what the second dispatch reads
        if residual is not None:
            want = want + rows_of(device, residual, [batch * p.m + r for r in rows])[:, cols]
        got = rows_of(device, out, [batch * p.m + r for r in rows])[:, cols]
        return differ(got, want, atol=rounding(p.k, units=units) + stored, dtype=p.dtype)

    return Work([plan], check, note="" if len(plan) == 1 else f"{len(plan)} dispatches")


def rounding(k: int, *, units: bool = False) -> float:
    """Absolute error of an f32 sum of k products of values from [-1, 1]: a missing product is a hundred times more.

    units: of matrix units, which cut digits off toward zero with every 16 products (Fasi et al. 2021, "Numerical
    behavior of NVIDIA tensor cores", PeerJ CS 7:e330); a sum is then of the order of sqrt(k) / 3.
    """
    cut = k / 16.0 * math.sqrt(k) / 3.0 if units else 0.0
    return 2.0**-23 * (k / 3.0 + 8.0 * math.sqrt(k) + cut)


def _matrix(device: Any, array: Any, batch: int, picked: np.ndarray, *, across: bool) -> np.ndarray:
    """(picked, K): rows of a matrix stored with K contiguous, or, `across`, columns of one stored with K rows."""
    height = array.shape[-2]
    if across:
        return (
            rows_of(device, array, range(batch * height, (batch + 1) * height))[:, picked].T
            if height <= 64
            else (values(device, array).reshape(-1, *array.shape[-2:])[batch][:, picked].T)
        )
    return rows_of(device, array, [batch * height + r for r in picked])


def _torch(peer: Any, *, product: Product) -> Any:
    p, torch = product, peer.torch
    lead = (p.batch,) if p.batch > 1 else ()
    a = peer.random((*lead, p.k, p.m) if p.layout[0] == "t" else (*lead, p.m, p.k), p.dtype)
    b = peer.random((*lead, p.n, p.k) if p.layout[1] == "t" else (*lead, p.k, p.n), p.dtype)
    a, b = a.mT if p.layout[0] == "t" else a, b.mT if p.layout[1] == "t" else b
    bias = peer.random((p.n,), p.dtype)
    residual = peer.random((*lead, p.m, p.n), p.dtype) if "residual" in p.epilogue else None

    def call() -> Any:
        y = torch.addmm(bias, a, b) if "bias" in p.epilogue else a @ b
        if "gelu" in p.epilogue:
            y = torch.nn.functional.gelu(y, approximate="tanh")
        return y if residual is None else y + residual

    return call


def _numpy(rng: np.random.Generator, *, product: Product) -> Any:
    p = product
    a = rng.standard_normal((p.batch, p.m, p.k), np.float32)
    b = rng.standard_normal((p.batch, p.k, p.n), np.float32)
    return lambda: a @ b


# --- prompts: f32 activations times a stored weight -------------------------------------------------------------------


def stored_case(format: str, tokens: int, rows: int, cols: int, *, beside: str, level: int) -> Case:
    """A row of a prompt's product: x (tokens, cols) f32 times a weight (rows, cols) in a storage format."""
    weight_bytes = int(rows * cols * 1.2)
    return Case(
        suite="gemm",
        key=f"{format} linear {tokens}x{rows}x{cols}",
        dtype=format,
        make=partial(_stored, format=format, tokens=tokens, rows=rows, cols=cols),
        flops=2.0 * tokens * rows * cols,
        nbytes=float(weight_bytes + 4 * tokens * (rows + cols)),
        need=weight_bytes + 4 * tokens * (rows + cols),
        largest=max(weight_bytes, 4 * tokens * max(rows, cols)),
        level=level,
        matrix=True,
        unit="GFLOP/s",
        beside=(beside, 0.6),
        torch=partial(_torch, product=Product(tokens, rows, cols, "f16", "nt")),
    )


def _stored(run: Run, *, format: str, tokens: int, rows: int, cols: int) -> Work:
    device = run.device
    x = uniform(device, (tokens, cols), "f32", seed=run.seed())
    weight = random_weight(device, (rows, cols), format, seed=run.seed(), std=1.0 / math.sqrt(3.0))
    plan, (out,) = plan_of(device, F.linear(Tensor(x), Tensor(weight, device)))

    def check() -> str | None:
        picked, wanted = pick(run.rng, tokens), pick(run.rng, rows)
        want = rows_of(device, x, picked) @ weight.to_numpy(device)[wanted].astype(np.float64).T
        return differ(rows_of(device, out, picked)[:, wanted], want, atol=stored_rounding(cols))

    return Work([plan], check, note="" if len(plan) == 1 else f"{len(plan)} dispatches")


def stored_rounding(k: int) -> float:
    """As `rounding`, where kernels may also round activations to 8 bits a block, as llama.cpp does: an error of at most
    1/254 each, 0.0023 on average, at random; five standard deviations of their sum over weights of about 0.58."""
    return rounding(k) + 5.0 * 0.0023 * 0.58 * math.sqrt(k)
