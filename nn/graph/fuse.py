"""Fusion: which nodes become one kernel, and the steps that run.

Nodes are visited operands first. An element-wise node or a view becomes an expression (expr.py) over values in memory,
and stays one as long as it can: views turn into strides of the loads, reductions and copies take the expression in as
their producer. It is written to memory (a step) when a kernel or an output needs it, when several kernels would compute
it again and that costs more than reading it back, or when it would bind more buffers than a shader may.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nn.graph import codegen, fold
from nn.graph.copy import GapsStep, transpose_step
from nn.graph.epilogue import FusedStep, Waiting, may_wait, read_elsewhere
from nn.graph.expr import Apply, Expr, Index, Load, Scalar, Value, scalars
from nn.graph.ir import (
    COMPUTE,
    Arange,
    Cast,
    Cat,
    Constant,
    Contiguous,
    Item,
    Leaf,
    Map,
    Node,
    Pack,
    Placeholder,
    Reduce,
    Reshape,
    Strided,
    View,
    name_of,
    topological,
)
from nn.graph.join import JoinStep
from nn.ops.base import DTYPES, Array, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu import Capabilities, Recorder
    from nn.ops.base import Op
    from nn.quant.weight import Weight

    Memory = Callable[[Value], Array | Weight]

MAX_INPUTS = 7  # storage buffers a fused kernel reads; the eighth is the result
MAX_FIELDS = 56  # 4-byte Params fields for shapes, strides and scalars (a slot of the uniform arena holds 64)
MAX_COST = 96  # operations in one kernel
CHEAP = 6  # operations that are computed again rather than stored and read back, if they read one array


class Step(Protocol):
    """Something that records dispatches. `reads` and `writes` drive the memory plan."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]

    def record(self, record: Recorder, array_of: Memory) -> None: ...


@dataclass
class KernelStep:
    """An operation that lowers itself."""

    node: Node
    operands: tuple[tuple[Value, Strided], ...]
    results: tuple[Value, ...]

    def __post_init__(self) -> None:
        self.reads = tuple(value for value, _ in self.operands)
        self.writes = self.results

    def record(self, record: Recorder, array_of: Memory) -> None:
        op = self.node.op
        operands = [array_at(array_of(value), at) for value, at in self.operands]
        op.lower(record, *operands, *(array_at(array_of(value), laid_out(op, value.spec)) for value in self.results))


def array_at(array: Array | Weight, at: Strided) -> Array | Weight:
    """The part of an array that `at` describes, as an array of its own: with strides where it is not contiguous."""
    if not isinstance(array, Array):
        return array
    size = DTYPES[array.dtype][0]
    buffer = array.buffer
    if not at.contiguous:
        if at.offset or at.shape != array.shape:
            last = sum((n - 1) * step for n, step in zip(at.shape, at.strides, strict=True))
            buffer = buffer.view(at.offset * size, -(-(last + 1) * size // 4) * 4)
        return Array(buffer, at.shape, array.dtype, at.strides)
    if at.shape == array.shape and at.offset == 0:
        return array
    if math.prod(at.shape) and (at.offset or math.prod(at.shape) != array.size):
        buffer = buffer.view(at.offset * size, math.prod(at.shape) * size)
    return Array(buffer, at.shape, array.dtype)


def laid_out(op: Op, spec: Spec) -> Strided:
    """Where an operation writes the elements of a result."""
    strides = op.layout(spec)
    return Strided.dense(spec.shape) if strides is None else Strided(spec.shape, strides)


class Fuser:
    """Turns rewritten nodes into steps. One use: `run`."""

    def __init__(self, caps: Capabilities) -> None:
        self.caps = caps
        self.steps: list[Step] = []
        self.paths: list[str] = []  # of each step: where in a model it stands
        self.exprs: dict[Node, Expr] = {}
        self.results: dict[Node, tuple[Value, ...]] = {}  # of kernels: results, then written operands
        self.waiting: Waiting | None = None  # an operation that an element-wise reader may join

    def run(self, outputs: Sequence[Node]) -> tuple[list[Step], list[tuple[Value, Strided]]]:
        order, self.pinned = ordered(outputs)
        self.shared, self.asked = shared_nodes(order, outputs), set(outputs)
        self.uses = Counter(x for node in order if node.value is None for x in node.inputs)
        self.users: dict[Node, list[Node]] = {}
        for node in order:
            for x in node.inputs if node.value is None else ():
                self.users.setdefault(x, []).append(node)
        for node in order:
            self.visit(node)
            self.name_steps(node)
        found = [self.operand(node) for node in outputs]
        self.settle()
        return self.steps, found

    def name_steps(self, node: Node) -> None:
        """Steps made since the last call are this node's."""
        self.paths += [node.path] * (len(self.steps) - len(self.paths))

    def emit(self, step: Step) -> None:
        """Append a step; before it the waiting operation, if this step reads its result or writes over an operand."""
        node = getattr(step, "node", None)
        if self.waiting is not None and (self.waiting.result in step.reads or (node is not None and node.op.mutates)):
            self.settle()
        self.steps.append(step)

    def settle(self) -> None:
        """The waiting operation becomes a step of its own."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            self.steps.append(KernelStep(waiting.node, waiting.operands, (waiting.result,)))
            self.name_steps(waiting.node)

    # --- one node ----------------------------------------------------------------------------------------------------

    def visit(self, node: Node) -> None:
        op = node.op
        if node.value is not None:
            at = Strided.dense(tuple(node.spec.shape))
            self.exprs[node] = Load(node.spec.dtype, Value(node.spec, array=node.value), at)
        elif isinstance(op, Placeholder):
            value = Value(node.spec, argument=op.index)
            self.exprs[node] = Load(node.spec.dtype, value, Strided.dense(node.spec.shape))
        elif isinstance(op, Constant):
            self.exprs[node] = Scalar(op.dtype, op.value)
        elif isinstance(op, Arange):
            self.exprs[node] = Index(op.dtype, op, Strided.dense(node.spec.shape))
        elif isinstance(op, Map | Cast):
            self.exprs[node] = self.apply(node)
            again = node in self.shared and not cheap(self.exprs[node])
            if again or node in self.pinned or node in self.asked:
                self.store(node)
        elif isinstance(op, View):
            self.exprs[node] = self.view(node, op)
            if node in self.pinned:
                self.store(node)
        elif isinstance(op, Contiguous):
            self.require_dense(node, compute=False)
            self.exprs[node] = self.exprs[node.inputs[0]]
            if op.copy or not is_dense(self.exprs[node]):
                self.store(node)
        elif isinstance(op, Reduce):
            self.reduce(node, op)
        elif isinstance(op, Cat):
            self.cat(node, op)
        elif isinstance(op, Pack):
            self.pack(node, op)
        elif isinstance(op, Item):
            made, results = node.inputs[0], self.results[node.inputs[0]]
            at = Strided.dense(node.spec.shape)
            if op.index < len(made.specs):  # not the new version of an operand
                at = laid_out(made.op, node.spec)
            self.exprs[node] = Load(node.spec.dtype, results[op.index], at)
        elif isinstance(op, Leaf):
            raise AssertionError("a leaf without a value")
        else:
            self.kernel(node)

    def apply(self, node: Node) -> Expr:
        """The element-wise node over its operands' expressions; operands are stored first where limits ask for it."""
        op = node.op
        assert isinstance(op, Map | Cast)
        self.require_dense(node, compute=True)
        while True:
            made = Apply(node.spec.dtype, op, tuple(self.exprs[x] for x in node.inputs))
            if self.fits(made, node.spec):
                return made
            candidates = [x for x in node.inputs if isinstance(self.exprs[x], Apply)]
            if not candidates:
                return made
            self.store(max(candidates, key=lambda x: (len(self.exprs[x].loads), self.exprs[x].cost)))

    def fits(self, expr: Expr, spec: Spec) -> bool:
        loads = expr.loads
        if len({load.value for load in loads}) > MAX_INPUTS or expr.cost > MAX_COST:
            return False
        rank = max(len(spec.shape), 1)
        return 2 + rank + (1 + len(loads)) * (1 + rank) + scalars(expr) <= MAX_FIELDS

    def view(self, node: Node, op: View) -> Expr:
        (x,) = node.inputs
        self.require_dense(node, compute=False)
        moved = self.exprs[x].seen_through(op, {})
        if moved is not None and not self.fits(moved, node.spec):
            moved = None
        if moved is None:
            self.store(x)
            moved = self.exprs[x].seen_through(op, {})
            assert moved is not None, "a dense value can be seen through any view"
        return moved

    def require_dense(self, node: Node, *, compute: bool) -> None:
        """Raise TypeError where an operand is a weight or, with compute, of a dtype that only kernels read."""
        for x in node.inputs:
            expr = self.exprs[x]
            if isinstance(expr, Load) and expr.value.array is not None and not isinstance(expr.value.array, Array):
                raise TypeError(
                    f"{name_of(node.op)}: got a weight in format {x.spec.dtype}; weights can only be operands of "
                    "linear and embedding operations"
                )
            if compute and x.spec.dtype not in COMPUTE:
                raise TypeError(
                    f"{name_of(node.op)}: computes with {', '.join(COMPUTE)}; got {x.spec.dtype}, which is storage for "
                    "kernels"
                )

    # --- memory ------------------------------------------------------------------------------------------------------

    def store(self, node: Node) -> Value:
        """Compute the node's expression into dense memory of its own; from here on it is a load."""
        value = Value(node.spec)
        at = Strided.dense(node.spec.shape)
        if not self.join(node, value, at):
            self.write(self.exprs[node], value, at)
        self.name_steps(node)
        self.exprs[node] = Load(node.spec.dtype, value, Strided.dense(node.spec.shape))
        return value

    def join(self, node: Node, value: Value, at: Strided) -> bool:
        """Make the node's value in the epilogue of the waiting operation, where that can be."""
        waiting, expr = self.waiting, self.exprs[node]
        if waiting is None or not any(load.value is waiting.result for load in expr.loads):
            return False
        kept = read_elsewhere(waiting.node, node, self.users, self.asked)
        if not waiting.takes(self.caps, expr, value, at, kept=kept):
            return False
        self.steps.append(FusedStep(waiting.node, waiting.operands, waiting.result, expr, value, kept))
        self.waiting = None
        self.name_steps(waiting.node)
        return True

    def write(self, expr: Expr, value: Value, at: Strided) -> None:
        if expr.dtype not in COMPUTE:
            raise TypeError(
                f"copy: moves {', '.join(COMPUTE)}; got {expr.dtype}, which is storage for kernels. A view of it that "
                "is not one block of rows cannot be made on the device"
            )
        if math.prod(at.shape):
            turned = transpose_step(self.caps, expr, value, at)
            self.emit(turned or codegen.MapStep(self.caps, expr, value, at))

    def operand(self, node: Node) -> tuple[Value, Strided]:
        """The node's value as kernels want it: contiguous, at an offset that can be bound."""
        expr = self.exprs[node]
        if isinstance(expr, Load):
            if isinstance(expr.value.array, Array) or expr.value.array is None:
                aligned = expr.at.offset * DTYPES[expr.dtype][0] % self.caps.offset_alignment == 0
                if expr.at.contiguous and aligned:
                    return expr.value, expr.at
            else:
                return expr.value, expr.at  # a Weight
        return self.store(node), Strided.dense(node.spec.shape)

    def rows(self, node: Node) -> tuple[Value, Strided] | None:
        """The node's value where its last axis is contiguous, wherever the rows lie; None where it has to be copied."""
        expr = self.exprs[node]
        if not isinstance(expr, Load) or not isinstance(expr.value.array, Array | None) or not expr.at.strides:
            return None
        aligned = expr.at.offset * DTYPES[expr.dtype][0] % self.caps.offset_alignment == 0
        inside = math.prod(expr.at.shape) > 0 and min(expr.at.strides) >= 0
        return (expr.value, expr.at) if aligned and inside and expr.at.strides[-1] == 1 else None

    def stack(self, inputs: Sequence[Node]) -> None:
        """Copy operands that lie alike in one value (queries, keys and values of one product) in one dispatch."""
        groups: dict[tuple[Value, Strided], list[tuple[int, Node]]] = {}
        for x in dict.fromkeys(inputs):
            expr = self.exprs[x]
            if not isinstance(expr, Load) or expr.at.contiguous or not isinstance(expr.value.array, Array | None):
                continue
            if expr.dtype in COMPUTE and x.spec.nbytes % self.caps.offset_alignment == 0 and x.spec.size:
                alike = Strided(expr.at.shape, expr.at.strides)
                groups.setdefault((expr.value, alike), []).append((expr.at.offset, x))
        for (value, alike), found in groups.items():
            found.sort(key=lambda pair: pair[0])
            first, step = found[0][0], found[-1][0] - found[0][0]
            if len(found) < 2 or step % (len(found) - 1):
                continue
            step //= len(found) - 1
            if any(offset != first + i * step for i, (offset, _) in enumerate(found)) or step <= 0:
                continue
            shape = (len(found), *alike.shape)
            together = Value(Spec(shape, value.spec.dtype))
            if together.spec.nbytes > self.caps.max_binding - 512:
                continue
            at = Strided(shape, (step, *alike.strides), first)
            self.write(Load(value.spec.dtype, value, at), together, Strided.dense(shape))
            dense = Strided.dense(alike.shape)
            for i, (_, x) in enumerate(found):
                self.exprs[x] = Load(x.spec.dtype, together, Strided(dense.shape, dense.strides, i * x.spec.size))

    # --- kernels -----------------------------------------------------------------------------------------------------

    def kernel(self, node: Node) -> None:
        anywhere = {i: self.rows(node.inputs[i]) for i in node.op.strided if i < len(node.inputs)}
        if None in anywhere.values():  # one that has to be copied: then they are copied together
            anywhere = {}
        self.stack([x for i, x in enumerate(node.inputs) if i not in anywhere])
        operands = [anywhere.get(i) or self.operand(x) for i, x in enumerate(node.inputs)]
        written = tuple(operands[i][0] for i in node.op.mutates)
        results = tuple(Value(spec) for spec in node.specs)
        if may_wait(node, self.users):
            self.settle()
            self.waiting = Waiting(node, tuple(operands), results[0])
        else:
            self.emit(KernelStep(node, tuple(operands), results))
        self.results[node] = (*results, *written)
        if results:
            self.exprs[node] = Load(node.spec.dtype, results[0], laid_out(node.op, node.spec))

    def reduce(self, node: Node, op: Reduce) -> None:
        (x,) = node.inputs
        self.require_dense(node, compute=True)
        if x.spec.size == 0:  # an empty fold gives the neutral element
            self.exprs[node] = Scalar(op.dtype, fold.EMPTY[op.kind] if node.spec.size else 0)
        else:
            if not self.fits(self.exprs[x], Spec((1, *x.spec.shape))) or isinstance(self.exprs[x], Scalar):
                self.store(x)
            value = Value(node.spec)
            for step in fold.reduce_steps(self.caps, op, self.exprs[x], x.spec.shape, value):
                self.emit(step)
            self.exprs[node] = Load(op.dtype, value, Strided.dense(node.spec.shape))

    def side_by_side(self, node: Node, op: Cat) -> Load | None:
        """The operands of a join as one load, where they lie in memory as the join has them."""
        if math.prod(node.spec.shape[: op.axis]) < 2:
            return None  # operands that are whole blocks may be results themselves, in memory of their own
        dense, start, first = Strided.dense(node.spec.shape), 0, self.exprs[node.inputs[0]]
        if not isinstance(first, Load) or first.value.array is not None or first.value.argument is not None:
            return None  # what is there already may be written over later
        for x in node.inputs:
            expr = self.exprs[x]
            if not isinstance(expr, Load) or expr.value is not first.value or not x.spec.size:
                return None
            along = zip(expr.at.shape, expr.at.strides, dense.strides, strict=True)
            if expr.at.offset != first.at.offset + start or any(n != 1 and s != t for n, s, t in along):
                return None
            start += x.spec.shape[op.axis] * dense.strides[op.axis]
        return Load(node.spec.dtype, first.value, Strided(dense.shape, dense.strides, first.at.offset))

    def cat(self, node: Node, op: Cat) -> None:
        self.require_dense(node, compute=True)
        if (there := self.side_by_side(node, op)) is not None:
            self.exprs[node] = there
            return
        value = Value(node.spec)
        dense = Strided.dense(node.spec.shape)
        joined = JoinStep.of(self.caps, [(self.exprs[x], x.spec) for x in node.inputs], value, op.axis)
        if joined is not None and node.spec.size:
            self.emit(joined)
            self.exprs[node] = Load(node.spec.dtype, value, dense)
            return
        start = 0
        for x in node.inputs:
            self.write(self.exprs[x], value, Strided(x.spec.shape, dense.strides, start * dense.strides[op.axis]))
            start += x.spec.shape[op.axis]
        self.exprs[node] = Load(node.spec.dtype, value, dense)

    def pack(self, node: Node, op: Pack) -> None:
        self.require_dense(node, compute=True)
        value = Value(node.spec)
        for x, offset in zip(node.inputs, op.offsets):
            expr = self.exprs[x]
            if self.moves_in(x):
                assert isinstance(expr, Load)
                expr.value.home = (value, offset)
            else:
                shape = (x.spec.size,)
                flat = expr.seen_through(Reshape(shape), {})
                at = Strided.dense(x.spec.shape)
                self.write(
                    flat or expr, value, Strided(shape, (1,), offset) if flat else Strided(at.shape, at.strides, offset)
                )
        gaps = GapsStep.of(value, op, [x.spec.size for x in node.inputs])
        if gaps.gaps:
            self.emit(gaps)
        self.exprs[node] = Load(node.spec.dtype, value, Strided.dense(node.spec.shape))

    def moves_in(self, node: Node) -> bool:
        """Whether the step that makes the node's value may write it elsewhere: one reader looks at it, nobody else."""
        expr = self.exprs[node]
        if not (isinstance(expr, Load) and expr.at.contiguous and expr.at.offset == 0):
            return False
        value = expr.value
        if value.array is not None or value.argument is not None or value.home is not None:
            return False
        while self.uses[node] == 1 and node not in self.asked:
            if not isinstance(node.op, View) or node.value is not None:
                return math.prod(node.spec.shape) == value.spec.size and not isinstance(node.op, Contiguous)
            (node,) = node.inputs
        return False


def is_dense(expr: Expr) -> bool:
    return isinstance(expr, Load) and expr.at.contiguous


def cheap(expr: Expr) -> bool:
    """Is computing it again about as fast as reading it back? A few operations on one array (and broadcast rows)."""
    large = [load for load in expr.loads if 0 not in load.at.strides or math.prod(load.at.shape) <= 1]
    return expr.cost <= CHEAP and len(large) <= 1


def ordered(outputs: Sequence[Node]) -> tuple[list[Node], set[Node]]:
    """Nodes in an order that keeps every reader of a value ahead of the operation that writes over it; and the
    readers without a kernel of their own that must not be fused into something later, because that needs the new value.

    Raises RuntimeError where a reader of the old version also needs the new one.
    """
    order = chronological(topological(outputs))
    writers = [node for node in order if node.value is None and node.op.mutates]
    if not writers:
        return order, set()
    readers: dict[Node, list[Node]] = {}
    for node in order:
        if node.value is None:
            for x in node.inputs:
                readers.setdefault(x, []).append(node)
    before: dict[Node, list[Node]] = {}
    pinned: set[Node] = set()
    for writer in writers:
        after: set[Node] | None = None  # what needs the write
        for position in writer.op.mutates:
            others = [node for node in readers[writer.inputs[position]] if node is not writer]
            behind = fused_readers(others, readers)
            if after is None:
                after = {writer}
                for node in order:
                    if node.value is None and not after.isdisjoint(node.inputs):
                        after.add(node)
            if after.isdisjoint(behind):  # all kernels that they end up in run before the write
                others = behind
            else:
                pinned.update(node for node in others if isinstance(node.op, Map | Cast | View))
            before.setdefault(writer, []).extend(others)
    order = chronological(topological(outputs, before), before)
    place = {node: i for i, node in enumerate(order)}
    for writer, others in before.items():
        for node in others:
            if place[node] > place[writer]:
                raise RuntimeError(
                    f"{name_of(node.op)} reads a value that {name_of(writer.op)} has written over in place, and comes "
                    "after it; read the tensor that was passed to the write, or .clone() the old value first"
                )
    return order, pinned


def fused_readers(nodes: Sequence[Node], readers: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The nodes and, behind those without a kernel of their own, all that may take them in."""
    found = dict.fromkeys(nodes)
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node.op, Map | Cast | View):
            for reader in readers.get(node, ()):
                if reader not in found:
                    found[reader] = None
                    todo.append(reader)
    return list(found)


def chronological(order: Sequence[Node], before: Mapping[Node, Sequence[Node]] | None = None) -> list[Node]:
    """The nodes in the order in which they were made, as far as `order` (operands first) allows.

    A walk back makes each weight's gradient next to the activation that it needs: in this order that activation is let
    go right after, where operands of the last operation first would keep all of them.
    """
    born = {node: node.born for node in order}
    for node in reversed(order):
        if node.value is None:
            for x in (*node.inputs, *((before or {}).get(node, ()))):
                born[x] = min(born[x], born[node])
    return sorted(order, key=born.__getitem__)


def shared_nodes(order: Sequence[Node], outputs: Sequence[Node]) -> set[Node]:
    """Nodes that more than one kernel would compute if everything that can be fused were."""
    sinks: dict[Node, set[Node]] = {node: set() for node in order}
    asked = set(outputs)
    shared: set[Node] = set()
    for node in reversed(order):
        own = sinks[node]
        if node in asked or not isinstance(node.op, Map | Cast | View):
            own = {node}
        elif len(own) > 1:
            shared.add(node)
            own = {node}
        if node.value is None:
            for x in node.inputs:
                sinks[x] |= own
    return shared


__all__ = ["Fuser", "KernelStep", "Step", "array_at"]
