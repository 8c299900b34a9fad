"""What has to be remembered while operations are applied, so that gradients can be taken afterwards.

Each operation on a tensor that needs a gradient leaves a `History`: the operation and its operands. A result points to
its history, the history to the operands, and so on back to the leaves: tensors that somebody asked gradients of. The
walk back is in nn/autograd.py, the gradient rules stand beside the operations (`Op.gradient`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nn.ops.base import FLOATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nn.graph.ir import Node
    from nn.ops.base import Op
    from nn.tensor import Tensor

Hook = Callable[["Tensor"], "Tensor | None"]
DIFFERENTIABLE = (*FLOATS, "bf16")  # dtypes that can need a gradient


class _Mode(threading.local):
    """Whether operations of this thread leave a history."""

    recording = True


_mode = _Mode()


def is_grad_enabled() -> bool:
    """Whether operations on tensors that need gradients are remembered, in this thread."""
    return _mode.recording


class set_grad_enabled(contextlib.ContextDecorator):
    """`with set_grad_enabled(flag):` remembers operations or not, in this thread. Also a decorator."""

    def __init__(self, mode: bool) -> None:
        self.mode, self.before = bool(mode), []

    def __enter__(self) -> None:
        self.before.append(_mode.recording)
        _mode.recording = self.mode

    def __exit__(self, *error: object) -> None:
        _mode.recording = self.before.pop()


def no_grad(function: Callable[..., Any] | None = None) -> Any:
    """`with no_grad():` computes without remembering how; `@no_grad` and `@no_grad()` do so for a whole function."""
    if function is None:
        return set_grad_enabled(False)

    @functools.wraps(function)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with set_grad_enabled(False):
            return function(*args, **kwargs)

    return quiet


def enable_grad() -> set_grad_enabled:
    """`with enable_grad():` remembers again, inside of no_grad."""
    return set_grad_enabled(True)


class History:
    """One applied operation: `tensors` its operands, `nodes` their values at that time, `results` its results' nodes.

    hooks: by result, functions that see (and may replace) its gradient. kept: results that want it in .grad.
    """

    __slots__ = ("__weakref__", "hooks", "kept", "nodes", "op", "results", "tensors")

    def __init__(self, op: Op, tensors: Sequence[Tensor], nodes: Sequence[Node], results: Sequence[Node]) -> None:
        self.op, self.results = op, tuple(results)
        self.tensors: tuple[Tensor, ...] | None = tuple(tensors)
        self.nodes: tuple[Node, ...] = tuple(nodes)
        self.hooks: dict[int, dict[int, Hook]] = {}
        self.kept: dict[int, Any] = {}

    def release(self) -> None:
        """Let the operands go: the walk has passed."""
        self.tensors, self.nodes = None, ()

    def __repr__(self) -> str:
        return f"History({getattr(self.op, 'name', type(self.op).__name__)})"


def remember(op: Op, tensors: Sequence[Tensor], nodes: Sequence[Node], results: Sequence[Tensor]) -> None:
    """Give the results a history, if gradients are wanted and can flow: through float results of float operands."""
    if not (_mode.recording and any(t.requires_grad for t in tensors)):
        return
    if op.mutates:
        raise RuntimeError(
            f"{type(op).__name__}: writes in place, and an operand needs a gradient, which cannot flow through the "
            "write; put the call under no_grad(), or .detach() the operand"
        )
    history = History(op, tensors, nodes, [t.node for t in results])
    for i, result in enumerate(results):
        if result.dtype in DIFFERENTIABLE:
            result.history = (history, i)


class HookHandle:
    """What register_hook gives; remove() takes the hook off again."""

    def __init__(self, hooks: dict[int, Hook], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        self._hooks.pop(self._number, None)


def add_hook(hooks: dict[int, Hook], hook: Hook) -> HookHandle:
    """Put a hook behind those that are there."""
    number = max(hooks, default=-1) + 1
    hooks[number] = hook
    return HookHandle(hooks, number)
