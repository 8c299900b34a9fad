"""The llama family: Llama 1 to 3, Mistral, TinyLlama, SmolLM2; and, by options of the config, Qwen 2 and 3.

    x = x + W_o attention(rope(W_qkv rms(x)))        (Qwen 2: biases on q, k, v; Qwen 3: RMSNorm of each q and k head)
    x = x + W_down (silu(W_gate rms(x)) * W_up rms(x))

Sources: Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825 (sliding window); Ainslie et al.
2023, arXiv:2305.13245 (grouped-query attention).
"""

from __future__ import annotations

from nn import functional as F
from nn.graph.scopes import named
from nn.models.decoder import ACTIVATIONS, LayerCache, Linears, Parameters, State
from nn.tensor import Tensor


class Block:
    """One layer: five dispatches for one token."""

    def __init__(self, parameters: Parameters, layer: int) -> None:
        name = f"blocks.{layer}."
        self.config, self.layer = parameters.config, layer
        self.attn_norm = parameters.vector(name + "attn_norm")
        self.qkv = Linears(parameters, name + "q", name + "k", name + "v")
        self.q_norm, self.k_norm = parameters.vector(name + "q_norm"), parameters.vector(name + "k_norm")
        self.o = Linears(parameters, name + "o")
        self.ffn_norm = parameters.vector(name + "ffn_norm")
        self.gate_up = Linears(parameters, name + "gate", name + "up")
        self.down = Linears(parameters, name + "down")

    def __call__(self, x: Tensor, cache: LayerCache, state: State) -> Tensor:
        with named("attention"):
            x = F.linear(self.attention(x, cache, state), self.o.weights[0], self.o.bias, residual=x)
        with named("mlp"):
            return F.linear(self.hidden(x), self.down.weights[0], self.down.bias, residual=x)

    def attention(self, x: Tensor, cache: LayerCache, state: State) -> Tensor:
        """(T, C) -> (T, heads * D): norm, q k v, rotation, cache write, attention."""
        config, layer = self.config, self.layer
        rope = state.local_rope if config.layer_local_rope(layer) else state.rope
        assert rope is not None and config.rope is not None and self.attn_norm is not None
        q = F.qkv_rope(
            x,
            self.attn_norm,
            self.qkv.weights,
            cache.k,
            cache.v,
            rope,
            state.step,
            eps=config.norm_eps,
            bias=self.qkv.bias,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            interleaved=config.rope.pairing == "interleaved",
        )
        return F.cached_attention(
            q,
            cache.k,
            cache.v,
            state.step,
            heads=config.heads,
            kv_heads=config.kv_heads,
            scale=config.attention_scale,
            window=config.layer_window(layer),
            softcap=config.attention_softcap,
            limit=state.limit,
        )

    def hidden(self, x: Tensor) -> Tensor:
        """(T, C) -> (T, F): norm, gate and up, activation, product."""
        config = self.config
        assert self.ffn_norm is not None
        if len(self.gate_up.weights) == 1 and self.gate_up.bias is None and config.activation != "gelu":
            weight = self.gate_up.weights[0]
            return F.gated_mlp(x, self.ffn_norm, weight, eps=config.norm_eps, activation=config.activation)
        normed = F.rms_norm(x, config.dim, self.ffn_norm, config.norm_eps)
        both = F.cat([F.linear(normed, w) for w in self.gate_up.weights], dim=-1)
        both = both if self.gate_up.bias is None else both + self.gate_up.bias
        gate, up = both[:, : config.ffn_dim], both[:, config.ffn_dim :]
        return ACTIVATIONS[config.activation](gate) * up
