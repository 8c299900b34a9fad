"""The sampler from end to end: the set that is kept, how often each token is drawn, and what a seed promises."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nn.check.sample import OFF, distribution, run_sampler
from nn.generate.engine import Engine
from nn.generate.options import SamplingOptions
from nn.models.load import ModelFile, load_model
from nn.ops.base import Array
from nn.ops.sample import IN_PROMPT, SampleToken, settings_bytes
from tests.fixtures import make_sampler_fixtures, tiny_chat

CASES = make_sampler_fixtures.cases()
NOTHING = np.zeros(4, np.uint32)


def options_of(settings) -> SamplingOptions:
    """The fixture's settings; what it does not name is off."""
    bias = {int(token): value for token, value in settings.get("logit_bias", {}).items()}
    return replace(OFF, **{**settings, "logit_bias": bias})


def ours(logits, seen_ids, settings) -> np.ndarray:
    options, vocab = options_of(settings), logits.size
    return distribution(logits, options, marks(seen_ids, vocab), bias_of(options, vocab))


def marks(seen_ids, vocab) -> np.ndarray:
    seen = np.zeros(vocab, np.uint32)
    seen[seen_ids] = IN_PROMPT
    return seen


def bias_of(options, vocab) -> np.ndarray | None:
    if not options.logit_bias:
        return None
    bias = np.zeros(vocab, np.float32)
    bias[list(options.logit_bias)] = list(options.logit_bias.values())
    return bias


def drawn(device, logits, options, seeds, draws) -> np.ndarray:
    """Tokens of many (seed, draw) pairs, from one recorded plan."""
    vocab = logits.size
    step, out = device.upload(np.zeros(4, np.uint32)), device.upload(np.zeros(4, np.uint32))
    operands = [
        Array(device.upload(logits.astype(np.float32)), (1, vocab)),
        Array(device.upload(settings_bytes(options)), (8,), "u32"),
        Array(step, (4,), "u32"),
        Array(device.upload(np.zeros(vocab, np.uint32)), (vocab,), "u32"),
        Array(out, (4,), "u32"),
    ]
    recorder = device.recorder()
    SampleToken().lower(recorder, *operands)
    plan = recorder.plan()
    tokens = []
    for seed, draw in zip(seeds, draws, strict=True):
        pending = plan.replay(write=(step, np.array([0, 1, seed, draw], np.uint32).tobytes()), read=(out, 16))
        token, flag, *_ = np.frombuffer(pending.result(), np.uint32)
        assert flag == 0
        tokens.append(int(token))
    return np.array(tokens)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]} {CASES[i][1]}")
def test_the_distribution_is_transformers(device, number):
    """Tokens and probabilities that transformers' processors leave; the device keeps as many and draws from them."""
    vocab, settings = CASES[number]
    with np.load(make_sampler_fixtures.PATH) as file:
        assert json.loads(str(file["cases"]))[number] == [vocab, settings]
        want = file[f"p{number}"]
    logits, seen_ids = make_sampler_fixtures.inputs(vocab)
    got = ours(logits, seen_ids, settings)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)
    options = replace(options_of(settings), seed=number)
    results, _ = run_sampler(device, logits, options, marks(seen_ids, vocab), bias=bias_of(options, vocab))
    token, flag, _, kept = results[0]
    assert flag == 0 and want[token] > 0 and kept == np.count_nonzero(want)


@pytest.mark.oracle
def test_the_distribution_is_transformers_live():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    rng = np.random.default_rng(1)
    for vocab, settings in CASES:
        logits, seen = make_sampler_fixtures.inputs(vocab)
        with np.load(make_sampler_fixtures.PATH) as file:  # the stored answers are still transformers'
            stored = file[f"p{CASES.index((vocab, settings))}"]
        np.testing.assert_allclose(
            make_sampler_fixtures.transformers_probabilities(logits, seen, settings), stored, rtol=1e-12, atol=1e-15
        )
        logits = (rng.standard_normal(vocab) * rng.choice([0.5, 3, 10])).astype(np.float32)
        seen = rng.choice(vocab, size=vocab // 2, replace=False)
        want = make_sampler_fixtures.transformers_probabilities(logits, seen, settings)
        got = ours(logits, seen, settings)
        np.testing.assert_array_equal(got > 0, want > 0)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("settings", "degrees", "limit"),
    [
        ({}, 5, 20.5),  # limits: chi-square's 0.1 % points; seeds are fixed, so the figure is the same every run
        ({"temperature": 2.0}, 5, 20.5),
        ({"top_k": 4}, 3, 16.3),
        ({"top_p": 0.8}, 2, 13.8),
        ({"min_p": 0.1}, 4, 18.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["draw", "seed"])
def test_tokens_are_drawn_as_often_as_they_should(device, settings, degrees, limit, vary):
    logits = np.log(np.array([0.4, 0.02, 0.3, 0.15, 0.08, 0.05], np.float32))
    options = replace(OFF, **settings)
    p = distribution(logits, options, np.zeros(6, np.uint32))
    assert np.count_nonzero(p) == degrees + 1
    count = 2000
    numbers, constant = range(count), [11] * count
    tokens = drawn(device, logits, options, *((constant, numbers) if vary == "draw" else (numbers, constant)))
    seen = np.bincount(tokens, minlength=6)
    assert not seen[p == 0].any()
    kept = p > 0
    statistic = ((seen[kept] - count * p[kept]) ** 2 / (count * p[kept])).sum()
    assert 0.01 < statistic < limit  # far under it would be as suspicious as over it


def test_neighbouring_draws_are_independent(device):
    """Pairs of one draw and the next fall into their 16 cells as products of the margins."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    tokens = drawn(device, logits, OFF, [5] * 2000, range(2000))
    pairs = np.bincount(4 * tokens[:-1] + tokens[1:], minlength=16)
    p = distribution(logits, OFF, NOTHING)
    expected = np.outer(p, p).ravel() * pairs.sum()
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 15 degrees, 0.1 %


@pytest.mark.parametrize("top_k", [4, 100])
def test_top_k_of_the_vocabulary_or_more_is_no_filter(device, top_k):
    logits = np.array([1.0, 4.0, 2.0, 0.0])
    for seed in range(8):
        options = replace(OFF, seed=seed)
        (plain,), _ = run_sampler(device, logits, options, NOTHING)
        (filtered,), _ = run_sampler(device, logits, replace(options, top_k=top_k), NOTHING)
        np.testing.assert_array_equal(filtered, plain)
        assert filtered[3] == 4


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-39, 1e-30, 1e-6])
def test_temperature_zero_and_next_to_it(device, temperature):
    """The most likely token, also where the logits over the temperature leave the range of f32."""
    for seed in range(4):
        options = replace(OFF, temperature=temperature, seed=seed)
        (result,), _ = run_sampler(device, np.array([1.0, 4.0, 2.0]), options, NOTHING[:3])
        assert list(result[:2]) == [1, 0]
        (result,), _ = run_sampler(device, np.array([-30.0, -10.0, -20.0]), options, NOTHING[:3])
        assert list(result[:2]) == [1, 0]


def test_penalties_by_hand(device):
    """Seen [3, -3] with penalty 1.5 become [2, -4.5]; presence counts once, frequency each time, the prompt neither."""
    seen = np.array([IN_PROMPT, 2, 0, IN_PROMPT + 1], np.uint32)
    logits = np.array([3.0, -3.0, 1.0, 0.5], np.float32)
    p = distribution(logits, replace(OFF, repeat_penalty=1.5), seen)
    np.testing.assert_allclose(np.log(p / p[2]) + 1, [2.0, -4.5, 1.0, 0.5 / 1.5], rtol=1e-12)
    p = distribution(logits, replace(OFF, presence_penalty=0.25, frequency_penalty=0.5), seen)
    np.testing.assert_allclose(np.log(p / p[2]) + 1, [3.0, -3 - 0.25 - 1.0, 1.0, 0.5 - 0.25 - 0.5], rtol=1e-12)


@pytest.fixture
def engines(device, tmp_path):
    """Two engines with the same model on one device."""
    folder = tiny_chat.write(tmp_path / "tiny", certainty=1.0)
    out = []
    for _ in range(2):
        file = ModelFile(folder)
        out.append(Engine(load_model(file, device, context=64)))
        file.close()
    return out


def test_a_seed_gives_the_same_ids_beside_an_unseeded_request(engines):
    seeded = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, seed=42, max_tokens=30)
    free = replace(seeded, seed=None)
    one, two = engines
    alone = [token.id for token in one.generate([1, 2, 3], seeded)]
    assert len(set(alone)) > 5  # it does draw
    together = []
    for token, _ in zip(one.generate([1, 2, 3], seeded), two.generate([7, 7], free), strict=True):
        together.append(token.id)
    assert together == alone
    assert [token.id for token in two.generate([1, 2, 3], seeded)] == alone


def test_without_a_seed_answers_differ(engines):
    free = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, max_tokens=30)
    assert [t.id for t in engines[0].generate([1], free)] != [t.id for t in engines[0].generate([1], free)]


def test_the_penalties_of_a_request_count_its_own_tokens(engines):
    """A heavy frequency penalty: no token of the answer comes twice, and the next request begins at zero."""
    options = SamplingOptions(temperature=0.0, frequency_penalty=100.0, max_tokens=40)
    first = [token.id for token in engines[0].generate([5], options)]
    assert len(set(first)) == len(first) == 40
    assert [token.id for token in engines[0].generate([5], options)] == first
