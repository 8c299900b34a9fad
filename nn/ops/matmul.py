"""Matrix products of dense tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpu.work import Cost
from nn.ops import matmul_matrix
from nn.ops.base import FLOATS, Array, Epilogue, Op, Progress, ShapeError, Spec, stored_bytes
from nn.ops.matmul_block import SUM, record_block, sum_options
from nn.ops.matmul_matrix import MATRIX
from nn.ops.matmul_packed import record_packed
from nn.ops.matmul_tune import MATMUL
from nn.ops.matmul_variants import BLOCK, PACKED, Shape, Variant
from nn.tensor import Tensor, add_methods, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Matrix product with torch's rules: leading axes are batches, which broadcast; a vector is a row or a column.

    Shapes: (..., M, K) x (..., K, N) -> (..., M, N); (K,) x (..., K, N) -> (..., N); (..., M, K) x (K,) -> (..., M);
    (K,) x (K,) -> (). Both f32, f16 or bf16; sums are f32, and so are the products of bf16, which is converted
    first. A transposed operand is read in place.
    Raises: ShapeError where the shapes do not fit or an operand has no axes, TypeError where the dtypes differ.
    """
    if not input.ndim or not other.ndim:
        raise ShapeError(
            f"matmul: shapes {list(input.shape)} and {list(other.shape)}; both need an axis, use * for scalars"
        )
    if input.shape[-1] != other.shape[max(other.ndim - 2, 0)]:
        raise ShapeError(
            f"matmul: shapes {list(input.shape)} and {list(other.shape)} do not fit: the first's last axis has "
            f"{input.shape[-1]} elements, the second's {'only' if other.ndim == 1 else 'second to last'} axis "
            f"{other.shape[max(other.ndim - 2, 0)]}; they must be equal"
        )
    if input.dtype == other.dtype == "bf16":  # storage: the arithmetic is f32's
        return matmul(input.to("f32"), other.to("f32")).to("bf16")
    a = input.reshape(1, input.shape[0]) if input.ndim == 1 else input
    b = other.reshape(other.shape[0], 1) if other.ndim == 1 else other
    out = apply(MatMul(), a, b)
    if input.ndim == 1:
        out = out.reshape(*out.shape[:-2], out.shape[-1])
    return out.reshape(*out.shape[:-1]) if other.ndim == 1 else out


@dataclass(frozen=True)
class MatMul(Op):
    """a (..., M, K) and b (..., K, N), or (..., K, M) and (..., N, K) where transposed; with bias also (N,)."""

    trans_a: bool = False
    trans_b: bool = False
    bias: bool = False
    group = "linear"
    name = "matmul"
    takes_epilogue = True

    def infer(self, *inputs: Spec) -> Spec:
        a, b, *rest = inputs
        if a.dtype != b.dtype or a.dtype not in FLOATS:
            raise TypeError(
                f"matmul: operands are {a.dtype} and {b.dtype}; expected both f32, both f16 or both bf16; convert with "
                ".to(...)"
            )
        if len(a.shape) < 2 or len(b.shape) < 2:
            raise ShapeError(f"MatMul: shapes {list(a.shape)} and {list(b.shape)}; both need at least two axes")
        (m, k), (k_b, n) = _matrix(a.shape, self.trans_a), _matrix(b.shape, self.trans_b)
        if k != k_b:
            raise ShapeError(
                f"matmul: (..., {m}, {k}) x (..., {k_b}, {n}) do not fit: the first needs as many columns as the "
                f"second has rows; given {list(a.shape)}{'^T' * self.trans_a} and "
                f"{list(b.shape)}{'^T' * self.trans_b}"
            )
        if self.bias and rest[0] != Spec((n,), a.dtype):
            raise ShapeError(f"matmul: bias is {rest[0].dtype} {list(rest[0].shape)}; expected {a.dtype} [{n}]")
        return Spec((*_broadcast(a.shape[:-2], b.shape[:-2]), m, n), a.dtype)

    def fold_transpose(self, position: int) -> MatMul | None:
        if position == 0:
            return replace(self, trans_a=not self.trans_a)
        return replace(self, trans_b=not self.trans_b) if position == 1 else None

    def gradient(self, dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """da = dy b^T and db = a^T dy, summed over the batches for which an operand was repeated."""
        a, b, *bias = tensors[:-1]
        if self.trans_a:
            da = matmul(b.mT if self.trans_b else b, dy.mT)
        else:
            da = matmul(dy, b if self.trans_b else b.mT)
        left, right = (a, dy) if self.trans_a else (a.mT, dy)
        if b.ndim == 2 and dy.ndim > 2 and not self.trans_a and a.shape[:-2] == dy.shape[:-2]:
            left, right = a.reshape(-1, a.shape[-1]).mT, dy.reshape(-1, dy.shape[-1])  # one long sum, not a sum of sums
        db = matmul(right.mT, left.mT) if self.trans_b else matmul(left, right)
        more = [dy.reshape(-1, dy.shape[-1]).sum(0)] if bias else []
        return _unrepeated(da, a.shape), _unrepeated(db, b.shape), *more

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        (out,) = results
        depth = _matrix(operands[0].shape, self.trans_a)[1]
        read = sum(stored_bytes(spec) for spec in operands)
        return Cost(out.size * (2 * depth + self.bias), read, stored_bytes(out))

    def lower(self, record: Recorder, *arrays: Any) -> None:
        self._lower(record, None, *arrays)

    def lower_with(self, record: Recorder, epilogue: Epilogue, *arrays: Any) -> None:
        self._lower(record, epilogue, *arrays)

    def _lower(self, record: Recorder, epilogue: Epilogue | None, *arrays: Any) -> None:
        a, b, *bias, out = arrays
        chosen = MATMUL.pick(record.device, shape_of(a, b, out, trans_a=self.trans_a, trans_b=self.trans_b))
        record_matmul(
            record, chosen, a, b, out, trans_a=self.trans_a, trans_b=self.trans_b,
            bias=bias[0] if bias else None, epilogue=epilogue,
        )  # fmt: skip


def shape_of(a: Array, b: Array, out: Array, *, trans_a: bool = False, trans_b: bool = False) -> Shape:
    """What the choice of a kernel depends on."""
    m, n = out.shape[-2:]
    k = _matrix(a.shape, trans_a)[1]
    return Shape(m, n, k, math.prod(out.shape[:-2]), out.dtype, trans_a, trans_b)


def record_matmul(
    record: Recorder,
    chosen: Variant,
    a: Array,
    b: Array,
    out: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Array | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """One product, or one for each outer index where more than two batch axes repeat in ways that do not merge."""
    slots = None if epilogue is None else epilogue.slots
    shape = shape_of(a, b, out, trans_a=trans_a, trans_b=trans_b)
    m, n, k = shape.m, shape.n, shape.k
    entry = "matmul" if bias is None else "matmul_bias"
    device, options = record.device, chosen.kernel_options(shape)
    total = None if chosen.split == 1 else device.kernel(SUM, entry, **sum_options(shape), slots=slots)
    if total is None:
        kernel = device.kernel(chosen.path, entry, **options, slots=slots)
    else:  # bias and epilogue wait for the sum
        kernel = device.kernel(chosen.path, "matmul", **options)
    buffers = {"a": a.buffer, "b": b.buffer, "out": out.buffer} | ({} if bias is None else {"bias": bias.buffer})
    more: dict[str, Any] = {} if epilogue is None else {**epilogue.fields, **epilogue.buffers}
    a_line, b_line = matmul_matrix.lines(shape)
    a_shape, b_shape = a.shape, b.shape
    if chosen.path == MATRIX and matmul_matrix.evened(shape):  # elements are read in pairs
        if a_line % 2:
            buffers["a"] = matmul_matrix.even_lines(record, a.buffer, math.prod(a.shape[:-1]), a_line)
            a_line, a_shape = a_line + 1, (*a.shape[:-1], a_line + 1)
        if b_line % 2:
            buffers["b"] = matmul_matrix.even_lines(record, b.buffer, math.prod(b.shape[:-1]), b_line)
            b_line, b_shape = b_line + 1, (*b.shape[:-1], b_line + 1)
    axes = _merged(out.shape[:-2], _strides(a_shape, out.shape), _strides(b_shape, out.shape))
    inner = [(1, 0, 0)] * (2 - len(axes)) + axes[-2:]
    (size_0, a_0, b_0), (size_1, a_1, b_1) = inner
    for index, (a_offset, b_offset) in enumerate(_offsets(axes[:-2])):
        sizes = {
            "m": m, "n": n, "k": k, "batches": size_0 * size_1, "size_1": size_1,
            "a_offset": a_offset, "a_row": 1 if trans_a else a_line, "a_col": a_line if trans_a else 1,
            "a_batch_0": a_0, "a_batch_1": a_1,
            "b_offset": b_offset, "b_row": 1 if trans_b else b_line, "b_col": b_line if trans_b else 1,
            "b_batch_0": b_0, "b_batch_1": b_1,
            "out_offset": index * size_0 * size_1 * m * n,
        }  # fmt: skip
        if chosen.path == PACKED:
            record_packed(record, kernel, chosen, shape.dtype, sizes, buffers, more)
            continue
        if chosen.path == BLOCK:
            record_block(record, (kernel, total), chosen, shape, sizes, buffers, more)
            continue
        record(kernel, grid=size_0 * size_1 * -(-m // chosen.rows) * -(-n // chosen.cols), **sizes, **buffers, **more)


def _unrepeated(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Summed over the batch axes along which an operand of this shape was repeated."""
    new = gradient.ndim - len(shape)
    repeated = [a for a, n in enumerate(gradient.shape) if a < new or (shape[a - new] == 1 and n != 1)]
    return (gradient.sum(repeated, keepdim=True) if repeated else gradient).reshape(shape)


def _matrix(shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    wide = [(1,) * (rank - len(s)) + s for s in (a, b)]
    if any(x != y and 1 not in (x, y) for x, y in zip(*wide, strict=True)):
        raise ShapeError(f"matmul: batch axes {list(a)} and {list(b)} do not broadcast; axes are equal or 1")
    return tuple(y if x == 1 else x for x, y in zip(*wide, strict=True))


def _strides(shape: tuple[int, ...], out: tuple[int, ...]) -> list[int]:
    """Elements from one index to the next of each batch axis of the result; 0 where the operand repeats."""
    batch = (1,) * (len(out) - len(shape)) + tuple(shape[:-2])
    step, strides = shape[-2] * shape[-1], []
    for size in reversed(batch):
        strides.append(0 if size == 1 else step)
        step *= size
    return strides[::-1]


def _merged(sizes: Sequence[int], a: list[int], b: list[int]) -> list[tuple[int, int, int]]:
    """(size, stride in a, stride in b) of the batch axes; neighbours that both operands step through evenly are one."""
    axes: list[tuple[int, int, int]] = []
    for size, a_step, b_step in zip(sizes, a, b, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * a_step and axes[-1][2] == size * b_step:
            axes[-1] = (axes[-1][0] * size, a_step, b_step)
        else:
            axes.append((size, a_step, b_step))
    return axes


def _offsets(axes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Offsets in a and b of every index of the outer axes, in order."""
    found = [(0, 0)]
    for size, a_step, b_step in axes:
        found = [(a + i * a_step, b + i * b_step) for a, b in found for i in range(size)]
    return found


__all__ = ["matmul"]
add_methods(globals())
