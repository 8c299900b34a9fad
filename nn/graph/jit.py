"""jit: capture what a function does to tensors once a signature, then replay the recording.

The function is called once with placeholders; what it returns is compiled into one Plan. Later calls copy the arguments
into the Plan's input buffers and replay it: no graph, no compilation, no allocation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.graph import nancheck, schedule
from nn.graph.ir import Arange, Constant, Node, Placeholder, View, leaf, topological, traces
from nn.graph.scopes import Left, Trace, tracing
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
    gradients: list[tuple[Left, Array | None]]  # tensors from outside whose .grad the function leaves, or clears
    temporary_bytes: int
    returned: list[Node]  # handed out by the last call


class Jitted:
    """The function, with its captures by signature.

    The signature is the shape, dtype and device of each tensor among the arguments (tuples, lists and dicts are looked
    into) and the value of every other argument. Tensors that the function takes from outside are captured by reference:
    in-place writes to them (KV caches) happen on every call. Numbers computed while tracing are constants.
    Gradients that the function leaves in .grad of such tensors are results of each call.
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
        if any(traces(t.node) for t in tensors) or nancheck.wanted():
            return self.function(*args, **kwargs)  # inside another trace: part of it; or a hunt for NaNs
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
        trace = Trace()
        try:
            return self.compile(device, trace, args, kwargs, tensors, arrays)
        except BaseException:
            trace.undo()
            raise

    def compile(
        self, device: Device, trace: Trace, args: Any, kwargs: Any, tensors: list[Tensor], arrays: list[Array]
    ) -> Capture:
        result, results, written = traced(self.name, self.function, device, trace, args, kwargs, tensors)
        left = [one.tensor.grad for one in trace.left.values() if one.tensor.grad is not None]
        nodes = [t.node for t in (*results, *written, *left)]
        hoist(device, nodes, trace.start)
        order = topological(nodes)
        for node in order:
            if node.stale is not None:
                raise schedule.stale_read(node)
        wanted = list(dict.fromkeys(nodes))  # nobody else can use what depends on arguments
        program = schedule.compile_program(device, wanted)
        inputs = [device.alloc(a.buffer.nbytes) for a in arrays]
        record = device.recorder()
        values = program.record(record, [Array(b, a.shape, a.dtype) for b, a in zip(inputs, arrays)])
        by_node = dict(zip(wanted, values))
        schedule.mark_overwritten(order)
        kept: list[tuple[Tensor, Array]] = []
        gradients: list[tuple[Left, Array | None]] = []
        for one in trace.left.values():
            gradient, one.tensor._grad = one.tensor._grad, one.before
            gradients.append((one, None if gradient is None else by_node[gradient.node]))  # pyright: ignore[reportArgumentType]
        for tensor in written:
            array = by_node[tensor.node]
            assert isinstance(array, Array)
            tensor.node = leaf(array)
            kept.append((tensor, array))
        return Capture(
            record.plan(), inputs, [by_node[node] for node in nodes[: len(results)]], result, kept, trace.before,
            gradients, program.temporary_bytes, [],
        )  # fmt: skip

    def replay(self, device: Device, capture: Capture, arrays: list[Array]) -> Any:
        for tensor, array in capture.written:
            if tensor.array().buffer is not array.buffer:
                raise RuntimeError(
                    f"jit {self.name}: writes in place into a tensor whose memory was replaced since it was captured; "
                    "keep the same Tensor, or make a new jit"
                )
        for one, _ in capture.gradients:
            if not one.cleared and one.tensor.grad is not None:
                raise RuntimeError(kept_gradient(self.name, one.tensor))
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
        for one, value in capture.gradients:
            gradient = None if value is None else Tensor(leaf(value), device)
            one.tensor.grad = gradient
            if gradient is not None:
                capture.returned.append(gradient.node)
        return rebuild(capture.structure, iter(fresh))


def traced(
    name: str, function: Callable[..., Any], device: Device, trace: Trace, args: Any, kwargs: Any, tensors: list[Tensor]
) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Call the function with placeholders for `tensors`: its result, the tensors in it, and those written in place."""
    stand_ins = [Tensor(Node(Placeholder(i, trace), (), (t.node.spec,)), device) for i, t in enumerate(tensors)]
    args, kwargs = rebuild((args, kwargs), iter(stand_ins))
    with tracing(trace):
        result = function(*args, **kwargs)
    results: list[Tensor] = []
    flatten(result, results)
    for one in trace.left.values():
        if not one.cleared and one.before is not None:
            raise RuntimeError(kept_gradient(name, one.tensor))
    return result, results, [tensor for tensor, _ in trace.writes.values()]


def kept_gradient(name: str, tensor: Tensor) -> str:
    return (
        f"jit {name}: the function adds to the .grad of a tensor {list(tensor.shape)} that has one from before the "
        "call, and a recording cannot add to what it does not make; call zero_grad() first, in the function or "
        "before each call, or add several gradients up inside of it"
    )


def jit(
    function: Callable[..., Any] | None = None,
    *,
    pad: Mapping[str, int] | None = None,
    buckets: Sequence[int] = (),
    cut: int | Mapping[int | str, int] | None = None,
) -> Any:
    """Compile a function of tensors: the first call with a signature captures it, later ones replay. Also `@jit`.

    pad, buckets, cut: for arguments of many lengths, see nn/graph/buckets.py.
    The function may only build the graph: reading a value of an argument (numpy, item, bool) raises RuntimeError.
    """
    from nn.graph.buckets import Bucketed  # here: that module imports this one

    if function is None:
        return functools.partial(jit, pad=pad, buckets=buckets, cut=cut)
    return Jitted(function) if pad is None else Bucketed(function, pad, buckets, cut)


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
