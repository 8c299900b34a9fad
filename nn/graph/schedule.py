"""From nodes to memory and dispatches: steps in order, buffers shared by liveness, one recording."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu.errors import LimitExceeded
from nn.graph import fuse, nancheck
from nn.graph.cost import StepScope
from nn.graph.ir import Contiguous, Item, Node, Placeholder, View, topological
from nn.graph.rewrite import rewrite
from nn.ops.base import DTYPES, Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Buffer, Device, Recorder
    from nn.graph.expr import Value
    from nn.graph.ir import Strided
    from nn.quant.weight import Weight


@dataclass
class Slot:
    """A temporary buffer that several values use one after another."""

    nbytes: int


@dataclass
class Program:
    """Steps in order, where each result lies, and which temporary slot each value uses.

    `bases` has for each output the node of older memory that it shares, or None.
    """

    device: Device
    steps: list[fuse.Step]
    results: list[tuple[Value, Strided]]
    bases: list[Node | None]
    paths: list[str]  # of each step: where in a model it stands
    slots: list[Slot] = field(default_factory=list)
    slot_of: dict[Value, Slot] = field(default_factory=dict)

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporaries with sharing: the peak that running the program adds to its inputs and results."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def unshared_bytes(self) -> int:
        """What the temporaries would take without sharing."""
        return sum(storage_bytes(value) for value in self.slot_of)

    @property
    def lower_bytes(self) -> int:
        """The most bytes of temporaries that live at a time: no plan can need less."""
        return max(self.live_bytes(), default=0)

    def lifetimes(self) -> dict[Value, tuple[int, int]]:
        """Of each temporary: the first and the last step that touches it."""
        spans: dict[Value, tuple[int, int]] = {}
        for i, step in enumerate(self.steps):
            for value in (*step.reads, *step.writes):
                if value.owner in self.slot_of:
                    spans[value.owner] = (spans.get(value.owner, (i, i))[0], i)
        return spans

    def live_bytes(self) -> list[int]:
        """Of each step: bytes of the temporaries that live while it runs."""
        live = [0] * len(self.steps)
        for value, (first, last) in self.lifetimes().items():
            for i in range(first, last + 1):
                live[i] += storage_bytes(value)
        return live

    def record(self, record: Recorder, arguments: Sequence[Array] = ()) -> list[Array | Weight]:
        """Record every step; returns the results in the order they were asked for."""
        array_of = self.placed(record, arguments)
        for step, path in zip(self.steps, self.paths, strict=True):
            scope = StepScope(step, path)
            try:
                with record.scope(scope):
                    step.record(record, array_of)
            except LimitExceeded as error:
                sizes = f"{', '.join(scope.operands)} -> {', '.join(scope.results)}"
                raise LimitExceeded(f"{scope.name} ({sizes}): {error}") from error
        return [fuse.array_at(array_of(value), at) for value, at in self.results]

    def hunt(self) -> list[Array | Weight]:
        """Run every step by itself and raise NaNFound at the first that makes a NaN (nancheck.py)."""
        self.slot_of = {}  # each value keeps memory of its own
        array_of = self.placed(self.device.recorder(), ())
        seen: set[Value] = set()
        for step, path in zip(self.steps, self.paths, strict=True):
            nancheck.run_step(self.device, step, path, array_of, seen)
        return [fuse.array_at(array_of(value), at) for value, at in self.results]

    def placed(self, record: Recorder, arguments: Sequence[Array]) -> fuse.Memory:
        """Where values lie: a function that finds memory for each when it is first asked for."""
        memory: dict[Value, Array | Weight] = {}
        buffers: dict[int, Buffer] = {}

        def array_of(value: Value) -> Array | Weight:
            if value.array is not None:
                return value.array
            if value.argument is not None:
                return arguments[value.argument]
            if value.home is not None:
                owner, start = value.home
                size = DTYPES[value.spec.dtype][0]
                within = array_of(owner).buffer.view(start * size, max(value.spec.nbytes, 4))  # pyright: ignore[reportAttributeAccessIssue]
                return Array(within, value.spec.shape, value.spec.dtype)
            if value not in memory:
                slot = self.slot_of.get(value)
                nbytes = storage_bytes(value)
                if slot is None:
                    buffer = self.device.alloc(nbytes)
                else:
                    if id(slot) not in buffers:
                        buffers[id(slot)] = record.temp(slot.nbytes)
                    buffer = buffers[id(slot)]
                    buffer = buffer if slot.nbytes == nbytes else buffer.view(0, nbytes)
                memory[value] = Array(buffer, value.spec.shape, value.spec.dtype)
            return memory[value]

        return array_of


def compile_program(device: Device, outputs: Sequence[Node]) -> Program:
    """Rewrite, fuse and plan memory for these nodes."""
    rewritten = rewrite(outputs)
    roots = [root_of(node) for node in rewritten]
    overwritten = {node.inputs[i] for node in topological(rewritten) if node.value is None for i in node.op.mutates}
    holders = {node: given for node, given in zip(rewritten, outputs) if isinstance(node.op, Item)}
    bases: list[Node | None] = []
    for i, (given, root) in enumerate(zip(outputs, roots)):
        if root in overwritten:  # it has to outlive the write
            rewritten[i] = Node(Contiguous(copy=True), (rewritten[i],), rewritten[i].specs)
            root = rewritten[i]
        base = root if root.value is not None else holders.get(root)
        bases.append(base if base is not given else None)
    fuser = fuse.Fuser(device.caps)
    steps, results = fuser.run(rewritten)
    program = Program(device, steps, results, bases, fuser.paths)
    plan_memory(program)
    return program


def root_of(node: Node) -> Node:
    """The node whose memory this one may share."""
    while node.value is None and (isinstance(node.op, View) or (isinstance(node.op, Contiguous) and not node.op.copy)):
        node = node.inputs[0]
    return node


def plan_memory(program: Program) -> None:
    """Give each temporary a slot: a slot is free again after the last step that touches its value."""
    last: dict[Value, int] = {}
    for i, step in enumerate(program.steps):
        for value in (*step.reads, *step.writes):
            last[value.owner] = i
    kept = {value for value, _ in program.results}
    free: list[Slot] = []
    for i, step in enumerate(program.steps):
        for value in (w.owner for w in step.writes):
            if value.array is not None or value.argument is not None or value in kept or value in program.slot_of:
                continue
            need = storage_bytes(value)
            fits = [slot for slot in free if slot.nbytes >= need]
            if fits:
                slot = min(fits, key=lambda s: s.nbytes)
                free.remove(slot)
            elif free:
                slot = max(free, key=lambda s: s.nbytes)
                free.remove(slot)
                slot.nbytes = need
            else:
                slot = Slot(need)
                program.slots.append(slot)
            program.slot_of[value] = slot
        for value in dict.fromkeys(v.owner for v in (*step.reads, *step.writes)):
            if last[value] == i and value in program.slot_of:
                free.append(program.slot_of[value])


def storage_bytes(value: Value) -> int:
    """Of a value's buffer: whole words, and never none."""
    return max(-(-value.spec.nbytes // 4) * 4, 4)


def realize(device: Device, nodes: Sequence[Node]) -> None:
    """Compute these nodes now, in one recording, and keep their values.

    Raises RuntimeError while jit traces (there is no value yet), or for a value that was overwritten in the meantime.
    """
    for node in nodes:
        if node.stale is not None:
            raise stale_read(node)
    wanted = [node for node in dict.fromkeys(nodes) if node.value is None]
    if not wanted:
        return
    order = topological(wanted)
    for node in order:
        if node.stale is not None:
            raise stale_read(node)
        if isinstance(node.op, Placeholder):
            raise RuntimeError(
                "jit: the traced function reads a value (numpy, item, bool, realize) that depends on its arguments. "
                "A captured function only builds the graph: return the tensor and read it outside, or compute the "
                "choice with where()."
            )
    wanted = with_siblings(wanted, order)
    program = compile_program(device, wanted)
    if nancheck.wanted():
        values = program.hunt()
    else:
        record = device.recorder()
        values = program.record(record)
        record.submit()
    mark_overwritten(order)
    for node, value, base in zip(wanted, values, program.bases, strict=True):
        node.settle(value, base)


def with_siblings(wanted: list[Node], order: list[Node]) -> list[Node]:
    """Add the other results of operations with several, which somebody else holds: they run once, and writes must not
    run twice. What the graph itself goes on with is no result, unless its operation writes."""
    inside = set(order)
    siblings = [
        item
        for node in order
        for item in node.living_items()
        if item.value is None and (node.op.mutates or item not in inside)
    ]
    return list(dict.fromkeys([*wanted, *siblings]))


def mark_overwritten(order: Sequence[Node]) -> None:
    """Note that the old versions of operands which these nodes write into are gone."""
    for node in order:
        for position in node.op.mutates:
            node.inputs[position].stale = type(node.op).__name__


def stale_read(node: Node) -> RuntimeError:
    """The error for a node whose memory an operation has written over."""
    return RuntimeError(
        f"a tensor {list(node.spec.shape)} is read after {node.stale} has written over its memory; compute what needs "
        "the old value before that, e.g. with .clone().realize()"
    )


__all__ = ["Program", "compile_program", "mark_overwritten", "realize", "stale_read", "with_siblings"]
