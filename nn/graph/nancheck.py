"""The hunt for the first NaN: with ANYGPU_NANCHECK=1 every step is run by itself, and its result looked at.

Recordings by jit are left out, so that the function runs as it stands. What a fused kernel computes on its way is
computed operation by operation once it has made a NaN. Slow; for finding faults.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from nn.graph.codegen import MapStep
from nn.graph.cost import StepScope, text_of
from nn.graph.epilogue import FusedStep
from nn.graph.expr import Apply, Value, walk
from nn.graph.fold import FoldStep
from nn.graph.fuse import KernelStep
from nn.graph.ir import Strided, name_of
from nn.ops.base import DTYPES, FLOATS, Array, Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu import Device
    from nn.graph.fuse import Memory, Step
    from nn.quant.weight import Weight


def wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("ANYGPU_NANCHECK", "").strip() not in ("", "0")


class NaNFound(FloatingPointError):
    """An operation made a NaN out of operands that hold none; the message names it."""


def run_step(device: Device, step: Step, path: str, array_of: Memory, seen: set[Value]) -> None:
    """Run one step now. Raises NaNFound where its result holds a NaN and its operands hold none.

    seen: values whose memory some step has written to already.
    """
    for owner in dict.fromkeys(value.owner for value in step.writes):
        if owner not in seen and owner.array is None:  # it may be written in parts
            array_of(owner).buffer.write(np.zeros(max(-(-owner.spec.nbytes // 4), 1), np.uint32))  # pyright: ignore[reportAttributeAccessIssue]
        seen.add(owner)
    clean = not any(nans(device, array_of(value)) for value in step.reads)
    submit(device, step, array_of)
    changed = [step.reads[i] for i in step.node.op.mutates] if isinstance(step, KernelStep) else []
    for value in (*step.writes, *changed) if clean else ():
        count = nans(device, array_of(value))
        if count:
            raise NaNFound(message(device, step, path, array_of, value, count))


def message(device: Device, step: Step, path: str, array_of: Memory, value: Value, count: int) -> str:
    """Who made how many, out of what, and what to do."""
    name, where = StepScope(step, path).name, f" in {path}" if path else ""
    first = first_operation(device, step, array_of)
    inner = f"; the first operation in it that gave one is {first}" if first not in (None, name) else ""
    read = [text_of(v.spec) + " with infinities" * bool(infinities(device, array_of(v))) for v in step.reads]
    return (
        f"ANYGPU_NANCHECK: {name}{where} made the first NaN: {count} of {value.spec.size} elements of its result "
        f"{text_of(value.spec)}{inner}. Its operands hold no NaN: {', '.join(read) or 'none'}. Look at the range of "
        "what goes in (log and sqrt of negatives, 0 / 0, infinity - infinity), or at a learning rate that is too high"
    )


def submit(device: Device, step: Step, array_of: Memory) -> None:
    record = device.recorder()
    step.record(record, array_of)
    record.submit()


def first_operation(device: Device, step: Step, array_of: Memory) -> str | None:
    """The first operation of a fused kernel whose own result holds a NaN."""
    made: dict[Value, Array] = {}

    def memory(value: Value) -> Array | Weight:
        return made.get(value) or array_of(value)

    def holds(value: Value, step: Step) -> bool:
        made[value] = Array(device.alloc(max(value.spec.nbytes, 4)), value.spec.shape, value.spec.dtype)
        submit(device, step, memory)
        return bool(nans(device, made[value]))

    if isinstance(step, MapStep):
        expr, shape = step.expr, step.at.shape
    elif isinstance(step, FusedStep):
        if holds(step.result, KernelStep(step.node, step.operands, (step.result,))):
            return name_of(step.node.op)
        expr, shape = step.expr, next(x.at.shape for x in step.expr.loads if x.value is step.result)
    elif isinstance(step, FoldStep) and step.body is not None and step.body.loads:
        expr, shape = step.body.expr, step.body.loads[0].at.shape
    else:
        return None
    for e in walk(expr):
        if isinstance(e, Apply) and e.dtype in FLOATS:
            value = Value(Spec(shape, e.dtype))
            if holds(value, MapStep(device.caps, e, value, Strided.dense(shape))):
                return name_of(e.op)
    return step.op.kind if isinstance(step, FoldStep) else None


def counted(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Device, Array | Weight], int]:
    """How many elements of a float array the function is true for; 0 for other arrays."""

    def count(device: Device, array: Array | Weight) -> int:
        if not isinstance(array, Array) or array.dtype not in FLOATS or not array.size:
            return 0
        return int(function(device.read(array.buffer, DTYPES[array.dtype][1], array.shape)).sum())

    return count


nans, infinities = counted(np.isnan), counted(np.isinf)

__all__ = ["NaNFound", "run_step", "wanted"]
