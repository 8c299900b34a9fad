"""Graph to graph: constant folding, common subexpressions, dead code, identities, chains of views."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.graph.ir import (
    LEAF,
    Cast,
    Cat,
    Constant,
    Contiguous,
    Expand,
    Map,
    Node,
    Pack,
    Permute,
    Reduce,
    Reshape,
    Slice,
    View,
    constant,
    topological,
)
from nn.graph.joins import step_cat, sum_of_padded
from nn.graph.scopes import in_region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS: dict[str, Any] = {"f32": np.float32, "f16": np.float32, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}
FOLD: dict[str, Callable[..., Any]] = {  # folded in the precision that the kernel would use
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "where": np.where,
}


def rewrite(outputs: Sequence[Node]) -> list[Node]:
    """Equivalent nodes for these outputs, in the same order. The given nodes are not changed.

    What no output needs is never visited. Nodes that write into operands are neither merged nor dropped.
    """
    new: dict[Node, Node] = {}
    known: dict[Any, Node] = {}
    start = time.perf_counter_ns()
    for node in topological(outputs):
        inputs = tuple(new[child] for child in node.inputs) if node.value is None else ()
        result = node
        if node.value is None:
            with in_region(node.region):
                if any(a is not b for a, b in zip(inputs, node.inputs)):
                    result = Node(node.op, inputs, node.specs)
                result = simplify(result)
            if result is not node and result.value is None and result.born > start:
                result.path, result.born = result.path or node.path, node.born
            if result.value is None and not result.op.mutates and result.op is not LEAF:
                key = (result.op, result.region, tuple(id(child) for child in result.inputs))
                result = known.setdefault(key, result)
        new[node] = result
    return [new[node] for node in outputs]


def simplify(node: Node) -> Node:
    """The node after every rule that applies to it; its inputs are simplified already."""
    while True:
        better = step(node)
        if better is None:
            return node
        node = better


def step(node: Node) -> Node | None:
    op = node.op
    if isinstance(op, View | Contiguous):
        return step_view(node)
    if isinstance(op, Map):
        return step_map(op, node)
    if isinstance(op, Cast):
        (x,) = node.inputs
        if x.spec.dtype == op.dtype:
            return x
        return fold(node, lambda v: cast_scalar(v, op.dtype))
    if isinstance(op, Cat):
        return step_cat(node, op)
    if isinstance(op, Pack):
        return packed_before(node, op)
    if isinstance(op, Reduce):
        (x,) = node.inputs
        alone = op.kind in ("sum", "prod", "max", "min", "mean") and x.spec.shape == node.spec.shape
        return x if alone and x.spec.dtype == op.dtype and x.spec.size else None
    return fold_transposes(node)


def packed_before(node: Node, op: Pack) -> Node | None:
    """The row that all operands were cut out of, each at the place where it goes."""
    rows = set()
    for x, offset in zip(node.inputs, op.offsets):
        while x.value is None and isinstance(x.op, Reshape):
            (x,) = x.inputs
        if x.value is not None or not isinstance(x.op, Slice) or x.op.starts != (offset,) or x.op.steps != (1,):
            return None
        rows.add(x.inputs[0])
    row = rows.pop()
    return row if not rows and row.spec == node.spec else None


def step_view(node: Node) -> Node | None:
    op = node.op
    (x,) = node.inputs
    inner = x.op
    base = x.inputs[0] if isinstance(inner, View) and x.value is None else None
    if isinstance(op, Contiguous):
        made_dense = x.value is None and not isinstance(inner, View | Constant)
        return x if made_dense and not op.copy else None
    if isinstance(op, Reshape | Expand) and op.shape == x.spec.shape:
        return x
    if isinstance(op, Slice) and op.shape == x.spec.shape and all(s == 1 for s in op.steps):
        return x
    if isinstance(op, Permute) and op.axes == tuple(range(len(op.axes))):
        return x
    if base is not None:
        if isinstance(op, Reshape) and isinstance(inner, Reshape):
            return Node(op, (base,), node.specs)
        if isinstance(op, Expand) and isinstance(inner, Expand):
            return Node(op, (base,), node.specs)
        if isinstance(op, Permute) and isinstance(inner, Permute):
            return Node(Permute(tuple(inner.axes[a] for a in op.axes)), (base,), node.specs)
    scalar = scalar_of(x)
    if scalar is not None and not (isinstance(op, Expand) and isinstance(inner, Constant)):
        return Node(Expand(node.spec.shape), (scalar,), node.specs)  # any view of a filled array is a filled array
    return None


def step_map(op: Map, node: Node) -> Node | None:
    inputs = node.inputs
    if op.name in ("add", "sub", "mul", "div") and len(inputs) == 2:
        left, right = (number(x) for x in inputs)
        neutral = 0 if op.name in ("add", "sub") else 1
        if right == neutral:
            if inputs[0].spec.dtype == node.spec.dtype:
                return inputs[0]
        elif left == neutral and op.name in ("add", "mul"):
            return inputs[1]
    if op.name == "add":
        joined = sum_of_padded(node)
        if joined is not None:
            return joined
    if op.name == "neg" and inputs[0].value is None and inputs[0].op == op:
        return inputs[0].inputs[0]
    if op.name == "where" and inputs[1] is inputs[-1]:
        return inputs[1]
    if op.name in FOLD:
        return fold(node, FOLD[op.name])
    return None


def scalar_of(node: Node) -> Node | None:
    """The Constant that this node repeats, if it is one or a view of one."""
    while node.value is None and isinstance(node.op, View):
        node = node.inputs[0]
    return node if node.value is None and isinstance(node.op, Constant) else None


def number(node: Node) -> float | int | bool | None:
    scalar = scalar_of(node)
    return scalar.op.value if scalar is not None and isinstance(scalar.op, Constant) else None


def fold(node: Node, function: Callable[..., Any]) -> Node | None:
    """The node as a constant if every operand is one."""
    values = []
    for x in node.inputs:
        value = number(x)
        if value is None:
            return None
        with np.errstate(all="ignore"):
            values.append(KINDS[x.spec.dtype](value))
    with np.errstate(all="ignore"):
        result = np.asarray(function(*values)).astype(KINDS[node.spec.dtype]).item()
    made = constant(result, node.spec.dtype)
    return made if not node.spec.shape else Node(Expand(node.spec.shape), (made,), node.specs)


def cast_scalar(value: Any, dtype: str) -> Any:
    if dtype in ("i32", "u32") and isinstance(value, np.floating):
        low, high = (-(2**31), 2**31 - 1) if dtype == "i32" else (0, 2**32 - 1)
        return 0 if math.isnan(value) else int(max(low, min(high, float(value))))
    return np.float16(value) if dtype == "f16" else value


def fold_transposes(node: Node) -> Node | None:
    """Drop a Permute that swaps the last two axes of an operand which the kernel can read transposed."""
    for i, x in enumerate(node.inputs):
        if x.value is None and isinstance(x.op, Permute) and len(x.op.axes) >= 2:
            *front, a, b = x.op.axes
            n = len(x.op.axes)
            if front == list(range(n - 2)) and (a, b) == (n - 1, n - 2):
                op = node.op.fold_transpose(i)
                if op is not None:
                    return Node(op, (*node.inputs[:i], x.inputs[0], *node.inputs[i + 1 :]), node.specs)
    return None
