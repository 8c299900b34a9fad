"""Attention: torch's scaled_dot_product_attention, the same with window and soft-cap, and attention over a KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpu.errors import LimitExceeded
from gpu.work import Cost
from nn import tape
from nn.ops.attention_tune import ATTENTION
from nn.ops.attention_variants import KEEPING, Shape, Variant, keeping
from nn.ops.base import FLOATS, Array, Op, Progress, ShapeError, Spec, check_step, stored_bytes
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Buffer, Recorder

MAX_HEAD = 256  # features a head
NARROW_ROWS = 4  # (query row, head) pairs a workgroup of narrow.wgsl at most


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + mask) value, never holding the scores of all keys at once.

    Args:
        query: (..., Hq, L, D) or (..., L, D) f32 or f16; D at most 256.
        key, value: (..., Hkv, S, D) or (..., S, D), f32 or f16, both the same dtype.
        attn_mask: bool (true takes part) or f32/f16 (added; minus infinity leaves out), broadcast to (..., Hq, L, S).
            A query that sees no key gives 0 (torch gives NaN).
        dropout_p: 0 only, for now.
        is_causal: query i sees keys 0..i, as torch counts: from the upper left whatever L and S are.
        scale: None takes 1 / sqrt(D).
        enable_gqa: Hq may be a multiple of Hkv: query head h reads key and value head h // (Hq / Hkv).
    Returns: shape and dtype of query.
    Raises: ShapeError, TypeError for other dtypes, ValueError if mask and is_causal are both given,
        NotImplementedError for dropout.
    Source: Dao 2023, arXiv:2307.08691. Name and signature: torch.nn.functional.scaled_dot_product_attention.
    """
    name = "scaled_dot_product_attention"
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"{name}: dropout_p is {dropout_p}; dropout of weights is not there yet, pass 0.0 and drop out the result"
        )
    if attn_mask is not None and is_causal:
        raise ValueError(
            f"{name}: attn_mask and is_causal are both given; put the causal rule into the mask, or leave one out"
        )
    if query.ndim < 2 or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ShapeError(
            f"{name}: query, key and value have shapes {query.shape}, {key.shape}, {value.shape}; expected "
            "the same number of axes, at least (L, D)"
        )
    if not enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        raise ShapeError(
            f"{name}: query has {query.shape[-3]} heads, key {key.shape[-3]}; "
            "pass enable_gqa=True to let query heads share keys"
        )
    lead = query.shape[:-3]
    q, k, v = (_four(t) for t in (query, key, value))
    mask = attn_mask
    if mask is not None:
        if mask.ndim > 4 and math.prod(mask.shape[:-3]) != 1:
            mask = mask.expand(*lead, *mask.shape[-3:])
        mask = mask.reshape(math.prod(mask.shape[:-3]), *((1,) * (3 - mask.ndim)), *mask.shape[-3:])
    out = attention(q, k, v, mask=mask, causal=is_causal, offset=0, scale=scale)
    return out.reshape(*query.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(mask + cap(scale * q k^T)) v with everything that language models ask for.

    Args:
        q: (B, Hq, L, D) f32 or f16; D at most 256.
        k, v: (B, Hkv, S, D), f32 or f16, both the same dtype; Hkv divides Hq, query head h reads head h // (Hq / Hkv).
        mask: bool (true takes part) or f32/f16 (added; minus infinity leaves out), broadcast to (B, Hq, L, S).
        causal: query i sees the keys 0..i + offset.
        offset: None takes S - L: the last query sees every key.
        window: with causal, only the last `window` of those keys, the query's own position counted.
        softcap: scores become softcap * tanh(score / softcap) before the mask.
        scale: None takes 1 / sqrt(D).
    Returns: (B, Hq, L, D), dtype of q. A query that sees no key gives 0.
    Raises: ShapeError, TypeError for other dtypes, ValueError for a window without causal or options out of range.
    Source: Dao 2023, arXiv:2307.08691; soft-cap: Gemma 2, arXiv:2408.00118; window: Mistral, arXiv:2310.06825.
    """
    _check_options("attention", window, softcap)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"attention: scale is {scale}; expected a finite number, or None for 1 / sqrt(D)")
    if window is not None and not causal:
        raise ValueError(
            f"attention: window={window} without causal=True; a window counts back from the causal position"
        )
    if q.ndim != 4:
        raise ShapeError(f"attention: q has shape {q.shape}; expected (B, Hq, L, D)")
    op = Attention(
        causal=causal,
        offset=(k.shape[-2] - q.shape[-2] if offset is None else offset) if causal and k.ndim == 4 else 0,
        window=window or 0,
        softcap=softcap or 0.0,
        scale=1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale,
    )
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    if tape.is_grad_enabled() and any(t.requires_grad for t in operands):
        return apply(replace(op, keep=True), *operands)[0]
    return apply(op, *operands)


def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    limit: int | None = None,
) -> Tensor:
    """Causal attention of T tokens over a KV cache whose fill is known on the device only.

    Row t stands at cache index position + t and sees the keys up to it; rows at and past `tokens` give 0. Neither the
    kernel nor its grid depends on position, so a recorded plan replays with nothing but the step buffer changed.

    Args:
        q: (T, heads * D) f32 or f16, positions already rotated in; D at most 256.
        k_cache, v_cache: (context, kv_heads, D) or (context, kv_heads * D), f32 or f16, both the same dtype.
        step: (4,) u32: position, tokens, seed, draw. The first two are read.
        heads, kv_heads: query head h reads key and value head h // (heads / kv_heads).
        scale: factor of q k^T, usually 1 / sqrt(D).
        window: only the last `window` keys, the row's own position counted; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        limit: a promise that position + T will not exceed it, by which the kernel is chosen; more keys are slow, not
            wrong. None: the context.
    Returns: (T, heads * D), dtype of q.
    Raises: ShapeError, TypeError for other dtypes, ValueError for options out of range.
    Source: as `attention`.
    """
    _check_options("cached_attention", window, softcap)
    if limit is not None and limit < 1:
        raise ValueError(f"cached_attention: limit is {limit}; it counts keys: at least 1, or None for the context")
    options = {"scale": scale, "window": window or 0, "softcap": softcap or 0.0, "limit": limit or 0}
    op = CachedAttention(heads=heads, kv_heads=kv_heads, **options)
    return apply(op, q, k_cache, v_cache, step)


@dataclass(frozen=True)
class Attention(Op):
    """Operands q, k, v and, optionally, mask. window and softcap: 0 for none. keep: a second result for the way back,
    the logarithms of the rows' sums of exponentials (B, Hq, L) f32."""

    causal: bool
    offset: int
    window: int
    softcap: float
    scale: float
    keep: bool = False
    strided = (0, 1, 2)
    group = "attention"

    def infer(self, q: Spec, k: Spec, v: Spec, mask: Spec | None = None) -> Spec | tuple[Spec, ...]:
        _check_dtypes("attention", q, k, v)
        (b, heads, length, d), name = q.shape, "attention"
        if len(k.shape) != 4 or k.shape != v.shape or k.shape[0] != b or k.shape[3] != d:
            raise ShapeError(
                f"{name}: q has shape {q.shape}, k {k.shape}, v {v.shape}; expected k and v "
                f"(B, Hkv, S, D) with B = {b}, D = {d}"
            )
        _check_heads(name, heads, k.shape[1], d)
        if mask is not None:
            whole = (b, heads, length, k.shape[2])
            if len(mask.shape) != 4 or any(m not in (1, n) for m, n in zip(mask.shape, whole, strict=True)):
                raise ShapeError(
                    f"{name}: mask has shape {mask.shape}; every axis must be 1 or as in (B, Hq, L, S) = {whole}"
                )
            if mask.dtype not in ("bool", *FLOATS):
                raise TypeError(f"{name}: mask is {mask.dtype}; expected bool (true takes part), f32 or f16 (added)")
        return (q, Spec(q.shape[:3])) if self.keep else q

    def layout(self, spec: Spec) -> tuple[int, ...] | None:
        return heads_inside(spec)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        from nn.ops.attention_grad import attention_gradient  # here: it imports this module

        return attention_gradient(self, dy[0], *tensors)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        q, k, _, *mask = operands
        batch, heads, q_len, d = q.shape
        pairs, keys = q_len * k.shape[2], k.shape[2]
        if self.causal:
            pairs, keys = visible(q_len, self.offset, self.window, keys)
        kept = Spec((batch, k.shape[1], keys, d), k.dtype)
        read = stored_bytes(q) + 2 * stored_bytes(kept) + sum(stored_bytes(spec) for spec in mask)
        return Cost(batch * heads * pairs * pair_flops(d, self.softcap), read, stored_bytes(results[0]))

    def lower(self, record: Recorder, q: Array, k: Array, v: Array, *rest: Array) -> None:
        *mask, out = rest[:-1] if self.keep else rest
        record_attention(
            record,
            Heads.of(q),
            Heads.of(k),
            Heads.of(v),
            Heads.of(out),
            scale=self.scale,
            mask=mask[0] if mask else None,
            causal=self.causal,
            offset=self.offset,
            window=self.window,
            softcap=self.softcap,
            lse=rest[-1] if self.keep else None,
        )


@dataclass(frozen=True)
class CachedAttention(Op):
    """Operands q, k_cache, v_cache, step. window, softcap and limit: 0 for none."""

    heads: int
    kv_heads: int
    scale: float
    window: int
    softcap: float
    limit: int = 0
    group = "attention"

    def infer(self, q: Spec, k: Spec, v: Spec, step: Spec) -> Spec:
        name = "cached_attention"
        _check_dtypes(name, q, k, v)
        if len(q.shape) != 2 or q.shape[1] % self.heads:
            raise ShapeError(f"{name}: q has shape {q.shape}; expected (T, heads * D) with heads = {self.heads}")
        d = q.shape[1] // self.heads
        _check_heads(name, self.heads, self.kv_heads, d)
        if k.shape != v.shape or len(k.shape) < 2 or math.prod(k.shape[1:]) != self.kv_heads * d:
            raise ShapeError(
                f"{name}: k_cache has shape {k.shape}, v_cache {v.shape}; expected both (context, {self.kv_heads}, {d})"
            )
        check_step(name, step)
        return q

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        q, k, _, step = operands
        rows, context, d = q.shape[0], k.shape[0], q.shape[1] // self.heads
        progress = progress or Progress(max(context - rows, 0), rows)
        pairs, keys = visible(min(rows, progress.tokens), progress.position, self.window, context)
        kept = Spec((keys, self.kv_heads * d), k.dtype)
        read = stored_bytes(q) + 2 * stored_bytes(kept) + stored_bytes(step)
        return Cost(self.heads * pairs * pair_flops(d, self.softcap), read, stored_bytes(results[0]))

    def lower(self, record: Recorder, q: Array, k: Array, v: Array, step: Array, out: Array) -> None:
        tokens, d, context = q.shape[0], q.shape[1] // self.heads, k.shape[0]
        record_attention(
            record,
            Heads.rows(q, self.heads, tokens, d),
            Heads.rows(k, self.kv_heads, context, d),
            Heads.rows(v, self.kv_heads, context, d),
            Heads.rows(out, self.heads, tokens, d),
            scale=self.scale,
            step=step.buffer,
            window=self.window,
            softcap=self.softcap,
            limit=min(self.limit or context, self.window + tokens if self.window else context),
        )


def visible(rows: int, offset: int, window: int, keys: int) -> tuple[int, int]:
    """How many (query, key) pairs causal attention looks at, and how many different keys: row i sees the keys up to
    i + offset, the last `window` of them (0: all)."""
    ends = [min(max(i + offset + 1, 0), keys) for i in range(rows)]
    starts = [max(0, i + offset + 1 - window) if window else 0 for i in range(rows)]
    pairs = sum(max(end - start, 0) for start, end in zip(starts, ends))
    return pairs, max(max(ends, default=0) - min(starts, default=0), 0)


def pair_flops(d: int, softcap: float) -> int:
    """Operations for one query and key: two products of d, and a maximum, a difference, an exponential and a sum."""
    return 4 * d + 4 + 3 * bool(softcap)


@dataclass(frozen=True)
class Heads:
    """A (batch, heads, rows, features) view of a buffer: sizes, and strides in elements; features are contiguous."""

    buffer: Buffer
    dtype: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]  # batch, head, row

    @classmethod
    def of(cls, array: Array) -> Heads:
        """Of a (B, H, L, D) array whose features are contiguous."""
        b, h, n, d = array.shape
        strides = (h * n * d, n * d, d)
        if array.strides is not None:
            strides = (array.strides[0], array.strides[1], array.strides[2])
        return cls(array.buffer, array.dtype, (b, h, n, d), strides)

    @classmethod
    def rows(cls, array: Array, heads: int, rows: int, d: int) -> Heads:
        """Of a dense (L, H * D) array."""
        return cls(array.buffer, array.dtype, (1, heads, rows, d), (0, d, heads * d))


def record_attention(
    record: Recorder,
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    *,
    scale: float,
    step: Buffer | None = None,
    mask: Array | None = None,
    causal: bool = False,
    offset: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    limit: int = 0,
    lse: Array | None = None,
    variant: Variant | None = None,
    subgroups: bool | None = None,
    subgroup_size: int | None = None,
) -> None:
    """One dispatch of shaders/attention/: the one place that knows which kernel, parts and grid.

    step: the buffer that gives position and tokens (then causal and offset are not looked at). limit: most keys that a
    row sees, if known (0: not). lse: (batch, heads, q_len) f32, filled with the logarithms of the rows' sums, for which
    there are fewer kernels. variant: which kernel; None takes the tuner's. subgroup_size: what lanes.wgsl is built
    for; None takes the size that the device was seen to use (a driver that varies it may run it with a smaller one).
    """
    device = record.device
    batch, heads, q_len, d = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    if batch * heads * q_len * d == 0:
        return
    wide = k_len > 0 and d % 4 == 0 and all(stride % 4 == 0 for view in (q, k, v, out) for stride in view.strides)
    shape = Shape(
        q_len=q_len,
        k_len=k_len,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        batch=batch,
        elem=q.dtype,
        kv=k.dtype,
        causal=causal,
        step=step is not None,
        wide=wide,
        wide8=d % 8 == 0 and all(stride % 8 == 0 for view in (k, v) for stride in view.strides),
        limit=limit,
    )
    if variant is None:
        variant = ATTENTION.pick(device, shape) if lse is None else keeping(device.caps, shape)
    elif not variant.fits(device.caps, shape):
        raise LimitExceeded(
            f"attention: the variant '{variant.name}' cannot run {shape} on {device.caps.name}; "
            "attention_variants.variants(caps, shape) lists those that can, None takes the tuner's"
        )
    parts = {
        "rows": f"attention/rows_{'vec4' if wide else 'scalar'}.wgsl",
        "keys": f"attention/keys_{'given' if step is None else 'step'}.wgsl",
        "mask": "attention/mask_none.wgsl",
    }
    types = {"Elem": q.dtype, "KV": k.dtype}
    buffers = {"q": q.buffer, "k": k.buffer, "v": v.buffer, "out": out.buffer}
    if step is not None:
        buffers["step"] = step
    if lse is not None:
        buffers["lse"] = lse.buffer
    if lse is not None and variant.kind in KEEPING:
        parts["lse"] = "attention/lse_store.wgsl"
    strides = mask_options(mask, parts, types, buffers) | strides_of(q=q, k=k, v=v, out=out)
    constants = {"D": d} | dict(variant.constants)
    kind, path = variant.kind, f"attention/{variant.kind}.wgsl"
    grid = (heads, q_len, batch)
    if kind in ("tile", "matrix"):
        grid = (-(-q_len // variant.rows), heads, batch)
    elif kind == "narrow":
        pairs = q_len * (heads // kv_heads)
        constants["ROWS"] = -(-pairs // -(-pairs // NARROW_ROWS))  # 5 pairs: 3 and 2
        groups = -(-pairs // constants["ROWS"])
        folds = -(-groups // device.fold_at)
        grid = (-(-groups // folds), kv_heads, batch * folds)
    elif kind in ("lanes", "split"):
        path = "attention/lanes.wgsl"
        size = min(max(subgroup_size or device.caps.subgroup_size, 8), constants["WG"])
        constants |= {"SUBGROUP": size, "WINDOWED": window > 0}
        grid = (heads // constants["HEADS"], q_len, batch)
        if shape.wide8 and wide and k.dtype == "f16":
            parts["rows"] = "attention/rows_vec8.wgsl"
    if kind == "matrix":
        del parts["rows"]
    numbers = {
        "heads": heads,
        "group": heads // kv_heads,
        "quads": -(-d // 4),
        "q_len": q_len,
        "k_len": k_len,
        "causal": int(causal),
        "offset": offset,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        **strides,
    }
    options = {"types": types, "constants": constants, "parts": parts}
    options["subgroups"] = subgroups if kind == "decode" else kind in ("lanes", "split")
    if kind == "split":  # two dispatches
        splits = constants["SPLITS"]
        buffers["parts"] = record.temp(batch * q_len * heads * splits * (-(-d // 4) + 1) * 16)
        grid = (splits, heads // constants["HEADS"], q_len * batch)
        passes = (("attention_split", grid), ("attention_merge", (heads, q_len, batch)))
    else:
        passes = ((f"attention_{kind}", grid),)
    for entry, counts in passes:
        kernel = device.kernel(path, entry, **options)
        record(kernel, counts, **{name: buffers[name] for name in kernel.names}, **numbers)


def heads_inside(spec: Spec) -> tuple[int, ...] | None:
    """Strides of (B, H, L, D) results laid out as (B, L, H, D), which is how models go on with them."""
    if len(spec.shape) != 4:
        return None
    _, heads, rows, d = spec.shape
    return (rows * heads * d, d, heads * d, 1)


def mask_options(
    mask: Array | None, parts: dict[str, str], types: dict[str, str], buffers: dict[str, Buffer]
) -> dict[str, int]:
    """The mask's strides; its part, type and buffer are put into the dictionaries."""
    strides: dict[str, int] = dict.fromkeys(("mask_batch", "mask_head", "mask_row", "mask_key"), 0)
    if mask is not None:
        boolean = mask.dtype == "bool"
        parts["mask"] = f"attention/mask_{'bool' if boolean else 'additive'}.wgsl"
        buffers["allowed" if boolean else "bias"] = mask.buffer
        if not boolean:
            types["Bias"] = mask.dtype
        for axis, name in enumerate(strides):
            strides[name] = math.prod(mask.shape[axis + 1 :]) if mask.shape[axis] > 1 else 0
    return strides


def strides_of(**views: Heads) -> dict[str, int]:
    """Params of shaders/attention/params.wgsl: q_batch, q_head, q_row, ..."""
    return {
        f"{name}_{axis}": stride
        for name, view in views.items()
        for axis, stride in zip(("batch", "head", "row"), view.strides, strict=True)
    }


def _four(x: Tensor) -> Tensor:
    """(..., H, L, D) or (L, D) as (B, H, L, D)."""
    heads = x.shape[-3] if x.ndim > 2 else 1
    return x.reshape(math.prod(x.shape[:-3]), heads, *x.shape[-2:])


def _check_options(name: str, window: int | None, softcap: float | None) -> None:
    if window is not None and window < 1:
        raise ValueError(
            f"{name}: window is {window}; it counts keys, the query's own included: at least 1, or None for all"
        )
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"{name}: softcap is {softcap}; it bounds the scores and must be > 0, or None for no bound")


def _check_dtypes(name: str, q: Spec, k: Spec, v: Spec) -> None:
    if q.dtype not in FLOATS or k.dtype not in FLOATS or k.dtype != v.dtype:
        raise TypeError(f"{name}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; expected f32 or f16, k and v the same")


def _check_heads(name: str, heads: int, kv_heads: int, d: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeError(
            f"{name}: {heads} query heads, {kv_heads} key/value heads; the first must be a multiple of the second"
        )
    if not 1 <= d <= MAX_HEAD:
        raise ShapeError(f"{name}: heads of {d} features; expected 1 to {MAX_HEAD}")


__all__ = ["attention", "cached_attention", "scaled_dot_product_attention"]
