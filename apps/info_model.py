"""`anygpu info --model`: what a model is made of and what it costs, read from its file; no device is opened."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apps import term
from apps.info import section

if TYPE_CHECKING:
    from nn.models.config import ModelConfig
    from nn.models.load import ModelFile


def run(model: str, *, context: int | None = None, as_json: bool = False) -> int:
    """Prints the report. Raises ModelError, FormatError, ConfigError, ValueError for a context out of range."""
    from apps.pull import locate
    from nn.models.load import ModelFile

    file = ModelFile(locate(model))
    try:
        report = collect(file, context)
    finally:
        file.close()
    print(json.dumps(report, indent=2, ensure_ascii=False) if as_json else as_text(report))
    return 0


def collect(file: ModelFile, context: int | None = None) -> dict[str, Any]:
    """Everything that is shown, as plain values: sizes in bytes, counts in elements, FLOPs in operations a token."""
    from nn.models.config import flops_per_token, kv_bytes, parameters_by_part
    from nn.models.load import DEFAULT_CONTEXT

    config = file.config
    if context is None:
        context = min(DEFAULT_CONTEXT, config.context_max)
    if not 1 <= context <= config.context_max:
        raise ValueError(
            f"--context must be from 1 to {config.context_max:,} tokens, what this model was made for; got {context:,}"
        )
    return {
        "path": str(file.path),
        "name": config.name or file.path.stem,
        "file_bytes": file.source.file_bytes,
        "architecture": architecture(config),
        "shapes": [
            {"name": name, "shape": list(shape), "format": format, "count": count}
            for name, shape, format, count in shapes(file)
        ],
        "parameters": parameters_by_part(config),
        "formats": formats(file),
        "context": context,
        "flops_per_token": {
            phase: flops_per_token(config, phase=phase, context=context) for phase in ("decode", "prefill")
        },
        "kv_bytes": {dtype: kv_bytes(config, context, dtype) for dtype in ("f16", "f32")},
        "device_bytes": {dtype: file.device_bytes(context, dtype) for dtype in ("f16", "f32")},
    }


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The fields of the config that say what the model is, without those that are off."""
    c = config
    found: dict[str, Any] = {
        "family": c.family, "layers": c.layers, "dim": c.dim, "ffn_dim": c.ffn_dim, "heads": c.heads,
        "kv_heads": c.kv_heads, "head_dim": c.head_dim, "vocab": c.vocab, "context_max": c.context_max,
        "norm": c.norm, "norm_eps": c.norm_eps, "activation": c.activation, "gated_mlp": c.gated_mlp,
        "tied_head": c.tied_head, "attention_scale": c.attention_scale,
    }  # fmt: skip
    if c.rope is None:
        found["positions"] = "learned"
    else:
        rope = {"base": c.rope.base, "dims": c.rope.dims, "pairing": c.rope.pairing, "local_base": c.rope.local_base}
        if c.rope.scaling is not None:
            rope |= {"scaling": c.rope.scaling.kind, "factor": c.rope.scaling.factor}
        found["rope"] = {key: value for key, value in rope.items() if value is not None}
    if any(c.sliding):
        found |= {"window": c.window, "sliding_layers": [i for i, sliding in enumerate(c.sliding) if sliding]}
    for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sandwich_norm"):
        if getattr(c, name):
            found[name] = True
    for name, off in (("attention_softcap", None), ("final_softcap", None), ("embedding_scale", 1.0)):
        if getattr(c, name) != off:
            found[name] = getattr(c, name)
    return found


def shapes(file: ModelFile) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Parameters as (name, shape, format, count), equal ones of several blocks as one: blocks.0..29.q."""
    from nn.models.config import tensor_table

    groups: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for name, shape in tensor_table(file.config).items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        format = file.source.spec(file.sources[name].name).dtype
        groups.setdefault((block[2] if block else name, shape, format), []).append(int(block[1]) if block else -1)
    return [
        (name if blocks[0] < 0 else f"blocks.{ranges(blocks)}.{name}", shape, format, len(blocks))
        for (name, shape, format), blocks in groups.items()
    ]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of them shortened: 0..4,6,8..9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("..".join(map(str, run)) for run in runs)


def formats(file: ModelFile) -> dict[str, dict[str, int]]:
    """Per storage format: tensors, elements, bytes in the file, and bytes on a device (padding, f32 vectors)."""
    found: dict[str, Counter[str]] = {}
    counted: set[str] = set()
    for canonical, source in file.sources.items():
        stored = file.source.spec(source.name)
        entry = found.setdefault(stored.dtype, Counter(tensors=0, elements=0, file_bytes=0, device_bytes=0))
        entry["device_bytes"] += file.parameter_bytes(canonical)
        if source.name not in counted:  # gpt2's q, k and v are parts of one tensor of the file
            counted.add(source.name)
            entry.update(tensors=1, elements=stored.size, file_bytes=file.source.nbytes(source.name))
    return {format: dict(entry) for format, entry in sorted(found.items(), key=lambda item: -item[1]["elements"])}


# --- how it reads ------------------------------------------------------------------------------------------------


def as_text(report: dict[str, Any]) -> str:
    """The report for people: sections of aligned lines, coloured only on a terminal."""
    a, total = report["architecture"], report["parameters"]["total"]
    gated = "gated " if a["gated_mlp"] else ""
    head = "tied to the embedding" if a["tied_head"] else "of its own"
    kv_heads = f"{a['kv_heads']} key/value head{'s' * (a['kv_heads'] > 1)}"
    facts = [
        ("file", f"{report['path']} ({term.size_text(report['file_bytes'])})"),
        ("parameters", f"{total:,} ({count_text(total)})"),
        ("layers", f"{a['layers']} of width {a['dim']}, MLP {a['ffn_dim']} ({gated}{a['activation']})"),
        ("attention", f"{a['heads']} query heads, {kv_heads} of {a['head_dim']}{_attention(a)}"),
        ("norm", f"{'RMS' if a['norm'] == 'rms' else 'layer'} norm, eps {a['norm_eps']:.3g}{_norms(a)}"),
        ("positions", _positions(a)),
        ("vocabulary", f"{a['vocab']:,} tokens, output head {head}"),
        ("context", f"up to {a['context_max']:,} tokens"),
    ]
    tensors = []
    for s in report["shapes"]:
        elements = math.prod(s["shape"]) * s["count"]
        tensors.append((f"  {s['name']}", f"({', '.join(map(str, s['shape']))})", s["format"], f"{elements:,}"))
    parts = [(part, f"{n:>13,} {100 * n / total:5.1f} %") for part, n in report["parameters"].items() if n]
    weights = [_weights_row(format, entry) for format, entry in report["formats"].items()]
    weights.append(_weights_row("total", sum(map(Counter, report["formats"].values()), Counter())))
    header = ("weights", "tensors", "elements", "in the file", "on a device")
    flops, kv, device = report["flops_per_token"], report["kv_bytes"], report["device_bytes"]
    costs = [
        ("decode", f"{count_text(flops['decode'])} FLOPs a token that sees all {report['context']:,}"),
        ("prefill", f"{count_text(flops['prefill'])} FLOPs a token, mean over a prompt of {report['context']:,}"),
        *((f"KV cache {t}", f"{term.size_text(kv[t])}; with the weights {term.size_text(device[t])}") for t in kv),
    ]
    return "\n\n".join(
        [
            section(f"{report['name']} ({a['family']})", facts),
            term.style("tensors", "bold") + "\n" + term.table(tensors, right=(3,)),
            section("parameters by part", parts),
            term.table(weights, header=header, right=(1, 2, 3, 4)),
            section(f"at a context of {report['context']:,} tokens", costs),
        ]
    )


def _weights_row(title: str, entry: Mapping[str, int]) -> tuple[str, ...]:
    sizes = [term.size_text(entry[key]) for key in ("file_bytes", "device_bytes")]
    return (f"  {title}", str(entry["tensors"]), f"{entry['elements']:,}", *sizes)


def _attention(a: dict[str, Any]) -> str:
    text = ", q/k/v bias" * ("qkv_bias" in a) + ", q/k norm" * ("qk_norm" in a)
    if cap := a.get("attention_softcap"):
        text += f", soft-capped at {cap:g}"
    if "window" in a:
        sliding = len(a["sliding_layers"])
        text += f"; {sliding} layers see {a['window']:,} tokens, {a['layers'] - sliding} all"
    return text


def _norms(a: dict[str, Any]) -> str:
    return ", before and after each part" if "sandwich_norm" in a else ""


def _positions(a: dict[str, Any]) -> str:
    if "rope" not in a:
        return "learned"
    rope = a["rope"]
    text = f"rotary, base {rope['base']:,.0f}, {rope['dims']} dimensions, {rope['pairing']}"
    if "local_base" in rope:
        text += f"; sliding layers base {rope['local_base']:,.0f}"
    return text + (f"; {rope['scaling']} scaling x {rope['factor']:g}" if "scaling" in rope else "")


def count_text(count: float) -> str:
    """A number for people: 134.5 M, 1.24 G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:g}"
