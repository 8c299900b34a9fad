"""Element-wise work in the kernel that makes its operand: what follows a matrix product becomes its epilogue.

A product waits until its value is read. If the reader is an element-wise kernel over the same elements, both become one
dispatch: the shader's slot `epilogue` computes the expression from the sum in a register. Where others read the product
too (the input of an activation, which backward needs), the kernel writes both: storing the product costs what it would
have cost anyway, and it is not read back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.graph.codegen import STORED, Addresses, Body, bindings, loaded, stored, with_library
from nn.graph.expr import Expr, Load, Value, coalesce, scalars
from nn.graph.ir import Cast, Map, Node, Reshape, Strided, View
from nn.ops.base import Array, Epilogue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu import Capabilities, Recorder

    Operands = tuple[tuple[Value, Strided], ...]

FIRST_BINDING = 5  # those before it are the product's own
MAX_FIELDS = 40  # 4-byte Params fields of an epilogue; a product's own are 24 of 64 at most


@dataclass
class Waiting:
    """An operation that has not become a step yet, because what reads its result may join it."""

    node: Node
    operands: Operands
    result: Value

    def takes(self, caps: Capabilities, expr: Expr, value: Value, at: Strided, *, kept: bool) -> bool:
        """Whether writing `expr` to `value` can be its epilogue. kept: others read its own result too."""
        own = [load for load in expr.loads if load.value is self.result]
        size = self.result.spec.size
        if isinstance(expr, Load) or not own or any(math.prod(a.shape) != size for a in (at, *(x.at for x in own))):
            return False
        if any(not a.contiguous or a.offset for a in (at, *(load.at for load in own))):
            return False
        if value.spec.dtype != self.result.spec.dtype and not kept:
            return False
        others = {load.value for load in expr.loads if load.value is not self.result}
        if len(self.operands) + 1 + len(others) + kept > caps.max_storage_buffers:
            return False
        if max(v.spec.nbytes for v in (value, self.result, *others)) > caps.max_binding - 512:
            return False
        rank = max(len(at.shape), 1)
        return rank + len(expr.loads) * (1 + rank) + scalars(expr) <= MAX_FIELDS


@dataclass
class FusedStep:
    """An operation with an epilogue: `result` is what the operation makes, `value` what `expr` makes of it.

    kept: both are written.
    """

    node: Node
    operands: Operands
    result: Value
    expr: Expr
    value: Value
    kept: bool

    def __post_init__(self) -> None:
        self.body = Body(self.expr, "f_")
        self.inputs = [load for load in self.body.loads if load.value is not self.result]
        self.reads = tuple(dict.fromkeys([*(v for v, _ in self.operands), *(load.value for load in self.inputs)]))
        self.writes = (self.result, self.value) if self.kept else (self.value,)

    def record(self, record: Recorder, array_of: Callable[[Value], Any]) -> None:
        from nn.graph.fuse import array_at  # here: that module imports this one

        operands = [array_at(array_of(value), at) for value, at in self.operands]
        out = array_of(self.result if self.kept else self.value)
        out = Array(out.buffer, self.result.spec.shape, self.result.spec.dtype)
        self.node.op.lower_with(record, self.epilogue(array_of), *operands, out)

    def epilogue(self, array_of: Callable[[Value], Any]) -> Epilogue:
        """The slot's text and what it reads, in the memory that `array_of` gives."""
        body, inputs = self.body, self.inputs
        sources = [*(load.at for load in inputs), *(index.at for index in body.indices)]
        own = next(load.at for load in body.loads if load.value is self.result)
        shape, strides = coalesce(own.shape, [at.strides for at in sources])
        addresses = Addresses(shape, list(zip(strides, (at.offset for at in sources))), "f_")
        keys = [load.value for load in inputs]
        declared, names = bindings(inputs, keys, [False] * len(inputs), FIRST_BINDING, "e")
        buffers = {name: array_of(value).buffer for name, value in zip(names, keys)}
        read = iter(loaded(f"{n}[{at}]", load.dtype) for n, at, load in zip(names, addresses.text, inputs))
        arguments = ["value" if load.value is self.result else next(read) for load in body.loads]
        made = f"element({', '.join([*arguments, *addresses.text[len(inputs) :]])})"
        if self.kept:
            dtype = self.value.spec.dtype
            number = FIRST_BINDING + len(declared)
            declared.append(f"@group(0) @binding({number}) var<storage, read_write> also: array<{STORED[dtype]}>;")
            buffers["also"] = array_of(self.value).buffer
            ends = [f"also[i] = {stored(made, dtype)};", "return value;"]
        else:
            ends = [f"return {made};"]
        lines = ["let i = p.out_offset + row * p.n + col;", *addresses.coordinates("i", 0, len(shape)), *ends]
        text = [
            f"// fused: {body.title}",
            *declared,
            *with_library(body.function()),
            "fn epilogue(value: f32, row: u32, col: u32) -> f32 {",
            *(f"  {line}" for line in lines),
            "}",
        ]
        fields = [*addresses.fields, *body.fields]
        extra = "".join(f"{name}: {type_}, " for name, type_, _ in fields)
        return Epilogue("\n".join(text), extra, {name: value for name, _, value in fields}, buffers)


def may_wait(node: Node, users: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether an element-wise function of as many elements reads the node, directly or reshaped."""
    if not node.op.takes_epilogue or not node.spec.size:
        return False
    todo = list(users.get(node, ()))
    while todo:
        user = todo.pop()
        if isinstance(user.op, Map | Cast):
            return True
        if isinstance(user.op, Reshape):
            todo += users.get(user, ())
    return False


def read_elsewhere(node: Node, reader: Node, users: Mapping[Node, Sequence[Node]], asked: set[Node]) -> bool:
    """Whether anything but the kernel that makes `reader` needs the value of `node`."""
    inside: set[Node] = set()  # what the kernel computes on its way
    todo = [reader]
    while todo:
        at = todo.pop()
        if at not in inside and at.value is None and (at is reader or isinstance(at.op, Map | Cast | View)):
            inside.add(at)
            todo += at.inputs
    todo, seen = [node], {reader}
    while todo:
        at = todo.pop()
        if at in asked:
            return True
        for user in users.get(at, ()):
            if user not in inside:
                return True
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return False


__all__ = ["FusedStep", "Waiting", "may_wait", "read_elsewhere"]
