"""Activation checkpointing: keep what a part of a model was given, and compute the rest again for backward.

A stack of n blocks keeps the activations of all of them for backward. With each run of about sqrt(n) blocks under a
checkpoint it keeps sqrt(n) inputs and, while backward is inside of one run, that run's activations: O(sqrt(n)) memory
for one more forward pass, a third more compute. Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nn import tape
from nn.graph.jit import flatten, rebuild
from nn.graph.scopes import recomputation
from nn.ops.base import Op
from nn.random import Draw, again, kept
from nn.tensor import Tensor


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose activations backward computes again instead of keeping them. As torch.utils.checkpoint.

        for i in range(0, 24, 5):
            x = nn.checkpoint(lambda x: run(blocks[i : i + 5], x))(x)

    The function takes and returns tensors, in tuples, lists and dicts too, and other values as they are. It runs twice
    and has to build the same graph both times: dropout draws the same mask again, but what it writes in place (running
    statistics) is written twice. Parameters that it uses get their gradients as usual.
    Raises: RuntimeError in a walk with create_graph=True: second derivatives are not taken through a checkpoint.
    """
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not tape.is_grad_enabled():
            return function(*args, **kwargs)
        given: list[Tensor] = []
        flatten((args, kwargs), given)
        start = time.perf_counter_ns()
        stand_ins = [cut_off(t) for t in given]
        with kept() as draws:
            result = call(function, args, kwargs, stand_ins)
        results: list[Tensor] = []
        flatten(result, results)
        captured = taken_from_outside(results, stand_ins, start)
        op = Recompute(name, function, args, kwargs, len(given), [cut_off(t) for t in given], draws, result)
        fresh = [Tensor(t.node, t.device) for t in results]
        remembered = [t for t, old in zip(fresh, results) if old.requires_grad]
        op.places = tuple(i for i, old in enumerate(results) if old.requires_grad)
        if remembered:
            tensors = (*given, *captured)
            tape.remember(op, tensors, tuple(t.node for t in tensors), remembered)
        return rebuild(result, iter(fresh))

    return checkpointed


@dataclass(eq=False)
class Recompute(Op):
    """In the history only: the function, to be run again. Operands: its arguments, then what it takes from outside."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    count: int
    arguments: list[Tensor]
    draws: list[Draw]
    structure: Any
    places: tuple[int, ...] = field(default=(), init=False)

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        if tape.is_grad_enabled():
            raise RuntimeError(
                f"checkpoint {self.name}: a walk with create_graph=True passes it; second derivatives are not taken "
                "through a checkpointed function, call it without nn.checkpoint there"
            )
        gradients = list(dy) if isinstance(dy, tuple) else [dy]
        captured = list(tensors[self.count : len(tensors) - len(gradients)])
        stand_ins = [cut_off(t) for t in self.arguments]
        with as_leaves(captured):
            return self.walk(gradients, stand_ins, captured)

    def walk(
        self, gradients: Sequence[Tensor], stand_ins: list[Tensor], captured: list[Tensor]
    ) -> Sequence[Tensor | None]:
        """Run the function again, and back from its results to its arguments and what it takes from outside."""
        from nn.autograd import grad

        with tape.enable_grad(), recomputation(), again(self.draws):
            result = call(self.function, self.args, self.kwargs, stand_ins)
        results: list[Tensor] = []
        flatten(result, results)
        if len(results) <= max(self.places) or not all(results[i].requires_grad for i in self.places):
            raise RuntimeError(
                f"checkpoint {self.name}: the function gave other results when it was run again for backward; it has "
                "to build the same graph each time"
            )
        wanted = [t for t in (*stand_ins, *captured) if t.requires_grad]
        found = iter(grad([results[i] for i in self.places], wanted, gradients, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in (*stand_ins, *captured)]


@contextlib.contextmanager
def as_leaves(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In the block a walk ends at these tensors, and runs no hooks there: the walk outside goes on, and runs them."""
    before = [(t.history, t._wants_grad, t._hooks) for t in tensors]
    try:
        for t in tensors:
            t.history, t._wants_grad, t._hooks = None, True, None
        yield
    finally:
        for t, (history, wants, hooks) in zip(tensors, before):
            t.history, t._wants_grad, t._hooks = history, wants, hooks


def cut_off(tensor: Tensor) -> Tensor:
    """The same value as a leaf, which needs a gradient if the tensor does."""
    leaf = tensor.detach()
    leaf.requires_grad = tensor.requires_grad
    return leaf


def call(function: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """The function's result for its arguments with other tensors in them."""
    args, kwargs = rebuild((args, kwargs), iter(tensors))
    return function(*args, **kwargs)


def taken_from_outside(results: list[Tensor], stand_ins: list[Tensor], start: int) -> list[Tensor]:
    """The tensors that need gradients and were not made inside: parameters, and results made before `start`."""
    found: dict[Any, Tensor] = {}
    arguments = {id(t) for t in stand_ins}
    seen: set[int] = set()
    todo = list(results)
    while todo:
        tensor = todo.pop()
        if tensor.history is None:
            if tensor.requires_grad and id(tensor) not in arguments:
                found.setdefault((tensor, -1), tensor)
            continue
        history, index = tensor.history
        if history.results[0].born < start:
            found.setdefault((id(history), index), tensor)
        elif id(history) not in seen and history.tensors is not None:
            seen.add(id(history))
            todo += history.tensors
    return list(found.values())


__all__ = ["checkpoint"]
