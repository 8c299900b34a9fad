"""Products with weight matrices in any storage format, and what a transformer block fuses to them.

y[t, n] = sum_k x[t, k] W[n, k], with W read block by block in its storage format and sums in f32. Four kernels share
their interface (shaders/matmul/weight.wgsl): `row` and `row_broadcast` for software drivers, `gemv` for few tokens on a
GPU, `gemm_weight` for more (nn/ops/linear_variants.py). One token takes one dispatch for each of the public functions
below: RMSNorm, bias, residual, gate, rotary embedding and cache write included. More take separate ones where that is
faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu.work import Cost, Scope
from nn.ops.base import DTYPES, FLOATS, Array, Op, Progress, ShapeError, Spec, check_step, stored_bytes
from nn.ops.create import arange
from nn.ops.embedding import embedding
from nn.ops.linear_tune import LINEAR
from nn.ops.linear_variants import BROADCAST, GEMV, ROW, WIDE, Shape, Variant
from nn.ops.linear_wide import record_wide
from nn.ops.matmul import MatMul, matmul
from nn.ops.norm import record_rms_norm
from nn.quant.formats import FORMATS
from nn.quant.repack import BLOCK
from nn.quant.weight import Weight
from nn.tape import is_grad_enabled
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Buffer, Device, Recorder

ACTIVATIONS = ("silu", "gelu_tanh")


# --- public functions -------------------------------------------------------------------------------------------------


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None) -> Tensor:
    """y = x W^T + bias + residual, x the input and W the weight. Name and signature: torch.nn.functional.linear.

    Args:
        input: (..., K) f32, or f16 with a dense f16 weight.
        weight: (N, K), a weight in any storage format, or a dense f32, f16 or bf16 tensor. K is a multiple of 32,
            except for dense ones of input's dtype.
        bias: (N,), residual: (..., N), of input's dtype.
    Returns: (..., N), dtype of input.
    Raises: ShapeError where the shapes do not fit, TypeError for dtypes that do not.
    """
    if dense_path(input, weight):
        out = dense_linear(input, weight, bias)
        return out if residual is None else out + residual
    more = [t for t in (bias, residual) if t is not None]
    return apply(Linear(bias=bias is not None, residual=residual is not None), input, weight, *more)


def dense_path(input: Tensor, weight: Tensor) -> bool:
    """Whether the product is one of dense matrices: of one dtype, and gradients, f16 or odd sizes ask for it.

    Kernels for stored weights are faster for few rows, and compute in f32.
    """
    if weight.dtype != input.dtype or weight.dtype not in FLOATS or weight.ndim != 2 or not input.ndim:
        return False
    if isinstance(weight.node.value, Weight):
        return False  # in row windows, also where its format is f32
    wanted = is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    return wanted or input.dtype == "f16" or weight.shape[1] % BLOCK != 0


def dense_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All rows of input as one matrix, times the weight as it lies."""
    if input.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: input {list(input.shape)} has {input.shape[-1]} features, weight {list(weight.shape)} takes "
            f"{weight.shape[1]}; the last axes must be equal"
        )
    rows = input.reshape(-1, input.shape[-1]) if input.numel() else input.reshape(math.prod(input.shape[:-1]), -1)
    more = () if bias is None else (bias,)
    out = apply(MatMul(trans_b=True, bias=bias is not None), rows, weight, *more)
    return out.reshape(*input.shape[:-1], weight.shape[0])


def norm_linear(x: Tensor, norm_weight: Tensor, w: Tensor, *, eps: float) -> Tensor:
    """y = rms_norm(x) W^T. Shapes: x (..., K) f32, norm_weight (K,) f32, w (N, K) in any format -> (..., N) f32.

    rms_norm(x) = x / sqrt(mean(x^2) + eps) * norm_weight (Zhang & Sennrich 2019, arXiv:1910.07467).
    Raises: ShapeError, TypeError as `linear`; ValueError if eps is negative.
    """
    return apply(NormLinear(eps=float(eps)), x, norm_weight, w)


def gated_mlp(x: Tensor, norm_weight: Tensor, w_gate_up: Tensor, *, eps: float, activation: str = "silu") -> Tensor:
    """act(rms_norm(x) G^T) * (rms_norm(x) U^T), the first half of a SwiGLU or GeGLU block.

    Args:
        x: (..., K) f32. norm_weight: (K,) f32.
        w_gate_up: (2 F, K) in any format, the F rows of G above the F rows of U.
        activation: "silu", or "gelu_tanh" (Hendrycks & Gimpel 2016, arXiv:1606.08415).
    Returns: (..., F) f32.
    Source: Shazeer 2020, arXiv:2002.05202.
    Raises: ShapeError, TypeError as `linear`; ValueError for another activation or a negative eps.
    """
    return apply(GatedMLP(eps=float(eps), activation=activation), x, norm_weight, w_gate_up)


def qkv_rope(
    x: Tensor,
    norm_weight: Tensor,
    w: Tensor | tuple[Tensor, ...],
    k_cache: Tensor,
    v_cache: Tensor,
    rope: Tensor,
    step: Tensor,
    *,
    eps: float,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Queries of an attention block; keys and values go to the cache. Norm, projections, bias, head norms, rotation.

    Args:
        x: (T, K) f32. norm_weight: (K,) f32.
        w: ((H + 2 Hkv) D, K) in any format, rows of q, then k, then v; or a tuple of that one, or of three matrices, in
            formats of their own.
        k_cache, v_cache: (context, Hkv, D) f32 or f16. Row t goes to index step.position + t, for t < step.tokens.
        rope: (positions, R/2, 2) f32, cos and sin of every angle; features R..D are not rotated. Positions past the
            table take its last row.
        step: (4,) u32: position, tokens, seed, draw.
        bias: ((H + 2 Hkv) D,) f32. q_norm, k_norm: (D,) f32, gains of an RMSNorm over each head, with the same eps.
        interleaved: features 2i, 2i + 1 are a pair, not i, i + R/2.
    Returns: q (T, H * D) f32, rotated.
    Raises: ShapeError, TypeError as `linear`; ValueError for a negative eps, two matrices, q_norm without k_norm.
    """
    if (q_norm is None) != (k_norm is None):
        raise ValueError("qkv_rope: q_norm and k_norm go together; pass both or neither")
    weights = w if isinstance(w, tuple) else (w,)
    if len(weights) not in (1, 3):
        raise ValueError(f"qkv_rope: got {len(weights)} weights; pass one with the rows of q, k and v, or three")
    more = [t for t in (bias, q_norm, k_norm) if t is not None]
    op = QKVRope(
        eps=float(eps), weights=len(weights), bias=bias is not None, norms=q_norm is not None, interleaved=interleaved
    )
    return apply(op, x, norm_weight, k_cache, v_cache, rope, step, *weights, *more)


# --- recording --------------------------------------------------------------------------------------------------------


def variant(device: Device, tokens: int, w: Weight, *, paired: bool = False) -> Variant:
    """The kernel to use on this device for so many rows of x. paired: for an entry that works on pairs of rows."""
    return LINEAR.pick(device, Shape(tokens, *w.shape, w.format, paired))


def multiply(
    record: Recorder,
    chosen: Variant,
    entry: str,
    w: Weight,
    *,
    tokens: int,
    out: Buffer,
    out_cols: int,
    first_col: int = 0,
    eps: float = 0.0,
    constants: dict[str, int] | None = None,
    types: dict[str, str] | None = None,
    sizes: dict[str, int] | None = None,
    subgroups: bool | None = None,
    **buffers: Any,
) -> None:
    """Record an entry of a kernel for every window of w; its columns of out start at `first_col`.

    buffers: x, rows of whole blocks, and what else the entry binds. sizes: the Params of norm_qkv_rope.
    """
    if chosen.path == WIDE:
        record_wide(
            record, chosen, entry, w, tokens=tokens, out=out, out_cols=out_cols, first_col=first_col,
            gelu=(constants or {}).get("GELU", 0), **buffers,
        )  # fmt: skip
        return
    kernel = record.device.kernel(
        chosen.path,
        entry,
        constants={**dict(chosen.constants), **(constants or {})},
        types=types,
        parts={"format": w.shader, **dict(chosen.parts)},
        subgroups=subgroups,
    )
    sizes = {**dict.fromkeys(("heads", "kv_heads", "head_dim", "rotated", "context", "table_rows"), 0), **(sizes or {})}
    for window in w.windows:
        record(
            kernel,
            grid=chosen.grid(window.rows, tokens),
            w=window.buffer,
            out=out,
            tokens=tokens,
            cols=w.shape[1],
            w_rows=window.rows,
            row0=first_col + window.row0,
            out_cols=out_cols,
            eps=eps,
            **sizes,
            **buffers,
        )


# --- operations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear(Op):
    bias: bool = False
    residual: bool = False
    group = "linear"

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """dx = dy W; dW = dy^T x for dense weights. Those in block formats are constants, decoded for dx."""
        x, w = tensors[:2]
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        stored = w.dtype not in FLOATS
        wide = embedding(arange(w.shape[0], device=w.device), w.detach()) if stored else w.to("f32")
        dx = matmul(rows, wide).reshape(x.shape)
        dw = None if stored else matmul(rows.mT, flat).to(w.dtype)
        bias = [rows.sum(0)] if self.bias else []
        return dx, dw, *bias, *([dy] if self.residual else [])

    def infer(self, *inputs: Spec) -> Spec:
        x, w, *more = inputs
        rows = _weight_rows("linear", x, w)
        out = Spec((*x.shape[:-1], rows), "f32")
        if self.bias:
            _expect("linear", "bias", more[0], (rows,))
        if self.residual:
            _expect("linear", "residual", more[-1], out.shape)
        return out

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        x, w, *more = operands
        return product_cost(x, [w], more, results, extra=len(more))

    def lower(self, record: Recorder, *arrays: Any) -> None:
        x, w, *more, out = arrays
        buffers = {}
        if self.bias:
            buffers["bias"] = more[0].buffer
        if self.residual:
            buffers["residual"] = more[-1].buffer
        _linear(record, _padded(record, x), x.rows, _weight(w), out.buffer, w.shape[0], **buffers)


@dataclass(frozen=True)
class NormLinear(Op):
    eps: float
    group = "linear"

    def infer(self, *inputs: Spec) -> Spec:
        x, gain, w = inputs
        _check_norm("norm_linear", x, gain, self.eps)
        return Spec((*x.shape[:-1], _weight_rows("norm_linear", x, w)), "f32")

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        x, gain, w = operands
        return product_cost(x, [w], [gain], results, norm=True)

    def lower(self, record: Recorder, *arrays: Any) -> None:
        x, gain, w, out = arrays
        _norm_linear(record, x, gain, (_weight(w),), out.buffer, self.eps)


@dataclass(frozen=True)
class GatedMLP(Op):
    eps: float
    activation: str = "silu"
    group = "linear"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"gated_mlp: activation={self.activation!r}; expected one of {', '.join(ACTIVATIONS)}")

    def infer(self, *inputs: Spec) -> Spec:
        x, gain, w = inputs
        _check_norm("gated_mlp", x, gain, self.eps)
        rows = _weight_rows("gated_mlp", x, w)
        if rows % 2:
            raise ShapeError(
                f"gated_mlp: w_gate_up has {rows} rows; it holds as many gate rows as up rows, so an even number"
            )
        return Spec((*x.shape[:-1], rows // 2), "f32")

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        x, gain, w = operands
        return product_cost(x, [w], [gain], results, norm=True, extra=2)  # the activation, and its product with up

    def lower(self, record: Recorder, *arrays: Any) -> None:
        x, gain, w, out = arrays
        weight, tokens = _weight(w), x.rows
        gelu = {"GELU": ACTIVATIONS.index(self.activation)}
        chosen = variant(record.device, tokens, weight, paired=True)
        if len(weight.windows) > 1:  # gate and up rows lie in different buffers
            both = record.temp(tokens * weight.shape[0] * 4)
            _norm_linear(record, x, gain, (weight,), both, self.eps)
            _rows(record, "gate", both, out.buffer, tokens, weight.shape[0], weight.shape[0] // 2, constants=gelu)
        elif _norm_fuses(chosen, tokens, x.cols):
            multiply(
                record, chosen, "norm_gated_linear", weight, tokens=tokens, out=out.buffer, out_cols=out.cols,
                eps=self.eps, constants=gelu, x=x.buffer, gain=gain.buffer,
            )  # fmt: skip
        else:
            multiply(
                record, chosen, "gated_linear", weight, tokens=tokens, out=out.buffer, out_cols=out.cols,
                constants=gelu, x=_normed(record, x, gain, self.eps),
            )  # fmt: skip


@dataclass(frozen=True)
class QKVRope(Op):
    """Operands: x, norm_weight, k_cache, v_cache, rope, step, the weights, then bias, q_norm and k_norm where given."""

    eps: float
    weights: int = 1
    bias: bool = False
    norms: bool = False
    interleaved: bool = False
    group = "linear"
    mutates = (2, 3)

    def infer(self, *inputs: Spec) -> Spec:
        x, gain, k_cache, v_cache, rope, step, *more = inputs
        name = "qkv_rope"
        _check_norm(name, x, gain, self.eps)
        if len(x.shape) != 2:
            raise ShapeError(f"{name}: x has shape {x.shape}; expected (T, K), the rows of one sequence")
        cached = k_cache.dtype in FLOATS and len(k_cache.shape) == 3 and k_cache.shape[2] % 2 == 0
        if not cached or k_cache != v_cache:
            raise ShapeError(
                f"{name}: k_cache is {k_cache.dtype} {k_cache.shape}, v_cache {v_cache.dtype} {v_cache.shape}; wanted "
                "two alike (context, kv_heads, head_dim), f32 or f16, head_dim even"
            )
        _, kv_heads, head_dim = k_cache.shape
        if rope.dtype != "f32" or len(rope.shape) != 3 or rope.shape[2] != 2 or not 0 < 2 * rope.shape[1] <= head_dim:
            raise ShapeError(
                f"{name}: rope is {rope.dtype} {rope.shape}; expected f32 (positions, R/2, 2), R <= {head_dim}"
            )
        check_step(name, step)
        rows = [_weight_rows(name, x, w) for w in more[: self.weights]]
        q_rows = sum(rows) - 2 * kv_heads * head_dim
        if q_rows <= 0 or q_rows % head_dim or (self.weights == 3 and rows[1:] != [kv_heads * head_dim] * 2):
            raise ShapeError(
                f"{name}: weights of {rows} rows; expected heads * {head_dim} rows of q, then "
                f"{kv_heads * head_dim} of k and as many of v, as the caches are (context, {kv_heads}, {head_dim})"
            )
        if self.bias:
            _expect(name, "bias", more[self.weights], (sum(rows),))
        if self.norms:
            _expect(name, "q_norm", more[-2], (head_dim,))
            _expect(name, "k_norm", more[-1], (head_dim,))
        return Spec((x.shape[0], q_rows), "f32")

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        x, gain, k_cache, _, rope, step, *more = operands
        weights, small = more[: self.weights], [gain, step, *more[self.weights :]]
        tokens = x.shape[0] if progress is None else min(progress.tokens, x.shape[0])
        kept = Spec((tokens, *k_cache.shape[1:]), k_cache.dtype)  # the rows of keys, and of values, that are written
        turned = 3 * x.shape[0] * (results[0].size // x.shape[0] + math.prod(k_cache.shape[1:]))  # 6 a pair of q or k
        angles = Spec((tokens, *rope.shape[1:]), rope.dtype)
        return product_cost(x, weights, [*small, angles], [results[0], kept, kept], norm=True) + Cost(turned)

    def lower(self, record: Recorder, *arrays: Any) -> None:
        x, gain, k_cache, v_cache, rope, step, *more, out = arrays
        caps, tokens = record.device.caps, x.rows
        weights = tuple(_weight(w) for w in more[: self.weights])
        context, kv_heads, head_dim = k_cache.shape
        sizes = {
            "heads": out.cols // head_dim,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rotated": 2 * rope.shape[1],
        }
        sizes |= {"context": context, "table_rows": rope.shape[0]}
        ends = {"rope": rope.buffer, "step": step.buffer, "k_cache": k_cache.buffer, "v_cache": v_cache.buffer}
        constants, types = {"INTERLEAVED": int(self.interleaved)}, {"KV": k_cache.dtype}
        added = {"bias": more[self.weights].buffer} if self.bias else {}
        chosen = variant(record.device, tokens, weights[0], paired=True)
        one = len(weights) == 1 and len(weights[0].windows) == 1 and not self.norms
        if one and _norm_fuses(chosen, tokens, x.cols) and len(added) + 8 <= caps.max_storage_buffers:
            entry = "norm_qkv_bias_rope" if self.bias else "norm_qkv_rope"
            multiply(
                record, chosen, entry, weights[0], tokens=tokens, out=out.buffer, out_cols=out.cols, eps=self.eps,
                sizes=sizes, x=x.buffer, gain=gain.buffer, constants=constants, types=types, **ends, **added,
            )  # fmt: skip
            return
        width = out.cols + 2 * kv_heads * head_dim
        qkv = record.temp(tokens * width * 4)
        entry = "rope_cache_bias" if self.bias else "rope_cache"
        if self.norms:
            _norm_linear(record, x, gain, weights, qkv, self.eps, **added)
            entry, added = "rope_cache_norm", {"q_gain": more[-2].buffer, "k_gain": more[-1].buffer}
        else:
            _norm_linear(record, x, gain, weights, qkv, self.eps)
        constants["WG"] = 8 if caps.kind == "cpu" else min(128, max(32, 1 << (head_dim // 2).bit_length() - 1))
        kept = 2 * tokens * kv_heads * head_dim
        moved = Cost(3 * tokens * width, 4 * tokens * width, 4 * out.size + kept * DTYPES[k_cache.dtype][0])
        with record.scope(Scope("rotate, keep", kind="rope", cost=moved)):
            record(
                record.device.kernel("rope/rope_cache.wgsl", entry, constants=constants, types=types),
                grid=tokens * (sizes["heads"] + 2 * kv_heads), qkv=qkv, out=out.buffer, tokens=tokens, eps=self.eps,
                **sizes, **ends, **added,
            )  # fmt: skip


def product_cost(
    x: Spec,
    weights: Sequence[Spec],
    small: Sequence[Spec],
    results: Sequence[Spec],
    *,
    norm: bool = False,
    extra: int = 0,
) -> Cost:
    """Work of products of x with weights: two operations a weight and row, the weights read once as they are stored.

    small: further operands. norm: x is normed first. extra: more operations for each element of the first result.
    """
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    flops = 2 * rows * cols * sum(w.shape[0] for w in weights) + 4 * rows * cols * norm + extra * results[0].size
    read = sum(stored_bytes(spec) for spec in (x, *weights, *small))
    return Cost(flops, read, sum(stored_bytes(spec) for spec in results))


# --- shared steps -----------------------------------------------------------------------------------------------------


def _norm_fuses(chosen: Variant, tokens: int, cols: int) -> bool:
    """Whether the kernel norms x itself: it repeats that in every workgroup, which pays for few tokens only."""
    return cols % BLOCK == 0 and (chosen.path == GEMV or (chosen.path in (ROW, BROADCAST) and tokens == 1))


def _linear(
    record: Recorder, x: Buffer, tokens: int, w: Weight, out: Buffer, out_cols: int, first_col: int = 0, **more: Any
) -> None:
    """x: rows of whole blocks. more: bias, residual."""
    entry = "_".join(("linear", *(name for name in ("bias", "residual") if name in more)))
    chosen = variant(record.device, tokens, w)
    multiply(record, chosen, entry, w, tokens=tokens, out=out, out_cols=out_cols, first_col=first_col, x=x, **more)


def _norm_linear(
    record: Recorder,
    x: Array,
    gain: Array,
    weights: Sequence[Weight],
    out: Buffer,
    eps: float,
    bias: Buffer | None = None,
) -> None:
    """Products of the normed x with several matrices, side by side in out."""
    tokens, out_cols = x.rows, sum(w.shape[0] for w in weights)
    chosen = [variant(record.device, tokens, w) for w in weights]
    first = 0
    if bias is None and all(_norm_fuses(c, tokens, x.cols) for c in chosen):
        for c, w in zip(chosen, weights, strict=True):
            multiply(
                record, c, "norm_linear", w, tokens=tokens, out=out, out_cols=out_cols, first_col=first, eps=eps,
                x=x.buffer, gain=gain.buffer,
            )  # fmt: skip
            first += w.shape[0]
        return
    normed = _normed(record, x, gain, eps)
    more = {} if bias is None else {"bias": bias}
    for w in weights:
        _linear(record, normed, tokens, w, out, out_cols, first, **more)
        first += w.shape[0]


def _normed(record: Recorder, x: Array, gain: Array, eps: float) -> Buffer:
    """RMSNorm of every row, in rows of whole blocks."""
    out = Array(record.temp(max(x.size, 1) * 4), x.shape)
    with record.scope(Scope("rms_norm", kind="norm", cost=Cost(4 * x.size, 4 * (x.size + gain.size), 4 * x.size))):
        record_rms_norm(record, x, out, gain=gain, eps=eps)
    return _padded(record, out)


def _padded(record: Recorder, x: Array) -> Buffer:
    """The rows of x, ending in zeros up to whole blocks; x itself where they are whole."""
    if x.cols % BLOCK == 0:
        return x.buffer
    cols = -(-x.cols // BLOCK) * BLOCK
    out = record.temp(max(x.rows, 1) * cols * 4)
    _rows(record, "pad", x.buffer, out, x.rows, x.cols, cols)
    return out


def _rows(
    record: Recorder, entry: str, x: Buffer, out: Buffer, rows: int, cols: int, out_cols: int, **options: Any
) -> None:
    kernel = record.device.kernel("matmul/rows.wgsl", entry, **options)
    with record.scope(Scope(entry, kind="movement", cost=Cost(0, 4 * rows * cols, 4 * rows * out_cols))):
        record(kernel, grid=-(-rows * out_cols // 64), x=x, out=out, rows=rows, cols=cols, out_cols=out_cols)


def _weight(w: Weight | Array) -> Weight:
    return w if isinstance(w, Weight) else Weight.of(w)


def _weight_rows(name: str, x: Spec, w: Spec) -> int:
    """N of W (N, K), after checking that x is f32 (..., K)."""
    if x.dtype != "f32":
        raise TypeError(f"{name}: x is {x.dtype}; activations are f32, convert with .to('f32')")
    if len(w.shape) != 2 or w.dtype not in FORMATS:
        raise ShapeError(
            f"{name}: the weight is {w.dtype} of shape {w.shape}; expected (N, K) in one of {', '.join(FORMATS)}"
        )
    if not x.shape or x.shape[-1] != w.shape[1]:
        raise ShapeError(f"{name}: x has shape {x.shape}, the weight {w.shape}; x needs a last axis of {w.shape[1]}")
    return w.shape[0]


def _expect(name: str, operand: str, got: Spec, shape: tuple[int, ...]) -> None:
    if got != Spec(shape, "f32"):
        raise ShapeError(f"{name}: {operand} is {got.dtype} of shape {got.shape}; expected f32 {shape}")


def _check_norm(name: str, x: Spec, gain: Spec, eps: float) -> None:
    if eps < 0.0:
        raise ValueError(f"{name}: eps must be at least 0, got {eps}; it is added to mean(x^2) under the root")
    _expect(name, "norm_weight", gain, x.shape[-1:])


__all__ = ["gated_mlp", "linear", "norm_linear", "qkv_rope"]
