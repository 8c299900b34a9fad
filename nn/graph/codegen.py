"""Writes the WGSL of fused kernels: one scalar function of the loads, and around it a loop over elements.

A generated element-wise kernel reads like this (sizes and numbers come from Params; the text holds only ranks, dtypes
and which strides are 0 or 1, so that other sizes reuse the pipeline):

    // fused: mul, add
    fn element(a0: f32, a1: f32) -> f32 {
      let t0 = a0 * p.k0;
      return t0 + a1;
    }
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu import LimitExceeded, wgsl
from nn.graph.expr import Apply, Expr, Index, Load, Scalar, Value, coalesce, walk
from nn.graph.ir import Cast, Strided, name_of
from nn.ops.base import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpu import Capabilities, Recorder

REGISTER = {"f32": "f32", "f16": "f32", "i32": "i32", "u32": "u32", "bool": "bool"}  # what a kernel computes with
STORED = {"f32": "f32", "f16": "f16", "i32": "i32", "u32": "u32", "bool": "u32"}
WG = {"cpu": 64, "gpu": 256}  # invocations a workgroup of a generated kernel
STEPS = {8: 2, 16: 1}  # vectors an invocation handles, by the bytes of the largest: enough to pay for its launch
ELEMENTS = 4  # or single elements
MAX_ELEMENTS = (1 << 32) - (1 << 24)  # u32 indices, with room for the overhang of a folded grid


# --- the function of one element -------------------------------------------------------------------------------------


class Body:
    """WGSL of an expression: a function `value` of its loads and positions, and the Params fields that it reads."""

    def __init__(self, expr: Expr, prefix: str = "") -> None:
        self.expr, self.prefix = expr, prefix
        self.loads: list[Load] = []
        self.indices: list[Index] = []
        self.names: list[str] = []
        self.fields: list[tuple[str, str, Any]] = []  # name, type, value
        lines: list[str] = []
        text: dict[Expr, str] = {}
        known: dict[tuple[Value, Strided], str] = {}
        for e in walk(expr):
            if isinstance(e, Load):
                key = (e.value, e.at)
                if key not in known:
                    known[key] = f"a{len(self.loads)}"
                    self.loads.append(e)
                text[e] = known[key]
            elif isinstance(e, Scalar):
                text[e] = self.number(e.value, e.dtype)
            elif isinstance(e, Index):
                start, step = self.number(e.op.start, e.dtype), self.number(e.op.step, e.dtype)
                text[e] = f"({start} + {step} * {REGISTER[e.dtype]}(i{len(self.indices)}))"
                self.indices.append(e)
            elif isinstance(e, Apply):
                self.names.append(name_of(e.op))
                lines.append(f"  let t{len(lines)} = {code_of(e, [text[a] for a in e.args])};")
                text[e] = f"t{len(lines) - 1}"
        result = text[expr]
        if lines and result == f"t{len(lines) - 1}":
            result = lines.pop().split(" = ", 1)[1].rstrip(";")
        self.lines = [*lines, f"  return {result};"]
        self.type = REGISTER[expr.dtype]
        self.title = ", ".join(self.names) or ("fill" if not self.loads else "copy")

    def number(self, value: float | int | bool, dtype: str) -> str:
        """A number as a field of Params, so that others reuse the pipeline."""
        name = f"{self.prefix}k{len(self.fields)}"
        if dtype == "bool":
            self.fields.append((name, "u32", int(bool(value))))
            return f"(p.{name} != 0u)"
        if REGISTER[dtype] == "f32":
            with np.errstate(over="ignore"):
                value = float(np.float32(value))
        self.fields.append((name, REGISTER[dtype], value))
        return f"p.{name}"

    def function(self) -> list[str]:
        """The lines of `element`: one value, from loaded values and positions."""
        arguments = [f"a{i}: {REGISTER[load.dtype]}" for i, load in enumerate(self.loads)]
        arguments += [f"i{i}: u32" for i in range(len(self.indices))]
        return [f"fn element({', '.join(arguments)}) -> {self.type} {{", *self.lines, "}"]


def code_of(e: Apply, args: list[str]) -> str:
    """WGSL of one operation on its operands' WGSL."""
    if isinstance(e.op, Cast):
        return cast_code(args[0], e.args[0].dtype, e.dtype)
    return e.op.code.format(*args, T=REGISTER[e.args[-1].dtype])


def cast_code(x: str, source: str, target: str) -> str:
    """WGSL of a cast between dtypes, of values in registers."""
    have, want = REGISTER[source], REGISTER[target]
    if want == "bool":
        return f"truth_f32({x})" if have == "f32" else f"({x} != {have}(0))" if have != "bool" else x
    if have == "f32" and want in ("i32", "u32"):
        return f"to_{want}({x})"
    if target == "f16" and source != "f16":
        return f"round_f16({x if have == 'f32' else f'f32({x})'})"  # rounded here, as a stored f16 would be
    return x if have == want else f"{want}({x})"


def loaded(text: str, dtype: str) -> str:
    """WGSL from a stored value to its register."""
    return f"f32({text})" if dtype == "f16" else f"({text} != 0u)" if dtype == "bool" else text


def stored(text: str, dtype: str) -> str:
    """WGSL from a register to the value as stored."""
    return f"f16({text})" if dtype == "f16" else f"select(0u, 1u, {text})" if dtype == "bool" else text


@functools.cache
def library() -> dict[str, str]:
    """The functions of shaders/elementwise/math.wgsl by name, each with its comment."""
    text = (wgsl.SHADERS / "elementwise" / "math.wgsl").read_text(encoding="utf-8")
    return {m[2]: m[0].strip() for m in re.finditer(r"((?://[^\n]*\n)*)fn (\w+)\(.*?\n?\}\n", text + "\n", re.DOTALL)}


def with_library(lines: list[str]) -> list[str]:
    """The lines and, before them, the library functions that they call."""
    functions, wanted, done = library(), [], set()
    todo = lines
    while todo:
        words = {w for line in todo for w in re.findall(r"\b([a-z]\w*)\(", line)}
        new = sorted(w for w in words if w in functions and w not in done)
        done.update(new)
        wanted += new
        todo = [functions[w] for w in new]
    return [functions[w] for w in sorted(wanted)] + lines


# --- addresses -------------------------------------------------------------------------------------------------------


class Addresses:
    """Where each load, position and result lies, as WGSL over coordinates c0, c1, ... and Params fields, whose names
    start with `prefix`."""

    def __init__(self, dims: tuple[int, ...], ats: list[tuple[tuple[int, ...], int]], prefix: str = "") -> None:
        self.fields: list[tuple[str, str, int]] = []
        self.text: list[str] = []
        self.dims, self.prefix = dims, prefix
        for j, (strides, offset) in enumerate(ats):
            terms = [f"p.{prefix}o{j}"]
            self.fields.append((f"{prefix}o{j}", "u32", offset))
            for axis, step in enumerate(strides):
                if step == 1:
                    terms.append(f"c{axis}")
                elif step:
                    terms.append(f"c{axis} * p.{prefix}s{j}_{axis}")
                    self.fields.append((f"{prefix}s{j}_{axis}", "u32", step % (1 << 32)))
            self.text.append(" + ".join(terms))

    def coordinates(self, source: str, first: int, last: int) -> list[str]:
        """Lines that split a flat index into coordinates of axes first..last-1."""
        if last - first == 0:
            return []
        if last - first == 1:
            return [f"let c{first} = {source};"]
        lines = [f"var r{first} = {source};"]
        for axis in range(last - 1, first, -1):
            size = f"p.{self.prefix}d{axis}"
            lines += [f"let c{axis} = r{first} % {size};", f"r{first} /= {size};"]
            self.fields.append((f"{self.prefix}d{axis}", "u32", self.dims[axis]))
        return [*lines, f"let c{first} = r{first};"]


def bindings(
    loads: Sequence[Load], keys: Sequence[Any], vector: Sequence[bool], first: int, prefix: str = "b"
) -> tuple[list[str], list[str]]:
    """Declarations from binding `first` on, and the name (prefix and a number) each load reads through.

    Loads of one key (the same piece of memory) share a binding; a piece seen as vectors and as scalars is bound twice.
    """
    names: dict[Any, str] = {}
    lines, of = [], []
    for load, key, wide in zip(loads, keys, vector):
        if (key, wide) not in names:
            name = names[key, wide] = f"{prefix}{len(names)}"
            type_ = f"vec4<{STORED[load.dtype]}>" if wide else STORED[load.dtype]
            lines.append(f"@group(0) @binding({first + len(lines)}) var<storage, read> {name}: array<{type_}>;")
        of.append(names[key, wide])
    return lines, of


# --- element-wise kernels --------------------------------------------------------------------------------------------


@dataclass
class MapStep:
    """out[at] = expression, element by element, in one dispatch (more where a binding is too small for an operand)."""

    caps: Capabilities
    expr: Expr
    value: Value
    at: Strided

    def __post_init__(self) -> None:
        self.dtype, self.moved, expr = self.value.spec.dtype, self.at, self.expr
        if (pairs := as_pairs(expr, self.at)) is not None:
            self.dtype, (expr, self.moved) = "u32", pairs
        self.body = Body(expr)
        self.reads = tuple(dict.fromkeys(load.value for load in self.body.loads))
        self.writes = (self.value,)
        if math.prod(self.at.shape) > MAX_ELEMENTS:
            raise LimitExceeded(
                f"fused {self.body.title}: {math.prod(self.at.shape):,} elements in one tensor; indices are 32 bits, "
                f"at most {MAX_ELEMENTS:,}; split the tensor"
            )
        self.sources = [*(load.at for load in self.body.loads), *(index.at for index in self.body.indices), self.moved]

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        loads = self.body.loads
        sizes = [DTYPES[load.dtype][0] for load in loads] + [0] * len(self.body.indices)
        sizes.append(DTYPES[self.dtype][0])
        shape, strides = coalesce(self.moved.shape, [at.strides for at in self.sources])
        views = [Strided(shape, s, at.offset) for s, at in zip(strides, self.sources)]
        limit = self.caps.max_binding
        buffers = [array_of(load.value).buffer for load in loads]
        for window in windows(views, sizes, limit, self.body.title):
            cut = [cut_buffer(b, view, size, limit) for b, view, size in zip(buffers, window, sizes)]
            keys = [(load.value, buffer.offset, buffer.nbytes) for load, (buffer, _) in zip(loads, cut)]
            positions = window[len(loads) : -1]
            out, out_view = cut_buffer(array_of(self.value).buffer, window[-1], sizes[-1], limit)
            wg = WG[self.caps.kind]
            text, fields, names, group = generate(
                self.body, keys, [v for _, v in cut], positions, out_view, self.dtype, wg=wg
            )
            kernel = record.device.kernel_source(text, "fused", label=f"fused {self.body.title}")
            record(
                kernel,
                grid=-(-fields["n"] // group),
                out=out,
                **{name: buffer for name, (buffer, _) in zip(names, cut)},
                **fields,
            )


def as_pairs(expr: Expr, at: Strided) -> tuple[Load, Strided] | None:
    """A copy of f16 as one of u32, two elements each, which moves wider vectors; None where it is no such copy."""
    if not isinstance(expr, Load) or expr.dtype != "f16" or not at.shape:
        return None
    views = (expr.at, at)
    if any(v.strides[-1] != 1 or v.shape[-1] % 2 or v.offset % 2 or any(s % 2 for s in v.strides[:-1]) for v in views):
        return None
    source, target = (
        Strided((*v.shape[:-1], v.shape[-1] // 2), (*(s // 2 for s in v.strides[:-1]), 1), v.offset // 2) for v in views
    )
    return Load("u32", expr.value, source), target


def windows(views: list[Strided], sizes: list[int], limit: int, title: str) -> Iterator[list[Strided]]:
    """The views, cut along their longest-striding axis until every operand of a piece fits one binding."""
    if all(span(view)[1] * size <= limit - 512 or size == 0 for view, size in zip(views, sizes)) or not views[0].shape:
        yield views
        return
    axis = max(range(len(views[0].shape)), key=lambda a: max(abs(v.strides[a]) * (v.shape[a] - 1) for v in views))
    n = views[0].shape[axis]
    if n == 1:
        raise LimitExceeded(
            f"fused {title}: an operand spans more than the {limit:,} bytes that this device binds at a time"
        )
    half = -(-n // 2)
    half = min(-(-half // 1024) * 1024, n - 1) if n > 1024 else half
    for start, count in ((0, half), (half, n - half)):
        piece = [
            Strided((*v.shape[:axis], count, *v.shape[axis + 1 :]), v.strides, v.offset + start * v.strides[axis])
            for v in views
        ]
        yield from windows(piece, sizes, limit, title)


def span(view: Strided) -> tuple[int, int]:
    """Lowest element that a view touches, and how many elements from there to its highest."""
    reach = [(n - 1) * s for n, s in zip(view.shape, view.strides)]
    return view.offset + sum(r for r in reach if r < 0), 1 + sum(abs(r) for r in reach)


def cut_buffer(buffer: Any, view: Strided, size: int, limit: int) -> tuple[Any, Strided]:
    """The buffer itself if it can be bound whole, else an aligned part of it that holds the view."""
    if buffer.bound_bytes <= limit:
        return buffer, view
    low, count = span(view)
    start = low * size // 256 * 256
    end = min((low + count) * size, buffer.nbytes)
    return buffer.view(start, end - start), replace(view, offset=view.offset - start // size)


def generate(
    body: Body, keys: list[Any], loads: list[Strided], positions: list[Strided], out: Strided, dtype: str, *, wg: int
) -> tuple[str, dict[str, Any], list[str], int]:
    """Text of the kernel, its Params, names of the loads, and how many of the n items a workgroup handles.

    An item is a vector of four elements where the innermost axis allows it for every operand, else one element.
    """
    shape, strides = out.shape, [v.strides for v in (*loads, *positions, out)]
    offsets = [v.offset for v in (*loads, *positions, out)]
    count = len(loads)
    wide = bool(shape) and shape[-1] % 4 == 0 and strides[-1][-1] == 1 and all(s[-1] in (0, 1) for s in strides)
    flags = [wide and s[-1] == 1 for s in strides]
    if wide:
        aligned = [
            all(step % 4 == 0 for step in s[:-1]) and o % 4 == 0
            for j, (s, o, flag) in enumerate(zip(strides, offsets, flags))
            if flag and not count <= j < count + len(positions)
        ]
        wide = all(aligned)
        flags = [wide and flag for flag in flags]
    if wide:
        shape = (*shape[:-1], shape[-1] // 4)
        for j, flag in enumerate(flags):
            if count <= j < count + len(positions):
                strides[j] = (*strides[j][:-1], strides[j][-1] * 4)
            elif flag:
                strides[j] = (*(step // 4 for step in strides[j][:-1]), 1)
                offsets[j] //= 4
        shape, strides = coalesce(shape, strides)
    addresses = Addresses(shape, list(zip(strides, offsets)))
    declared, names = bindings(body.loads, keys, flags[:count], 1)
    largest = 4 * max(DTYPES[d][0] for d in (dtype, *(load.dtype for load in body.loads)))
    steps = STEPS[largest] if wide else ELEMENTS
    lines = addresses.coordinates("i", 0, len(shape))
    stored_type = STORED[dtype]
    element = f"vec4<{stored_type}>" if wide else stored_type
    arguments: list[list[str]] = [[] for _ in range(4 if wide else 1)]
    for j, load in enumerate(body.loads):
        lines.append(f"let v{j} = {names[j]}[{addresses.text[j]}];")
        for lane, argument in enumerate(arguments):
            argument.append(loaded(f"v{j}.{'xyzw'[lane]}" if flags[j] else f"v{j}", load.dtype))
    for j in range(len(positions)):
        lines.append(f"let q{j} = {addresses.text[count + j]};")
        for lane, argument in enumerate(arguments):
            argument.append(f"q{j} + {lane}u" if flags[count + j] and lane else f"q{j}")
    calls = [stored(f"element({', '.join(argument)})", dtype) for argument in arguments]
    result = calls[0] if not wide else f"{element}(\n    " + ",\n    ".join(calls) + ")"
    lines.append(f"out[{addresses.text[-1]}] = {result};")
    fields = [("n", "u32", math.prod(shape)), *addresses.fields, *body.fields]
    code = [
        f"// fused: {body.title}",
        f"struct Params {{ {', '.join(f'{name}: {type_}' for name, type_, _ in fields)} }}",
        f"@group(0) @binding(0) var<storage, read_write> out: array<{element}>;",
        *declared,
        f"@group(0) @binding({len(declared) + 1}) var<uniform> p: Params;",
        *with_library(body.function()),
        f"@compute @workgroup_size({wg})",
        "fn fused(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,",
        "         @builtin(local_invocation_index) lane: u32) {",
        f"  let start = (wg.y * grid.x + wg.x) * {steps * wg}u + lane;",
        f"  for (var step = 0u; step < {steps}u; step++) {{",
        f"    let i = start + step * {wg}u;",
        "    if (i < p.n) {",
        *(f"      {line}" for line in lines),
        "    }",
        "  }",
        "}",
    ]
    return "\n".join(code), {name: value for name, _, value in fields}, names, steps * wg
