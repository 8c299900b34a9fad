"""The graph: nodes that say how a value comes about, and the operations that the fuser itself understands.

Every operation is an `Op` (nn/ops/base.py). Three groups of Ops have no kernel of their own; the fuser (fuse.py)
writes their WGSL:

    sources     Constant, Arange                      values computed from an index
    Map         element-wise functions and casts      one WGSL expression
    View        reshape, permute, expand, slice       no arithmetic: strides and an offset
    Reduce      sum, max, argmax, ...                 a fold over axes
    Cat         concatenation                         one strided copy an operand

All other Ops are kernels: they lower themselves. A node keeps `op` and `inputs`, so that a gradient can be a transform
of the graph; `Node.settle` is the one place where they are let go.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nn.graph.scopes import Trace, here
from nn.ops.base import FLOATS, Array, Op, ShapeError, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nn.quant.weight import Weight
    from nn.tensor import Tensor

COMPUTE = ("f32", "f16", "i32", "u32", "bool")  # dtypes the fuser computes with; u8 and bf16 are storage for kernels
INTEGERS = ("i32", "u32")


class Node:
    """One value of the graph. A node with several results has their `specs`, and `Item` nodes that pick them apart;
    `spec` is the first one's.

    `value` holds the device memory once there is any; `base` is the node whose memory it shares, if it has none of its
    own. `stale` names the operation that wrote over that memory. `born` is when it was made (perf_counter_ns), `path`
    where in a model (`named`), `region` in which `recomputation` (0: none): equal nodes of two regions stay apart.
    """

    __slots__ = (
        "__weakref__",
        "_items",
        "_stale",
        "base",
        "born",
        "inputs",
        "op",
        "path",
        "region",
        "spec",
        "specs",
        "value",
    )

    def __init__(
        self, op: Op, inputs: tuple[Node, ...], specs: tuple[Spec, ...], value: Array | Weight | None = None
    ) -> None:
        self.op, self.specs, self.value = op, specs, value
        self.inputs: tuple[Node, ...] = inputs
        self.spec: Spec = specs[0] if specs else Spec((), "f32")
        self.born = time.perf_counter_ns()
        self.path: str = here.path
        self.region: int = here.region
        self.base: Node | None = None
        self._stale: str | None = None
        self._items: list[weakref.ref[Node]] = []

    def item(self, index: int, spec: Spec) -> Node:
        """A node for one of several results."""
        node = Node(Item(index), (self,), (spec,))
        self._items.append(weakref.ref(node))
        return node

    def living_items(self) -> list[Node]:
        """The result nodes that somebody still holds."""
        return [node for ref in self._items if (node := ref()) is not None]

    @property
    def stale(self) -> str | None:
        return self._stale or (self.base.stale if self.base is not None else None)

    @stale.setter
    def stale(self, writer: str) -> None:
        self._stale = writer

    def settle(self, value: Array | Weight, base: Node | None) -> None:
        """The value is in memory now: keep it and let the nodes it came from go."""
        self.value, self.base, self.op = value, base, LEAF
        self.inputs = ()

    def __repr__(self) -> str:
        return f"Node({name_of(self.op)}, {self.spec.dtype}{list(self.spec.shape)})"


def leaf(value: Array | Weight) -> Node:
    """A node whose value is already in device memory."""
    dtype = value.dtype if isinstance(value, Array) else value.format
    return Node(LEAF, (), (Spec(tuple(value.shape), dtype),), value)


def name_of(op: Op) -> str:
    """The name an operation goes by in messages and in comments of generated code."""
    name = getattr(op, "name", None)
    return name if isinstance(name, str) else type(op).__name__.lower()


def topological(outputs: Iterable[Node], before: Mapping[Node, list[Node]] | None = None) -> list[Node]:
    """Every node the outputs need, operands first, each once. Values already in memory end the walk.

    `before` names more nodes that have to come before a node, besides its operands.
    """
    order: list[Node] = []
    done: set[Node] = set()
    stack = [(node, False) for node in reversed(list(outputs))]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            if node.value is None:
                children = node.inputs if before is None else (*node.inputs, *before.get(node, ()))
                stack.extend((child, False) for child in reversed(children) if child not in done)
    return order


@dataclass(frozen=True)
class Leaf(Op):
    """A value that is there from the start."""


@dataclass(frozen=True)
class Item(Op):
    """Result `index` of a node with several results. An index past the results is the new version of a mutated operand:
    result count + i stands for the operand that `op.mutates[i]` names, after the write."""

    index: int


@dataclass(frozen=True)
class Placeholder(Op):
    """Argument `index` of a function that jit is tracing: it has a shape and no value yet."""

    index: int
    trace: Trace


LEAF = Leaf()


def traces(node: Node) -> set[Trace]:
    """The captures that a node's value depends on."""
    return {n.op.trace for n in topological([node]) if isinstance(n.op, Placeholder)}


# --- sources ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant(Op):
    """A Python scalar; `value` is compared by its bits, so -0.0, 0.0, 0 and False stay apart."""

    value: float | int | bool = field(compare=False)
    dtype: str
    bits: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", repr(self.value))

    def infer(self) -> Spec:
        return Spec((), self.dtype)


@dataclass(frozen=True)
class Arange(Op):
    """start + step * index, index 0..length-1."""

    length: int
    start: float | int
    step: float | int
    dtype: str

    def infer(self) -> Spec:
        return Spec((self.length,), self.dtype)


def constant(value: float | int | bool, dtype: str) -> Node:
    op = Constant(value, dtype)
    return Node(op, (), (op.infer(),))


# --- element-wise ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map(Op):
    """An element-wise function of operands of one shape.

    code: WGSL with {0}, {1}, ... for the operands (f32 for floats, else i32, u32, bool) and {T} for the last one's
    register type; functions of shaders/elementwise/math.wgsl may be called. accepts: dtypes of the operands.
    result: a dtype, or "same" for that of the last operand. condition: operand 0 is bool and the others agree (where).
    rule: the gradients of the operands out of (dy, operands..., result), as Op.gradient; one tensor for one operand.
    """

    name: str
    code: str
    accepts: tuple[str, ...] = FLOATS
    result: str = "same"
    condition: bool = False
    rule: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        if self.rule is None:
            return super().gradient(dy, *tensors)
        gradients = self.rule(dy, *tensors)
        return gradients if isinstance(gradients, tuple) else (gradients,)

    def infer(self, *inputs: Spec) -> Spec:
        values = inputs[1:] if self.condition else inputs
        if self.condition and inputs[0].dtype != "bool":
            raise TypeError(
                f"{self.name}: the condition is {inputs[0].dtype}, it has to be bool; compare first, e.g. x != 0"
            )
        dtype = values[-1].dtype
        for other in values:
            if other.dtype != dtype:
                raise TypeError(
                    f"{self.name}: operands are {values[0].dtype} and {dtype}; dtypes are never promoted silently, "
                    f"convert one with .to({dtype!r})"
                )
        if dtype not in self.accepts:
            raise TypeError(
                f"{self.name}: takes {', '.join(self.accepts)}, got {dtype}; convert with .to({self.accepts[0]!r})"
            )
        if any(other.shape != inputs[0].shape for other in inputs):
            raise ShapeError(f"{self.name}: shapes {[list(i.shape) for i in inputs]} differ; broadcast first")
        return Spec(inputs[0].shape, dtype if self.result == "same" else self.result)


@dataclass(frozen=True)
class Cast(Op):
    """Conversion to another dtype. Float to integer truncates toward zero and saturates; NaN gives 0."""

    dtype: str

    @property
    def name(self) -> str:
        return f"to {self.dtype}"

    def infer(self, x: Spec) -> Spec:
        if x.dtype not in COMPUTE or self.dtype not in COMPUTE:
            raise TypeError(f"to: converts between {', '.join(COMPUTE)}; got {x.dtype} -> {self.dtype}")
        return Spec(x.shape, self.dtype)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        return (dy.to(tensors[0].dtype),)


# --- views -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strided:
    """Where the elements of a shape lie in a row-major buffer: offset + sum_i index_i * strides_i, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def dense(shape: tuple[int, ...]) -> Strided:
        strides, step = [], 1
        for n in reversed(shape):
            strides.append(step)
            step *= n
        return Strided(shape, tuple(reversed(strides)))

    @property
    def contiguous(self) -> bool:
        """Elements follow each other without gaps (the offset may be anything)."""
        step = 1
        for n, s in zip(reversed(self.shape), reversed(self.strides)):
            if n != 1 and s != step:
                return False
            step *= n
        return True

    def reshape(self, shape: tuple[int, ...]) -> Strided | None:
        """The same elements in the same order under another shape, or None where that needs a copy."""
        if math.prod(shape) == 0:
            return Strided.dense(shape)
        old = [(n, s) for n, s in zip(self.shape, self.strides) if n != 1]
        strides: list[int] = []
        new = list(shape)
        i = 0
        j = 0
        while i < len(old):  # match runs of old axes with runs of new axes of the same product
            run, k = old[i][0], i + 1
            group: list[int] = []
            product = 1
            while product != run or not group:
                if product < run:
                    group.append(new[j])
                    product *= new[j]
                    j += 1
                else:
                    run *= old[k][0]
                    k += 1
            if any(old[a][1] != old[a + 1][1] * old[a + 1][0] for a in range(i, k - 1)):
                return None
            step = old[k - 1][1] * run
            for n in group:
                step //= n
                strides.append(step)
            i = k
        strides += [0] * (len(new) - len(strides))  # what is left over are axes of length 1
        return Strided(tuple(new), tuple(strides), self.offset)


class View(Op):
    """A rearrangement without arithmetic."""

    def apply(self, x: Strided) -> Strided | None:
        """Strides of the result, or None where the elements have to be copied first."""
        raise NotImplementedError


@dataclass(frozen=True)
class Reshape(View):
    shape: tuple[int, ...]

    def infer(self, x: Spec) -> Spec:
        if math.prod(self.shape) != x.size:
            raise ShapeError(
                f"reshape: {list(x.shape)} has {x.size} elements, {list(self.shape)} has {math.prod(self.shape)}"
            )
        return Spec(self.shape, x.dtype)

    def apply(self, x: Strided) -> Strided | None:
        return x.reshape(self.shape)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        return (dy.reshape(tensors[0].shape),)


@dataclass(frozen=True)
class Permute(View):
    axes: tuple[int, ...]

    def infer(self, x: Spec) -> Spec:
        if sorted(self.axes) != list(range(len(x.shape))):
            raise ShapeError(
                f"permute: axes {self.axes} do not name each of the {len(x.shape)} axes of {list(x.shape)} once"
            )
        return Spec(tuple(x.shape[a] for a in self.axes), x.dtype)

    def apply(self, x: Strided) -> Strided:
        return Strided(tuple(x.shape[a] for a in self.axes), tuple(x.strides[a] for a in self.axes), x.offset)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        back = sorted(range(len(self.axes)), key=lambda i: self.axes[i])
        return (dy.permute(back),)


@dataclass(frozen=True)
class Expand(View):
    """Repeat axes of length 1 and add axes in front."""

    shape: tuple[int, ...]

    def infer(self, x: Spec) -> Spec:
        tail = self.shape[len(self.shape) - len(x.shape) :] if len(self.shape) >= len(x.shape) else ()
        if min(self.shape, default=0) < 0:
            raise ShapeError(f"expand: {list(self.shape)}; lengths are 0 or more")
        if len(tail) != len(x.shape) or any(n not in (1, m) for n, m in zip(x.shape, tail)):
            raise ShapeError(
                f"expand: {list(x.shape)} does not broadcast to {list(self.shape)}; only axes of length 1 repeat"
            )
        return Spec(self.shape, x.dtype)

    def apply(self, x: Strided) -> Strided:
        new = len(self.shape) - len(x.shape)
        strides = [0] * new + [s if n == m else 0 for n, m, s in zip(x.shape, self.shape[new:], x.strides)]
        return Strided(self.shape, tuple(strides), x.offset)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        (shape,) = (tensors[0].shape,)
        new = len(self.shape) - len(shape)
        repeated = [a for a, m in enumerate(self.shape) if a < new or (shape[a - new] == 1 and m != 1)]
        return ((dy.sum(repeated, keepdim=True) if repeated else dy).reshape(shape),)


@dataclass(frozen=True)
class Slice(View):
    """start + step * i along each axis, for i below the result's length; step may be negative."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]

    def infer(self, x: Spec) -> Spec:
        for n, start, step, m in zip(x.shape, self.starts, self.steps, self.shape, strict=True):
            if m and not (0 <= start < n and 0 <= start + step * (m - 1) < n):
                raise ShapeError(f"slice: start {start}, step {step}, {m} elements leaves an axis of length {n}")
        return Spec(self.shape, x.dtype)

    def apply(self, x: Strided) -> Strided:
        offset = x.offset + sum(a * s for a, s in zip(self.starts, x.strides)) if math.prod(self.shape) else 0
        return Strided(self.shape, tuple(s * t for s, t in zip(x.strides, self.steps)), offset)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        """dy where it came from, zeros between and around: flipped, spread and padded axis by axis."""
        for axis, (n, start, step, m) in enumerate(zip(tensors[0].shape, self.starts, self.steps, self.shape)):
            if m == 0:
                dy = dy.sum(axis, keepdim=True)  # of nothing: zeros
                start, step, m = 0, 1, 1
            if step < 0:
                dy, start, step = dy.flip(axis), start + step * (m - 1), -step
            if step > 1 and m > 1:
                after = [0, 0] * (dy.ndim - axis - 1)
                dy = (
                    dy.unsqueeze(axis + 1)
                    .pad([*after, 0, step - 1])
                    .flatten(axis, axis + 1)
                    .narrow(axis, 0, step * (m - 1) + 1)
                )
                m = step * (m - 1) + 1
            if m != n:
                dy = dy.pad([0, 0] * (dy.ndim - axis - 1) + [start, n - start - m])
        return (dy,)


@dataclass(frozen=True)
class Contiguous(Op):
    """The same values in row-major memory; with `copy`, in memory that nothing else uses."""

    copy: bool = False

    def infer(self, x: Spec) -> Spec:
        return x

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        return (dy,)


# --- folds and joins -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduce(Op):
    """Fold `axes` (sorted, not negative); the result keeps them with length 1. kind: as in fold.fold_of."""

    kind: str
    axes: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        return self.kind

    def infer(self, x: Spec) -> Spec:
        return Spec(tuple(1 if a in self.axes else n for a, n in enumerate(x.shape)), self.dtype)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        """Extremes: equal ones share the gradient, as torch.amax. Products: exact where factors are 0."""
        x, y = tensors
        if self.kind == "sum":
            return (dy.expand(x.shape),)
        if self.kind == "mean":
            return ((dy * (y.numel() / max(x.numel(), 1))).expand(x.shape),)
        if self.kind in ("max", "min"):
            at = (x == y.expand(x.shape)).to(x.dtype)
            return (at * (dy / at.sum(self.axes, keepdim=True)).expand(x.shape),)
        if self.kind == "prod":
            zero = x == 0
            zeros = zero.int().sum(self.axes, keepdim=True).expand(x.shape)
            filled = x.masked_fill(zero, 1.0)
            others = filled.prod(self.axes, keepdim=True).expand(x.shape) / filled
            alive = (zeros == 0).logical_or((zeros == 1).logical_and(zero))
            return (dy.expand(x.shape) * others.masked_fill(alive.logical_not(), 0.0),)
        return super().gradient(dy, *tensors)


@dataclass(frozen=True)
class Cat(Op):
    """Operands one after another along `axis`."""

    axis: int

    def infer(self, *inputs: Spec) -> Spec:
        first = inputs[0]
        if not first.shape:
            raise ShapeError("cat: tensors without axes cannot be joined; stack them, or reshape them to (1,)")
        for x in inputs:
            same = len(x.shape) == len(first.shape) and all(
                n == m or a == self.axis for a, (n, m) in enumerate(zip(x.shape, first.shape))
            )
            if not same:
                raise ShapeError(f"cat: {list(first.shape)} and {list(x.shape)} differ outside axis {self.axis}")
            if x.dtype != first.dtype:
                raise TypeError(f"cat: operands are {first.dtype} and {x.dtype}; convert with .to({first.dtype!r})")
        total = sum(x.shape[self.axis] for x in inputs)
        return Spec((*first.shape[: self.axis], total, *first.shape[self.axis + 1 :]), first.dtype)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        return dy.split([x.shape[self.axis] for x in tensors[:-1]], self.axis)


@dataclass(frozen=True)
class Pack(Op):
    """Operands of any shapes one after another in one row, each at its own offset (in elements, of 256 bytes), zeros
    between. What produces an operand writes straight into the row where nobody else reads it."""

    offsets: tuple[int, ...]
    size: int

    def infer(self, *inputs: Spec) -> Spec:
        ends = [offset + x.size for offset, x in zip(self.offsets, inputs, strict=True)]
        if any(x.dtype != inputs[0].dtype for x in inputs):
            raise TypeError(f"pack: operands are {', '.join(sorted({x.dtype for x in inputs}))}; expected one dtype")
        if any(end > start for end, start in zip(ends, (*self.offsets[1:], self.size))):
            raise ShapeError(f"pack: operands overlap or do not fit a row of {self.size}")
        return Spec((self.size,), inputs[0].dtype)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        return [dy.narrow(0, offset, x.numel()).reshape(x.shape) for offset, x in zip(self.offsets, tensors[:-1])]
