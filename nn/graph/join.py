"""A join (cat) as one dispatch: each element of the result comes out of the part that it falls into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.graph.codegen import (
    ELEMENTS,
    MAX_ELEMENTS,
    STEPS,
    STORED,
    WG,
    Addresses,
    Body,
    bindings,
    loaded,
    stored,
    with_library,
)
from nn.graph.copy import transpose_step
from nn.graph.expr import Expr, Value
from nn.graph.ir import Strided
from nn.ops.base import DTYPES, Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu import Capabilities, Recorder

MAX_FIELDS = 56


@dataclass
class JoinStep:
    """value = parts one after another along `axis`; each is an expression over its own shape."""

    caps: Capabilities
    parts: tuple[tuple[Expr, Spec], ...]
    value: Value
    axis: int

    def __post_init__(self) -> None:
        self.bodies = [Body(expr, f"p{j}_") for j, (expr, _) in enumerate(self.parts)]
        self.loads = [load for body in self.bodies for load in body.loads]
        self.reads = tuple(dict.fromkeys(load.value for load in self.loads))
        self.writes = (self.value,)
        self.title = "join of " + "; ".join(dict.fromkeys(body.title for body in self.bodies))

    @classmethod
    def of(cls, caps: Capabilities, parts: Sequence[tuple[Expr, Spec]], value: Value, axis: int) -> JoinStep | None:
        """The step, or None where parts are better or only written one by one."""
        step = cls(caps, tuple(parts), value, axis)
        shape = value.spec.shape
        fields = 1 + 2 * len(shape) + len(parts) + len(step.loads) * (1 + len(shape))
        fields += sum(len(body.fields) for body in step.bodies)
        bound = {(load.value, wide) for load, wide in zip(step.loads, step.flags())}  # both ways: bound twice
        if len(bound) >= caps.max_storage_buffers or fields > MAX_FIELDS or value.spec.size > MAX_ELEMENTS:
            return None
        if any(body.indices for body in step.bodies) or len(parts) < 2:
            return None
        if max(v.owner.spec.nbytes for v in (value, *step.reads)) > caps.max_binding - 512:
            return None
        start, dense = 0, Strided.dense(shape)
        for expr, spec in parts:
            at = Strided(spec.shape, dense.strides, start * dense.strides[axis])
            if transpose_step(caps, expr, value, at) is not None:
                return None
            start += spec.shape[axis]
        return step

    def flags(self) -> list[bool]:
        """Of each load, whether it comes as vectors of four. None do unless all parts allow it."""
        last = len(self.value.spec.shape) - 1
        none = [False] * len(self.loads)
        if self.value.spec.shape[last] % 4 or (
            self.axis == last and any(spec.shape[last] % 4 for _, spec in self.parts)
        ):
            return none
        found = []
        for load in self.loads:
            *front, step = load.at.strides
            if step not in (0, 1) or (step == 1 and (load.at.offset % 4 or any(s % 4 for s in front))):
                return none
            found.append(step == 1)
        return found

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        flags = self.flags()
        wide = any(flags)
        shape, axis, dtype = list(self.value.spec.shape), self.axis, self.value.spec.dtype
        unit = 4 if wide else 1
        last = len(shape) - 1
        shape[last] //= unit
        ats, starts, ends = [], [], []
        start = 0
        for body, (_, spec) in zip(self.bodies, self.parts, strict=True):
            for load in body.loads:
                strides, offset = list(load.at.strides), load.at.offset - start * load.at.strides[axis]
                if flags[len(ats)]:
                    strides, offset = [*(s // 4 for s in strides[:last]), 1], offset // 4
                ats.append((tuple(strides), offset % (1 << 32)))
            starts.append(start)
            start += spec.shape[axis]
            ends.append(start // unit if axis == last else start)
        addresses = Addresses(tuple(shape), ats)
        declared, names = bindings(self.loads, [load.value for load in self.loads], flags, 1)
        element = f"vec4<{STORED[dtype]}>" if wide else STORED[dtype]
        lines, functions, at = addresses.coordinates("i", 0, len(shape)), [], 0
        for j, body in enumerate(self.bodies):
            count = len(body.loads)
            mine = range(at, at + count)
            at += count
            functions += [line.replace("fn element(", f"fn element{j}(", 1) for line in body.function()]
            calls = []
            for lane in "xyzw"[:unit]:
                read = (loaded(f"v{k}.{lane}" if flags[k] else f"v{k}", self.loads[k].dtype) for k in mine)
                calls.append(stored(f"element{j}({', '.join(read)})", dtype))
            here = [f"  let v{k} = {names[k]}[{addresses.text[k]}];" for k in mine]
            made = f"{element}({', '.join(calls)})" if wide else calls[0]
            here.append(f"  out[i] = {made};")
            head = f"if (c{axis} < p.e{j}) {{" if j < len(self.parts) - 1 else "{"
            lines += [head if j == 0 else f"}} else {head}", *here]
        lines.append("}")
        fields = [("n", "u32", math.prod(shape)), *((f"e{j}", "u32", e) for j, e in enumerate(ends[:-1]))]
        fields += [*addresses.fields, *(field for body in self.bodies for field in body.fields)]
        wg = WG[self.caps.kind]
        steps = STEPS[4 * DTYPES[dtype][0]] if wide else ELEMENTS
        code = [
            f"// fused: {self.title}",
            f"struct Params {{ {', '.join(f'{name}: {type_}' for name, type_, _ in fields)} }}",
            f"@group(0) @binding(0) var<storage, read_write> out: array<{element}>;",
            *declared,
            f"@group(0) @binding({len(declared) + 1}) var<uniform> p: Params;",
            *with_library(functions),
            f"@compute @workgroup_size({wg})",
            "fn joined(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,",
            "          @builtin(local_invocation_index) lane: u32) {",
            f"  let start = (wg.y * grid.x + wg.x) * {steps * wg}u + lane;",
            f"  for (var step = 0u; step < {steps}u; step++) {{",
            f"    let i = start + step * {wg}u;",
            "    if (i < p.n) {",
            *(f"      {line}" for line in lines),
            "    }",
            "  }",
            "}",
        ]
        kernel = record.device.kernel_source("\n".join(code), "joined", label=f"fused {self.title}")
        record(
            kernel,
            grid=-(-math.prod(shape) // (steps * wg)),
            out=array_of(self.value).buffer,
            **{name: array_of(load.value).buffer for name, load in zip(names, self.loads)},
            **{name: value for name, _, value in fields},
        )


__all__ = ["JoinStep"]
