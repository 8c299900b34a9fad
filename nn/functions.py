"""Functions of functions: the gradient of a function as a function. Names as in torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nn import autograd
from nn.tape import enable_grad
from nn.tensor import Tensor


def value_and_grad(function: Callable[..., Any], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """A function that gives (function(...), its gradient for argument `argnums`, or a tuple of them for several).

    function gives a tensor of one element. The gradients can be differentiated again.
    Raises: TypeError where such an argument is no tensor.
    """
    several = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for i in several:
            if i >= len(args) or not isinstance(args[i], Tensor):
                what = type(args[i]).__name__ if i < len(args) else "nothing"
                raise TypeError(f"grad: argument {i} is {what}; expected a tensor, choose another with argnums=")
            given[i] = args[i] if args[i].requires_grad else args[i].detach().requires_grad_()
        with enable_grad():
            value = function(*given, **kwargs)
            found = autograd.grad(value, [given[i] for i in several], create_graph=True)
        return value, found[0] if isinstance(argnums, int) else found

    return both


def grad(function: Callable[..., Any], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """A function that gives function's gradient for argument `argnums`; see value_and_grad. As torch.func.grad."""
    both = value_and_grad(function, argnums)

    @functools.wraps(function)
    def slope(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[1]

    return slope
