"""Linear and Embedding: layers around a matrix, dense or in a block format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nn import functional as F
from nn.graph.ir import leaf
from nn.layers.module import Module, Parameter
from nn.ops.base import ShapeError
from nn.quant.repack import BLOCK
from nn.quant.weight import Weight

if TYPE_CHECKING:
    from gpu import Device
    from nn.tensor import Tensor


class Linear(Module):
    """y = x W^T + b. Shapes: x (..., in_features) f32, weight (out_features, in_features), bias (out_features,).

    Weights start uniform in +-1 / sqrt(in_features), as torch.nn.Linear's. `rng` makes them repeatable.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Device,
        dtype: str = "f32",
        rng: np.random.Generator | None = None,
    ) -> None:
        if in_features < 1 or out_features < 1:
            raise ValueError(f"Linear: got {in_features} -> {out_features} features; both must be 1 or more")
        self.in_features, self.out_features = in_features, out_features
        rng = rng or np.random.default_rng()
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter(rng.uniform(-bound, bound, (out_features, in_features)), device, dtype=dtype)
        self.bias = Parameter(rng.uniform(-bound, bound, out_features), device, dtype="f32") if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"Linear: x has shape {list(x.shape)}; the layer was built for a last axis of {self.in_features}. "
                f"Build Linear({x.shape[-1] if x.ndim else 1}, {self.out_features}) or pass that many features."
            )
        if self.weight.dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        return F.linear(*whole_blocks(x, self.weight), self.bias)

    def to_quantized(self, format: str = "q8_0") -> Linear:
        """Store the weight in a block format from here on. Returns self. Raises ValueError where rows do not divide."""
        self.weight.node = leaf(Weight.from_array(self.weight.device, self.weight.numpy(), format))
        return self


class Embedding(Module):
    """A row of `weight` for each id.

    Shapes: ids (...) i32 or u32, weight (num_embeddings, embedding_dim) -> (..., embedding_dim).

    Rows start normal with variance 1, as torch.nn.Embedding's. `rng` makes them repeatable.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        device: Device,
        dtype: str = "f32",
        rng: np.random.Generator | None = None,
    ) -> None:
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"Embedding: got {num_embeddings} x {embedding_dim}; both must be 1 or more")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        rng = rng or np.random.default_rng()
        self.weight = Parameter(rng.standard_normal((num_embeddings, embedding_dim)), device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        (table,) = whole_blocks(self.weight)
        return F.embedding(ids, table)[..., : self.embedding_dim]


def whole_blocks(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Dense tensors with zeros behind the last axis up to the 32 columns that the kernels read at a time."""
    more = -tensors[0].shape[-1] % BLOCK
    if more == 0 or any(isinstance(t.node.value, Weight) for t in tensors):
        return tensors
    return tuple(F.pad(t, (0, more)) for t in tensors)
