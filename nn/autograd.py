"""Reverse mode: the walk from a result back to the tensors that it depends on.

Gradients are ordinary tensors, made with the operations' own rules (`Op.gradient`): nothing is computed here, the graph
grows. So what no one needs is never computed, and backward fuses with forward. Second derivatives are the same walk
over a walk that was remembered (`create_graph`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nn import tape
from nn.graph.ir import name_of
from nn.graph.scopes import current_trace
from nn.ops.base import ShapeError
from nn.ops.create import ones_like, zeros_like
from nn.tensor import Tensor, realize

if TYPE_CHECKING:
    from nn.tape import History

Place = tuple[Any, int]  # (History, result) of an operation's result, (leaf Tensor, -1) of a leaf


def backward(
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Add the gradients of the sum of `tensors` to .grad of the leaves, or of `inputs`. As torch.autograd.backward."""
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    seeds = start("backward", outputs, gradients)
    found = walk("backward", outputs, seeds, inputs, retain_graph=retain_graph, create_graph=create_graph)
    changed = [tensor for tensor, gradient in found if gradient is not None]
    for tensor, gradient in found:
        if gradient is not None:
            with tape.set_grad_enabled(create_graph):
                tensor.add_grad(gradient)
    if current_trace() is None and not create_graph:  # with what they were made of still as it is
        realize(*outputs, *(tensor.grad for tensor in changed if tensor.grad is not None))


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of the sum of `outputs` for each of `inputs`; .grad is not touched. As torch.autograd.grad.

    Raises: RuntimeError for an input that the outputs do not depend on; with allow_unused its gradient is None.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    seeds = start("grad", outputs, grad_outputs)
    found = walk("grad", outputs, seeds, wanted, retain_graph=retain_graph, create_graph=create_graph)
    for i, (_, gradient) in enumerate(found):
        if gradient is None and not allow_unused:
            raise RuntimeError(
                f"grad: input {i} {list(wanted[i].shape)} was not used to make the outputs; pass allow_unused=True for "
                "None in its place"
            )
    return tuple(gradient for _, gradient in found)


def start(name: str, outputs: Sequence[Tensor], gradients: Any) -> list[Tensor]:
    """The gradient that each output starts with. Raises where one is missing or does not fit."""
    if gradients is None:
        given: list[Tensor | None] = [None] * len(outputs)
    else:
        given = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if len(given) != len(outputs):
        raise ValueError(f"{name}: {len(outputs)} tensors and {len(given)} gradients; give one each")
    seeds = []
    for tensor, gradient in zip(outputs, given):
        if not tensor.requires_grad:
            raise RuntimeError(
                f"{name}: the tensor {list(tensor.shape)} {tensor.dtype} needs no gradient: no operand of what made it "
                "has requires_grad, or it was computed under no_grad(), detached, or returned by a jitted function "
                "(take gradients inside of that function)"
            )
        if gradient is None:
            if tensor.numel() != 1:
                raise RuntimeError(
                    f"{name}: the tensor has shape {list(tensor.shape)}; without a gradient only a single element can "
                    "start, e.g. a loss. Pass gradient= of that shape, or .sum() first"
                )
            gradient = ones_like(tensor)
        elif not isinstance(gradient, Tensor):
            raise TypeError(f"{name}: the gradient is a {type(gradient).__name__}; expected a Tensor")
        elif gradient.shape != tensor.shape or gradient.dtype != tensor.dtype:
            raise ShapeError(
                f"{name}: the gradient is {gradient.dtype} {list(gradient.shape)}; the tensor is {tensor.dtype} "
                f"{list(tensor.shape)}, and both must agree"
            )
        seeds.append(gradient)
    return seeds


def place_of(tensor: Tensor) -> Place:
    return (tensor, -1) if tensor.history is None else tensor.history


def walk(
    name: str,
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    inputs: Sequence[Tensor] | None,
    *,
    retain_graph: bool | None,
    create_graph: bool,
) -> list[tuple[Tensor, Tensor | None]]:
    """(tensor, gradient) of every input; without inputs, of every leaf that needs one.

    Operations are visited latest first, each after all that use its results.
    """
    retain = create_graph if retain_graph is None else retain_graph
    for tensor in inputs or ():
        if not tensor.requires_grad:
            raise RuntimeError(f"{name}: an input {list(tensor.shape)} does not have requires_grad")
    wanted = None if inputs is None else {place_of(t) for t in inputs}
    uses, leaves = reach(name, outputs, wanted)
    gradients: dict[Place, Tensor] = {}
    done: dict[Place, Tensor] = {}

    def add(place: Place, gradient: Tensor) -> None:
        gradients[place] = gradients[place] + gradient if place in gradients else gradient

    with tape.set_grad_enabled(create_graph):
        for tensor, seed in zip(outputs, seeds):
            add(place_of(tensor), seed)
        ready = [(-h.results[0].born, i, h) for i, h in enumerate(uses) if uses[h] == 0]
        heapq.heapify(ready)
        count = len(uses)
        while ready:
            _, _, history = heapq.heappop(ready)
            results = [finish(gradients, history, i) for i in range(len(history.results))]
            for i, gradient in enumerate(results):
                if gradient is not None and wanted is not None and (history, i) in wanted:
                    done[history, i] = gradient
            assert history.tensors is not None
            needed = [(t.requires_grad and place_of(t) in leaves) or (t.history is not None and t.history[0] in uses)
                      for t in history.tensors]  # fmt: skip
            if any(needed) and any(g is not None for g in results):
                for tensor, need, gradient in zip(history.tensors, needed, chain(history, results), strict=True):
                    if need and gradient is not None:
                        add(place_of(tensor), gradient)
            for tensor in history.tensors:
                if tensor.history is not None and tensor.history[0] in uses:
                    before = tensor.history[0]
                    uses[before] -= 1
                    if uses[before] == 0:
                        count += 1
                        heapq.heappush(ready, (-before.results[0].born, count, before))
            if not retain:
                history.release()
        for leaf in leaves:
            gradient = gradients.get(leaf)
            if gradient is not None:
                done[leaf] = hooked(gradient, leaf[0]._hooks)
    if inputs is not None:
        return [(t, done.get(place_of(t))) for t in inputs]
    return [(place[0], gradient) for place, gradient in done.items()]


def reach(
    name: str, outputs: Sequence[Tensor], wanted: set[Place] | None
) -> tuple[dict[History, int], dict[Place, None]]:
    """The histories on the way from the outputs to the leaves (or to `wanted`), with how many operands of others each
    of them made; and those leaves, in the order they were found."""
    order: list[History] = []
    seen: set[History] = set()
    leaves: dict[Place, None] = {}
    stack = [(t.history[0], False) for t in outputs if t.history is not None]
    for t in outputs:
        if t.history is None:
            leaves[place_of(t)] = None
    while stack:  # operands first
        history, expanded = stack.pop()
        if expanded:
            order.append(history)
            continue
        if history in seen:
            continue
        seen.add(history)
        if history.tensors is None:
            raise RuntimeError(
                f"{name}: the walk back comes to {name_of(history.op)} a second time, and its operands were let go "
                "after the first; pass retain_graph=True to the first walk"
            )
        stack.append((history, True))
        for tensor in history.tensors:
            if tensor.history is not None:
                stack.append((tensor.history[0], False))
            elif tensor.requires_grad:
                leaves[place_of(tensor)] = None
    if wanted is not None:
        leaves = {place: None for place in leaves if place in wanted}
        useful: set[History] = set()
        for history in order:
            assert history.tensors is not None
            own = any((history, i) in wanted for i in range(len(history.results)))
            if own or any(place_of(t) in leaves or place_of(t)[0] in useful for t in history.tensors):
                useful.add(history)
        order = [history for history in order if history in useful]
    uses = dict.fromkeys(order, 0)
    for history in order:
        assert history.tensors is not None
        for tensor in history.tensors:
            if tensor.history is not None and tensor.history[0] in uses:
                uses[tensor.history[0]] += 1
    return uses, leaves


def finish(gradients: dict[Place, Tensor], history: History, index: int) -> Tensor | None:
    """The whole gradient of one result, after its hooks; put into .grad where that was asked for."""
    gradient = gradients.pop((history, index), None)
    if gradient is None:
        return None
    gradient = hooked(gradient, history.hooks.get(index))
    kept = history.kept.get(index)
    tensor = kept() if kept is not None else None
    if tensor is not None:
        tensor.add_grad(gradient)
    return gradient


def hooked(gradient: Tensor, hooks: dict[int, tape.Hook] | None) -> Tensor:
    for hook in list((hooks or {}).values()):
        replaced = hook(gradient)
        if replaced is not None:
            if not isinstance(replaced, Tensor) or replaced.shape != gradient.shape:
                raise ShapeError(
                    f"register_hook: the hook returned {replaced!r}; expected a tensor {list(gradient.shape)} or None"
                )
            gradient = replaced
    return gradient


def chain(history: History, results: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The operands' gradients by the operation's rule, checked. What is unused of several results counts as zeros."""
    assert history.tensors is not None
    op = history.op
    for tensor, node in zip(history.tensors, history.nodes):
        if tensor.node is not node or node.stale is not None:
            raise RuntimeError(
                f"backward: an operand {list(node.spec.shape)} of {name_of(op)} was written over since; take gradients "
                "before that, or let the operation use a .clone()"
            )
    made = []
    for i, node in enumerate(history.results):
        tensor = Tensor(node, history.tensors[0].device)
        tensor.history = (history, i) if tape.is_grad_enabled() and node.spec.dtype in tape.DIFFERENTIABLE else None
        made.append(tensor)
    filled = [zeros_like(t) if g is None else g for g, t in zip(results, made)]
    gradients = op.gradient(filled[0] if len(filled) == 1 else tuple(filled), *history.tensors, *made)
    if len(gradients) != len(history.tensors):
        raise ValueError(
            f"{name_of(op)}: gradient() gave {len(gradients)} values for {len(history.tensors)} operands; give None "
            "for an operand without a gradient"
        )
    for i, (tensor, gradient) in enumerate(zip(history.tensors, gradients)):
        if gradient is not None and (gradient.shape != tensor.shape or gradient.dtype != tensor.dtype):
            raise ShapeError(
                f"{name_of(op)}: gradient() gave {gradient.dtype} {list(gradient.shape)} for operand {i}, which is "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
    return gradients


__all__ = ["backward", "grad"]
