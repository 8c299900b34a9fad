"""Checks of the gradients of attention, shaders/attention/grad_*.wgsl, and of the sums that forward keeps for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nn.check.arrays import STORE_ERROR, STORE_FLOOR, fetch, poisoned, upload
from nn.check.attention import Problem, visible
from nn.check.base import Case, Outcome
from nn.ops.attention import Heads, heads_inside, record_attention
from nn.ops.attention_grad import record_attention_grad
from nn.ops.attention_variants import GRADS, NARROW, SMALL_TILE, GradVariant, Shape, Variant
from nn.ops.base import Array

if TYPE_CHECKING:
    from gpu import Capabilities, Device


def gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    *,
    scale: float,
    seen: np.ndarray,
    bias: np.ndarray | None = None,
    softcap: float = 0.0,
) -> dict[str, np.ndarray]:
    """dq, dk and dv of `attention` in float64, and its out and lse (0 for rows that see no key)."""
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    capped = scale * np.einsum("bhld,bhsd->bhls", q, wide_k)
    slope = np.ones_like(capped)
    if softcap:
        ratio = np.tanh(capped / softcap)
        capped, slope = softcap * ratio, 1 - ratio**2
    scores = np.where(seen, capped if bias is None else capped + bias, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.where(np.isneginf(scores), 0.0, np.exp(scores - top))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    lse = np.where(total == 0, 0.0, top + np.log(np.where(total == 0, 1, total)))[..., 0]
    through = np.einsum("bhld,bhsd->bhls", dout, wide_v)
    ds = scale * slope * weights * (through - (weights * through).sum(-1, keepdims=True))
    own = (k.shape[0], k.shape[1], share, k.shape[2], k.shape[3])  # the query heads that share keys
    return {
        "dq": np.einsum("bhls,bhsd->bhld", ds, wide_k),
        "dk": np.einsum("bhls,bhld->bhsd", ds, q).reshape(own).sum(2),
        "dv": np.einsum("bhls,bhld->bhsd", weights, dout).reshape(own).sum(2),
        "out": np.einsum("bhls,bhsd->bhld", weights, wide_v),
        "lse": lse,
    }


# Lengths around tiles of 64 and 32 rows on either side; every way of seeing keys.
PLAIN = [
    Problem(),
    Problem(batch=2, heads=4, kv=2, rows=63, keys=65, causal=True, offset=2),
    Problem(heads=3, kv=1, rows=33, keys=64, softcap=3.0, logits=5),
    Problem(heads=1, kv=1, rows=64, keys=130, causal=True, offset=66, window=20),
    Problem(heads=2, kv=2, rows=100, keys=33, causal=True, offset=-40),  # 40 rows see nothing
    Problem(
        batch=2, heads=2, kv=2, rows=70, keys=70, causal=True, offset=-3, window=5
    ),  # alike: gradients side by side
]
SHORT = [Problem(batch=2, heads=4, kv=2, rows=66, keys=70, causal=True, offset=4), Problem(rows=1, keys=9)]
MASKED = [
    Problem(batch=2, heads=4, kv=2, rows=3, keys=40, mask=(True, True, True, True)),
    Problem(heads=2, kv=1, rows=34, keys=33, causal=True, offset=0, mask=(False, True, False, True), softcap=5.0),
]


@dataclass(frozen=True)
class Make:
    """One specialisation and what it is fed."""

    problems: list[Problem]
    d: int = 64
    elem: str = "f32"
    rows: str = "vec4"
    mask: str = "none"


FIRST = [
    Make(PLAIN),
    Make(SHORT, 80, "f16"),
    Make(SHORT, 37, "f32", "scalar"),
    Make(MASKED, 6, "f16", "scalar", "additive"),
    Make(MASKED, 32, "f32", "vec4", "bool"),
]


def cases() -> list[Case]:
    """The first kernel of each kind with everything, the others with wide heads."""
    found, kinds = [], set()
    for variant in GRADS:
        kind = variant.kind
        makes = [Make(SHORT, 128)] if kind in kinds else FIRST
        kinds.add(kind)
        for make in makes:
            shape = Shape(1, 1, 1, 1, make.d, elem=make.elem, kv=make.elem)
            found.append(
                Case(
                    f"attention/grad {variant.name}: {make.mask} {make.rows} {make.elem} D {make.d}",
                    partial(_gradients, make=make, variant=variant),
                    (
                        f"attention/grad_{kind}.wgsl",
                        "attention/grad_pair.wgsl",
                        "attention/grad_stats.wgsl",
                        f"attention/grad_rows_{make.rows}.wgsl",
                        f"attention/mask_{make.mask}.wgsl",
                    ),
                    frozenset({"f16"} if make.elem == "f16" else ()),
                    partial(_fits, variant=variant, shape=shape),
                )
            )
    for variant, elem in ((NARROW, "f32"), (SMALL_TILE, "f32")):
        files = (f"attention/{variant.kind}.wgsl", "attention/lse_store.wgsl")
        shape = Shape(1, 1, 1, 1, 64, elem=elem, kv=elem)
        found.append(
            Case(
                f"attention/{variant.name}: sums kept",
                partial(_kept, variant=variant, make=Make(PLAIN, elem=elem)),
                files,
                frozenset({"f16"} if elem == "f16" else ()),
                partial(_fits, variant=variant, shape=shape),
            )
        )
    return found


def _fits(caps: Capabilities, *, variant: GradVariant | Variant, shape: Shape) -> bool:
    return variant.fits(caps, shape)


@dataclass
class Inputs:
    arrays: dict[str, Array]
    exact: dict[str, np.ndarray]
    seen: np.ndarray
    bias: np.ndarray | None
    mask: Array | None


def _inputs(device: Device, rng: np.random.Generator, problem: Problem, make: Make) -> Inputs:
    b, n, m, d = problem.batch, problem.rows, problem.keys, make.d
    size = (problem.logits / 3.0) ** 0.5
    arrays, exact = {}, {}
    for name, shape, spread in (
        ("q", (b, problem.heads, n, d), size),
        ("k", (b, problem.kv, m, d), size),
        ("v", (b, problem.kv, m, d), 1.0),
        ("dout", (b, problem.heads, n, d), 1.0),
    ):
        values = rng.standard_normal(shape) * spread
        if name in ("k", "dout"):  # as (B, L, H, D)
            array, held = upload(device, values.transpose(0, 2, 1, 3), make.elem)
            arrays[name], exact[name] = replace(array, shape=shape), held.transpose(0, 2, 1, 3)
            arrays[name] = _inside(arrays[name])
        else:
            arrays[name], exact[name] = upload(device, values, make.elem)
    seen = visible(n, m, offset=problem.offset, window=problem.window) if problem.causal else np.ones((n, m), bool)
    mask, bias = None, None
    if problem.mask is not None:
        whole = (b, problem.heads, n, m)
        shape = tuple(length if full else 1 for length, full in zip(whole, problem.mask, strict=True))
        allowed = rng.random(shape) < 0.7
        allowed[0, 0, -1] = False  # a row that sees no key, where the mask has rows
        if make.mask == "bool":
            mask = Array(device.upload(allowed.astype(np.uint32)), shape, "bool")
            seen = seen & allowed
        else:
            mask, bias = upload(device, np.where(allowed, rng.standard_normal(shape), -np.inf), make.elem)
    return Inputs(arrays, exact, seen, bias, mask)


def _gradients(device: Device, rng: np.random.Generator, *, make: Make, variant: GradVariant) -> Iterator[Outcome]:
    for problem in make.problems:
        given = _inputs(device, rng, problem, make)
        scale = make.d**-0.5
        want = gradients(**given.exact, scale=scale, seen=given.seen, bias=given.bias, softcap=problem.softcap)
        # Forward's results as this type holds them, so that only the gradients' own errors are looked at.
        out, out64 = upload(device, want["out"], make.elem)
        lse, _ = upload(device, want["lse"])
        error = np.abs(out64 - want["out"]).max(initial=0.0) * np.abs(given.exact["dout"]).max() * make.d
        sizes = [given.arrays[name].size for name in "qkv"]
        joint = given.arrays["q"].shape == given.arrays["k"].shape
        grads = poisoned(device, (sum(sizes),), make.elem)
        record = device.recorder()
        record_attention_grad(
            record,
            **given.arrays,
            out=out,
            lse=lse,
            grads=grads,
            joint=joint,
            mask=given.mask,
            scale=scale,
            causal=problem.causal,
            offset=problem.offset,
            window=problem.window,
            softcap=problem.softcap,
            variant=variant,
        )
        record.submit()
        flat = fetch(device, grads)
        for i, name in enumerate(("dq", "dk", "dv")):
            # A score is wrong by some ten units of its size, a weight by as much of itself; dS is a weight times
            # numbers of size dout.v, of which some hundreds are added.
            size = max(float(np.abs(want[name]).max(initial=0.0)), 1.0)
            atol = 2e-5 * size + scale * error * float(np.abs(given.exact["q"]).max()) + STORE_FLOOR[make.elem]
            b, h, n, d = given.arrays[name[1]].shape
            own = flat.reshape(b, n, 3, h, d)[:, :, i] if joint else np.split(flat, np.cumsum(sizes)[:2])[i]
            got = own.reshape(b, n, h, d).transpose(0, 2, 1, 3)
            yield Outcome(got, want[name], STORE_ERROR[make.elem], atol, label=f"{name}, {problem}")


def _inside(array: Array) -> Array:
    """(B, L, H, D) in memory, seen as (B, H, L, D)."""
    return Array(array.buffer, array.shape, array.dtype, heads_inside(array.spec))


def _kept(device: Device, rng: np.random.Generator, *, variant: Variant, make: Make) -> Iterator[Outcome]:
    error = 1e-5 if make.elem == "f32" else 2e-3
    for problem in make.problems:
        given = _inputs(device, rng, problem, make)
        scale = make.d**-0.5
        want = gradients(**given.exact, scale=scale, seen=given.seen, softcap=problem.softcap)
        out, lse = poisoned(device, want["out"].shape, make.elem), poisoned(device, want["lse"].shape)
        record = device.recorder()
        record_attention(
            record,
            q=Heads.of(given.arrays["q"]),
            k=Heads.of(given.arrays["k"]),
            v=Heads.of(given.arrays["v"]),
            out=Heads.of(out),
            scale=scale,
            causal=problem.causal,
            offset=problem.offset,
            window=problem.window,
            softcap=problem.softcap,
            lse=lse,
            variant=variant,
        )
        record.submit()
        yield Outcome(fetch(device, lse), want["lse"], 2e-6, 1e-5, label=f"lse, {problem}")
        yield Outcome(fetch(device, out), want["out"], STORE_ERROR[make.elem], error, label=f"out, {problem}")
