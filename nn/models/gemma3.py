"""Gemma 3: a norm on both sides of attention and MLP, q and k norms, five sliding layers to a global one.

    x = x + rms(W_o attention(rope(rms_head(W_qkv rms(x)))))
    x = x + rms(W_down (gelu(W_gate rms(x)) * W_up rms(x)))

Sliding layers have an angle base of their own. Source: Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

from nn import functional as F
from nn.graph.scopes import named
from nn.models import llama
from nn.models.decoder import LayerCache, Parameters, State
from nn.tensor import Tensor


class Block(llama.Block):
    """One layer: eight dispatches for one token."""

    def __init__(self, parameters: Parameters, layer: int) -> None:
        super().__init__(parameters, layer)
        self.attn_post_norm = parameters.vector(f"blocks.{layer}.attn_post_norm")
        self.ffn_post_norm = parameters.vector(f"blocks.{layer}.ffn_post_norm")

    def __call__(self, x: Tensor, cache: LayerCache, state: State) -> Tensor:
        assert self.attn_post_norm is not None and self.ffn_post_norm is not None
        eps = self.config.norm_eps
        with named("attention"):
            attended = F.linear(self.attention(x, cache, state), self.o.weights[0])
            x = F.add_rms_norm(x, attended, self.attn_post_norm, eps=eps)
        with named("mlp"):
            return F.add_rms_norm(x, F.linear(self.hidden(x), self.down.weights[0]), self.ffn_post_norm, eps=eps)
