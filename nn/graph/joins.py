"""Rewrites of joins: what a split leaves behind when its gradient is taken becomes one join again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nn.graph.ir import Cat, Constant, Expand, Node, Reshape, View, constant
from nn.ops.base import Spec

if TYPE_CHECKING:
    from collections.abc import Callable


def is_zeros(node: Node) -> bool:
    """A filled array of zeros."""
    while node.value is None and isinstance(node.op, View):
        node = node.inputs[0]
    return node.value is None and isinstance(node.op, Constant) and node.op.value == 0


def step_cat(node: Node, op: Cat) -> Node | None:
    """Parts without elements go; a single part is the whole; heads are joined before they become columns."""
    filled = tuple(x for x in node.inputs if x.spec.size)
    if len(filled) == 1:
        return filled[0]
    if 0 < len(filled) < len(node.inputs):
        return Node(op, filled, node.specs)
    return join_then_reshape(node, op)


def join_then_reshape(node: Node, op: Cat) -> Node | None:
    """Parts (..., h, d) that were reshaped to (..., h d), joined along that last axis: joined along h, then reshaped.

    Where the parts are transposed, each reshape would have copied.
    """
    a = op.axis
    if a != len(node.spec.shape) - 1 or any(x.value is not None or not isinstance(x.op, Reshape) for x in node.inputs):
        return None
    parts = tuple(x.inputs[0] for x in node.inputs)
    first = parts[0].spec.shape
    if len(first) <= a + 1 or any(
        x.spec.shape[:a] != first[:a] or x.spec.shape[a + 1 :] != first[a + 1 :] for x in parts
    ):
        return None
    if first[:a] != node.spec.shape[:a]:
        return None
    shape = (*first[:a], sum(x.spec.shape[a] for x in parts), *first[a + 1 :])
    joined = Node(Cat(a), parts, (Spec(shape, node.spec.dtype),))
    return Node(Reshape(node.spec.shape), (joined,), node.specs)


def sum_of_padded(node: Node) -> Node | None:
    """The sum of two arrays with zeros around what they hold, in different places of one axis: one join."""
    left, right = node.inputs
    if any(x.value is not None or not isinstance(x.op, Cat) for x in (left, right)) or left.op != right.op:
        return None
    assert isinstance(left.op, Cat)
    axis = left.op.axis
    found: list[tuple[int, Node]] = []
    for side in (left, right):
        at = 0
        for x in side.inputs:
            if not is_zeros(x):
                found.append((at, x))
            at += x.spec.shape[axis]
    found.sort(key=lambda part: part[0])
    parts: list[Node] = []
    at = 0
    for start, x in found:
        if start < at:
            return None  # both hold something there
        if start > at:
            parts.append(zeros(node.spec, axis, start - at))
        parts.append(x)
        at = start + x.spec.shape[axis]
    if at < node.spec.shape[axis]:
        parts.append(zeros(node.spec, axis, node.spec.shape[axis] - at))
    return Node(left.op, tuple(parts), node.specs)


def zeros(spec: Spec, axis: int, length: int) -> Node:
    """Of a spec's shape, but for the length of one axis."""
    shape = (*spec.shape[:axis], length, *spec.shape[axis + 1 :])
    kind: Callable[[int], float | int | bool] = {"f32": float, "f16": float, "bool": bool}.get(spec.dtype, int)
    return Node(Expand(shape), (constant(kind(0), spec.dtype),), (Spec(shape, spec.dtype),))
