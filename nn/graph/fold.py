"""Writes and records reductions: the slots of shaders/reduce/fold.wgsl, and how a fold is cut into passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu import LimitExceeded, wgsl
from nn.graph.codegen import MAX_ELEMENTS, REGISTER, STORED, WG, Addresses, Body, bindings, loaded, with_library
from nn.graph.expr import Expr, Value, coalesce
from nn.graph.ir import Reduce
from nn.ops.base import Spec

if TYPE_CHECKING:
    from gpu import Capabilities, Recorder

EMPTY: dict[str, float | int | bool] = {"sum": 0, "prod": 1, "mean": math.nan, "any": False, "all": True}


@dataclass(frozen=True)
class Fold:
    """One kind of reduction over a register type: accumulator, bits of the neutral element, three expressions."""

    acc: str
    neutral: int
    join: str
    enter: str = "{x}"
    leave: str = "a"


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def fold_of(kind: str, register: str) -> Fold:
    """How `kind` folds values of a register type (f32, i32, u32)."""
    floats = register == "f32"
    if kind in ("sum", "mean"):
        return Fold(register, 0, "a + b")
    if kind == "prod":
        return Fold(register, bits(1.0) if floats else 1, "a * b")
    if kind in ("any", "all"):
        return Fold("u32", int(kind == "all"), "a | b" if kind == "any" else "a & b", "select(0u, 1u, {x})")
    if kind in ("max", "min"):
        ends = {"f32": (bits(-math.inf), bits(math.inf)), "i32": (1 << 31, (1 << 31) - 1), "u32": (0, (1 << 32) - 1)}
        return Fold(register, ends[register][kind == "min"], f"{kind}_{register}(a, b)")
    order = f"order_{'down_' if kind == 'argmin' else ''}{register}"
    first = "select(b, a, a.x > b.x || (a.x == b.x && a.y < b.y))"  # ties: the lower index
    return Fold("vec2<u32>", 0, first, f"vec2<u32>({order}({{x}}), col)", "a.y")


def reduce_steps(caps: Capabilities, op: Reduce, expr: Expr, shape: tuple[int, ...], out: Value) -> list[FoldStep]:
    """The dispatches that fold `expr`, an expression over `shape` (bool for any and all), along op.axes into `out`."""
    kept = tuple(a for a in range(len(shape)) if a not in op.axes)
    rows, cols = math.prod(shape[a] for a in kept), math.prod(shape[a] for a in op.axes)
    fold = fold_of(op.kind, REGISTER[expr.dtype])
    steps: list[FoldStep] = []
    source: Expr | Value = expr
    while True:
        if isinstance(source, Value):
            grouped = caps.kind == "gpu" and cols >= WG
        else:
            grouped = group_pays(caps, source, shape, op.axes, rows, cols)
        parts = split(caps, rows, cols, grouped=grouped)
        pair = (2,) if fold.acc == "vec2<u32>" else ()
        target = out if parts == 1 else Value(Spec((rows, parts, *pair), "u32" if pair else fold.acc))
        steps.append(FoldStep(caps, op, fold, source, shape, (kept, op.axes), target, cols, parts, grouped))
        if parts == 1:
            return steps
        source, cols = target, parts


def group_pays(
    caps: Capabilities, expr: Any, shape: tuple[int, ...], axes: tuple[int, ...], rows: int, cols: int
) -> bool:
    """A workgroup a row: on GPUs, for long rows whose neighbours in memory are neighbours in the fold."""
    if caps.kind != "gpu" or cols < WG:
        return False
    inner = max((a for a in axes if shape[a] > 1), default=0)
    along = any(load.at.strides[inner] == 1 for load in expr.loads)
    return along or rows < 1024


def split(caps: Capabilities, rows: int, cols: int, *, grouped: bool) -> int:
    """How many parts a row is folded in. Parts keep the device busy and keep f32 sums short, so accurate."""
    width = 16 * WG if grouped else 64
    longest = 4096 * (WG if grouped else 1) if caps.kind == "gpu" else 1024
    wanted = 1024 if grouped else 1 << 18 if caps.kind == "gpu" else 64
    busy = max(1, min(-(-wanted // rows), cols // width))
    return max(busy, -(-cols // longest))


@dataclass
class FoldStep:
    """One dispatch of shaders/reduce/fold.wgsl."""

    caps: Capabilities
    op: Reduce
    fold: Fold
    source: Expr | Value  # the expression of the first pass, the partial results of a later one
    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    out: Value
    cols: int
    parts: int
    grouped: bool

    def __post_init__(self) -> None:
        self.rows = math.prod(self.shape[a] for a in self.axes[0])
        if self.rows * self.parts > MAX_ELEMENTS or self.cols > MAX_ELEMENTS:
            raise LimitExceeded(
                f"{self.op.kind}: {self.rows:,} x {self.cols:,} elements; indices are 32 bits, split the tensor"
            )
        self.body = None if isinstance(self.source, Value) else Body(self.source)
        inputs = [self.source] if isinstance(self.source, Value) else [load.value for load in self.source.loads]
        self.reads = tuple(dict.fromkeys(inputs))
        self.writes = (self.out,)

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        slots, declared, fields, names = self.value_slot()
        acc, final = self.fold.acc, self.parts == 1
        kind, dtype = self.op.kind, self.op.dtype
        out_type = STORED[dtype] if final else acc
        leave = "a * p.scale" if kind == "mean" else self.fold.leave
        if final and dtype == "f16":
            leave = f"f16({leave})"
        elif final and kind.startswith("arg"):
            leave = f"i32({leave})"
        group = "wg_sum" if kind in ("sum", "mean") and acc == "f32" else "tree"
        lines = with_library([*slots, f"fn join(a: {acc}, b: {acc}) -> {acc} {{ return {self.fold.join}; }}"])
        neutral = "vec2<u32>(0u, 0xffffffffu)" if acc == "vec2<u32>" else f"bitcast<{acc}>(p.neutral)"
        source = wgsl.load(
            "reduce/fold.wgsl",
            types={"Acc": acc, "Out": out_type},
            slots={
                "value": "\n".join([*declared, *lines[:-1]]),
                "join": lines[-1],
                "neutral": f"fn neutral() -> Acc {{ return {neutral}; }}",
                "finish": f"fn finish(a: Acc) -> Out {{ return {leave if final else 'a'}; }}",
                "join_group": f"fn join_group(lane: u32, a: Acc) -> Acc {{ return {group}(lane, a); }}",
            },
            subgroups=self.caps.subgroups,
        )
        extra = "".join(f"{name}: {type_}, " for name, type_, _ in fields)
        title = f"{kind}({self.body.title})" if self.body and self.body.names else kind
        text = f"// fused: {title}\n" + source.code.replace("struct Params { ", f"struct Params {{ {extra}", 1)
        outputs = self.rows * self.parts
        wg = WG if not self.grouped else min(256, self.caps.max_invocations)
        entry = "fold_group" if self.grouped else "fold_serial"
        kernel = record.device.kernel_source(text, entry, label=f"fused {title}", constants={"WG": wg})
        record(
            kernel,
            grid=outputs if self.grouped else -(-outputs // wg),
            out=array_of(self.out).buffer,
            outputs=outputs,
            parts=self.parts,
            cols=self.cols,
            chunk=-(-self.cols // self.parts),
            scale=1 / math.prod(self.shape[a] for a in self.axes[1]),
            neutral=self.fold.neutral,
            **{name: array_of(value).buffer for name, value in names.items()},
            **{name: value for name, _, value in fields},
        )

    def value_slot(self) -> tuple[list[str], list[str], list[tuple[str, str, Any]], dict[str, Value]]:
        """WGSL of value(row, col), its declarations, its Params fields, and what its buffers are."""
        acc = self.fold.acc
        if self.body is None:
            declared = [f"@group(0) @binding(3) var<storage, read> b0: array<{acc}>;"]
            code = [f"fn value(row: u32, col: u32) -> {acc} {{ return b0[row * p.cols + col]; }}"]
            return code, declared, [], dict(zip(["b0"], self.reads))
        body = self.body
        kept, folded = self.axes
        sources = [*(load.at for load in body.loads), *(index.at for index in body.indices)]
        outer, outer_strides = coalesce(
            tuple(self.shape[a] for a in kept), [tuple(s.strides[a] for a in kept) for s in sources]
        )
        inner, inner_strides = coalesce(
            tuple(self.shape[a] for a in folded), [tuple(s.strides[a] for a in folded) for s in sources]
        )
        ats = [((*o, *i), s.offset) for o, i, s in zip(outer_strides, inner_strides, sources)]
        addresses = Addresses((*outer, *inner), ats)
        keys = [load.value for load in body.loads]
        declared, names = bindings(body, keys, [False] * len(keys), 3)
        values = {name: load.value for name, load in zip(names, body.loads)}
        split_row = addresses.coordinates("row", 0, len(outer))
        split_col = addresses.coordinates("col", len(outer), len(outer) + len(inner))
        arguments = [loaded(f"{names[j]}[{addresses.text[j]}]", load.dtype) for j, load in enumerate(body.loads)]
        arguments += addresses.text[len(body.loads) :]
        call = f"element({', '.join(arguments)})"
        code = [
            *body.function(),
            f"fn value(row: u32, col: u32) -> {acc} {{",
            *(f"  {line}" for line in (*split_row, *split_col)),
            f"  return {self.fold.enter.format(x=call)};",
            "}",
        ]
        return code, declared, [*addresses.fields, *body.fields], values
