"""Checks of shaders/matmul (products with weight matrices) and shaders/rope/rope_cache.wgsl, against float64 formulas.

Every entry point of every kernel file with every storage format, token counts around each switch, row counts that no
tile divides, weights in several windows; the kernels of both kinds of device run on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu import LimitExceeded
from nn.check import arrays, reference
from nn.check.base import Case, Outcome
from nn.check.quant import random_raw, upload_in
from nn.ops.linear import multiply
from nn.ops.linear_variants import (
    BROADCAST,
    DIGITS,
    F32,
    GEMM,
    GEMV,
    ROW,
    TILES,
    Shape,
    Variant,
    gemm_fits,
    gemv_variant,
    row_variant,
    variants,
)
from nn.quant import FORMATS, Weight, dequantize, format_of

if TYPE_CHECKING:
    from gpu import Buffer, Device

EPS = 1e-5


# --- truths ----------------------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """reference.rms_norm in float64, with the eps of these checks."""
    return reference.rms_norm(x.astype(np.float64), gain, eps=EPS)


def gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """act(gate) * up, float64."""
    return reference.activate(activation, gate) * up


def products(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, float]:
    """x W^T in float64, and 32 units of f32 rounding at the largest sum of |x w|: the tolerance of an f32 sum."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    return x @ w.T, 2e-6 * float((np.abs(x) @ np.abs(w).T).max(initial=0.0)) + 1e-30


# --- one kernel on one input -----------------------------------------------------------------------------------------


def poisoned(device: Device, *shape: int) -> Buffer:
    """A buffer of NaN, so that what a kernel leaves unwritten fails."""
    return arrays.poisoned(device, shape).buffer


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal numbers, f32."""
    return rng.standard_normal(shape).astype(np.float32)


def _rows(
    device: Device,
    rng: np.random.Generator,
    *,
    chosen: Variant,
    entry: str,
    format: str,
    rows: int,
    cols: int,
    tokens: tuple[int, ...],
    pieces: int = 1,
    activation: str = "silu",
    subgroups: bool | None = None,
) -> Iterator[Outcome]:
    """An entry that makes rows of out: linear*, norm_linear, gated_linear, norm_gated_linear. cols: whole blocks."""
    if chosen.path == GEMM and not gemm_fits(device.caps, chosen):
        yield Outcome(np.array(chosen in variants(device.caps, Shape(9, rows, cols, format))), np.array(False))
        return
    raw = random_raw(rng, format, rows, cols)
    weight, matrix = upload_in(device, raw, (rows, cols), format, pieces), dequantize(raw, format)
    for t in tokens:
        x, gain, bias = normal(rng, t, cols), normal(rng, cols), normal(rng, rows)
        width = rows // 2 if "gated" in entry else rows
        residual, out = normal(rng, t, width), poisoned(device, t, width)
        want, atol = products(rms_norm(x, gain) if "norm" in entry else x, matrix)
        buffers: dict[str, np.ndarray] = {"x": x}
        if "norm" in entry:
            buffers["gain"] = gain
        if "bias" in entry:
            want, buffers["bias"] = want + bias, bias
        if "residual" in entry:
            want, buffers["residual"] = want + residual, residual
        if "gated" in entry:
            atol *= 2.0 * (1.0 + np.abs(want).max())
            want = gated(want[:, :width], want[:, width:], activation)
        uploaded: dict[str, Any] = {name: device.upload(array) for name, array in buffers.items()}
        record = device.recorder()
        multiply(
            record, chosen, entry, weight, tokens=t, out=out, out_cols=width, eps=EPS if "norm" in entry else 0.0,
            constants={"GELU": int(activation == "gelu_tanh")} if "gated" in entry else None,
            subgroups=subgroups, **uploaded,
        )  # fmt: skip
        record.submit()
        yield Outcome(device.read(out, np.float32, want.shape), want, 1e-5, atol, f"{t} tokens")


class Projection:
    """Random queries, keys and values with their truth. `ahead` and `table_ahead` count from `position`."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotated: int,
        tokens: int,
        valid: int,
        cache: str = "f32",
        ahead: int | None = None,
        table_ahead: int | None = None,
        interleaved: bool = False,
    ) -> None:
        self.position, self.valid, self.tokens = 5, valid, tokens
        self.heads, self.kv_heads, self.head_dim, self.rotated = heads, kv_heads, head_dim, rotated
        self.context = self.position + (tokens + 2 if ahead is None else ahead)
        self.table_rows = self.position + (tokens if table_ahead is None else table_ahead)
        self.interleaved = interleaved
        self.width = (heads + 2 * kv_heads) * head_dim
        angles = rng.uniform(-np.pi, np.pi, (self.table_rows, rotated // 2))
        self.table = np.stack((np.cos(angles), np.sin(angles)), -1).astype(np.float32)
        self.angles = np.arctan2(self.table[..., 1].astype(np.float64), self.table[..., 0])
        self.step = np.array([self.position, valid, 0, 0], np.uint32)
        self.type = np.dtype(np.float32 if cache == "f32" else np.float16)
        self.caches = [normal(rng, self.context, kv_heads * head_dim).astype(self.type) for _ in range(2)]

    def sizes(self) -> dict[str, int]:
        """The Params that say where queries, keys and values go."""
        names = ("heads", "kv_heads", "head_dim", "rotated", "context", "table_rows")
        return {name: getattr(self, name) for name in names}

    def truth(self, qkv: np.ndarray, q_gain: np.ndarray | None = None, k_gain: np.ndarray | None = None) -> Any:
        """q (T, H * D), and both caches, from qkv (T, width) float64."""
        ends = np.cumsum([self.heads, self.kv_heads]) * self.head_dim
        q, k, v = (part.reshape(self.tokens, -1, self.head_dim) for part in np.split(qkv, ends, axis=1))
        if q_gain is not None and k_gain is not None:
            q, k = rms_norm(q, q_gain), rms_norm(k, k_gain)
        places = np.arange(self.position, self.position + self.tokens)
        angles = self.angles[np.minimum(places, self.table_rows - 1)]
        pairing = "interleaved" if self.interleaved else "neox"
        q, k = (reference.rotate(part, np.cos(angles), np.sin(angles), pairing=pairing) for part in (q, k))
        k_cache, v_cache = (cache.astype(np.float64) for cache in self.caches)
        kept = places[: self.valid][places[: self.valid] < self.context]
        k_cache[kept] = k.reshape(self.tokens, -1)[: len(kept)]
        v_cache[kept] = v.reshape(self.tokens, -1)[: len(kept)]
        return q.reshape(self.tokens, -1), k_cache, v_cache

    def upload(self, device: Device) -> dict[str, Any]:
        """Buffers by the names of their bindings; `out` holds NaN."""
        k_cache, v_cache = (device.upload(cache) for cache in self.caches)
        out = poisoned(device, self.tokens, self.heads * self.head_dim)
        ends = {"rope": device.upload(self.table), "step": device.upload(self.step)}
        return {**ends, "k_cache": k_cache, "v_cache": v_cache, "out": out}

    def outcomes(self, device: Device, buffers: dict[str, Buffer], truth: Any, atol: float) -> Iterator[Outcome]:
        """What the device wrote beside `truth`, for q and both caches."""
        q, *caches = truth
        label = f"{self.tokens} tokens"
        yield Outcome(device.read(buffers["out"], np.float32, q.shape), q, 1e-5, 2 * atol, f"q, {label}")
        half = 0.0 if self.type == np.float32 else 2.0**-11  # an f16 rounds by at most this part of its value
        for name, want in zip(("k_cache", "v_cache"), caches, strict=True):
            got = device.read(buffers[name], self.type, want.shape).astype(np.float64)
            yield Outcome(got, want, 1e-5 + half, 2 * atol, f"{name}, {label}")


def _qkv(
    device: Device,
    rng: np.random.Generator,
    *,
    chosen: Variant,
    entry: str,
    format: str,
    cols: int,
    tokens: tuple[int, ...],
    subgroups: bool | None = None,
    interleaved: bool = False,
    cache: str = "f32",
    **shape: int,
) -> Iterator[Outcome]:
    """norm_qkv_rope and norm_qkv_bias_rope. The last of several tokens is padding, which must not reach the cache."""
    for t in tokens:
        case = Projection(rng, tokens=t, valid=max(1, t - 1), cache=cache, interleaved=interleaved, **shape)
        raw = random_raw(rng, format, case.width, cols)
        weight = upload_in(device, raw, (case.width, cols), format, 1)
        x, gain, bias = normal(rng, t, cols), normal(rng, cols), normal(rng, case.width)
        qkv, atol = products(rms_norm(x, gain), dequantize(raw, format))
        buffers = case.upload(device)
        more: dict[str, Any] = {"x": device.upload(x), "gain": device.upload(gain)}
        if "bias" in entry:
            qkv, more["bias"] = qkv + bias, device.upload(bias)
        record = device.recorder()
        if len(buffers) + len(more) + 1 > device.caps.max_storage_buffers:  # the operation takes two dispatches there
            yield Outcome(_refused(device, chosen, entry, weight), np.array(True), label="refused, too many buffers")
            return
        multiply(
            record, chosen, entry, weight, tokens=t, out_cols=case.heads * case.head_dim, eps=EPS, sizes=case.sizes(),
            constants={"INTERLEAVED": int(interleaved)}, types={"KV": cache}, subgroups=subgroups, **buffers, **more,
        )  # fmt: skip
        record.submit()
        yield from case.outcomes(device, buffers, case.truth(qkv), atol)


def _refused(device: Device, chosen: Variant, entry: str, weight: Weight) -> np.ndarray:
    try:
        device.kernel(chosen.path, entry, constants=dict(chosen.constants), parts={"format": weight.shader})
    except LimitExceeded:
        return np.array(True)
    return np.array(False)


def _rope_cache(
    device: Device,
    rng: np.random.Generator,
    *,
    entry: str,
    group: int,
    tokens: int,
    valid: int,
    subgroups: bool | None = None,
    **options: Any,
) -> Iterator[Outcome]:
    case = Projection(rng, tokens=tokens, valid=valid, **options)
    qkv, buffers, more = normal(rng, tokens, case.width), case.upload(device), {}
    want, gains = qkv.astype(np.float64), []
    if "bias" in entry:
        bias = normal(rng, case.width)
        want, more["bias"] = want + bias, device.upload(bias)
    if "norm" in entry:
        gains = [normal(rng, case.head_dim) for _ in range(2)]
        more |= {name: device.upload(gain) for name, gain in zip(("q_gain", "k_gain"), gains, strict=True)}
    kernel = device.kernel(
        "rope/rope_cache.wgsl", entry, constants={"INTERLEAVED": int(case.interleaved), "WG": group},
        types={"KV": options.get("cache", "f32")}, subgroups=subgroups,
    )  # fmt: skip
    record = device.recorder()
    grid = tokens * (case.heads + 2 * case.kv_heads)
    record(kernel, grid, qkv=device.upload(qkv), tokens=tokens, eps=EPS, **case.sizes(), **buffers, **more)
    record.submit()
    yield from case.outcomes(device, buffers, case.truth(want, *gains), 2e-6)


def _small_rows(device: Device, rng: np.random.Generator, *, entry: str, activation: str = "silu") -> Iterator[Outcome]:
    """pad and gate of rows.wgsl."""
    rows, cols, out_cols = (5, 45, 64) if entry == "pad" else (7, 26, 13)
    x, out = 8.0 * normal(rng, rows, cols), poisoned(device, rows, out_cols)
    constants = {"GELU": int(activation == "gelu_tanh")} if entry == "gate" else {}
    if entry == "pad":
        want = np.pad(x, ((0, 0), (0, out_cols - cols)))
    else:
        x[0, :4] = -100.0, 100.0, -3e18, 3e18  # the activation must not overflow on its way
        x[:, out_cols:] = np.clip(x[:, out_cols:], -1.0, 1.0)
        with np.errstate(over="ignore"):
            want = gated(x[:, :out_cols].astype(np.float64), x[:, out_cols:].astype(np.float64), activation)
    record = device.recorder()
    kernel = device.kernel("matmul/rows.wgsl", entry, constants=constants)
    record(kernel, -(-out_cols * rows // 64), x=device.upload(x), out=out, rows=rows, cols=cols, out_cols=out_cols)
    record.submit()
    yield Outcome(device.read(out, np.float32, want.shape), want, 1e-5, 1e-6)


# --- the list --------------------------------------------------------------------------------------------------------

PLAIN = ("linear", "linear_bias", "linear_residual", "linear_bias_residual", "norm_linear")
PAIRED = ("gated_linear", "norm_gated_linear")
QKV = ("norm_qkv_rope", "norm_qkv_bias_rope")
SHARED = ("matmul/weight.wgsl", "matmul/gated.wgsl", "rope/qkv.wgsl")
_SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": 3, "kv_heads": 1, "head_dim": 6, "rotated": 4},
    {"heads": 2, "kv_heads": 2, "head_dim": 16, "rotated": 16, "interleaved": True},
)


def _whole(format: str, blocks: int) -> int:
    """Columns of at least that many blocks of 32 that the format can store."""
    return -(-blocks * 32 // max(32, format_of(format).block)) * max(32, format_of(format).block)


@dataclass(frozen=True)
class _Form:
    """A kernel in one form: how it is chosen for an entry and a format, and what it is tried with."""

    name: str
    make: Callable[[str, str], Variant]
    path: str
    tokens: tuple[int, ...]
    blocks: int = 3  # of 32, a row
    subgroups: bool | None = None
    entries: tuple[str, ...] = (*PLAIN, *PAIRED, *QKV)
    dots: str = F32  # gemv only


def _forms() -> list[_Form]:
    def row(tokens: int, *, broadcast: bool = False) -> Callable[[str, str], Variant]:
        return lambda entry, format: row_variant(tokens, dense=format_of(format).dense, broadcast=broadcast)

    def gemv(dots: str, blocks: int, rows: int, most: int, **options: Any) -> Callable[[str, str], Variant]:
        def make(entry: str, format: str) -> Variant:
            paired = "gated" in entry or "qkv" in entry
            form = gemv_variant(dots, blocks, rows=max(rows, 1 + paired), memory=16_384, **options)
            return replace(form, most=most)

        return make

    found = [
        _Form("row", row(1), ROW, (1,)),
        _Form("row 4 tokens", row(4), ROW, (2, 3, 8, 9, 33)),
        _Form("row broadcast", row(1, broadcast=True), BROADCAST, (1,)),
        _Form("row broadcast 4 tokens", row(4, broadcast=True), BROADCAST, (2, 3, 8, 9, 33)),
    ]
    # Blocks: more than the lanes and than one chunk; or few: several rows share a subgroup. `most` 3: several rounds.
    for name, make, tokens, blocks in (
        ("1 lanes 32", gemv(F32, 115, 1, 3, tokens=1, lanes=32, unroll=1, group=64, within=False), (1,), 115),
        ("1 lanes 4 unroll 2", gemv(F32, 3, 1, 0, tokens=1, lanes=4, unroll=2, group=256, within=False), (1,), 3),
        ("2 lanes 8", gemv(F32, 50, 2, 3, tokens=2, lanes=8, unroll=1, group=128, within=False), (2,), 50),
        ("4 lanes 16", gemv(F32, 35, 2, 0, tokens=4, lanes=16, unroll=1, group=64, within=False), (3, 8, 9, 33), 35),
    ):
        for subgroups in (True, False):
            label = f"gemv {name}{' subgroups' if subgroups else ''}"
            found.append(_Form(label, make, GEMV, tokens, blocks, subgroups))
    for name, make, tokens, blocks in (
        ("1 lanes 32", gemv(DIGITS, 150, 1, 3, tokens=1, lanes=32, unroll=2, group=64, within=False), (1,), 150),
        ("1 lanes 8", gemv(DIGITS, 18, 1, 3, tokens=1, lanes=8, unroll=2, group=128, within=True), (1,), 18),
        ("2 lanes 8", gemv(DIGITS, 70, 2, 0, tokens=2, lanes=8, unroll=1, group=64, within=True), (1, 2), 70),
        ("4 lanes 8", gemv(DIGITS, 3, 4, 3, tokens=4, lanes=8, unroll=1, group=32, within=True), (3, 8, 9), 3),
    ):
        found.append(_Form(f"gemv digits {name}", make, GEMV, tokens, blocks, True, dots=DIGITS))
    for form in TILES:
        make = partial(lambda entry, format, form: form, form=form)
        tokens = (form.tokens // 2 + 1, form.tokens + 1)
        found.append(_Form(form.name, make, form.path, tokens, 5, entries=(*PLAIN[:4], PAIRED[0])))
    return found


def cases() -> list[Case]:
    """Row kernels meet every format, each form of gemv every fourth, each tile every eighth of them; entries rotate."""
    found: list[Case] = []
    for number, form in enumerate(_forms()):
        for i, format in enumerate(FORMATS):
            if form.path not in (ROW, BROADCAST) and (i + number) % (8 if form.path == GEMM else 4):
                continue
            if form.dots == DIGITS and format_of(format).dense:
                continue
            entry, cols = form.entries[len(found) % len(form.entries)], _whole(format, form.blocks)
            shaders = (form.path, f"quant/{format}.wgsl", *SHARED)
            if form.path != GEMM:
                shaders += ("matmul/entries.wgsl",)
            if form.path == GEMV:
                shaders += ("matmul/lanes_subgroup.wgsl" if form.subgroups else "matmul/lanes.wgsl", form.dots)
            options: dict[str, Any] = {"chosen": form.make(entry, format), "entry": entry, "format": format}
            options |= {"cols": cols, "tokens": form.tokens, "subgroups": form.subgroups}
            label = f"matmul/{entry}: {form.name}, {format} K={cols}"
            needs = {"wide_subgroups" if form.dots == DIGITS else "subgroups"} if form.subgroups else set()
            needs |= {"wide_subgroups"} if form.path == BROADCAST else set()
            if entry in QKV:
                cache = ("f32", "f16")[len(found) // len(form.entries) % 2]
                run = partial(_qkv, cache=cache, **options, **_SHAPES[number % 2])
                needs |= {"f16"} if cache == "f16" else set()
                label += f" cache {cache}"
            else:
                several = form.path not in (ROW, BROADCAST)  # windows, always where a format stands for others
                pieces = 2 + i % 2 if several else 1 + i % 3
                shape = {"rows": 78, "pieces": 1} if "gated" in entry else {"rows": 77, "pieces": pieces}
                run = partial(_rows, activation=("silu", "gelu_tanh")[number % 2], **options, **shape)
            found.append(Case(label, run, shaders, frozenset(needs)))
    return found + _rope_cases() + _small_cases()


def _rope_cases() -> list[Case]:
    found = []
    shaders = ("rope/rope_cache.wgsl", "rope/qkv.wgsl")
    forms: list[tuple[str, int, bool, dict[str, Any]]] = [
        ("1 token", 32, False, {"tokens": 1, "valid": 1}),
        ("padding", 8, True, {"tokens": 7, "valid": 4}),
        ("past the end of the cache", 8, False, {"tokens": 4, "valid": 4, "ahead": 2}),
        ("past the end of the table", 32, True, {"tokens": 4, "valid": 4, "table_ahead": 1}),
        ("f16", 8, False, {"tokens": 5, "valid": 5, "cache": "f16"}),
        ("head 256", 128, True, {"tokens": 3, "valid": 3, "heads": 2, "kv_heads": 1, "head_dim": 256, "rotated": 256}),
    ]
    for entry in ("rope_cache", "rope_cache_bias", "rope_cache_norm"):
        for i, (name, group, subgroups, form) in enumerate(forms):
            options = {**_SHAPES[i % 2], **form}
            needs = ({"subgroups"} if subgroups else set()) | ({"f16"} if form.get("cache") == "f16" else set())
            run = partial(_rope_cache, entry=entry, group=group, subgroups=subgroups, **options)
            label = f"rope/{entry}: {name}, {group} invocations{' subgroups' if subgroups else ''}"
            found.append(Case(label, run, shaders, frozenset(needs)))
    return found


def _small_cases() -> list[Case]:
    shaders = ("matmul/rows.wgsl", "matmul/gated.wgsl")
    return [
        Case("matmul/pad: 45 to 64 columns", partial(_small_rows, entry="pad"), shaders),
        Case("matmul/gate: silu", partial(_small_rows, entry="gate"), shaders),
        Case("matmul/gate: gelu_tanh", partial(_small_rows, entry="gate", activation="gelu_tanh"), shaders),
    ]
