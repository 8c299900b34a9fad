"""Suite memory: what moves bytes and computes little: softmax, norms, chains, sums, transposes, lookups, rotation.

Bytes: every operand read once and every result written once. The ceiling is the measured copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from apps.bench.case import Case, Run, Skip, Work, differ, pick, plan_of, rows_of, values
from nn import functional as F
from nn.ops.base import DTYPES, Array
from nn.quant.fill import uniform
from nn.quant.repack import BLOCK
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu.device import Capabilities

FIRST = re.compile(r"f32 .*16384.*")  # as in gemm.py
EPS = 1e-5


@dataclass(frozen=True)
class Operation:
    """One kind of row on x (R, C).

    compute: tensors x and more -> the result. truth: the sampled rows of the result in float64, from the sampled rows
    of x (all of x where `whole`) and of `more`. more: shapes of further operands by (R, C). moved: elements read and
    written. peer: torch's way, on its module and tensors.
    """

    compute: Callable[..., Tensor]
    truth: Callable[..., np.ndarray]
    peer: Callable[..., Any]
    more: Callable[[int, int], list[tuple[int, ...]]] = lambda r, c: []
    moved: Callable[[int, int], float] = lambda r, c: 2.0 * r * c
    whole: bool = False
    atol: float = 3e-5


def chain(x: Any, y: Any, relu: Callable[[Any], Any], maximum: Callable[[Any, Any], Any]) -> Any:
    """Eight element-wise operations on two operands."""
    z = relu(x * 1.5 + y)
    return maximum(z * z - x, y) * 0.5 + 0.25


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layer_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * w + b


OPERATIONS: dict[str, Operation] = {
    "softmax": Operation(
        lambda x: F.softmax(x, dim=-1), _softmax, lambda t, x: t.softmax(x, -1), atol=1e-7
    ),
    "log_softmax": Operation(
        lambda x: F.log_softmax(x, dim=-1), lambda x: np.log(_softmax(x)), lambda t, x: t.log_softmax(x, -1)
    ),
    "rms_norm": Operation(
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w,
        lambda t, x, w: t.nn.functional.rms_norm(x, x.shape[-1:], w, EPS),
        more=lambda r, c: [(c,)],
    ),
    "layer_norm": Operation(
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
        _layer_norm,
        lambda t, x, w, b: t.nn.functional.layer_norm(x, x.shape[-1:], w, b, EPS),
        more=lambda r, c: [(c,), (c,)],
    ),
    "chain of 8": Operation(
        lambda x, y: chain(x, y, F.relu, F.maximum),
        lambda x, y: chain(x, y, lambda v: np.maximum(v, 0.0), np.maximum),
        lambda t, x, y: chain(x, y, t.relu, t.maximum),
        more=lambda r, c: [(r, c)],
        moved=lambda r, c: 3.0 * r * c,
    ),
    "sum of rows": Operation(
        lambda x: x.sum(dim=-1), lambda x: x.sum(-1, keepdims=True), lambda t, x: x.sum(-1),
        moved=lambda r, c: r * c + r, atol=2e-3,
    ),
    "sum of columns": Operation(
        lambda x: x.sum(dim=0), lambda x: x.sum(0, keepdims=True), lambda t, x: x.sum(0),
        moved=lambda r, c: r * c + c, whole=True, atol=1e-2,
    ),
    "sum of all": Operation(
        lambda x: x.sum(), lambda x: x.sum().reshape(1, 1), lambda t, x: x.sum(),
        moved=lambda r, c: float(r * c), whole=True, atol=0.5,
    ),
    "transpose": Operation(
        lambda x: x.mT.contiguous(), lambda x: x.T, lambda t, x: x.mT.contiguous(), whole=True, atol=0.0
    ),
}  # fmt: skip
ROW_RESULTS = ("sum of rows",)


def cases(caps: Capabilities, *, dtypes: set[str] | None, shape: tuple[int, ...] | None) -> Iterator[Case]:
    """Every row for this device. shape: (rows, columns)."""
    wanted = dtypes or {"f32", "f16"}
    small = caps.kind == "cpu"
    sizes = [shape] if shape else [(256, 1024)] if small else [(16384, 4096), (4096, 4096)]
    for i, (r, c) in enumerate(sizes):
        for dtype in ("f32", "f16"):
            if dtype not in wanted:
                continue
            for name in OPERATIONS:
                essential = i == 0 and (dtype == "f32" or name in ("softmax", "rms_norm", "chain of 8", "transpose"))
                yield case(name, r, c, dtype, level=1 if essential else 2)
            yield gather(r, c, dtype, level=1 if i == 0 and dtype == "f32" else 2)
            yield rotation(r, c, dtype, level=1 if i == 0 and dtype == "f32" else 2)
    if shape is None:
        for r, c in ((4096, 1000),) if small else ((65536, 1000), (1024, 65536), (262144, 256)):
            for name in ("softmax", "layer_norm", "sum of rows"):
                if "f32" in wanted:
                    yield case(name, r, c, "f32", level=2)


def case(name: str, r: int, c: int, dtype: str, *, level: int) -> Case:
    """A row of an operation on an (r, c) tensor."""
    op = OPERATIONS[name]
    unit = DTYPES[dtype][0]
    operands = r * c + sum(int(np.prod(s)) for s in op.more(r, c))
    return Case(
        suite="memory",
        key=f"{dtype} {name} {r}x{c}",
        dtype=dtype,
        make=partial(_make, op=op, r=r, c=c, dtype=dtype),
        nbytes=unit * op.moved(r, c),
        need=unit * (operands + r * c),
        largest=unit * r * c,
        level=level,
        unit="GB/s",
        torch=partial(_torch, op=op, r=r, c=c, dtype=dtype),
        numpy=partial(_numpy, op=op, r=r, c=c) if dtype == "f32" else None,
    )


def _make(run: Run, *, op: Operation, r: int, c: int, dtype: str) -> Work:
    device = run.device
    shapes = [(r, c), *op.more(r, c)]
    arrays = [uniform(device, s, dtype, seed=run.seed()) for s in shapes]
    plan, (out,) = plan_of(device, op.compute(*(Tensor(a) for a in arrays)))

    def check() -> str | None:
        rows = pick(run.rng, r)
        if op.whole:
            want = op.truth(values(device, arrays[0]))
            got = values(device, out).reshape(want.shape)
        else:
            given = [rows_of(device, a, rows) if a.shape == (r, c) else values(device, a) for a in arrays]
            want = op.truth(*given)
            got = values(device, out).reshape(r, -1)[rows] if out.size == r else rows_of(device, out, rows)
        return differ(got, want, atol=op.atol + (0.0 if dtype == "f32" else 2.0**-24), dtype=dtype)

    return Work([plan], check, note="" if len(plan) == 1 else f"{len(plan)} dispatches")


def _torch(peer: Any, *, op: Operation, r: int, c: int, dtype: str) -> Any:
    arrays = [peer.random(s, dtype) for s in [(r, c), *op.more(r, c)]]
    return lambda: op.peer(peer.torch, *arrays)


def _numpy(rng: np.random.Generator, *, op: Operation, r: int, c: int) -> Any:
    arrays = [rng.standard_normal(s, np.float32) for s in [(r, c), *op.more(r, c)]]
    return lambda: np.ascontiguousarray(op.truth(*arrays))


def gather(r: int, c: int, dtype: str, *, level: int) -> Case:
    """Rows of a table by random ids; the result is f32."""
    unit = DTYPES[dtype][0]
    moved = unit * r * c + 4 * r * c + 4 * r
    return Case(
        suite="memory",
        key=f"{dtype} gather {r} rows of {r}x{c}",
        dtype=dtype,
        make=partial(_gather, r=r, c=c, dtype=dtype),
        nbytes=float(moved),
        need=moved,
        largest=4 * r * c,
        level=level,
        unit="GB/s",
        torch=partial(_torch_gather, r=r, c=c, dtype=dtype),
    )


def _gather(run: Run, *, r: int, c: int, dtype: str) -> Work:
    device = run.device
    if c % BLOCK:
        raise Skip(f"a dense table is read in place where its rows are a multiple of {BLOCK} wide")
    table = uniform(device, (r, c), dtype, seed=run.seed())
    ids = run.rng.permutation(r).astype(np.uint32)
    plan, (out,) = plan_of(device, F.embedding(Tensor(Array(device.upload(ids), (r,), "u32")), Tensor(table)))

    def check() -> str | None:
        rows = pick(run.rng, r)
        return differ(rows_of(device, out, rows), rows_of(device, table, ids[rows]), atol=0.0)

    return Work([plan], check)


def _torch_gather(peer: Any, *, r: int, c: int, dtype: str) -> Any:
    table = peer.random((r, c), dtype)
    ids = peer.torch.randperm(r, device=peer.device)
    return lambda: table.index_select(0, ids)


def rotation(r: int, c: int, dtype: str, *, level: int) -> Case:
    """Rotary embedding of r tokens, heads of 128 features."""
    unit, dim = DTYPES[dtype][0], 128
    heads = max(c // dim, 1)
    moved = 2 * unit * r * heads * dim + 4 * r * dim
    return Case(
        suite="memory",
        key=f"{dtype} rope {r} tokens, {heads} heads of {dim}",
        dtype=dtype,
        make=partial(_rotation, r=r, heads=heads, dim=dim, dtype=dtype),
        nbytes=float(moved),
        need=moved,
        largest=unit * r * heads * dim,
        level=level,
        unit="GB/s",
        torch=partial(_torch_rotation, r=r, heads=heads, dim=dim, dtype=dtype),
    )


def _rotation(run: Run, *, r: int, heads: int, dim: int, dtype: str) -> Work:
    device = run.device
    x = uniform(device, (1, r, heads, dim), dtype, seed=run.seed())
    table = uniform(device, (r, dim // 2, 2), "f32", seed=run.seed())
    positions = Array(device.upload(np.arange(r, dtype=np.int32)), (r,), "i32")
    plan, (out,) = plan_of(device, F.rope(Tensor(x), Tensor(table), Tensor(positions)))

    def check() -> str | None:
        tokens = pick(run.rng, r, 8)
        rows = [int(t) * heads + int(run.rng.integers(heads)) for t in tokens]
        given = rows_of(device, x, rows)
        angle = values(device, table)[tokens]
        a, b, cos, sin = given[:, : dim // 2], given[:, dim // 2 :], angle[..., 0], angle[..., 1]
        want = np.concatenate([a * cos - b * sin, a * sin + b * cos], 1)
        return differ(rows_of(device, out, rows), want, atol=1e-6 if dtype == "f32" else 2.0**-11, dtype=dtype)

    return Work([plan], check)


def _torch_rotation(peer: Any, *, r: int, heads: int, dim: int, dtype: str) -> Any:
    x = peer.random((1, r, heads, dim), dtype)
    cos, sin = (peer.random((r, 1, dim), dtype) for _ in "cs")
    torch = peer.torch

    def call() -> Any:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return call
