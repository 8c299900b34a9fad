"""Gradients kept within bounds. Names as in torch.nn.utils."""

from __future__ import annotations

from collections.abc import Iterable

from nn import functional as F
from nn.graph.ir import Pack
from nn.optim.flat import offsets_of
from nn.tape import no_grad
from nn.tensor import Tensor, apply


def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), norm the root of the sum of all their squares, which is returned.

    In place of the .grad come parts of one scaled row, which optimizers take as it is: no copy of each gradient. Sums
    are f32. As torch.nn.utils.clip_grad_norm_ with norm_type 2; it divides by norm + 1e-6, and so does this.
    Raises: ValueError for a max_norm below 0, or where no parameter has a gradient.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    held = [(p, p.grad) for p in given if p.grad is not None]
    if not max_norm >= 0.0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm}; expected 0 or more")
    if not held:
        raise ValueError("clip_grad_norm_: no parameter has a gradient; call it between backward() and step()")
    with no_grad():
        offsets, size = offsets_of(p.numel() for p, _ in held)
        row = apply(Pack(offsets, size), *(gradient.to("f32") for _, gradient in held))
        norm = row.square().sum().sqrt()
        scaled = row * F.clamp(max_norm / (norm + 1e-6), max=1.0)
        for (p, _), start in zip(held, offsets):
            p.grad = scaled.narrow(0, start, p.numel()).reshape(p.shape)
    return norm


def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Limit every element of every gradient to [-clip_value, clip_value]. As torch.nn.utils.clip_grad_value_."""
    if not clip_value > 0.0:
        raise ValueError(f"clip_grad_value_: clip_value is {clip_value}; expected a number above 0")
    with no_grad():
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad.clamp(-clip_value, clip_value)
