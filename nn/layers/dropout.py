"""Dropout as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nn import functional as F
from nn.layers.module import Module

if TYPE_CHECKING:
    from nn.random import Generator
    from nn.tensor import Tensor


class Dropout(Module):
    """Zeroes elements with probability p while training. As torch.nn.Dropout, with the generator that draws."""

    def __init__(self, p: float = 0.5, *, generator: Generator | None = None) -> None:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p is {p}; expected a probability from 0 to 1")
        if p > 0.0 and generator is None:
            raise TypeError("Dropout: p > 0 draws random numbers; pass generator=Generator(device, seed)")
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training, generator=self.generator)
