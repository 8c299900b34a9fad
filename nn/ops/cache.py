"""Small steps around a KV cache whose fill is known on the device only (struct Step: position, tokens, seed, draw)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn.ops.base import FLOATS, Array, Op, Progress, ShapeError, Spec, check_step, stored_bytes
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder

SHADER = "cache/cache.wgsl"
_SIZES = dict.fromkeys(("rows", "cols", "q_cols", "kv_cols", "context", "last"), 0)


def step_positions(step: Tensor, *, rows: int, limit: int) -> Tensor:
    """Positions of the rows of a chunk: (rows,) u32, step.position + t, at most limit - 1.

    step: (4,) u32: position, tokens, seed, draw. Raises ShapeError.
    """
    return apply(StepPositions(rows, limit), step)


def last_row(x: Tensor, step: Tensor) -> Tensor:
    """Row step.tokens - 1 of x: (T, C) f32 -> (1, C) f32, the only one whose logits a prompt needs.

    step: (4,) u32: position, tokens, seed, draw. Raises ShapeError.
    """
    return apply(LastRow(), x, step)


def store_qkv(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, step: Tensor) -> Tensor:
    """Split rows of q, k, v: k and v go to the cache, q comes back. For models without rotary positions.

    Args:
        qkv: (T, H * D + 2 * Hkv * D) f32. k_cache, v_cache: (context, Hkv, D) f32 or f16; row t goes to index
            step.position + t, for t < step.tokens.
        step: (4,) u32.
    Returns: (T, H * D) f32.
    Raises: ShapeError.
    """
    return apply(StoreQKV(), qkv, k_cache, v_cache, step)


@dataclass(frozen=True)
class StepPositions(Op):
    rows: int
    limit: int
    group = "cache"

    def infer(self, *inputs: Spec) -> Spec:
        check_step("step_positions", inputs[0])
        return Spec((self.rows,), "u32")

    def lower(self, record: Recorder, *arrays: Array) -> None:
        step, out = arrays
        kernel = record.device.kernel(SHADER, "positions")
        sizes = _SIZES | {"rows": self.rows, "last": self.limit - 1}
        record(kernel, -(-self.rows // 64), step=step.buffer, ids=out.buffer, **sizes)


@dataclass(frozen=True)
class LastRow(Op):
    group = "cache"

    def infer(self, *inputs: Spec) -> Spec:
        x, step = inputs
        check_step("last_row", step)
        if len(x.shape) != 2 or x.dtype != "f32" or 0 in x.shape:
            raise ShapeError(f"last_row: x is {x.dtype} {x.shape}; expected f32 (T, C)")
        return Spec((1, x.shape[1]), "f32")

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        return Cost(0, stored_bytes(results[0]) + stored_bytes(operands[1]), stored_bytes(results[0]))

    def lower(self, record: Recorder, *arrays: Array) -> None:
        x, step, out = arrays
        kernel = record.device.kernel(SHADER, "last_row")
        sizes = _SIZES | {"rows": x.rows, "cols": x.cols}
        record(kernel, -(-x.cols // 64), x=x.buffer, step=step.buffer, out=out.buffer, **sizes)


@dataclass(frozen=True)
class StoreQKV(Op):
    group = "cache"
    mutates = (1, 2)

    def infer(self, *inputs: Spec) -> Spec:
        qkv, k_cache, v_cache, step = inputs
        check_step("store_qkv", step)
        kv = math.prod(k_cache.shape[1:])
        if k_cache != v_cache or len(k_cache.shape) != 3 or k_cache.dtype not in FLOATS:
            raise ShapeError(
                f"store_qkv: k_cache is {k_cache.dtype} {k_cache.shape}, v_cache {v_cache.dtype} {v_cache.shape}; "
                "expected two alike (context, kv_heads, head_dim), f32 or f16"
            )
        if len(qkv.shape) != 2 or qkv.dtype != "f32" or qkv.shape[1] <= 2 * kv:
            raise ShapeError(f"store_qkv: qkv is {qkv.dtype} {qkv.shape}; expected f32 (T, H * D + {2 * kv})")
        return Spec((qkv.shape[0], qkv.shape[1] - 2 * kv), "f32")

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        qkv, k_cache, _, step = operands
        tokens = qkv.shape[0] if progress is None else min(progress.tokens, qkv.shape[0])
        kept = Spec((tokens, *k_cache.shape[1:]), k_cache.dtype)  # the rows of keys, and of values, that are written
        return Cost(0, stored_bytes(qkv) + stored_bytes(step), stored_bytes(results[0]) + 2 * stored_bytes(kept))

    def lower(self, record: Recorder, *arrays: Array) -> None:
        qkv, k_cache, v_cache, step, out = arrays
        kernel = record.device.kernel(SHADER, "store_qkv", types={"KV": k_cache.dtype})
        sizes = {"rows": qkv.rows, "cols": qkv.cols, "q_cols": out.cols, "kv_cols": k_cache.size // k_cache.shape[0]}
        buffers = {"k_cache": k_cache.buffer, "v_cache": v_cache.buffer, "step": step.buffer}
        grid = -(-qkv.size // 64)
        record(
            kernel, grid, x=qkv.buffer, out=out.buffer, **buffers, **(_SIZES | sizes | {"context": k_cache.shape[0]})
        )


__all__ = ["last_row", "step_positions", "store_qkv"]
