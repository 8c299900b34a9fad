"""GPT-2: LayerNorm, learned positions, biases everywhere, an MLP without a gate.

    x = x + W_o attention(W_qkv ln(x) + b) + b_o
    x = x + W_down gelu(W_up ln(x) + b_up) + b_down

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from nn import functional as F
from nn.graph.scopes import named
from nn.models.decoder import ACTIVATIONS, LayerCache, Linears, Parameters, State
from nn.tensor import Tensor


class Block:
    """One layer."""

    def __init__(self, parameters: Parameters, layer: int) -> None:
        name = f"blocks.{layer}."
        self.config = parameters.config
        self.attn_norm = parameters.vector(name + "attn_norm")
        self.attn_norm_bias = parameters.vector(name + "attn_norm_bias")
        self.qkv = Linears(parameters, name + "q", name + "k", name + "v")
        self.o = Linears(parameters, name + "o")
        self.ffn_norm = parameters.vector(name + "ffn_norm")
        self.ffn_norm_bias = parameters.vector(name + "ffn_norm_bias")
        self.up = Linears(parameters, name + "up")
        self.down = Linears(parameters, name + "down")

    def __call__(self, x: Tensor, cache: LayerCache, state: State) -> Tensor:
        config, shape = self.config, (self.config.dim,)
        with named("attention"):
            normed = F.layer_norm(x, shape, self.attn_norm, self.attn_norm_bias, eps=config.norm_eps)
            qkv = F.cat([F.linear(normed, w) for w in self.qkv.weights], dim=-1)
            qkv = qkv if self.qkv.bias is None else qkv + self.qkv.bias
            q = F.store_qkv(qkv, cache.k, cache.v, state.step)
            attended = F.cached_attention(
                q,
                cache.k,
                cache.v,
                state.step,
                heads=config.heads,
                kv_heads=config.kv_heads,
                scale=config.attention_scale,
                limit=state.limit,
            )
            x = F.linear(attended, self.o.weights[0], self.o.bias, residual=x)
        with named("mlp"):
            normed = F.layer_norm(x, shape, self.ffn_norm, self.ffn_norm_bias, eps=config.norm_eps)
            hidden = F.linear(normed, self.up.weights[0], self.up.bias)
            hidden = ACTIVATIONS[config.activation](hidden)
            return F.linear(hidden, self.down.weights[0], self.down.bias, residual=x)
