"""Where each parameter of ours lies in a model file: GGUF tensor names and Hugging Face safetensors names.

Canonical names are the attribute paths of our modules: embed, positions (gpt2), blocks.N.attn_norm, blocks.N.q/k/v/o,
blocks.N.q_norm/k_norm, blocks.N.attn_post_norm, blocks.N.ffn_norm, blocks.N.gate/up/down, blocks.N.ffn_post_norm, norm,
head; a bias is NAME_bias. Every matrix is (rows, columns) with y = W x + b. `tensor_table(config)` lists the shapes.

One table a format below; both directions are derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nn.models.config import ConfigError, ModelConfig, tensor_table

# Canonical leaf -> name in the file; a bias of ours is the same with ".bias" for ".weight".
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "positions": "position_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "ffn_post_norm": "post_ffw_norm.weight",
}
HF_NAMES = {
    "embed": "embed_tokens.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# Gemma puts a norm on both sides of attention and MLP, and so names them differently.
HF_GEMMA3_NAMES = HF_NAMES | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}
# gpt2 fuses q, k, v into one matrix and stores matrices as (columns, rows): its Conv1D computes x W + b.
HF_GPT2_NAMES = {
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "norm": "ln_f.weight",
    "head": "lm_head.weight",
    "attn_norm": "ln_1.weight",
    "q": "attn.c_attn.weight",
    "k": "attn.c_attn.weight",
    "v": "attn.c_attn.weight",
    "o": "attn.c_proj.weight",
    "ffn_norm": "ln_2.weight",
    "up": "mlp.c_fc.weight",
    "down": "mlp.c_proj.weight",
}
GPT2_GGUF_NAMES = GGUF_NAMES | dict.fromkeys(("q", "k", "v"), "attn_qkv.weight")
MATRICES = frozenset(("q", "k", "v", "o", "gate", "up", "down"))
# In a file, but not a parameter: read by the config, or masks and tables that older exporters stored.
GGUF_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
HF_IGNORED = re.compile(
    r".*rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)|(model\.)?(vision_tower|multi_modal_projector)\..*"
)


@dataclass(frozen=True)
class Source:
    """Where one canonical parameter lies: read `name`, transpose if asked, take rows, add `offset`.

    `rows` counts in the canonical orientation, after the transpose.
    """

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None
    offset: float = 0.0

    def take(self, stored: np.ndarray) -> np.ndarray:
        """The canonical array out of the stored one (dense values)."""
        array = stored.T if self.transpose else stored
        if self.rows is not None:
            array = array[self.rows[0] : self.rows[1]]
        return array + array.dtype.type(self.offset) if self.offset else array


def _fused_rows(config: ModelConfig, leaf: str) -> tuple[int, int]:
    starts = {"q": 0, "k": config.q_dim, "v": config.q_dim + config.kv_dim}
    return starts[leaf], starts[leaf] + (config.q_dim if leaf == "q" else config.kv_dim)


def _split(canonical: str) -> tuple[str, str, bool]:
    """("blocks.3." or "", leaf without "_bias", whether it is a bias)."""
    head, dot, leaf = canonical.rpartition(".")
    return head + dot, leaf.removesuffix("_bias"), leaf.endswith("_bias")


def gguf_source(config: ModelConfig, canonical: str) -> Source:
    """The GGUF tensor that holds this parameter. Raises KeyError for a name that is not canonical."""
    block, leaf, bias = _split(canonical)
    fused = config.family == "gpt2"
    name = (GPT2_GGUF_NAMES if fused else GGUF_NAMES)[leaf]
    if bias:
        name = name.removesuffix("weight") + "bias"
    rows = _fused_rows(config, leaf) if fused and leaf in ("q", "k", "v") else None
    return Source(block.replace("blocks.", "blk.", 1) + name, rows=rows)


def hf_source(config: ModelConfig, canonical: str, *, prefix: str = "model.") -> Source:
    """The safetensors tensor that holds this parameter; `prefix` stands before `layers.0` (gpt2: `h.0`)."""
    block, leaf, bias = _split(canonical)
    gpt2 = config.family == "gpt2"
    table = HF_GPT2_NAMES if gpt2 else HF_GEMMA3_NAMES if config.family == "gemma3" else HF_NAMES
    name = table[leaf]
    if bias:
        name = name.removesuffix("weight") + "bias"
    if leaf == "head":  # beside the model, not in it: "model." -> "lm_head.weight", "a.model." -> "a.lm_head.weight"
        return Source(prefix.removesuffix("transformer." if gpt2 else "model.") + name)
    name = prefix + block.replace("blocks.", "h." if gpt2 else "layers.", 1) + name
    if gpt2:
        rows = _fused_rows(config, leaf) if leaf in ("q", "k", "v") else None
        return Source(name, transpose=leaf in MATRICES and not bias, rows=rows)
    return Source(name, offset=config.norm_offset if leaf.endswith("norm") and not bias else 0.0)


def _match(
    config: ModelConfig,
    found: dict[str, Source],
    names: Iterable[str],
    ignored: re.Pattern[str],
    kind: str,
) -> dict[str, Source]:
    names = set(names)
    wanted = {source.name for source in found.values()}
    missing = sorted(wanted - names)
    extra = sorted(name for name in names - wanted if not ignored.fullmatch(name))
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing: {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}")
        if extra:
            parts.append(f"{len(extra)} unexpected: {', '.join(extra[:8])}{' ...' if len(extra) > 8 else ''}")
        raise ConfigError(
            f"{kind}: tensors do not match a {config.family} model of {config.layers} layers: {'; '.join(parts)}. "
            f"The file is incomplete or of a variant that is not supported"
        )
    return found


def gguf_sources(config: ModelConfig, names: Iterable[str]) -> dict[str, Source]:
    """Canonical name -> Source for every parameter, given the tensor names of a GGUF file.

    Raises ConfigError listing missing and unexpected tensors.
    """
    found = {canonical: gguf_source(config, canonical) for canonical in tensor_table(config)}
    return _match(config, found, names, GGUF_IGNORED, "GGUF")


def hf_sources(config: ModelConfig, names: Iterable[str]) -> dict[str, Source]:
    """Canonical name -> Source for every parameter, given the tensor names of safetensors files.

    The prefix ("model.", "transformer.", "language_model.model." or none) is found from the embedding's name. A stored
    `lm_head.weight` of a tied model is not read: the embedding is the head. Raises ConfigError listing missing and
    unexpected tensors.
    """
    names = set(names)
    embed = HF_GPT2_NAMES["embed"] if config.family == "gpt2" else HF_NAMES["embed"]
    prefixes = [name.removesuffix(embed) for name in names if name == embed or name.endswith("." + embed)]
    if len(prefixes) != 1:
        raise ConfigError(
            f"safetensors: expected one tensor named {embed} (with any prefix), found {len(prefixes)}; "
            f"is this a {config.family} model?"
        )
    prefix = prefixes[0]
    found = {canonical: hf_source(config, canonical, prefix=prefix) for canonical in tensor_table(config)}
    if config.tied_head:
        names.discard(hf_source(config, "head", prefix=prefix).name)
    return _match(config, found, names, HF_IGNORED, "safetensors")


def check_shapes(config: ModelConfig, sources: Mapping[str, Source], shapes: Mapping[str, Sequence[int]]) -> None:
    """Hold the stored shape of every parameter against the config. Raises ConfigError naming the first that differs."""
    for canonical, wanted in tensor_table(config).items():
        source = sources[canonical]
        if source.rows is not None:  # a fused q, k, v
            wanted = (config.q_dim + 2 * config.kv_dim, *wanted[1:])
        wanted = wanted[::-1] if source.transpose else wanted
        if tuple(shapes[source.name]) != wanted:
            raise ConfigError(
                f"tensor {source.name} has shape {tuple(shapes[source.name])}; expected {wanted} by the description of "
                f"the model ({config.family}: {config.dim} features, {config.heads} heads of {config.head_dim}, "
                f"{config.kv_heads} key/value heads, {config.ffn_dim} in the MLP, {config.vocab} tokens). "
                "The two do not belong together: fetch the model again"
            )


def gguf_canonical(config: ModelConfig, name: str) -> tuple[str, ...]:
    """Canonical names of the parameters that a GGUF tensor holds: one, three for a fused q, k, v, none if unknown."""
    return tuple(c for c in tensor_table(config) if gguf_source(config, c).name == name)


def hf_canonical(config: ModelConfig, name: str, *, prefix: str = "model.") -> tuple[str, ...]:
    """Canonical names of the parameters that a safetensors tensor holds; see gguf_canonical."""
    return tuple(c for c in tensor_table(config) if hf_source(config, c, prefix=prefix).name == name)
