"""Checks of the sampler against NumPy: which tokens are kept, with which probabilities, and which one a seed draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from gpu import Device
from nn.check.base import Case, Outcome
from nn.generate.options import SamplingOptions
from nn.ops.base import Array
from nn.ops.sample import IN_PROMPT, SampleToken, settings_bytes

SHADERS = ("sample/sample.wgsl", "lib/reduce.wgsl", "lib/reduce_subgroup.wgsl")
OFF = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)


def distribution(
    logits: np.ndarray, options: SamplingOptions, seen: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """The probabilities (float64) that a token is drawn from; temperature 0 gives all to the first largest."""
    x = logits.astype(np.float64).copy()
    marked, count = seen != 0, (seen & ~IN_PROMPT).astype(np.float64)
    x = np.where(marked, np.where(x > 0, x / options.repeat_penalty, x * options.repeat_penalty), x)
    x -= np.where(count > 0, options.presence_penalty + options.frequency_penalty * count, 0.0)
    x += 0.0 if bias is None else bias
    if options.temperature == 0:
        return (np.arange(x.size) == np.argmax(x)).astype(np.float64)
    x /= options.temperature
    if 0 < options.top_k < x.size:
        x[x < np.sort(x)[-options.top_k]] = -np.inf
    if options.top_p < 1:
        p = np.exp(x - x.max())
        order = np.argsort(-p, kind="stable")
        above = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        cut = p[order][above < options.top_p * p.sum()].min()
        x[p < cut] = -np.inf
    if options.min_p > 0:
        x[np.exp(x - x.max()) < options.min_p] = -np.inf
    p = np.exp(x - x.max())
    return p / p.sum()


def philox(seed: int, counter: int) -> float:
    """Philox2x32-10 as the shader uses it, in Python integers."""
    x0, x1, key = counter, 0, seed
    for _ in range(10):
        product = 0xD256D193 * x0
        x0, x1 = ((product >> 32) ^ key ^ x1) & 0xFFFFFFFF, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return ((x0 >> 8) + 0.5) / 16777216.0


def run_sampler(
    device: Device,
    logits: np.ndarray,
    options: SamplingOptions,
    seen: np.ndarray,
    *,
    draws: int = 1,
    first: int = 0,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`draws` samples with draw counters first, first + 1, ...: (draws, 4) results, and `seen` after the last one."""
    vocab = logits.size
    results = []
    for draw in range(first, first + draws):
        state = device.upload(seen.astype(np.uint32))
        step = device.upload(np.array([0, 1, options.seed or 0, draw], np.uint32))
        settings = device.upload(settings_bytes(options))
        out = device.upload(np.full(4, 0xDEADBEEF, np.uint32))
        operands = [Array(device.upload(logits.astype(np.float32)), (1, vocab)), Array(settings, (8,), "u32")]
        operands += [Array(step, (4,), "u32"), Array(state, (vocab,), "u32")]
        operands.append(Array(out, (4,), "u32"))
        if bias is not None:
            operands.append(Array(device.upload(bias.astype(np.float32)), (vocab,)))
        recorder = device.recorder()
        SampleToken().lower(recorder, *operands)
        recorder.submit()
        results.append(device.read(out, np.uint32, 4))
        after = device.read(state, np.uint32, vocab)
    return np.array(results), after


def expected_token(
    probabilities: np.ndarray, candidates: np.ndarray, u: float, *, lanes: int = 256
) -> tuple[int, float]:
    """The token that the draw u takes, walking the candidates in the shader's order; how near u is to a border."""
    kept = np.flatnonzero(candidates)
    order = np.concatenate([kept[kept % lanes == lane] for lane in range(lanes)])  # as select_token gathers them
    edges = np.cumsum(probabilities[order])
    index = min(int(np.searchsorted(edges, u, side="right")), order.size - 1)
    return int(order[index]), float(np.abs(edges - u).min())


VARIANTS: dict[str, SamplingOptions] = {
    "greedy": replace(OFF, temperature=0.0),
    "plain": OFF,
    "hot": replace(OFF, temperature=1.7),
    "top_k 1": replace(OFF, top_k=1),
    "top_k 7": replace(OFF, top_k=7),
    "top_k 300": replace(OFF, top_k=300, top_p=0.95),
    "top_k over vocab": replace(OFF, top_k=10_000_000),
    "top_p 0.1": replace(OFF, top_p=0.1),
    "top_p 0.9": replace(OFF, top_p=0.9),
    "min_p 0.2": replace(OFF, min_p=0.2),
    "penalties": replace(OFF, repeat_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3),
    "all": SamplingOptions(0.8, 40, 0.9, 0.05, 1.2, 0.2, 0.1),
}


def _chosen(name: str, vocab: int, *, biased: bool = False) -> Case:
    options = VARIANTS[name]

    def run(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
        logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
        seen = np.where(rng.random(vocab) < 0.3, IN_PROMPT, 0).astype(np.uint32) + rng.integers(0, 3, vocab, np.uint32)
        bias = rng.standard_normal(vocab).astype(np.float32) if biased else None
        p = distribution(logits, options, seen, bias)
        candidates = distribution(logits, replace(options, top_p=1.0, min_p=0.0), seen, bias)
        seeds = [int(s) for s in rng.integers(0, 2**32, 4)]
        for seed in seeds:
            chosen = replace(options, seed=seed, logprobs=True)
            (result,), after = run_sampler(device, logits, chosen, seen, bias=bias)
            token, margin = expected_token(p, candidates, philox(seed, 0))
            if options.temperature == 0 or margin > 1e-5:  # nearer than rounding: either neighbour is right
                yield Outcome(result[:2], np.array([token, 0], np.uint32), label=f"token of seed {seed}")
            yield Outcome(result[3:], np.array([np.count_nonzero(p)], np.uint32), label="tokens kept")
            want = logits.astype(np.float64)[result[0]] - np.log(np.exp(logits.astype(np.float64)).sum())
            yield Outcome(result[2:3].view(np.float32), np.array([want]), rtol=1e-5, atol=1e-5, label="logprob")
            counted = seen.copy()
            counted[result[0]] += 1
            yield Outcome(after, counted, label="seen")

    return Case(f"sample/sample select_token: {name}, vocab {vocab}{', bias' if biased else ''}", run, SHADERS)


def _extremes(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
    zero = np.zeros(4, np.uint32)
    greedy = replace(OFF, temperature=0.0)
    for label, logits, options, want in (
        ("first of ties", [1.0, 5.0, 5.0, 2.0], greedy, [1, 0]),
        ("temperature 0", [1.0, 4.0, 2.0, 0.0], greedy, [1, 0]),
        ("all -inf", [-np.inf] * 4, OFF, [0, 1]),
        ("NaN", [1.0, np.nan, 2.0, 0.0], OFF, [0, 2]),
        ("+inf", [1.0, np.inf, 2.0, 0.0], OFF, [0, 2]),
        ("one left", [-np.inf, -np.inf, -300.0, -np.inf], OFF, [2, 0]),
        ("huge", [3e38, -3e38, 0.0, 1.0], OFF, [0, 0]),
        ("large", [2e38, -2e38, 0.0, 1.0], replace(OFF, temperature=0.01), [0, 0]),
    ):
        (result,), _ = run_sampler(device, np.array(logits, np.float32), options, zero)
        yield Outcome(result[:2], np.array(want, np.uint32), label=label)
    # penalty 1.5 on seen [3, -3] gives [2, -4.5]: greedy between them and a bias shows both numbers
    seen = np.array([IN_PROMPT, IN_PROMPT, 0, 0], np.uint32)
    for value, token in ((1.99, 0), (2.01, 2)):
        logits = np.array([3.0, -3.0, value, -9.0], np.float32)
        (result,), _ = run_sampler(device, logits, replace(greedy, repeat_penalty=1.5), seen)
        yield Outcome(result[:1], np.array([token], np.uint32), label=f"3 / 1.5 against {value}")
    for value, token in ((-4.51, 1), (-4.49, 2)):
        logits = np.array([-9.0, -3.0, value, -9.0], np.float32)
        (result,), _ = run_sampler(device, logits, replace(greedy, repeat_penalty=1.5), seen)
        yield Outcome(result[:1], np.array([token], np.uint32), label=f"-3 * 1.5 against {value}")


def _edges(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
    """The largest logit first, last and around each multiple of the workgroup: no place is left out."""
    greedy, vocab = replace(OFF, temperature=0.0), 1027
    many = np.round(rng.uniform(-1, 1, 20_000), 2)  # ties across blocks, at every threshold
    many[[300, 5000, 19_999]] = 1.5
    (result,), _ = run_sampler(device, many, greedy, np.zeros(many.size, np.uint32))
    yield Outcome(result[:2], np.array([300, 0], np.uint32), label="first of ties in different blocks")
    for top_k in (2, 3, 4, 40):
        (result,), _ = run_sampler(device, many, replace(OFF, top_k=top_k, seed=1), np.zeros(many.size, np.uint32))
        wanted = np.count_nonzero(many >= np.sort(many)[-top_k])
        yield Outcome(result[3:], np.array([wanted], np.uint32), label=f"kept of ties, top_k {top_k}")
    for at in (0, 255, 256, 257, 511, 512, 513, 768, 1023, 1024, 1026):
        logits = rng.uniform(-1, 1, vocab)
        logits[at] = 2.0
        for bias in (None, np.zeros(vocab)):
            (result,), after = run_sampler(device, logits, greedy, np.zeros(vocab, np.uint32), bias=bias)
            yield Outcome(result[:2], np.array([at, 0], np.uint32), label=f"largest at {at}")
            yield Outcome(after, (np.arange(vocab) == at).astype(np.uint32), label=f"seen after {at}")


def carrying(rng: np.random.Generator, count: int) -> list[int]:
    """Draw counters whose product with Philox's multiplier carries out of each half only just, or only just not."""
    b0, b1 = 0xD193, 0xD256  # halves of 0xD256D193
    draws = rng.integers(0, 2**32, 1 << 20, np.uint64)
    low, high = draws & np.uint64(0xFFFF), draws >> np.uint64(16)
    cross = high * np.uint64(b0) + ((low * np.uint64(b0)) >> np.uint64(16))
    other = low * np.uint64(b1) + (cross & np.uint64(0xFFFF))
    near = [(x & np.uint64(0xFFFF)) == np.uint64(edge) for x in (cross, other) for edge in (0, 0xFFFF)]
    return [int(draw) for mask in near for draw in draws[mask][:count]]


def _generator(device: Device, rng: np.random.Generator) -> Iterable[Outcome]:
    """Draws of equally likely tokens are Philox's numbers, in full to nine bits, with every carry of its products."""
    vocab = 512
    logits, seen = np.zeros(vocab), np.zeros(vocab, np.uint32)
    p, everything = np.full(vocab, 1 / vocab), np.ones(vocab)
    for draw in [0, 1, 2**32 - 1, *carrying(rng, 3)]:
        seed = int(rng.integers(0, 2**32))
        (result,), _ = run_sampler(device, logits, replace(OFF, seed=seed), seen, first=draw)
        token, margin = expected_token(p, everything, philox(seed, draw))
        if margin > 1e-5:
            yield Outcome(result[:1], np.array([token], np.uint32), label=f"seed {seed}, draw {draw}")


def cases() -> list[Case]:
    """All cases of the sampler."""
    out = [_chosen(name, vocab) for name in VARIANTS for vocab in (5, 1000)]
    out += [_chosen(name, 257, biased=True) for name in ("greedy", "all")]
    # 47 blocks, so that a top_k of at most 47 leaves some out; more than 256 candidates; two values an invocation
    out += [_chosen(name, 12_000) for name in ("greedy", "plain", "top_k 7", "top_k 300", "top_p 0.9", "all")]
    out += [_chosen(name, 262_145, biased=name == "all") for name in ("greedy", "all")]
    out.append(Case("sample/sample select_token: extremes", _extremes, SHADERS))
    out.append(Case("sample/sample adjust: largest at the edges, vocab 1027", _edges, SHADERS))
    out.append(Case("sample/sample select_token: generator, vocab 512", _generator, SHADERS))
    return out
