"""jit: capture what a function does to tensors once a signature, then replay the recording.

The function is called once with placeholders; what it returns is compiled into one Plan. Later calls copy the arguments
into the Plan's input buffers and replay it: no graph, no compilation, no allocation.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.graph import schedule
from nn.graph.ir import Arange, Constant, Node, Placeholder, Trace, View, leaf, topological, traces, tracing
from nn.ops.base import Array
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Buffer, Device, Plan


@dataclass
class Capture:
    """One signature's recording: inputs in argument order, results in the order of the function's structure."""

    plan: Plan
    inputs: list[Buffer]
    values: list[Any]  # Array or Weight of each tensor returned
    structure: Any
    written: list[tuple[Tensor, Array]]  # captured tensors that the function writes in place
    before: list[Callable[[], None]]  # what the host does before each replay
    temporary_bytes: int
    returned: list[Node]  # handed out by the last call


class Jitted:
    """The function, with its captures by signature.

    The signature is the shape, dtype and device of each tensor among the arguments (tuples, lists and dicts are looked
    into) and the value of every other argument. Tensors that the function takes from outside are captured by reference:
    in-place writes to them (KV caches) happen on every call. Numbers computed while tracing are constants.
    Results stay valid until the next call with the same signature, which writes over them: reading an old one raises.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.captures: dict[Any, Capture] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        shape = flatten((args, kwargs), tensors)
        if any(traces(t.node) for t in tensors):
            return self.function(*args, **kwargs)  # inside another trace: part of it
        devices = {t.device for t in tensors}
        if len(devices) != 1:
            raise TypeError(
                f"jit {self.name}: takes at least one tensor, all on one device; got {len(tensors)} on {len(devices)}"
            )
        (device,) = devices
        arrays = [t.array() for t in tensors]
        key = (shape, device, tuple((a.shape, a.dtype) for a in arrays))
        try:
            capture = self.captures.get(key)
        except TypeError as error:
            raise TypeError(f"jit {self.name}: arguments besides tensors must be hashable ({error})") from error
        if capture is None:
            capture = self.captures[key] = self.capture(device, args, kwargs, tensors, arrays)
        return self.replay(device, capture, arrays)

    def capture(self, device: Device, args: Any, kwargs: Any, tensors: list[Tensor], arrays: list[Array]) -> Capture:
        """Trace, compile and record."""
        trace, start = Trace(), time.perf_counter_ns()
        stand_ins = [Tensor(Node(Placeholder(i, trace), (), (t.node.spec,)), device) for i, t in enumerate(tensors)]
        it = iter(stand_ins)
        args, kwargs = rebuild((args, kwargs), it)
        with tracing(trace):
            result = self.function(*args, **kwargs)
        results: list[Tensor] = []
        flatten(result, results)
        written = list({id(t): t for t in trace.writes}.values())
        nodes = [t.node for t in (*results, *written)]
        hoist(device, nodes, start)
        order = topological(nodes)
        for node in order:
            if node.stale is not None:
                raise schedule.stale_read(node)
        siblings = schedule.with_siblings(nodes, order)
        program = schedule.compile_program(device, siblings)
        inputs = [device.alloc(a.buffer.nbytes) for a in arrays]
        record = device.recorder()
        values = program.record(record, [Array(b, a.shape, a.dtype) for b, a in zip(inputs, arrays)])
        by_node = dict(zip(siblings, values))
        schedule.mark_overwritten(order)
        kept: list[tuple[Tensor, Array]] = []
        for tensor in written:
            array = by_node[tensor.node]
            assert isinstance(array, Array)
            tensor.node = leaf(array)
            kept.append((tensor, array))
        return Capture(
            record.plan(), inputs, [by_node[node] for node in nodes[: len(results)]], result, kept, trace.before,
            program.temporary_bytes, [],
        )  # fmt: skip

    def replay(self, device: Device, capture: Capture, arrays: list[Array]) -> Any:
        for tensor, array in capture.written:
            if tensor.array().buffer is not array.buffer:
                raise RuntimeError(
                    f"jit {self.name}: writes in place into a tensor whose memory was replaced since it was captured; "
                    "keep the same Tensor, or make a new jit"
                )
        pairs = [(a.buffer, b) for a, b in zip(arrays, capture.inputs) if a.size]
        if pairs:
            device.memory.copy(pairs)
        for prepare in capture.before:
            prepare()
        capture.plan.replay()
        for node in capture.returned:
            node.stale = f"the next call of {self.name}"
        for tensor, array in capture.written:
            tensor.node.stale = self.name
            tensor.node = leaf(array)
        fresh = [Tensor(leaf(value), device) for value in capture.values]
        capture.returned = [t.node for t in fresh]
        return rebuild(capture.structure, iter(fresh))


def jit(function: Callable[..., Any]) -> Jitted:
    """Compile a function of tensors: the first call with a signature captures it, later ones replay.

    The function may only build the graph: reading a value of an argument (numpy, item, bool) raises RuntimeError.
    """
    return Jitted(function)


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """A hashable picture of the structure; the tensors in it are appended to `tensors` in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, tuple | list):
        return (type(value), *(flatten(v, tensors) for v in value))
    if isinstance(value, dict):
        return (dict, *((k, flatten(v, tensors)) for k, v in value.items()))
    return (type(value), value)


def rebuild(value: Any, tensors: Any) -> Any:
    """The structure with its tensors replaced, in the order that `flatten` visits them."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(v, tensors) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(rebuild(v, tensors) for v in value)
    if isinstance(value, dict):
        return {k: rebuild(v, tensors) for k, v in value.items()}
    return value


def hoist(device: Device, nodes: list[Node], start: int) -> None:
    """Compute lazy values that the function took from outside, so that replays do not compute them again. What it makes
    itself out of captured tensors stays in the recording: their contents may change (load_state_dict, caches)."""
    outside = [
        x
        for node in topological(nodes)
        if node.born >= start and node.value is None
        for x in node.inputs
        if x.born < start and x.value is None and not isinstance(x.op, Constant | Arange | View | Placeholder)
    ]
    schedule.realize(device, list(dict.fromkeys(outside)))
