"""Checks of shaders/attention/: every kernel with every way of reading rows, of choosing keys and of masking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.base import Case, Outcome
from nn.ops.attention import Heads, record_attention
from nn.ops.attention_variants import EVERY, KEEPING, Shape, Variant
from nn.ops.base import Array

if TYPE_CHECKING:
    from gpu import Capabilities, Device

UNIT = 2.0**-24  # half the spacing of f32 at 1


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    seen: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    softcap: float = 0.0,
) -> np.ndarray:
    """softmax(cap(scale q.k) + bias) v in float64. q (B, Hq, L, D), k and v (B, Hkv, S, D); seen and bias broadcast to
    (B, Hq, L, S). Query head h reads head h // (Hq / Hkv); a row that sees no key is 0."""
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = scale * np.einsum("bhld,bhsd->bhls", q, k)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    if scores.shape[-1] == 0:
        return np.zeros(q.shape)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhls,bhsd->bhld", weights / np.where(total == 0.0, 1.0, total), v)


def visible(rows: int, keys: int, *, offset: int, window: int = 0) -> np.ndarray:
    """(rows, keys) bool: row i sees keys up to i + offset, the last `window` of them (0: all)."""
    end = np.arange(rows)[:, None] + offset
    at = np.arange(keys)[None, :]
    return (at <= end) & ((at > end - window) if window else True)


@dataclass(frozen=True)
class Problem:
    """One input. kv: key/value heads. mask: its shape with True where it has the problem's length and False where 1."""

    batch: int = 1
    heads: int = 2
    kv: int = 1
    rows: int = 1
    keys: int = 1
    causal: bool = False
    offset: int = 0
    window: int = 0
    softcap: float = 0.0
    logits: float = 3.0  # largest |scale q.k|, about
    mask: tuple[bool, bool, bool, bool] | None = None


# Lengths around the switches: tiles of 64 rows and 32 keys, blocks of 256 keys in decode, 4 pairs and 32 keys in
# narrow. Groups of 1, 2, 3 and 4 query heads.
PLAIN = [
    Problem(),
    Problem(heads=6, kv=2, rows=1, keys=77),
    Problem(batch=2, heads=4, kv=2, rows=15, keys=31, causal=True, offset=16),
    Problem(heads=3, kv=3, rows=16, keys=32, causal=True),
    Problem(heads=3, kv=1, rows=17, keys=33, softcap=20.0, logits=60),
    Problem(heads=1, kv=1, rows=63, keys=64, causal=True, offset=1, window=16),
    Problem(heads=2, kv=1, rows=64, keys=65, causal=True, offset=0, window=1),
    Problem(heads=2, kv=2, rows=65, keys=33, causal=True, offset=-32),  # 32 rows see nothing
    Problem(heads=2, kv=1, rows=130, keys=200, causal=True, offset=70, window=33),
    Problem(heads=4, kv=1, rows=3, keys=255, logits=80),
    Problem(heads=4, kv=1, rows=2, keys=257, causal=True, offset=255, softcap=0.75, logits=80),
    Problem(heads=1, kv=1, rows=5, keys=600, causal=True, offset=595, window=300),
    Problem(heads=2, kv=1, rows=5, keys=20, causal=True, offset=17, window=4),  # the last rows stand behind the keys
    Problem(heads=2, kv=1, rows=9, keys=0),
]
SHORT = [  # fewer lengths, for other D
    Problem(heads=2, kv=1, rows=1, keys=77),
    Problem(batch=2, heads=4, kv=2, rows=66, keys=70, causal=True, offset=4, logits=10),
    Problem(heads=5, kv=1, rows=1, keys=300, logits=30),
]
MASKED = [
    Problem(batch=2, heads=4, kv=2, rows=3, keys=77, mask=(True, True, True, True)),
    Problem(batch=2, heads=2, kv=2, rows=66, keys=33, mask=(False, False, True, True)),
    Problem(batch=2, heads=2, kv=1, rows=5, keys=40, mask=(True, False, False, True)),
    Problem(
        heads=2, kv=1, rows=7, keys=40, causal=True, offset=33, mask=(False, True, False, True), logits=80, softcap=30.0
    ),
]


@dataclass(frozen=True)
class Make:
    """One specialisation of a kernel and what it is fed."""

    title: str
    parts: tuple[str, str, str]  # rows, keys, mask
    elem: str = "f32"
    kv: str = "f32"
    d: int = 64


# Compiling one takes a software driver seconds, so each stands for several things at once.
PLAIN_F32 = Make("plain", ("vec4", "given", "none"))
HALVES = Make("short", ("vec4", "given", "none"), "f16", "f16", 80)  # 20 groups of four features: 8, 8 and a part of 8
CACHE = Make("cache", ("vec4", "step", "none"), "f32", "f16", 64)
MAKES = [
    PLAIN_F32,
    HALVES,
    Make("short", ("vec4", "given", "none"), d=96),
    Make("short", ("vec4", "given", "none"), d=256),
    Make("short", ("scalar", "given", "none"), d=63),
    CACHE,
    Make("cache", ("vec4", "step", "none"), d=128),
    Make("cache", ("scalar", "step", "none"), "f16", "f16", 37),
    Make("masked", ("vec4", "given", "bool"), d=32),
    Make("masked", ("vec4", "given", "additive"), "f16", "f16", 32),
    Make("masked", ("scalar", "given", "additive"), d=1),
]
WIDE = [MAKES[3], MAKES[6]]  # 256 and 128 features
SPLIT = [PLAIN_F32, HALVES, CACHE, MAKES[3], MAKES[4], MAKES[7], MAKES[8]]
MATRIX = [
    HALVES,
    MAKES[9],
    Make("plain", ("vec4", "given", "none"), "f16", "f16", 64),
    Make("cache", ("vec4", "step", "none"), "f16", "f16", 128),
    Make("masked", ("vec4", "given", "bool"), "f16", "f16", 128),
    Make("short", ("vec4", "given", "none"), "f16", "f16", 256),
    Make("short", ("vec4", "given", "none"), "f16", "f16", 8),
]


def cases() -> list[Case]:
    """One size of each kernel with everything that it reads, its other sizes with some of that. Less where only the
    reduction over subgroups changes, or lanes.wgsl is built for subgroups four times as wide as those that it meets."""
    found, kinds = [], set()
    for variant in EVERY:
        again = variant.kind in kinds
        kinds.add(variant.kind)
        if variant.kind == "matrix":
            others = [MATRIX[3]] if dict(variant.constants)["KEYS"] == 32 else [MATRIX[0], MATRIX[5]]
            makes = others if again else MATRIX
        elif variant.kind == "split":
            makes = SPLIT if not again else [CACHE]
        elif variant.kind == "tile" and again:
            makes = WIDE if dict(variant.constants)["WIDE"] > 3 else [HALVES, CACHE]
        else:
            makes = MAKES if not again else [CACHE]
        found += [_case(variant, make, subgroups=False) for make in makes]
        if variant.kind == "decode":
            found += [_case(variant, make, subgroups=True) for make in (PLAIN_F32, CACHE)]
        if variant.kind in ("lanes", "split") and not again:
            found += [_case(variant, make, subgroups=True, wider=4) for make in (PLAIN_F32, CACHE)]
    return found


def _case(variant: Variant, make: Make, *, subgroups: bool, wider: int = 1) -> Case:
    rows, keys, mask = make.parts
    lanes = variant.kind in ("lanes", "split")
    files = (f"attention/{'lanes' if lanes else variant.kind}.wgsl", "attention/params.wgsl")
    if lanes and rows == "vec4" and make.kv == "f16":
        rows = "vec8"
    files += (f"attention/keys_{keys}.wgsl", f"attention/mask_{mask}.wgsl")
    if variant.kind != "matrix":
        files += (f"attention/rows_{rows}.wgsl",)
    if variant.kind in KEEPING:
        files += ("attention/lse_none.wgsl",)
    if variant.kind == "decode":
        files += (f"lib/reduce{'_subgroup' if subgroups else ''}.wgsl",)
    needs = {"f16"} if "f16" in (make.elem, make.kv) else set()
    needs |= {"wide_subgroups"} if lanes else {"subgroups"} if subgroups else set()
    needs |= {"matrix_f16"} if variant.kind == "matrix" else set()
    how = " ".join(
        (
            make.title,
            mask,
            rows,
            *["subgroups"] * (subgroups and not lanes),
            *[f"built {wider} times wider"] * (wider > 1),
        )
    )
    name = f"attention/{variant.name}: {how}, q {make.elem} kv {make.kv} D {make.d}"
    options = {
        "elem": make.elem,
        "kv": make.kv,
        "d": make.d,
        "variant": variant,
        "subgroups": subgroups,
        "wider": wider,
    }
    fits = partial(_fits, variant=variant, make=make)
    if make.title == "cache":
        return Case(name, partial(_cached, **options), files, frozenset(needs), fits)
    problems = {"plain": PLAIN, "short": SHORT, "masked": MASKED}[make.title]
    mask_type = "bool" if mask == "bool" else make.elem
    run = partial(_general, problems=problems, mask_type=mask_type, **options)
    return Case(name, run, files, frozenset(needs), fits)


def _fits(caps: Capabilities, *, variant: Variant, make: Make) -> bool:
    """Whether the kernel fits this device; which problems it takes is looked at problem by problem."""
    group = dict(variant.constants).get("HEADS", 1)
    wide = make.parts[0] == "vec4"
    shape = Shape(1, 1, group, 1, make.d, elem=make.elem, kv=make.kv, wide=wide, wide8=wide and make.d % 8 == 0)
    return variant.fits(caps, shape)


def tolerance(
    elem: str, d: int, logits: float, values: np.ndarray, *, keys: int = 0, matrices: bool = False
) -> dict[str, float]:
    """Bounds of the error: a score of size s is a sum of d products, wrong by at most about (sqrt(d) + 4) s units, and
    exp adds (3 + 2 s) ulp more; each weight is wrong by that much of itself, the result by twice that of max |v|.

    Matrix units may cut sums off where they should round: twice the error. And weights are rounded to f16: by half of
    2^-10 of themselves, or of the smallest f16 where they are small, and the largest is at least 1."""
    score = (d**0.5 + 4.0) * logits + 2.0 * logits + 8.0
    error = 2.0 * (score + 8.0) * UNIT
    if matrices:
        error = 2.0 * error + 2.0**-11 + keys * 2.0**-25
    atol = error * float(np.abs(values).max(initial=0.0))
    return {"rtol": STORE_ERROR[elem], "atol": atol + STORE_FLOOR[elem]}


def _general(
    device: Device,
    rng: np.random.Generator,
    *,
    problems: list[Problem],
    elem: str,
    kv: str,
    d: int,
    variant: Variant,
    subgroups: bool,
    wider: int,
    mask_type: str,
) -> Iterator[Outcome]:
    group = dict(variant.constants).get("HEADS", 1)
    matrices = variant.kind == "matrix"
    for problem in problems:
        b, n, m = problem.batch, problem.rows, problem.keys
        if problem.heads // problem.kv % group or (matrices and m == 0):
            continue
        scale = 1.0 / d**0.5
        size = (problem.logits / 3.0) ** 0.5  # of each feature: scale * q.k then has the deviation logits / 3
        q, q64, q_view = _heads(device, rng, (b, problem.heads, n, d), elem, size, swapped=False)
        k, k64, k_view = _heads(device, rng, (b, problem.kv, m, d), kv, size, swapped=True)
        v, v64, v_view = _heads(device, rng, (b, problem.kv, m, d), kv, 1.0, swapped=False)
        out = poisoned(device, (b, n, problem.heads, d), elem)
        seen = visible(n, m, offset=problem.offset, window=problem.window) if problem.causal else np.ones((n, m), bool)
        mask, bias = None, None
        if problem.mask is not None:
            whole = (b, problem.heads, n, m)
            shape = tuple(length if full else 1 for length, full in zip(whole, problem.mask, strict=True))
            allowed = rng.random(shape) < 0.7
            allowed[0, 0, -1] = False  # a row that sees no key, where the mask has rows
            if mask_type == "bool":
                mask = Array(device.upload(allowed.astype(np.uint32)), shape, "bool")
                seen = seen & allowed
            else:
                added = np.where(allowed, rng.standard_normal(shape) * 2, -np.inf)
                mask, bias = upload(device, added, mask_type)
        record = device.recorder()
        record_attention(
            record,
            q_view,
            k_view,
            v_view,
            _swapped_view(out),
            scale=scale,
            mask=mask,
            causal=problem.causal,
            offset=problem.offset,
            window=problem.window,
            softcap=problem.softcap,
            variant=variant,
            subgroups=subgroups,
            subgroup_size=wider * device.caps.subgroup_size,
        )
        record.submit()
        want = attention(q64, k64, v64, scale=scale, seen=seen, bias=bias, softcap=problem.softcap)
        largest = float(
            np.abs(scale * np.einsum("bhld,bhsd->bhls", q64, np.repeat(k64, problem.heads // problem.kv, 1))).max(
                initial=0.0
            )
        )
        got = fetch(device, out).transpose(0, 2, 1, 3)
        bounds = tolerance(elem, d, largest + 8.0, v64, keys=m, matrices=matrices)
        yield Outcome(got, want, **bounds, label=str(problem))
        del q, k, v


def _cached(
    device: Device,
    rng: np.random.Generator,
    *,
    elem: str,
    kv: str,
    d: int,
    variant: Variant,
    subgroups: bool,
    wider: int,
) -> Iterator[Outcome]:
    """One recording, replayed with another step buffer; what lies behind the filled part of the cache is NaN."""
    group = dict(variant.constants).get("HEADS", 1)
    for heads, kv_heads, rows, context, window, softcap in (
        (9, 3, 1, 300, 0, 0.0),
        (4, 1, 8, 64, 16, 30.0),
        (2, 2, 67, 131, 0, 0.0),
        (14, 2, 5, 290, 257, 0.0),
        (12, 1, 2, 600, 300, 0.0),
    ):
        if heads // kv_heads % group:
            continue
        q, q64 = upload(device, rng.standard_normal((rows, heads * d)) * 3, elem)
        keys = rng.standard_normal((context, kv_heads * d))
        values = rng.standard_normal((context, kv_heads * d))
        k, k64 = upload(device, keys, kv)
        v, v64 = upload(device, values, kv)
        out = poisoned(device, (rows, heads * d), elem)
        step = device.upload(np.zeros(4, np.uint32))
        record = device.recorder()
        record_attention(
            record,
            Heads.rows(q, heads, rows, d),
            Heads.rows(k, kv_heads, context, d),
            Heads.rows(v, kv_heads, context, d),
            Heads.rows(out, heads, rows, d),
            scale=d**-0.5,
            step=step,
            window=window,
            softcap=softcap,
            variant=variant,
            subgroups=subgroups,
            subgroup_size=wider * device.caps.subgroup_size,
        )
        plan = record.plan()
        scale = d**-0.5
        for position, tokens in ((0, rows), (context // 2, max(rows - 2, 1)), (context - rows, rows), (7, 0), (31, 1)):
            filled = position + tokens
            k.buffer.write(_until(keys, filled, kv))
            v.buffer.write(_until(values, filled, kv))
            out.buffer.write(np.full(out.shape, np.nan, np.float16 if elem == "f16" else np.float32))
            step.write(np.array([position, tokens, 0, 0], np.uint32))
            plan.replay()
            split = [x[:filled].reshape(1, filled, kv_heads, d).transpose(0, 2, 1, 3) for x in (k64, v64)]
            rows64 = q64.reshape(1, rows, heads, d).transpose(0, 2, 1, 3)
            seen = visible(rows, filled, offset=position, window=window) & (np.arange(rows) < tokens)[:, None]
            want = attention(rows64, split[0], split[1], scale=scale, seen=seen, softcap=softcap)
            largest = float(np.abs(q64).max() * np.abs(k64).max() * d**0.5)
            label = f"{heads}/{kv_heads} heads, {rows} rows, context {context}, window {window}, at {position}+{tokens}"
            got = fetch(device, out).reshape(1, rows, heads, d).transpose(0, 2, 1, 3)
            bounds = tolerance(elem, d, largest, v64, keys=filled, matrices=variant.kind == "matrix")
            yield Outcome(got, want, **bounds, label=label)


def _until(values: np.ndarray, filled: int, dtype: str) -> np.ndarray:
    """The cache with NaN where nothing was written yet: a kernel that reads on shows it."""
    stored = values.astype(np.float16 if dtype == "f16" else np.float32)
    stored[filled:] = np.nan
    return stored


def _heads(
    device: Device,
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    dtype: str,
    size: float,
    *,
    swapped: bool,
) -> tuple[Array, np.ndarray, Heads]:
    """Random (B, H, L, D) values, stored so, or as (B, L, H, D) where swapped; in float64 as (B, H, L, D); the view."""
    values = rng.standard_normal(shape) * size
    if not swapped:
        array, exact = upload(device, values, dtype)
        return array, exact, Heads.of(array)
    array, exact = upload(device, values.transpose(0, 2, 1, 3), dtype)
    return array, exact.transpose(0, 2, 1, 3), _swapped_view(array)


def _swapped_view(array: Array) -> Heads:
    """(B, L, H, D) seen as (B, H, L, D)."""
    b, n, h, d = array.shape
    return Heads(array.buffer, array.dtype, (b, h, n, d), (n * h * d, d, h * d))
