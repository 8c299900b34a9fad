"""Checks of the small steps around the KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpu import Device
from nn.check.base import Case, Outcome
from nn.ops.base import Array
from nn.ops.cache import SHADER, LastRow, StepPositions, StoreQKV

POISON = np.float32(np.nan)


def _step(device: Device, position: int, tokens: int) -> Array:
    return Array(device.upload(np.array([position, tokens, 0, 0], np.uint32)), (4,), "u32")


def _positions(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
    for position, rows, limit in ((0, 1, 9), (5, 65, 1000), (7, 4, 9)):
        out = Array(device.upload(np.full(rows, 0xDEAD, np.uint32)), (rows,), "u32")
        record = device.recorder()
        StepPositions(rows, limit).lower(record, _step(device, position, rows), out)
        record.submit()
        want = np.minimum(position + np.arange(rows), limit - 1).astype(np.uint32)
        yield Outcome(device.read(out.buffer, np.uint32, rows), want, label=f"{rows} from {position}")


def _last_row(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
    for rows, cols, tokens in ((1, 1, 1), (8, 65, 3), (5, 130, 5), (4, 7, 0), (4, 7, 9)):
        x = rng.standard_normal((rows, cols)).astype(np.float32)
        out = Array(device.upload(np.full(cols, POISON)), (1, cols))
        record = device.recorder()
        LastRow().lower(record, Array(device.upload(x), x.shape), _step(device, 3, tokens), out)
        record.submit()
        want = x[min(max(tokens, 1), rows) - 1]
        yield Outcome(device.read(out.buffer, np.float32, cols), want, label=f"{tokens} of {rows} x {cols}")


def _store(dtype: str) -> Case:
    kind = {"f32": np.float32, "f16": np.float16}[dtype]

    def run(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
        # whole chunk; padded rows; a chunk that would run past the cache
        for context, heads, kv_heads, d, rows, position, tokens in (
            (9, 1, 1, 1, 1, 0, 1),
            (16, 6, 2, 5, 7, 4, 5),
            (8, 3, 3, 32, 6, 5, 6),
        ):
            qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * d)).astype(np.float32)
            before = rng.standard_normal((2, context, kv_heads, d)).astype(kind)
            caches = [Array(device.upload(c), (context, kv_heads, d), dtype) for c in before]
            out = Array(device.upload(np.full((rows, heads * d), POISON)), (rows, heads * d))
            record = device.recorder()
            operands = (Array(device.upload(qkv), qkv.shape), *caches, _step(device, position, tokens), out)
            StoreQKV().lower(record, *operands)
            record.submit()
            want, kv = before.copy(), qkv[:, heads * d :].reshape(rows, 2, kv_heads, d)
            count = min(tokens, context - position)
            want[:, position : position + count] = kv[:count].transpose(1, 0, 2, 3)
            yield Outcome(device.read(out.buffer, np.float32, out.shape), qkv[:, : heads * d], label="q")
            for name, cache, right in zip("kv", caches, want, strict=True):
                yield Outcome(device.read(cache.buffer, kind, cache.shape).view(kind), right, label=name)

    return Case(f"cache/cache store_qkv: {dtype}", run, (SHADER,), frozenset({"f16"} if dtype == "f16" else ()))


def cases() -> list[Case]:
    """All cases of the cache steps."""
    return [
        Case("cache/cache positions", _positions, (SHADER,)),
        Case("cache/cache last_row", _last_row, (SHADER,)),
        _store("f32"),
        _store("f16"),
    ]
