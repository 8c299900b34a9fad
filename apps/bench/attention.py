"""Suite attention: many queries (prompts, training), one query over a long cache (decode), and the memory it takes.

FLOPs: 4 times the pairs of query and key, times the head size; half of the pairs where the rule is causal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from apps.bench.case import Case, Run, Work, differ, lowered, pick, plan_of, rows_of, values
from nn import functional as F
from nn.ops.base import DTYPES, Array
from nn.quant.fill import uniform
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu.device import Capabilities

FIRST = re.compile(r"f(16|32) 4x16x4096x\d+|f(16|32) 1x8x4096x64.*|.* context (4096|32768)|f16 1x1x.*")  # as in gemm.py
ROTATE = {"gpu": 128 << 20, "cpu": 8 << 20}  # bytes of caches taken in turn
LONG = 262_144  # tokens
MEMORY = 1.05  # bytes taken over those of inputs and outputs


@dataclass(frozen=True)
class Heads:
    """Sizes of one call. length: tokens, of decode keys; dim: features a head; kv_heads: 0 where as many as heads."""

    batch: int
    heads: int
    length: int
    dim: int
    dtype: str
    causal: bool = False
    kv_heads: int = 0

    @property
    def size(self) -> int:
        """Bytes of q, and of k, v and the result where they have as many heads."""
        return self.batch * self.heads * self.length * self.dim * DTYPES[self.dtype][0]

    @property
    def key(self) -> str:
        """The name of its row."""
        return f"{self.dtype} {self.batch}x{self.heads}x{self.length}x{self.dim}{' causal' if self.causal else ''}"

    @property
    def flops(self) -> float:
        """Operations of both products; with a causal mask, of the scores that count."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * pairs * self.dim


def cases(caps: Capabilities, *, dtypes: set[str] | None, shape: tuple[int, ...] | None) -> Iterator[Case]:
    """Every row for this device. shape: (batch, heads, tokens, head size)."""
    wanted = {"f16", "f32"} & (dtypes or {"f16", "f32"})
    if shape is not None:
        batch, heads, length, dim = shape
        for dtype in sorted(wanted):
            yield from (flash(Heads(batch, heads, length, dim, dtype, causal)) for causal in (False, True))
        return
    small = caps.kind == "cpu"
    batch, heads, length = (1, 2, 256) if small else (4, 16, 4096)
    for dtype in ("f16", "f32"):
        if dtype not in wanted:
            continue
        for dim in (64, 128):
            one = Heads(1, 2 if small else 8, length, dim, dtype)
            yield flash(one, unfused=True)
            yield flash(one, beside=f"{one.key} in three kernels", rule=4.0)
        for dim in (64, 128):
            for causal in (False, True):
                yield flash(Heads(batch, heads, length, dim, dtype, causal))
    if "f16" in wanted:
        for context in (512, 1024) if small else (512, 4096, 32768):
            for heads, kv_heads, dim in ((9, 3, 64), (32, 8, 128)):
                level = 1 if kv_heads == 8 or context < 32768 else 2
                yield decode(
                    caps, Heads(1, heads, context, dim, "f16" if not small else "f32", kv_heads=kv_heads), level
                )
        if not small:
            yield flash(Heads(1, 1, LONG, 64, "f16", True), memory=True)


def flash(
    h: Heads, *, unfused: bool = False, beside: str = "", rule: float = 0.0, memory: bool = False, level: int = 1
) -> Case:
    """A row of attention without a cache. memory: of its peak of memory instead of its time; beside, rule: see Case."""
    scores = h.batch * h.heads * h.length**2 * DTYPES[h.dtype][0] if unfused else 0
    return Case(
        suite="attention",
        key=h.key + (" in three kernels" if unfused else ""),
        dtype=h.dtype,
        make=partial(_make, h=h, unfused=unfused, memory=memory),
        flops=h.flops,
        nbytes=4.0 * h.size,
        need=4 * h.size + 2 * scores,
        largest=max(h.size, scores),
        level=level,
        matrix=h.dtype == "f16",
        unit="GFLOP/s",
        beside=(beside, rule) if beside else None,
        torch=None if unfused or memory else partial(_torch, h=h),
    )


def _make(run: Run, *, h: Heads, unfused: bool, memory: bool) -> Work:
    device = run.device
    shape = (h.batch, h.heads, h.length, h.dim)
    device.memory.trim()
    q, k, v = (uniform(device, shape, h.dtype, seed=run.seed(), low=-1.7, high=1.7) for _ in "qkv")
    before = device.counters.bytes_live
    tensors = [Tensor(a) for a in (q, k, v)]
    scale = h.dim**-0.5
    if unfused:
        scores = (tensors[0] @ tensors[1].mT) * scale
        y = F.softmax(scores, dim=-1) @ tensors[2]
    else:
        y = F.scaled_dot_product_attention(*tensors, is_causal=h.causal)
    plan, (out,) = plan_of(device, y)
    taken = (device.counters.bytes_live - before + 3 * h.size) / (4 * h.size)

    def check() -> str | None:
        if memory and taken > MEMORY:
            return f"{taken:.3f} times the bytes of inputs and outputs are taken, at most {MEMORY} is right"
        lead = int(run.rng.integers(h.batch * h.heads))
        rows = pick(run.rng, h.length, 8)
        first = lead * h.length
        queries = rows_of(device, q, [first + r for r in rows])
        keys, held = (_block(device, a, first, h) for a in (k, v))
        want = attend(queries, keys, held, scale, rows if h.causal else None)
        got = rows_of(device, out, [first + r for r in rows])
        return differ(got, want, atol=tolerance(h.dtype), dtype=h.dtype)

    if not memory:
        return Work([plan], check)
    note = f"{taken:.3f}x the bytes of inputs and outputs"
    return Work([plan], check, note=note, extra={"bytes_taken": round(taken, 4)})


def _block(device: Any, array: Array, first: int, h: Heads) -> np.ndarray:
    """(L, D) of one head."""
    width = h.dim * DTYPES[h.dtype][0]
    raw = device.memory.read(array.buffer, h.length * width, first * width)
    return np.frombuffer(raw, DTYPES[h.dtype][1]).reshape(h.length, h.dim).astype(np.float64)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, last: np.ndarray | None) -> np.ndarray:
    """softmax(q k^T scale) v in float64; row i sees the keys up to last[i]."""
    scores = q @ k.T * scale
    if last is not None:
        scores = np.where(np.arange(len(k)) <= np.asarray(last)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ v / weights.sum(1, keepdims=True)


def tolerance(dtype: str) -> float:
    """Weights sum to 1 and values are at most 1.7: f32 sums err by some 2^-20; matrix units take weights as f16,
    which errs at random."""
    return 1.7 * (2.0**-12 if dtype == "f16" else 2.0**-17)


def _torch(peer: Any, *, h: Heads) -> Any:
    q, k, v = (peer.random((h.batch, h.heads, h.length, h.dim), h.dtype) for _ in "qkv")
    attention = peer.torch.nn.functional.scaled_dot_product_attention
    if h.dtype == "f16":  # its flash kernel, where it has one
        return lambda: attention(q, k, v, is_causal=h.causal)
    return peer.with_math(lambda: attention(q, k, v, is_causal=h.causal))


# --- decode -----------------------------------------------------------------------------------------------------------


def decode(caps: Capabilities, h: Heads, level: int) -> Case:
    """A row of one token over a filled cache, whose copies are taken in turn."""
    cache = 2 * h.length * h.kv_heads * h.dim * DTYPES[h.dtype][0]
    copies = min(256, max(1, -(-ROTATE[caps.kind] // cache)))
    return Case(
        suite="attention",
        key=f"{h.dtype} decode {h.heads}/{h.kv_heads} heads of {h.dim}, context {h.length}",
        dtype=h.dtype,
        make=partial(_decode, h=h, copies=copies),
        flops=4.0 * h.heads * h.length * h.dim,
        nbytes=float(cache + 2 * h.heads * h.dim * 4),
        need=copies * cache,
        largest=cache // 2,
        level=level,
        unit="GB/s",
        torch=partial(_torch_decode, h=h),
    )


def _decode(run: Run, *, h: Heads, copies: int) -> Work:
    device, d = run.device, h.dim
    step = Tensor(Array(device.upload(np.array([h.length - 1, 1, 0, 0], np.uint32)), (4,), "u32"))
    q = uniform(device, (1, h.heads * d), "f32", seed=run.seed(), low=-1.7, high=1.7)
    shape = (h.length, h.kv_heads, d)
    caches = [
        [uniform(device, shape, h.dtype, seed=run.seed(), low=-1.7, high=1.7) for _ in "kv"] for _ in range(copies)
    ]
    out = Array(device.alloc(4 * h.heads * d), (1, h.heads * d))
    plans = []
    for k, v in caches:
        record = device.recorder()
        y = F.cached_attention(Tensor(q), Tensor(k), Tensor(v), step, heads=h.heads, kv_heads=h.kv_heads, scale=d**-0.5)
        lowered(record, y, out)
        plans.append(record.plan())

    def check() -> str | None:
        queries = rows_of(device, q, [0]).reshape(h.heads, d)
        k, v = (values(device, a) for a in caches[0])
        group = h.heads // h.kv_heads
        want = np.concatenate(
            [attend(queries[i : i + 1], k[:, i // group], v[:, i // group], d**-0.5, None) for i in range(h.heads)]
        )
        return differ(rows_of(device, out, [0]).reshape(h.heads, d), want, atol=tolerance("f32") + 2.0**-12)

    return Work(plans, check, note="" if len(plans[0]) == 1 else f"{len(plans[0])} dispatches")


def _torch_decode(peer: Any, *, h: Heads) -> Any:
    nbytes = 2 * h.length * h.kv_heads * h.dim * DTYPES[h.dtype][0]
    copies = min(256, max(1, -(-peer.rotate // nbytes)))
    q = peer.random((1, h.heads, 1, h.dim), h.dtype)
    shape = (1, h.kv_heads, h.length, h.dim)
    caches = [(peer.random(shape, h.dtype), peer.random(shape, h.dtype)) for _ in range(copies)]
    attention = peer.torch.nn.functional.scaled_dot_product_attention
    turn = iter(range(1 << 60))
    return lambda: attention(q, *caches[next(turn) % copies], enable_gqa=True)
