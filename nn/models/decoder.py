"""What every decoder-only model shares: parameters on the device, the KV cache, and the walk from token ids to logits.

A family's file (named as its family: llama.py, gemma3.py, ...) holds its Block and nothing else. Shapes: T tokens of
one chunk, C = config.dim, V = vocabulary; activations are f32 (T, C).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nn import functional as F
from nn.graph.scopes import named
from nn.models.config import KV_BYTES, ModelConfig
from nn.models.rope import rope_table
from nn.ops.base import Array
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Parameters(Protocol):
    """Where a module gets its parameters from, by canonical name (nn/models/names.py)."""

    config: ModelConfig
    device: Device

    def vector(self, name: str) -> Tensor | None:
        """A norm weight or bias as (C,) f32, or None if the model has none of that name."""
        ...

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        """Matrices with the same columns: one Weight with all rows, or one a name where their formats differ."""
        ...


class Linears:
    """y = W x + b with the rows of several matrices of a model below each other.

    `weights`: one matrix, or one a name where their storage formats differ. `bias`: of all rows, or None.
    """

    def __init__(self, parameters: Parameters, *names: str) -> None:
        self.weights = parameters.matrices(*names)
        biases = [b for name in names if (b := parameters.vector(f"{name}_bias")) is not None]
        self.bias = biases[0] if biases else None
        if len(biases) > 1:
            self.bias = Tensor(np.concatenate([b.numpy() for b in biases]), parameters.device)


@dataclass
class State:
    """What a forward pass reads besides its tokens: step (position, tokens, seed, draw) and the angle tables.

    limit: a promise that no more keys than this are in the cache, by which attention's kernels are chosen; None: none.
    """

    step: Tensor  # (4,) u32
    rope: Tensor | None  # (context, R/2, 2) f32
    local_rope: Tensor | None
    limit: int | None = None


@dataclass
class LayerCache:
    """Keys and values of one layer: (context, kv_heads, D) each, f32 or f16, written in place."""

    k: Tensor
    v: Tensor


class Block(Protocol):
    """One layer: (T, C) -> (T, C)."""

    def __init__(self, parameters: Parameters, layer: int) -> None: ...

    def __call__(self, x: Tensor, cache: LayerCache, state: State) -> Tensor: ...


class Decoder:
    """A language model on a device.

    Args:
        parameters: the source of weights; see nn.models.load.
        context: positions that the KV cache and the angle tables have room for.
        kv_dtype: "f32" or "f16" storage of keys and values.
        progress: called with the number of layers built so far.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        context: int,
        kv_dtype: str = "f32",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        config = parameters.config
        self.config, self.device, self.context, self.kv_dtype = config, parameters.device, context, kv_dtype
        block = importlib.import_module(f"nn.models.{config.family}").Block
        self.embed = parameters.matrices("embed")[0]
        self.positions = parameters.matrices("positions")[0] if config.rope is None else None
        self.blocks: list[Block] = []
        for layer in range(config.layers):
            self.blocks.append(block(parameters, layer))
            if progress is not None:
                progress(layer + 1)
        self.norm, self.norm_bias = parameters.vector("norm"), parameters.vector("norm_bias")
        self.head = self.embed if config.tied_head else parameters.matrices("head")[0]
        self._rope = self._table(local=False) if config.rope else None
        self._local_rope = self._table(local=True) if config.rope and config.rope.local_base is not None else None
        self.step = Array(self.device.upload(np.zeros(4, np.uint32)), (4,), "u32")
        nbytes = context * config.kv_dim * KV_BYTES[kv_dtype]
        shape = (context, config.kv_heads, config.head_dim)
        self._cache = [
            tuple(Array(self.device.alloc(nbytes), shape, kv_dtype) for _ in "kv") for _ in range(config.layers)
        ]

    def _table(self, *, local: bool) -> Array:
        table = rope_table(self.config, self.context, local=local)
        return Array(self.device.upload(table), table.shape)

    def hidden(self, ids: Tensor, *, limit: int | None = None) -> Tensor:
        """The last layer's output before the final norm. ids (T,) u32 -> (T, C) f32; the cache is written on the way.

        Rows at and past step.tokens are padding. Reads step.position. limit: see State.
        """
        config = self.config
        state = State(
            Tensor(self.step),
            None if self._rope is None else Tensor(self._rope),
            None if self._local_rope is None else Tensor(self._local_rope),
            limit,
        )
        with named("embed"):
            x = F.embedding(ids, self.embed, scale=config.embedding_scale)
            if self.positions is not None:
                positions = F.step_positions(state.step, rows=ids.shape[0], limit=config.context_max)
                x = x + F.embedding(positions, self.positions)
        for i, (block, (k, v)) in enumerate(zip(self.blocks, self._cache, strict=True)):
            with named(f"layers.{i}"):
                x = block(x, LayerCache(Tensor(k), Tensor(v)), state)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, C) -> (T, V) f32."""
        with named("head"):
            return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        config = self.config
        assert self.norm is not None
        if config.norm == "rms":
            out = F.norm_linear(hidden, self.norm, self.head, eps=config.norm_eps)
        else:
            normed = F.layer_norm(hidden, (config.dim,), self.norm, self.norm_bias, eps=config.norm_eps)
            out = F.linear(normed, self.head)
        if config.final_softcap is not None:
            out = (out * (1.0 / config.final_softcap)).tanh() * config.final_softcap
        return out
