"""Parameters of a group in one buffer, so that one dispatch updates them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.graph.ir import Pack, leaf
from nn.ops.base import Array, Op, Spec
from nn.ops.create import zeros
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from gpu import Device, Recorder
    from nn.layers import Parameter

ALIGN = 64  # elements of f32: what a buffer may be bound at is a multiple of 256 bytes
WG = 256


def offsets_of(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Where tensors of these sizes start in a row, each aligned; and the row's length."""
    ends = [0, *itertools.accumulate(-(-n // ALIGN) * ALIGN for n in sizes)]
    return tuple(ends[:-1]), ends[-1]


class Flat:
    """Some parameters, moved into one buffer; their states lie in buffers of the same layout.

    weights: (size,) f32, the row of all of them. states: one row for each name. hyper: numbers that change from step to
    step. The parameters stay tensors of their own: each reads and writes its part of the row.
    """

    def __init__(self, device: Device, parameters: Sequence[Parameter], states: Sequence[str], numbers: int) -> None:
        self.device, self.parameters = device, list(parameters)
        self.offsets, self.size = offsets_of(p.numel() for p in parameters)
        buffer = device.alloc(4 * self.size)
        buffer.write(np.zeros(self.size, np.float32))
        self.weights = Tensor(Array(buffer, (self.size,), "f32"))
        pairs = []
        for parameter, offset in zip(parameters, self.offsets):
            old, n = parameter.array(), parameter.numel()
            part = buffer.view(4 * offset, max(4 * n, 4))
            if n:
                pairs.append((old.buffer, part))
            parameter.node.stale = "the optimizer, which moved it"
            parameter.node = leaf(Array(part, parameter.shape, "f32"))
        device.memory.copy(pairs)
        self.states = {name: Tensor(np.zeros(self.size, np.float32), device) for name in states}
        self.hyper = Tensor(np.zeros(numbers, np.float32), device)
        self.one = Tensor(np.ones(1, np.float32), device)  # the factor of a step without one

    def gradient(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """All .grad in one row, and the runs (start, length) of it that belong to parameters that have one."""
        parts, runs = [], []
        ends = (*self.offsets[1:], self.size)
        for parameter, start, end in zip(self.parameters, self.offsets, ends):
            if parameter.grad is None:
                parts.append(zeros(parameter.shape, device=self.device))
                continue
            parts.append(parameter.grad.to("f32"))
            if runs and runs[-1][0] + runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end - runs[-1][0])
            else:
                runs.append((start, end - start))
        return apply(Pack(self.offsets, self.size), *parts), runs

    def part(self, name: str, index: int) -> np.ndarray:
        """A parameter's part of a state, on the host."""
        parameter = self.parameters[index]
        start = self.offsets[index]
        return self.states[name].numpy()[start : start + parameter.numel()].reshape(parameter.shape)

    def load(self, name: str, values: Mapping[int, np.ndarray]) -> None:
        """Put parameters' parts of a state back."""
        row = self.states[name].numpy()
        for index, value in values.items():
            start = self.offsets[index]
            row[start : start + value.size] = np.asarray(value, np.float32).reshape(-1)
        self.states[name].array().buffer.write(row)

    def update(self, kernel: UpdateRow, gradient: Tensor, factor: Tensor) -> None:
        """One step, in place."""
        apply(kernel, gradient, factor, self.hyper, self.weights, *self.states.values(), *self.parameters)


@dataclass(frozen=True)
class UpdateRow(Op):
    """An optimizer's kernel over rows: operands gradient, factor, hyper, weights, the states by name, then the
    parameters that lie in the row of weights and so are written too. runs: the parts of the rows that take part."""

    path: str
    entry: str
    states: tuple[str, ...]
    count: int
    runs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[str, Any], ...] = ()
    group = "optimizer"

    @property
    def name(self) -> str:
        return self.entry

    @property
    def mutates(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(range(3, 4 + len(self.states) + self.count))

    def infer(self, *inputs: Spec) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None

    def lower(self, record: Recorder, *arrays: Any) -> None:
        gradient, factor, hyper, weights, *rest = arrays
        kernel = record.device.kernel(self.path, self.entry, constants=dict(self.constants))
        buffers = {name: array.buffer for name, array in zip(self.states, rest)}
        for start, length in self.runs:
            record(
                kernel, -(-length // (4 * WG)), grad=gradient.buffer, factor=factor.buffer, hyper=hyper.buffer,
                weight=weights.buffer, size=length // 4, first=start // 4, **buffers,
            )  # fmt: skip
