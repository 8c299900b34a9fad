"""explain: what a function becomes. The graph as written and as it runs, each kernel with the operations fused into it,
the bytes and operations that fusing and rewriting save, and the memory plan. As text, and as a page with a picture.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu.work import Cost
from nn.graph.cost import StepScope, cost_of, text_of
from nn.graph.ir import (
    Arange,
    Cast,
    Cat,
    Constant,
    Contiguous,
    Item,
    Map,
    Node,
    Pack,
    Placeholder,
    Reduce,
    View,
    name_of,
    topological,
)
from nn.graph.jit import flatten, hoist, traced
from nn.graph.rewrite import rewrite
from nn.graph.schedule import Program, compile_program, storage_bytes
from nn.graph.scopes import Trace
from nn.ops.base import stored_bytes

if TYPE_CHECKING:
    from gpu import Device
    from nn.graph.expr import Value
    from nn.tensor import Tensor


@dataclass(frozen=True)
class Kernel:
    """One step: what it computes, where in the model, its operands and results, its work, the bytes of temporaries that
    live while it runs."""

    name: str
    path: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    cost: Cost
    live: int


@dataclass(frozen=True)
class Temporary:
    """A value between kernels: shape, bytes, the slot it lies in, its first and last step."""

    text: str
    nbytes: int
    slot: int
    first: int
    last: int


@dataclass(frozen=True)
class Explanation:
    """str() and text() give it as text, html() as a page that needs nothing else, svg() the picture of memory in it.

    before, after: how often each operation stands in the graph as written, and after rewriting. written: the work of
    the graph as written, each operation a kernel of its own; work: of the kernels that run.
    """

    name: str
    before: dict[str, int]
    after: dict[str, int]
    kernels: tuple[Kernel, ...]
    temporaries: tuple[Temporary, ...]
    slots: tuple[int, ...]
    written: Cost
    work: Cost
    lower_bytes: int
    unshared_bytes: int

    @property
    def temporary_bytes(self) -> int:
        """Of all temporary buffers: the peak that running adds to arguments, parameters and results."""
        return sum(self.slots)

    @classmethod
    def of(cls, device: Device, nodes: Sequence[Node], name: str) -> Explanation:
        """Of the graph that ends in these nodes."""
        given = topological(nodes)
        program = compile_program(device, nodes)
        return cls(
            name, census(given), census(topological(rewrite(nodes))), kernels_of(program), temporaries_of(program),
            tuple(slot.nbytes for slot in program.slots), total(work_of(n) for n in given if n.value is None),
            total(kernel_cost(step) for step in program.steps), program.lower_bytes, program.unshared_bytes,
        )  # fmt: skip

    def __str__(self) -> str:
        return self.text()

    def text(self, *, width: int = 76) -> str:
        """All of it, a kernel a line."""
        lines = [f"{self.name}: {len(self.kernels)} kernels", "", *self.summary(), "", "kernels"]
        for i, kernel in enumerate(self.kernels):
            what = f"{kernel.name} in {kernel.path}" if kernel.path else kernel.name
            shapes = f"{', '.join(kernel.operands) or '-'} -> {', '.join(kernel.results) or '(in place)'}"
            work = f"{quantity(kernel.cost.flops)}op {quantity(kernel.cost.bytes)}B, live {quantity(kernel.live)}B"
            lines += [f"{i:4} {what[:width]}", f"       {shapes[:width]}", f"       {work}"]
        lines += ["", "memory plan: temporaries by slot, with the kernels that they live for"]
        for slot, nbytes in enumerate(self.slots):
            lines.append(f"{slot:4} {quantity(nbytes)}B")
            for t in self.temporaries:
                if t.slot == slot:
                    lines.append(f"       {t.first}-{t.last}: {t.text}, {quantity(t.nbytes)}B")
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """What was there, what runs, what that saves."""
        saved = self.written.bytes - self.work.bytes
        share = saved / self.written.bytes if self.written.bytes else 0.0
        ratio = self.temporary_bytes / self.lower_bytes if self.lower_bytes else 1.0
        return [
            f"as written  {counted(self.before)}",
            f"rewritten   {counted(self.after)}",
            f"bytes       {quantity(self.work.bytes)}B moved; an operation a kernel {quantity(self.written.bytes)}B, "
            f"so {quantity(saved)}B ({share:.0%}) saved",
            f"operations  {quantity(self.work.flops)}; as written {quantity(self.written.flops)}, so "
            f"{quantity(self.written.flops - self.work.flops)} saved",
            f"memory      {quantity(self.temporary_bytes)}B of temporaries in {len(self.slots)} slots; lower bound "
            f"{quantity(self.lower_bytes)}B (x{ratio:.2f}), unshared {quantity(self.unshared_bytes)}B",
        ]

    def svg(self) -> str:
        """Temporaries as bars: the kernels from left to right, the slots from top to bottom, each as high as large."""
        steps, wide = max(len(self.kernels), 1), 960.0
        high = 420.0
        scale = high / max(self.temporary_bytes, 1)
        tops, at = [], 0.0
        for nbytes in self.slots:
            tops.append(at)
            at += nbytes * scale
        bars = []
        for t in self.temporaries:
            x, w = wide * t.first / steps, max(wide * (t.last + 1 - t.first) / steps - 1, 1)
            color = f"hsl({(t.slot * 47) % 360} 55% 62%)"
            h = max(t.nbytes * scale - 0.5, 0.5)
            title = html.escape(f"{t.text}: {quantity(t.nbytes)}B, kernels {t.first} to {t.last}")
            bars.append(
                f'<rect x="{x:.1f}" y="{tops[t.slot]:.1f}" width="{w:.1f}" height="{h:.1f}" '
                f'fill="{color}"><title>{title}</title></rect>'
            )
        line = " ".join(
            f"{wide * (i + 0.5) / steps:.1f},{high - kernel.live * scale:.1f}" for i, kernel in enumerate(self.kernels)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" role="img">'
            f"<title>Temporary memory over the kernels of {html.escape(self.name)}</title>{''.join(bars)}"
            f'<polyline points="{line}" fill="none" stroke="#222" stroke-width="1.5"/></svg>'
        )

    def html(self) -> str:
        """A page of its own: summary, picture, kernels."""
        rows = "".join(
            f"<tr><td>{i}<td>{html.escape(k.name)}<td>{html.escape(k.path)}<td>{html.escape(', '.join(k.operands))}"
            f"<td>{html.escape(', '.join(k.results) or 'in place')}<td>{quantity(k.cost.flops)}"
            f"<td>{quantity(k.cost.bytes)}B<td>{quantity(k.live)}B"
            for i, k in enumerate(self.kernels)
        )
        heads = "".join(f"<th>{h}" for h in ("", "kernel", "part", "reads", "writes", "operations", "bytes", "live"))
        name = html.escape(self.name)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}: kernels and memory</title>'
            "<style>body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
            "table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:left;border-bottom:1px solid #ddd}"
            "svg{width:100%;background:#f6f6f6}</style>"
            f"<h1>{name}</h1><pre>{html.escape(chr(10).join(self.summary()))}</pre>"
            "<h2>Memory</h2><p>Each bar is a temporary: its slot from top to bottom, the kernels that it lives for "
            f"from left to right. The line is what lives at a time.</p>{self.svg()}"
            f"<h2>Kernels</h2><table><thead><tr>{heads}</thead><tbody>{rows}</tbody></table></html>\n"
        )


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What jit would make of function(*args, **kwargs): kernels, what is fused into each, bytes saved, memory plan.

    Nothing is run and nothing changes: parameters, optimizer states and .grad are as they were.
    Raises: TypeError where no argument holds a tensor, RuntimeError as jit where the function reads a value.
    """
    name = getattr(function, "__name__", type(function).__name__)
    function = getattr(function, "function", function)  # of a Jitted
    tensors: list[Tensor] = []
    flatten((args, kwargs), tensors)
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        raise TypeError(
            f"explain {name}: takes at least one tensor, all on one device; got {len(tensors)} on {len(devices)}"
        )
    (device,) = devices
    trace = Trace()
    try:
        _, results, written = traced(name, function, device, trace, args, kwargs, tensors)
        left = [one.tensor.grad for one in trace.left.values() if one.tensor.grad is not None]
        nodes = list(dict.fromkeys(t.node for t in (*results, *written, *left)))
        hoist(device, nodes, trace.start)
        return Explanation.of(device, nodes, name)
    finally:
        trace.undo()


def census(nodes: Sequence[Node]) -> dict[str, int]:
    """How often each operation stands there; values in memory and picked results are no operations."""
    plain = (Constant, Arange, Item, Placeholder)
    return dict(Counter(name_of(n.op) for n in nodes if n.value is None and not isinstance(n.op, plain)).most_common())


def counted(names: dict[str, int]) -> str:
    most = ", ".join(f"{n} {name}" for name, n in list(names.items())[:8])
    return f"{sum(names.values())} operations: {most}{', ...' if len(names) > 8 else ''}"


def work_of(node: Node) -> Cost:
    """Of one operation in a kernel of its own; views are free."""
    op, inputs = node.op, [x.spec for x in node.inputs]
    if isinstance(op, View | Constant | Arange | Item | Placeholder):
        return Cost()
    written = sum(stored_bytes(spec) for spec in node.specs)
    read = sum(stored_bytes(spec) for spec in inputs)
    if isinstance(op, Map | Cast):
        return Cost(node.spec.size, read, written)
    if isinstance(op, Reduce):
        return Cost(inputs[0].size, read, written)
    if isinstance(op, Contiguous | Cat | Pack):
        return Cost(0, read, written)
    return op.cost(inputs, list(node.specs))


def kernel_cost(step: Any) -> Cost:
    node = getattr(step, "node", None)
    return cost_of(step, None if node is None else node.op)


def total(costs: Any) -> Cost:
    return sum(costs, Cost())


def kernels_of(program: Program) -> tuple[Kernel, ...]:
    made = []
    for step, path, live in zip(program.steps, program.paths, program.live_bytes(), strict=True):
        scope = StepScope(step, path)
        made.append(Kernel(scope.name, path, tuple(scope.operands), tuple(scope.results), kernel_cost(step), live))
    return tuple(made)


def temporaries_of(program: Program) -> tuple[Temporary, ...]:
    slots = {id(slot): i for i, slot in enumerate(program.slots)}
    spans = program.lifetimes()

    def made(value: Value) -> Temporary:
        return Temporary(text_of(value.spec), storage_bytes(value), slots[id(program.slot_of[value])], *spans[value])

    return tuple(made(value) for value in program.slot_of)


def quantity(value: float) -> str:
    """Three digits and a prefix: 12.3 M."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


__all__ = ["Explanation", "explain"]
