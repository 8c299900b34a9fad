"""The gradients of attention: flash kernels that make the scores again, and the same written with public functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn import tape
from nn.ops import create, elementwise
from nn.ops.attention import Heads, mask_options, pair_flops, strides_of, visible
from nn.ops.attention_variants import GradVariant, Shape, grad_default
from nn.ops.base import FLOATS, Array, Op, Progress, Spec, stored_bytes
from nn.ops.softmax import softmax
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Buffer, Recorder
    from nn.ops.attention import Attention

SMALL_SCORES = 64 << 20  # bytes of all scores up to which software drivers keep them


def attention_gradient(op: Attention, dout: Tensor, *tensors: Tensor) -> Sequence[Tensor | None]:
    """The gradients of q, k, v and, where there is one, mask. tensors: those, then the result and its lse.

    The flash kernels leave no history, so with create_graph all of it is the composite rule; so it is on software
    drivers, whose matrix products are faster than these kernels, as long as the scores stay small; and so is a mask's
    gradient, which takes memory for all scores where somebody uses it.
    """
    q, k, v, *mask = tensors[:-2]
    out, lse = tensors[-2:]
    bias = [m for m in mask if m.dtype in FLOATS and m.requires_grad]
    scores = 4 * math.prod(q.shape[:3]) * k.shape[2]
    small = q.device.caps.kind == "cpu" and scores <= SMALL_SCORES
    if tape.is_grad_enabled() or small or q.dtype != k.dtype:
        return composite_gradient(op, dout, q, k, v, *mask)
    masks = composite_gradient(op, dout, q, k, v, *mask)[3:] if bias else [None] * len(mask)
    made = AttentionGrad(
        causal=op.causal, offset=op.offset, window=op.window, softcap=op.softcap, scale=op.scale,
        joint=q.shape == k.shape,
    )  # fmt: skip
    grads = apply(made, q, k, v, dout, out, lse, *mask)
    if made.joint:
        return (*(grads[:, :, i].transpose(1, 2) for i in range(3)), *masks)
    found, start = [], 0
    for x in (q, k, v):
        batch, heads, rows, d = x.shape
        found.append(grads.narrow(0, start, x.numel()).reshape(batch, rows, heads, d).transpose(1, 2))
        start += x.numel()
    return (*found, *masks)


def composite_gradient(
    op: Attention, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor
) -> Sequence[Tensor | None]:
    """The same with public functions, in f32: memory grows with L * S, and it can be differentiated again.

    With s = scale q k^T, t = cap(s), P = softmax(t + mask): dv = P^T dout, dt = P (dout v^T - rowsum(P dout v^T)),
    ds = dt (1 - (t / softcap)^2), dq = scale ds k, dk = scale ds^T q; k and v sum over the query heads that share them.
    """
    (batch, heads, length, d), (_, kv_heads, keys, _) = q.shape, k.shape
    group = heads // kv_heads
    split = (batch, kv_heads, group, length)
    wide_q, g = (t.to("f32").reshape(*split, d) for t in (q, dout))
    wide_k, wide_v = (t.to("f32").unsqueeze(2) for t in (k, v))
    score = (wide_q @ wide_k.mT) * op.scale
    capped = (score * (1.0 / op.softcap)).tanh() * op.softcap if op.softcap else score
    score = capped
    if op.causal:
        row = create.arange(length, device=q.device, dtype="i32").unsqueeze(1) + op.offset
        key = create.arange(keys, device=q.device, dtype="i32")
        seen = key <= row
        seen = seen & (key > row - op.window) if op.window else seen
        score = elementwise.where(seen, score, -float("inf"))
    if mask:
        shape = mask[0].shape
        wide = mask[0].expand(shape[0], heads, *shape[2:]).reshape(shape[0], kv_heads, group, *shape[2:])
        score = elementwise.where(wide, score, -float("inf")) if wide.dtype == "bool" else score + wide.to("f32")
    weight = softmax(score, -1)
    dv = (weight.mT @ g).sum(2)
    through = g @ wide_v.mT
    slope = weight * (through - (weight * through).sum(-1, keepdim=True))
    masks: list[Tensor | None] = [None] * len(mask)
    if mask and mask[0].dtype in FLOATS:
        repeated = [a for a, n in enumerate(mask[0].shape) if n == 1]
        whole = slope.reshape(batch, heads, length, keys)
        masks = [(whole.sum(repeated, keepdim=True) if repeated else whole).to(mask[0].dtype)]
    if op.softcap:
        ratio = capped * (1.0 / op.softcap)
        slope = slope * (1.0 - ratio * ratio)
    slope = slope * op.scale
    dq = (slope @ wide_k).reshape(q.shape)
    dk = (slope.mT @ wide_q).sum(2)
    return (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *masks)


@dataclass(frozen=True)
class AttentionGrad(Op):
    """Operands q, k, v, the result's gradient, the result, its lse and, optionally, mask. The result has dq, dk
    and dv: joint, where the three are alike, as (B, L, 3, H, D), else one after the other, each as (B, L, H, D)."""

    causal: bool
    offset: int
    window: int
    softcap: float
    scale: float
    joint: bool = False
    strided = (0, 1, 2, 3, 4)
    group = "attention"

    def infer(self, *inputs: Spec) -> Spec:
        batch, heads, rows, d = inputs[0].shape
        whole = sum(spec.size for spec in inputs[:3])
        return Spec((batch, rows, 3, heads, d) if self.joint else (whole,), inputs[0].dtype)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        q, k = operands[:2]
        batch, heads, q_len, d = q.shape
        pairs = visible(q_len, self.offset, self.window, k.shape[2])[0] if self.causal else q_len * k.shape[2]
        read, written = (sum(stored_bytes(spec) for spec in specs) for specs in (operands, results))
        return Cost(batch * heads * pairs * 5 * pair_flops(d, self.softcap) // 2, read, written)

    def lower(self, record: Recorder, *arrays: Array) -> None:
        q, k, v, dout, out, lse, *mask, grads = arrays
        record_attention_grad(
            record,
            q,
            k,
            v,
            dout,
            out,
            lse,
            grads,
            joint=self.joint,
            mask=mask[0] if mask else None,
            scale=self.scale,
            causal=self.causal,
            offset=self.offset,
            window=self.window,
            softcap=self.softcap,
        )


def record_attention_grad(
    record: Recorder,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    out: Array,
    lse: Array,
    grads: Array,
    *,
    scale: float,
    joint: bool = False,
    mask: Array | None = None,
    causal: bool = False,
    offset: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    variant: GradVariant | None = None,
) -> None:
    """Three dispatches of shaders/attention/grad_*.wgsl: what each row needs, dq, and dk with dv. grads, joint: as the
    result of AttentionGrad."""
    device = record.device
    (batch, heads, q_len, d), (_, kv_heads, k_len, _) = q.shape, k.shape
    if batch * heads * d == 0:
        return
    shape = Shape(q_len, k_len, heads, kv_heads, d, batch, q.dtype, k.dtype, causal)
    variant = variant or grad_default(device.caps, shape)
    rows = batch * heads * q_len
    stats = record.temp(max(rows, 1) * 8)
    if rows:
        lanes = 1 if device.caps.kind == "cpu" else 8
        kernel = device.kernel(
            "attention/grad_stats.wgsl", "attention_grad_stats", types={"Elem": q.dtype}, constants={"LANES": lanes}
        )
        record(
            kernel, -(-rows // (64 // lanes)), dout=dout.buffer, out=out.buffer, lse=lse.buffer, stats=stats,
            rows=rows, d=d, heads=heads, q_len=q_len, **strides_of(dout=Heads.of(dout), out=Heads.of(out)),
        )  # fmt: skip
    views = {"q": Heads.of(q), "k": Heads.of(k), "v": Heads.of(v), "out": Heads.of(dout)}
    wide = d % 4 == 0 and min(q_len, k_len) > 0
    wide = wide and all(stride % 4 == 0 for view in views.values() for stride in view.strides)
    parts = {
        "rows": f"attention/grad_rows_{'vec4' if wide else 'scalar'}.wgsl",
        "mask": "attention/mask_none.wgsl",
    }
    types = {"Elem": q.dtype, "KV": k.dtype}
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "grads": grads}
    buffers: dict[str, Buffer] = {name: array.buffer for name, array in arrays.items()} | {"stats": stats}
    strides = mask_options(mask, parts, types, buffers) | strides_of(**views)
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
    constants = {"D": d, "JOINT": joint} | dict(variant.constants)
    for entry, side, length in (("q", heads, q_len), ("kv", kv_heads, k_len)):
        if length:
            kernel = device.kernel(
                "attention/grad_tile.wgsl",
                f"attention_grad_{entry}_tile",
                types=types,
                constants=constants,
                parts=parts,
            )
            grid = (-(-length // variant.rows), side, batch)
            record(kernel, grid, **{name: buffers[name] for name in kernel.names}, **numbers)


__all__: list[str] = []
