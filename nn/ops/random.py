"""Random tensors and dropout. Numbers come from a Generator (nn/random.py) and are computed where they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nn.graph.ir import Map
from nn.ops import elementwise
from nn.ops.create import arange
from nn.ops.elementwise import FLOATS, spread
from nn.tensor import Tensor, apply, sizes

if TYPE_CHECKING:
    from nn.random import Generator

UNIT = Map("random", "random_unit({0}, {1}, {2})", ("u32",), "f32")
BITS = Map("random bits", "random_bits({0}, {1}, {2})", ("u32",))


def uniform_numbers(op: Map, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """One number for each place of the shape."""
    seed, draw = generator.draw()
    places = arange(math.prod(shape), device=generator.device, dtype="u32").reshape(shape)
    return apply(op, places, spread(draw, shape), spread(seed, shape))


def rand(*size: int | Sequence[int], generator: Generator, dtype: str = "f32") -> Tensor:
    """Uniform in [0, 1), multiples of 2^-24. As torch.rand."""
    return uniform_numbers(UNIT, sizes(size), generator).to(floats("rand", dtype))


def randn(*size: int | Sequence[int], generator: Generator, dtype: str = "f32") -> Tensor:
    """Normal with mean 0 and variance 1, by Box & Muller 1958; values up to 5.77. As torch.randn."""
    shape = sizes(size)
    radius = elementwise.sqrt(elementwise.log(1.0 - uniform_numbers(UNIT, shape, generator)) * -2.0)
    angle = (uniform_numbers(UNIT, shape, generator) - 0.5) * (2.0 * math.pi)
    return (radius * elementwise.cos(angle)).to(floats("randn", dtype))


def randint(low: int, high: int, size: Sequence[int], *, generator: Generator, dtype: str = "i32") -> Tensor:
    """Whole numbers from low up to but without high. As torch.randint; the bias towards some is below range / 2^32."""
    if not low < high or high - low > 1 << 31:
        raise ValueError(f"randint: low {low}, high {high}; expected low < high, at most 2^31 apart")
    words = uniform_numbers(BITS, sizes((size,) if isinstance(size, int) else size), generator)
    return (words % (high - low)).to("i32").to(dtype) + low


def bernoulli(input: Tensor, *, generator: Generator) -> Tensor:
    """1 with the probability that input has at each place, else 0. As torch.bernoulli."""
    elementwise.require_floats("bernoulli", input)
    return (uniform_numbers(UNIT, input.shape, generator) < input.to("f32")).to(input.dtype)


def rand_like(input: Tensor, *, generator: Generator) -> Tensor:
    """rand of input's shape and dtype."""
    return rand(input.shape, generator=generator, dtype=input.dtype)


def randn_like(input: Tensor, *, generator: Generator) -> Tensor:
    """randn of input's shape and dtype."""
    return randn(input.shape, generator=generator, dtype=input.dtype)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, *, generator: Generator | None = None) -> Tensor:
    """Zero elements with probability p and scale the others by 1 / (1 - p). As torch.nn.functional.dropout.

    The mask is a function of the generator's draw: backward makes it again, nothing is stored.
    Raises: ValueError for p outside [0, 1], TypeError where training needs a generator and there is none.
    Source: Srivastava et al. 2014, JMLR 15.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p is {p}; expected a probability from 0 to 1")
    if not training or p == 0.0:
        return input
    if generator is None:
        raise TypeError("dropout: training draws random numbers; pass generator=Generator(device, seed)")
    if p == 1.0:
        return input * 0.0
    elementwise.require_floats("dropout", input)
    dropped = uniform_numbers(UNIT, input.shape, generator) < p
    return elementwise.where(dropped, 0.0, input * (1.0 / (1.0 - p)))


def floats(name: str, dtype: str) -> str:
    if dtype not in FLOATS:
        raise TypeError(f"{name}: dtype is {dtype!r}; expected {' or '.join(FLOATS)}")
    return dtype


__all__ = ["bernoulli", "dropout", "rand", "rand_like", "randint", "randn", "randn_like"]
