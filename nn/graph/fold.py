"""Writes and records reductions: the slots of shaders/reduce/fold.wgsl, and how a fold is cut into passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu import LimitExceeded, wgsl
from nn.graph.codegen import MAX_ELEMENTS, REGISTER, STORED, Addresses, Body, bindings, loaded, with_library
from nn.graph.expr import Expr, Value, coalesce
from nn.graph.ir import Reduce
from nn.ops.base import Spec

if TYPE_CHECKING:
    from gpu import Capabilities, Recorder

BUSY = 1 << 16  # invocations that keep a large GPU busy
WORKGROUPS = 528  # of 256 invocations that do: four for each core of an H200
LAST = 4096  # partial results a row that one more pass joins
NARROW = 32  # neighbouring columns that make a whole line of a cache
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
    """Of a number as f32."""
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
    return Fold("vec2<u32>", 0, first, f"vec2<u32>({order}({{x}}), {{col}})", "a.y")


@dataclass(frozen=True)
class FoldVariant:
    """An entry of shaders/reduce/fold.wgsl with its constants, named as there."""

    entry: str
    pack: int = 1
    lanes: int = 1
    wg: int = 64
    subgroups: bool = False

    @property
    def columns(self) -> int:
        """Columns that come at once."""
        return self.pack if self.entry == "fold_rows" else 1

    @property
    def name(self) -> str:
        how = " subgroups" if self.subgroups else ""
        return f"{self.entry} {self.lanes} lanes of {self.pack}, {self.wg}{how}"


def reduce_steps(
    caps: Capabilities,
    op: Reduce,
    expr: Expr,
    shape: tuple[int, ...],
    out: Value,
    *,
    variant: FoldVariant | None = None,
) -> list[FoldStep]:
    """The dispatches that fold `expr`, an expression over `shape` (bool for any and all), along op.axes into `out`.

    variant: how the first of them works; None takes the device's default. It must be one of `variants`.
    """
    kept = tuple(a for a in range(len(shape)) if a not in op.axes)
    rows, cols = math.prod(shape[a] for a in kept), math.prod(shape[a] for a in op.axes)
    fold = fold_of(op.kind, REGISTER[expr.dtype])
    matrix = Matrix.of(expr, shape, kept, op.axes)
    pair = (2,) if fold.acc == "vec2<u32>" else ()
    width = 8 if pair else 4
    steps: list[FoldStep] = []
    source: Expr | Value = expr
    while True:
        chosen = variant if variant is not None and not steps else default(caps, matrix, rows, cols, width=width)
        parts, chunk = (1, cols // chosen.columns) if steps and cols <= LAST else split(chosen, rows, cols)
        across = chosen.entry == "fold_columns"
        partial = (parts, rows, *pair) if across else (rows, parts, *pair)
        target = out if parts == 1 else Value(Spec(partial, "u32" if pair else fold.acc))
        count = math.prod(shape[a] for a in op.axes)
        steps.append(FoldStep(caps, op, fold, source, matrix, target, rows, cols, parts, chunk, count, chosen))
        if parts == 1:
            return steps
        source, cols = target, parts
        matrix = Matrix((rows,), (parts,), (((1, rows) if across else (parts, 1)),), (0,), single=bool(pair))


@dataclass(frozen=True)
class Matrix:
    """What is folded, as a matrix: sizes of its row and column axes, and each source's strides over both and offset.

    Sources are the loads, then the positions of an expression (`positions` of them); or partial results.
    single: elements are pairs, which never come four at a time.
    """

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    positions: int = 0
    single: bool = False

    @classmethod
    def of(cls, expr: Expr, shape: tuple[int, ...], kept: tuple[int, ...], folded: tuple[int, ...]) -> Matrix:
        """The matrix of an expression over `shape`: axes that are kept as rows, those that are folded as columns."""
        body = Body(expr)
        sources = [*(load.at for load in body.loads), *(index.at for index in body.indices)]
        outer, over = coalesce(tuple(shape[a] for a in kept), [tuple(s.strides[a] for a in kept) for s in sources])
        inner, along = coalesce(tuple(shape[a] for a in folded), [tuple(s.strides[a] for a in folded) for s in sources])
        strides = tuple((*o, *i) for o, i in zip(over, along))
        return cls(outer, inner, strides, tuple(s.offset for s in sources), len(body.indices))

    def runs(self, axis: int) -> bool:
        """Whether neighbours along an axis are neighbours in memory, for one of the loads at least."""
        return any(s[axis] == 1 for s in self.strides[: len(self.strides) - self.positions])

    def packs(self, axis: int) -> bool:
        """Whether each load gives four values along an axis at once, as an aligned vector or as one repeated value."""
        sizes = (*self.outer, *self.inner)
        loads = len(self.strides) - self.positions
        if self.single or sizes[axis] % 4 or any(s[axis] not in (0, 1) for s in self.strides) or not self.runs(axis):
            return False
        return all(
            offset % 4 == 0 and all(step % 4 == 0 for a, step in enumerate(s) if a != axis)
            for s, offset in zip(self.strides[:loads], self.offsets)
            if s[axis] == 1
        )


def variants(caps: Capabilities, matrix: Matrix) -> list[FoldVariant]:
    """All that are valid for this matrix, in a fixed order."""
    found = [FoldVariant("fold_serial")]
    last_row, last_col = len(matrix.outer) - 1, len(matrix.outer) + len(matrix.inner) - 1
    for entry, axis, there in (("fold_rows", last_col, matrix.inner), ("fold_columns", last_row, matrix.outer)):
        for pack in (4, 1) if there and matrix.packs(axis) else (1,):
            for lanes in (1, 4, 32, 256):
                for subgroups in (True, False) if caps.subgroups and entry == "fold_rows" else (False,):
                    found.append(FoldVariant(entry, pack, lanes, 256, subgroups))
    return found


def default(caps: Capabilities, matrix: Matrix, rows: int, cols: int, *, width: int = 8) -> FoldVariant:
    """Rows or columns by what lies along memory; as many invocations an output as keep a large GPU busy.

    width: bytes of a partial result.
    """
    if caps.kind != "gpu":
        return FoldVariant("fold_serial")
    wg = 256
    last_row, last_col = len(matrix.outer) - 1, len(matrix.outer) + len(matrix.inner) - 1
    along = bool(matrix.inner) and matrix.runs(last_col)
    if not along and matrix.outer and (matrix.runs(last_row) or rows >= 1024):
        pack = 4 if matrix.packs(last_row) else 1
        lanes, wide = power(-(-rows // pack), NARROW // pack), wg
        while 2 * wide <= min(caps.max_invocations, 1024):
            wide *= 2
        while wide * pack * width > caps.max_workgroup_bytes:
            wide //= 2
        return FoldVariant("fold_columns", pack, lanes, wide)
    pack = 4 if matrix.inner and matrix.packs(last_col) else 1
    packs = cols // pack
    lanes = power(packs // 4, 8) if packs < 128 else power(packs // 16 + 1, wg)
    while rows * lanes < BUSY and lanes < min(wg, packs):
        lanes *= 2
    return FoldVariant("fold_rows", pack, lanes, wg if rows * lanes >= BUSY else max(lanes, 64), caps.subgroups)


def power(n: int, most: int) -> int:
    """The power of two at or above n, from 1 to `most`."""
    return min(1 << max(n - 1, 0).bit_length(), most)


def split(chosen: FoldVariant, rows: int, cols: int) -> tuple[int, int]:
    """Parts a row is folded in, and columns (packs of them) a part. Parts keep the device busy and f32 sums short."""
    if chosen.entry == "fold_serial":
        busy, least, unit, longest = -(-64 // rows), 64, 1, 1024
    elif chosen.entry == "fold_rows":
        cols //= chosen.pack
        unit = 4 * chosen.lanes
        busy, least, longest = WORKGROUPS * chosen.wg // (rows * chosen.lanes), 4 * unit, 1024 * unit
    else:
        unit, tiles = 8 * chosen.wg // chosen.lanes, -(-rows // (chosen.pack * chosen.lanes))
        busy = 1 if tiles * chosen.wg >= 96 * 1024 else 2 * WORKGROUPS * 256 // (tiles * chosen.wg)
        least, longest = unit, 512 * unit
    parts = max(1, min(busy, cols // least), -(-cols // longest))
    chunk = -(-cols // parts)
    chunk = chunk if parts == 1 else -(-chunk // unit) * unit
    return -(-cols // chunk), chunk


@dataclass
class FoldStep:
    """One dispatch of shaders/reduce/fold.wgsl."""

    caps: Capabilities
    op: Reduce
    fold: Fold
    source: Expr | Value  # the expression of the first pass, the partial results of a later one
    matrix: Matrix
    out: Value
    rows: int
    cols: int
    parts: int
    chunk: int
    count: int  # elements of a whole row: what a mean divides by
    variant: FoldVariant

    def __post_init__(self) -> None:
        if self.rows * self.parts > MAX_ELEMENTS or self.cols > MAX_ELEMENTS:
            raise LimitExceeded(
                f"{self.op.kind}: {self.rows:,} x {self.cols:,} elements; indices are 32 bits, split the tensor"
            )
        self.body = None if isinstance(self.source, Value) else Body(self.source)
        inputs = [self.source] if isinstance(self.source, Value) else [load.value for load in self.source.loads]
        self.reads = tuple(dict.fromkeys(inputs))
        self.writes = (self.out,)

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        chosen = self.variant
        slots, declared, fields, names = self.values_slot()
        acc, final = self.fold.acc, self.parts == 1
        kind, dtype = self.op.kind, self.op.dtype
        out_type = STORED[dtype] if final else acc
        leave = "a * p.scale" if kind == "mean" else self.fold.leave
        if final and dtype == "f16":
            leave = f"f16({leave})"
        elif final and kind.startswith("arg"):
            leave = f"i32({leave})"
        lines = with_library([*slots, f"fn join(a: {acc}, b: {acc}) -> {acc} {{ return {self.fold.join}; }}"])
        neutral = "vec2<u32>(0u, 0xffffffffu)" if acc == "vec2<u32>" else f"bitcast<{acc}>(p.neutral)"
        source = wgsl.load(
            "reduce/fold.wgsl",
            types={"Acc": acc, "Out": out_type},
            constants={"PACK": chosen.pack, "LANES": chosen.lanes},
            slots={
                "values": "\n".join([*declared, *lines[:-1]]),
                "join": lines[-1],
                "neutral": f"fn neutral() -> Acc {{ return {neutral}; }}",
                "finish": f"fn finish(a: Acc) -> Out {{ return {leave if final else 'a'}; }}",
            },
            subgroups=chosen.subgroups,
        )
        extra = "".join(f"{name}: {type_}, " for name, type_, _ in fields)
        title = f"{kind}({self.body.title})" if self.body and self.body.names else kind
        text = f"// fused: {title}\n" + source.code.replace("struct Params { ", f"struct Params {{ {extra}", 1)
        kernel = record.device.kernel_source(
            text, chosen.entry, label=f"fused {title}", constants={"WG": chosen.wg}
        )  # fmt: skip
        record(
            kernel,
            grid=self.grid,
            out=array_of(self.out).buffer,
            rows=self.packed_rows,
            parts=self.parts,
            cols=self.packed_cols,
            chunk=self.chunk,
            scale=1 / self.count,
            neutral=self.fold.neutral,
            **{name: array_of(value).buffer for name, value in names.items()},
            **{name: value for name, _, value in fields},
        )

    @property
    def packed_rows(self) -> int:
        """Rows as the shader counts them."""
        return self.rows // self.variant.pack if self.variant.entry == "fold_columns" else self.rows

    @property
    def packed_cols(self) -> int:
        """Columns as the shader counts them."""
        return self.cols // self.variant.columns

    @property
    def grid(self) -> int:
        """Workgroups, as the header of shaders/reduce/fold.wgsl has it."""
        chosen = self.variant
        if chosen.entry == "fold_columns":
            return -(-self.packed_rows // chosen.lanes) * self.parts
        outputs = self.rows * self.parts
        return -(-outputs // (chosen.wg // chosen.lanes if chosen.entry == "fold_rows" else chosen.wg))

    def values_slot(self) -> tuple[list[str], list[str], list[tuple[str, str, Any]], dict[str, Value]]:
        """WGSL of values(row, col), its declarations, its Params fields, and what its buffers are."""
        pack, acc, matrix, body = self.variant.pack, self.fold.acc, self.matrix, self.body
        outer, inner = list(matrix.outer), list(matrix.inner)
        strides, offsets = [list(s) for s in matrix.strides], list(matrix.offsets)
        count = len(strides) - matrix.positions
        wide = [False] * len(strides)
        if pack > 1:
            axis = len(outer) - 1 if self.variant.entry == "fold_columns" else len(outer) + len(inner) - 1
            sizes = outer if axis < len(outer) else inner
            sizes[-1] //= pack
            for j, steps in enumerate(strides):
                wide[j] = steps[axis] == 1
                if j >= count:
                    steps[axis] *= pack
                elif wide[j]:
                    strides[j] = [1 if a == axis else step // pack for a, step in enumerate(steps)]
                    offsets[j] //= pack
        addresses = Addresses((*outer, *inner), [(tuple(s), o) for s, o in zip(strides, offsets)])
        if body is None:
            element = f"vec4<{acc}>" if wide[0] else acc
            declared = [f"@group(0) @binding(3) var<storage, read> b0: array<{element}>;"]
            values, dtypes, reads = dict(zip(["b0"], self.reads)), [acc], ["b0"]
        else:
            declared, reads = bindings(body.loads, [load.value for load in body.loads], wide[:count], 3)
            values = {name: load.value for name, load in zip(reads, body.loads)}
            dtypes = [load.dtype for load in body.loads]
        code = [*addresses.coordinates("row", 0, len(outer))]
        code += addresses.coordinates("col", len(outer), len(outer) + len(inner))
        code += [f"let v{j} = {reads[j]}[{addresses.text[j]}];" for j in range(count)]
        results = []
        for lane in range(pack):
            arguments = [loaded(f"v{j}.{'xyzw'[lane]}" if wide[j] else f"v{j}", dtypes[j]) for j in range(count)]
            arguments += [f"{t} + {lane}u" if wide[count + j] else t for j, t in enumerate(addresses.text[count:])]
            if body is None:
                results += arguments
                continue
            col = f"{pack}u * col + {lane}u" if pack > 1 and self.variant.entry == "fold_rows" else "col"
            results.append(self.fold.enter.format(x=f"element({', '.join(arguments)})", col=col))
        code.append(f"return array<Acc, PACK>({', '.join(results)});")
        head = [] if body is None else body.function()
        lines = [*head, "fn values(row: u32, col: u32) -> array<Acc, PACK> {", *(f"  {line}" for line in code), "}"]
        return lines, declared, [*addresses.fields, *(body.fields if body else [])], values
