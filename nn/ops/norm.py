"""RMSNorm and LayerNorm over trailing axes, and the RMSNorm that ends in a residual sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn.ops.base import FLOATS, Array, Op, Progress, ShapeError, Spec
from nn.ops.norm_grad import norm_gradient
from nn.ops.rows import RowVariant, record_rows
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from gpu import Buffer, Recorder

EPSILON = {"f32": 2.0**-23, "f16": 2.0**-10}  # torch's default eps of rms_norm: the dtype's machine epsilon


def rms_norm(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Scale each row to unit root mean square: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        input: (..., *normalized_shape) f32 or f16. Sums are f32.
        normalized_shape: the trailing axes that make up a row.
        weight: of normalized_shape, f32 or f16, or None for ones.
        eps: added to the mean square; None takes the machine epsilon of input's dtype, as torch does.
    Returns: shape and dtype of input.
    Raises: ShapeError where shapes do not fit, ValueError if eps is negative, TypeError for other dtypes.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. Name and signature: torch.nn.functional.rms_norm.
    """
    shape = _trailing("rms_norm", input, normalized_shape)
    eps = EPSILON.get(input.dtype, 0.0) if eps is None else eps
    op = RMSNormRows(axes=len(shape), eps=_checked_eps("rms_norm", eps))
    return apply(op, input) if weight is None else apply(op, input, weight)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """residual + rms_norm(x) * weight over the last axis in one pass: a sub-layer's output joining the residual stream.

    Args:
        residual, x: (..., C), the same shape and dtype, f32 or f16. Sums are f32.
        weight: (C,) f32 or f16.
        eps: added to the mean square of x.
    Returns: (..., C), dtype of x.
    Raises: ShapeError, ValueError if eps is negative, TypeError for other dtypes.
    Source: the post-norms of Gemma 2, arXiv:2408.00118, section 2.
    """
    return apply(AddRMSNormRows(eps=_checked_eps("add_rms_norm", eps)), residual, x, weight)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Shift and scale each row to mean 0 and variance 1: y = (x - mean) / sqrt(var + eps) * weight + bias.

    Args:
        input: (..., *normalized_shape) f32 or f16. Sums are f32; the variance is the biased one.
        normalized_shape: the trailing axes that make up a row.
        weight, bias: of normalized_shape, f32 or f16 (both the same), or None for ones and zeros.
        eps: added to the variance.
    Returns: shape and dtype of input.
    Raises: ShapeError where shapes do not fit, ValueError if eps is negative, TypeError for other dtypes.
    Source: Ba et al. 2016, arXiv:1607.06450. Name and signature: torch.nn.functional.layer_norm.
    """
    shape = _trailing("layer_norm", input, normalized_shape)
    op = LayerNormRows(axes=len(shape), eps=_checked_eps("layer_norm", eps))
    if weight is None and bias is None:
        return apply(op, input)
    if weight is None:
        assert bias is not None
        if bias.shape != shape:
            raise ShapeError(
                f"layer_norm: bias has shape {bias.shape}, rows of the input {input.shape} have shape {shape}"
            )
        return apply(op, input) + bias
    return apply(op, input, weight) if bias is None else apply(op, input, weight, bias)


@dataclass(frozen=True)
class RMSNormRows(Op):
    """Operands x and, optionally, weight; the last `axes` axes of x are a row."""

    axes: int
    eps: float
    group = "norm"

    def infer(self, x: Spec, *weights: Spec) -> Spec:
        return _infer("rms_norm", x, weights, self.axes)

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """With s = 1 / rms(x) and g = weight dy: dx = s g - x s^3 mean(g x), dweight = sum over rows of dy x s."""
        x, *weight = tensors[:-1]
        if fused := norm_gradient(dy, x, *weight, axes=self.axes, eps=self.eps, centred=False):
            return fused
        axes = tuple(range(-self.axes, 0))
        wide, g = x.to("f32"), _times(dy, *weight)
        s = ((wide * wide).mean(axes, keepdim=True) + self.eps).rsqrt()
        dx = s * g - wide * (s * s * s * (g * wide).mean(axes, keepdim=True))
        return dx.to(x.dtype), *(_over_rows(dy.to("f32") * wide * s, w) for w in weight)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        return _cost(super().cost(operands, results), operands[0], 2 + len(operands))  # square, sum, scale; gain

    def lower(self, record: Recorder, x: Array, *rest: Array) -> None:
        *gain, out = rest
        record_rms_norm(record, x, out, gain=gain[0] if gain else None, axes=self.axes, eps=self.eps)


@dataclass(frozen=True)
class AddRMSNormRows(Op):
    """Operands residual, x, weight; rows are the last axis."""

    eps: float
    group = "norm"

    def infer(self, residual: Spec, x: Spec, weight: Spec) -> Spec:
        if residual != x:
            raise ShapeError(
                f"add_rms_norm: residual is {residual.shape} {residual.dtype}, x is {x.shape} {x.dtype}; "
                "both must be the same"
            )
        return _infer("add_rms_norm", x, (weight,), 1)

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        _, x, weight, y = tensors
        return dy, *RMSNormRows(axes=1, eps=self.eps).gradient(dy, x, weight, y)

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        return _cost(super().cost(operands, results), operands[0], 5)  # square, sum, scale, gain, residual

    def lower(self, record: Recorder, residual: Array, x: Array, weight: Array, out: Array) -> None:
        record_rms_norm(record, x, out, gain=weight, residual=residual, eps=self.eps)


@dataclass(frozen=True)
class LayerNormRows(Op):
    """Operands x and, optionally, weight, then bias; the last `axes` axes of x are a row."""

    axes: int
    eps: float
    group = "norm"

    def infer(self, x: Spec, *weights: Spec) -> Spec:
        return _infer("layer_norm", x, weights, self.axes)

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """With n = (x - mean) s, s = 1 / sqrt(var + eps), g = weight dy: dx = s (g - mean(g) - n mean(g n))."""
        x, *weights = tensors[:-1]
        if fused := norm_gradient(dy, x, *weights, axes=self.axes, eps=self.eps, centred=True):
            return fused
        axes = tuple(range(-self.axes, 0))
        wide, g = x.to("f32"), _times(dy, *weights[:1])
        centred = wide - wide.mean(axes, keepdim=True)
        s = ((centred * centred).mean(axes, keepdim=True) + self.eps).rsqrt()
        n = centred * s
        dx = s * (g - g.mean(axes, keepdim=True) - n * (g * n).mean(axes, keepdim=True))
        terms = (dy.to("f32") * n, dy.to("f32"))  # of weight, of bias
        return dx.to(x.dtype), *(_over_rows(t, w) for t, w in zip(terms, weights))

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        return _cost(super().cost(operands, results), operands[0], 4 + len(operands))  # sum, centre, square, sum, scale

    def lower(self, record: Recorder, x: Array, *rest: Array) -> None:
        *weights, out = rest
        weight = weights[0] if weights else None
        bias = weights[1] if len(weights) > 1 else None
        record_layer_norm(record, x, out, weight=weight, bias=bias, axes=self.axes, eps=self.eps)


def _times(dy: Tensor, *weight: Tensor) -> Tensor:
    """weight * dy in f32, or dy where there is no weight."""
    wide = dy.to("f32")
    return wide * weight[0].to("f32") if weight else wide


def _over_rows(terms: Tensor, weight: Tensor) -> Tensor:
    """The sum over rows, as weight is stored."""
    rows = tuple(range(terms.ndim - weight.ndim))
    return (terms.sum(rows) if rows else terms).to(weight.dtype)


def _cost(moved: Cost, x: Spec, operations: int) -> Cost:
    """Bytes as `moved` has them, and so many operations an element of x."""
    return Cost(operations * x.size, moved.read, moved.written)


def record_rms_norm(
    record: Recorder,
    x: Array,
    out: Array,
    *,
    gain: Array | None = None,
    residual: Array | None = None,
    axes: int = 1,
    eps: float,
    variant: RowVariant | None = None,
) -> None:
    """One dispatch of shaders/norm/rms_norm*.wgsl. `residual` needs `gain`. variant: None takes the default one."""
    entry = "rms_norm" if gain is None else "rms_norm_gain" if residual is None else "add_rms_norm"
    record_rows(
        record, "norm/rms_norm", entry, x, out, axes=axes, variant=variant, eps=eps,
        gain_type="f32" if gain is None else gain.dtype, **_buffers(gain=gain, residual=residual),
    )  # fmt: skip


def record_layer_norm(
    record: Recorder,
    x: Array,
    out: Array,
    *,
    weight: Array | None = None,
    bias: Array | None = None,
    axes: int = 1,
    eps: float,
    variant: RowVariant | None = None,
) -> None:
    """One dispatch of shaders/norm/layer_norm*.wgsl. `bias` needs `weight`. variant: None takes the default one."""
    entry = "layer_norm" if weight is None else "layer_norm_weight" if bias is None else "layer_norm_affine"
    gain = "f32" if weight is None else weight.dtype
    record_rows(
        record, "norm/layer_norm", entry, x, out, axes=axes, gain_type=gain, variant=variant, eps=eps,
        **_buffers(weight=weight, bias=bias),
    )  # fmt: skip


def _buffers(**arrays: Array | None) -> dict[str, Buffer]:
    return {name: array.buffer for name, array in arrays.items() if array is not None}


def _trailing(name: str, x: Tensor, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(normalized_shape, Tensor):
        raise TypeError(
            f"{name}: normalized_shape is a Tensor; the second argument is the shape of a row, as in torch: "
            f"{name}(x, (C,), weight)"
        )
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ShapeError(
            f"{name}: input has shape {x.shape}, which does not end in normalized_shape {shape}; pass "
            "the lengths of the trailing axes to normalise over"
        )
    return shape


def _checked_eps(name: str, eps: float) -> float:
    if not eps >= 0.0:
        raise ValueError(f"{name}: eps is {eps}; it is added under the root and must be >= 0, 1e-5 or 1e-6 is usual")
    return float(eps)


def _infer(name: str, x: Spec, weights: Sequence[Spec], axes: int) -> Spec:
    row = x.shape[len(x.shape) - axes :]
    for spec in weights:
        if spec.shape != row:
            raise ShapeError(
                f"{name}: weight or bias has shape {spec.shape}, rows of the input {x.shape} have shape {row}"
            )
    for what, spec in [("input", x), *(("weight or bias", w) for w in weights)]:
        if spec.dtype not in FLOATS:
            raise TypeError(f"{name}: {what} is {spec.dtype}; expected f32 or f16, convert with .to('f32')")
    if len({spec.dtype for spec in weights}) > 1:
        raise TypeError(f"{name}: weight is {weights[0].dtype}, bias is {weights[1].dtype}; both must have one dtype")
    return x


__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]
