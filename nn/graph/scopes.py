"""Where nodes are being made: in which part of a model, in which recomputation, in which capture by jit."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nn.graph.ir import Node


class _Here(threading.local):
    """Of this thread: the path in a model, and the number of the recomputation (0: none)."""

    path = ""
    region = 0


here = _Here()
_regions = itertools.count(1)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Nodes made in the block belong to this part of a model: `named("layers.3")`, and in it `named("attention")`, give
    the path "layers.3.attention". For traces and profiles; nothing else depends on it."""
    before = here.path
    here.path = f"{before}.{name}" if before else name
    try:
        yield
    finally:
        here.path = before


@contextlib.contextmanager
def in_region(region: int) -> Iterator[None]:
    """Nodes made in the block belong to the recomputation of this number."""
    before = here.region
    here.region = region
    try:
        yield
    finally:
        here.region = before


@contextlib.contextmanager
def recomputation() -> Iterator[None]:
    """Nodes made in the block are computed although equal ones are there, so that those need not be kept."""
    with in_region(next(_regions)):
        yield


@dataclass
class Left:
    """What a traced function did to the .grad of a tensor from outside: `before` it was this; `cleared`: it was
    replaced first, not added to."""

    tensor: Any
    before: Any
    cleared: bool


class Trace:
    """One capture of a function by jit.

    writes: the tensors that kernels write in place while it is traced, with the nodes they had. before: what the host
    has to do before each replay (write a learning rate, advance a random generator). left: tensors from outside whose
    .grad was set.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter_ns()
        self.writes: dict[int, tuple[Any, Node]] = {}
        self.before: list[Callable[[], None]] = []
        self.left: dict[int, Left] = {}

    def wrote(self, tensor: Any, node: Node) -> None:
        """A kernel writes into the tensor, which had this node."""
        self.writes.setdefault(id(tensor), (tensor, node))

    def set_grad(self, tensor: Any, before: Any, *, added: bool) -> None:
        """The .grad of a tensor was `before` and changes: it is replaced, or something is added."""
        if id(tensor) not in self.left and tensor.node.born < self.start:
            self.left[id(tensor)] = Left(tensor, before, not added)

    def undo(self) -> None:
        """Tensors from outside are as they were before the function was traced."""
        for tensor, node in self.writes.values():
            tensor.node = node
        for left in self.left.values():
            left.tensor._grad = left.before


class _Tracing(threading.local):
    """The captures that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []


_tracing = _Tracing()


def current_trace() -> Trace | None:
    """The capture that this thread is in, if any."""
    return _tracing.traces[-1] if _tracing.traces else None


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """What is made in the block belongs to this capture."""
    _tracing.traces.append(trace)
    try:
        yield
    finally:
        _tracing.traces.pop()
