"""RMSNorm and LayerNorm. Names, arguments and starting values follow torch.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nn import functional as F
from nn.layers.module import Module, Parameter
from nn.ops.base import ShapeError

if TYPE_CHECKING:
    from gpu import Device
    from nn.tensor import Tensor


class RMSNorm(Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the trailing axes `normalized_shape`; weight starts at 1.

    eps None takes the machine epsilon of x's dtype. Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        device: Device,
    ) -> None:
        self.normalized_shape, self.eps = shape_of(normalized_shape), eps
        self.weight = Parameter(np.ones(self.normalized_shape, np.float32), device) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        check("RMSNorm", x, self.normalized_shape)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LayerNorm(Module):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the trailing axes; weight starts at 1, bias at 0.

    Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device,
    ) -> None:
        self.normalized_shape, self.eps = shape_of(normalized_shape), eps
        shape = self.normalized_shape
        self.weight = Parameter(np.ones(shape, np.float32), device) if elementwise_affine else None
        self.bias = Parameter(np.zeros(shape, np.float32), device) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        check("LayerNorm", x, self.normalized_shape)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def shape_of(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape[x.ndim - len(shape) :] != shape or x.ndim < len(shape):
        raise ShapeError(
            f"{name}: x has shape {list(x.shape)}; the layer was built for trailing axes {list(shape)}. "
            f"Build {name} for {list(x.shape[-len(shape) :])} or pass those axes."
        )
