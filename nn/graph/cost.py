"""What the steps of a program are for and how much work they are: the scopes that traces and profiles show.

Operations tell their own cost (Op.cost); this file knows those that the fuser makes. Everything is computed when
somebody asks, from shapes alone: recording makes one small object a step.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from gpu.work import Cost, Scope
from nn.graph.codegen import MapStep
from nn.graph.copy import TransposeStep
from nn.graph.epilogue import FusedStep
from nn.graph.expr import Apply, Load, walk
from nn.graph.fold import FoldStep
from nn.graph.ir import Strided, name_of
from nn.graph.join import JoinStep
from nn.ops.base import DTYPES, Op, Progress, Spec, stored_bytes

if TYPE_CHECKING:
    from nn.graph.expr import Expr, Value
    from nn.graph.fuse import Step


class StepScope(Scope):
    """The scope of one step of a program; `step` is a Step of nn/graph/fuse.py."""

    __slots__ = ("op", "step")

    def __init__(self, step: Step, path: str) -> None:
        self.step, self.path, self.parent = step, path, None
        node = getattr(step, "node", None)
        self.op: Any = None if node is None else node.op  # kept here: a node whose value is known lets it go

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The operation, or what a fused kernel computes: "mul, add"."""
        step = self.step
        if isinstance(step, MapStep):
            return f"fused {step.body.title}"
        if isinstance(step, FoldStep):
            inner = ", ".join(step.body.names) if step.body else ""
            return f"{step.op.kind}({inner})" if inner else step.op.kind
        if isinstance(step, TransposeStep):
            return "transpose"
        if isinstance(step, JoinStep):
            return f"fused {step.title}"
        if self.op is None:
            return type(step).__name__
        name = name_of(self.op)
        name = snake(type(self.op).__name__) if name == type(self.op).__name__.lower() else name
        return f"{name}, {step.body.title}" if isinstance(step, FusedStep) else name

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        step = self.step
        if isinstance(step, MapStep):
            return "element-wise" if step.body.names else "movement"
        if isinstance(step, FoldStep):
            return "reduction"
        if isinstance(step, TransposeStep | JoinStep):
            return "movement"
        return "other" if self.op is None else self.op.group

    @property
    def operands(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [text_of(spec) for spec in operand_specs(self.step)]

    @property
    def results(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [text_of(spec) for spec in result_specs(self.step)]

    def cost(self, state: bytes | None = None, turn: int = 0) -> Cost:
        """The step's work; `state` is a struct Step (nn/ops/base.py), which tells attention how far the cache goes."""
        return cost_of(self.step, self.op, Progress.of(state, turn))


def snake(name: str) -> str:
    """QKVRope as qkv_rope."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def text_of(spec: Spec) -> str:
    """A shape for people: q4_1 960x576."""
    return f"{spec.dtype} {'x'.join(map(str, spec.shape)) or 'scalar'}"


def operand_specs(step: Step) -> list[Spec]:
    """What a step reads, as it sees it."""
    operands = getattr(step, "operands", None)
    if operands is not None and hasattr(step, "node"):
        return [Spec(at.shape, value.spec.dtype) for value, at in operands]
    return [value.spec for value in step.reads]


def result_specs(step: Step) -> list[Spec]:
    """What a step writes, as it sees it."""
    results = getattr(step, "results", None)
    return [value.spec for value in (step.writes if results is None else results)]


def cost_of(step: Step, op: Op | None, progress: Progress | None = None) -> Cost:
    """The work of one step; `op` is what a KernelStep runs."""
    if isinstance(step, MapStep):
        count = math.prod(step.at.shape)
        written = count * DTYPES[step.value.spec.dtype][0]
        return Cost(operations(step.expr) * count, read_bytes(step.expr.loads), written)
    if isinstance(step, JoinStep):
        flops = sum(operations(expr) * spec.size for expr, spec in step.parts)
        return Cost(flops, read_bytes(tuple(step.loads)), stored_bytes(step.value.spec))
    if isinstance(step, TransposeStep):
        nbytes = step.batches * step.rows * step.cols * DTYPES[step.load.dtype][0]
        return Cost(0, nbytes, nbytes)
    if isinstance(step, FoldStep):
        elements, written = step.rows * step.cols, step.rows * step.parts * width_of(step.out)
        if step.body is None:
            return Cost(elements, elements * width_of(step.reads[0]), written)
        return Cost(elements * (1 + operations(step.body.expr)), read_bytes(step.body.expr.loads), written)
    if op is None:
        return Cost(0, sum(stored_bytes(v.spec) for v in step.reads), sum(stored_bytes(v.spec) for v in step.writes))
    if isinstance(step, FusedStep):
        own = op.cost(operand_specs(step), [step.result.spec], progress)
        size, saved = step.value.spec.size, 0 if step.kept else stored_bytes(step.result.spec)
        return own + Cost(
            operations(step.expr) * size, read_bytes(tuple(step.inputs)), stored_bytes(step.value.spec) - saved
        )
    return op.cost(operand_specs(step), result_specs(step), progress)


def operations(expr: Expr) -> int:
    """Arithmetic operations an element: one for each function and cast, shared ones once."""
    return sum(isinstance(e, Apply) for e in walk(expr))


def read_bytes(loads: tuple[Load, ...]) -> int:
    """Bytes of memory that loads touch, each piece once however often it is repeated."""
    touched: dict[Value, int] = {}
    for load in loads:
        nbytes = touched_elements(load.at) * DTYPES[load.dtype][0]
        touched[load.value] = min(touched.get(load.value, 0) + nbytes, stored_bytes(load.value.spec))
    return sum(touched.values())


def touched_elements(at: Strided) -> int:
    """Different elements that a view shows: axes of stride 0 repeat them."""
    return math.prod(n for n, stride in zip(at.shape, at.strides) if stride or n == 0)


def width_of(value: Value) -> int:
    """Bytes of an element."""
    return DTYPES[value.spec.dtype][0]
