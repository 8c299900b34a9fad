"""The models on the device: tiny random ones of every family, and real ones, against transformers and float64 NumPy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nn.check import reference
from nn.generate.engine import ContextFull, Engine, GenerationError, Timings
from nn.generate.options import SamplingOptions
from nn.io import registry
from nn.io.safetensors import save_file
from nn.models.config import kv_bytes
from nn.models.load import DoesNotFit, ModelFile, default_memory, load_model, parse_memory
from tests.fixtures import real, tiny

GREEDY = SamplingOptions(temperature=0.0)


def write(folder, name):
    """A tiny model as a Hugging Face folder."""
    model = tiny.load(name)
    save_file(tiny.hf_state(model.config, model.weights(), model.hf_shapes), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.json))
    return model


def opened(device, folder, **options):
    file = ModelFile(folder)
    try:
        return Engine(load_model(file, device, **options))
    finally:
        file.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny llama that several tests load."""
    path = tmp_path_factory.mktemp("llama")
    write(path, "llama")
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_running_ahead_changes_nothing(device, folder, monkeypatch, temperature):
    """The same tokens however many steps are under way, also where the caller stops early and goes on."""
    options = SamplingOptions(temperature=temperature, seed=3, max_tokens=15)
    model, texts = opened(device, folder, context=40).model, []
    for ahead, burst in ((0, 1), (1, 1), (3, 1), (1, 4), (2, 2)):
        engine = Engine(model, ahead=ahead)
        engine.burst = burst
        monkeypatch.setattr(engine, "_set_burst", lambda seconds: None)
        first = []
        for token in engine.generate([1, 2, 3], options):
            first.append(token.id)
            if len(first) == 6:
                break
        assert engine.cached[:8] == (1, 2, 3, *first[:5])
        again = [t.id for t in engine.generate([1, 2, 3, *first], options)]
        texts.append((first, again))
    assert len(texts[0][1]) == 15 and all(text == texts[0] for text in texts[1:])


def test_bursts_grow_where_tokens_are_fast_and_cancel_in_between(device, folder):
    engine = Engine(opened(device, folder, context=64).model, ahead=2)
    for seconds, burst in ((0.001, 4), (0.0026, 2), (0.006, 1), (0.001, 4)):
        engine._set_burst(seconds)
        assert engine.burst == burst
    seen = []
    for token in engine.generate([1, 2, 3], GREEDY, cancelled=lambda: len(seen) == 3):
        seen.append(token.id)
    assert len(seen) == 3 and engine.cached[3:] == tuple(seen)
    software = Engine(engine.model, ahead=0)
    software._set_burst(1e-6)
    assert software.burst == 1


def test_a_chunk_goes_out_in_fewer_submits_once_it_was_seen_to_be_fast(device, folder, monkeypatch):
    monkeypatch.setattr("nn.generate.engine.CHUNK_SUBMIT", 3)
    engine = opened(device, folder, context=32)
    ids = [5, 6, 7, 8]
    before = engine.logits(ids)
    plan = engine._plan("chunk", engine._chunk(len(ids)))[0]
    assert plan.per_submit == 3 and len(plan) > 6
    engine._pace([engine._chunk(4)], 0.1 * len(plan) / 3)  # three dispatches take all of the 0.1 s
    assert plan.per_submit == 3
    engine._pace([engine._chunk(4)], 1e-4)
    assert plan.per_submit == len(plan)
    submits, dispatches = device.counters.submits, device.counters.dispatches
    plan.replay()
    assert 12 < len(plan) <= 36 and device.counters.submits - submits == 2  # 12 dispatches, then up to 24
    assert device.counters.dispatches - dispatches == len(plan)
    engine.reset()
    np.testing.assert_array_equal(engine.logits(ids), before)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_logits_equal_transformers_and_float64(device, tmp_path, name):
    model = write(tmp_path, name)
    context = model.config.context_max
    ids = model.ids[:context]
    engine = opened(device, tmp_path, context=context, kv_dtype="f32")
    got = engine.logits(ids.tolist())
    deviation = model.logits.std()
    truth = reference.forward(model.config, model.weights(), ids, context=context)
    for label, want in (("float64", truth), ("transformers", model.logits[:context])):
        if label == "transformers" and name == "llama_dynamic":
            continue  # transformers stretches for the text's length, we for the whole context: the truth does too
        error = np.abs(got - want).max()
        assert error < 2e-3 * deviation, f"{label}: {error / deviation:.1e} deviations"
        top = np.sort(want, axis=1)
        sure = top[:, -1] - top[:, -2] > 2 * error
        assert (got.argmax(1) == want.argmax(1))[sure].all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "mistral"])
def test_decoding_equals_recomputing_the_prefix(device, tmp_path, name):
    """Token by token through the cache gives the ids that the whole text gives at once; the prompt is odd-sized."""
    model = write(tmp_path, name)
    engine = opened(device, tmp_path, kv_dtype="f32", context=min(model.config.context_max, 128))
    prompt = model.ids[:9].tolist()
    steps = min(100, engine.model.context - len(prompt))
    answer = [t.id for t in engine.generate(prompt, SamplingOptions(temperature=0.0, max_tokens=steps))]
    assert len(answer) == steps
    whole = engine.logits(prompt + answer)
    np.testing.assert_array_equal(whole.argmax(1)[len(prompt) - 1 : -1], answer)


def test_half_precision_cache_is_close(device, folder):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    ids = tiny.load("llama").ids.tolist()
    single = opened(device, folder, kv_dtype="f32").logits(ids)
    half = opened(device, folder, kv_dtype="f16").logits(ids)
    assert 0 < np.abs(single - half).max() < 2e-2 * single.std()


def test_later_steps_compile_and_allocate_nothing(device, folder):
    engine = opened(device, folder)
    prompt = [1, 2, 3]
    steps = engine.generate(prompt, SamplingOptions(temperature=0.7, seed=1, max_tokens=20))
    next(steps), next(steps)
    before = (device.counters.pipelines, device.counters.allocations, device.counters.bind_groups)
    assert len(list(steps)) == 18
    assert (device.counters.pipelines, device.counters.allocations, device.counters.bind_groups) == before
    # prompts of other lengths neither, once each chunk size has been used
    engine.logits(list(range(40)))
    for length in (5, 33, 8):
        list(engine.generate(list(range(length)), SamplingOptions(max_tokens=3)))
    before = device.counters.pipelines
    for length in (2, 7, 19, 31, 38):
        list(engine.generate(list(range(length)), SamplingOptions(max_tokens=3)))
    assert device.counters.pipelines == before


def test_same_seed_same_ids(device, folder):
    engine = opened(device, folder)
    options = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, seed=42, max_tokens=30)
    first = [t.id for t in engine.generate([1, 2, 3], options)]
    list(engine.generate([9, 8], SamplingOptions(max_tokens=4)))  # an unseeded one between
    engine.reset()
    assert [t.id for t in engine.generate([1, 2, 3], options)] == first
    other = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, seed=43, max_tokens=30)
    assert [t.id for t in engine.generate([1, 2, 3], other)] != first


def test_capacity(device, folder):
    """A cache of 8: a prompt of 6 gives at most 3 tokens, a prompt of 9 is refused, and cancelling leaves no trace."""
    engine = opened(device, folder, context=8)
    assert len(list(engine.generate([1, 2, 3, 4, 5, 6], SamplingOptions(max_tokens=20)))) == 3
    assert len(list(engine.generate([1, 2, 3, 4, 5, 6, 7, 8], SamplingOptions(max_tokens=20)))) == 1
    with pytest.raises(ContextFull, match="9 tokens, the context holds 8"):
        list(engine.generate(list(range(1, 10)), GREEDY))
    want = [t.id for t in engine.generate([1, 2], SamplingOptions(temperature=0.0, max_tokens=5))]
    live = device.counters.bytes_live
    for _ in range(100):
        answer = engine.generate([3, 2, 1], SamplingOptions(max_tokens=5))
        next(answer)
        answer.close()
    assert device.counters.bytes_live == live
    assert [t.id for t in engine.generate([1, 2], SamplingOptions(temperature=0.0, max_tokens=5))] == want


def test_a_prompt_that_goes_on_is_not_computed_again(device, folder):
    engine = opened(device, folder)
    prompt = tiny.load("llama").ids[:12].tolist()
    first = [t.id for t in engine.generate(prompt, SamplingOptions(temperature=0.0, max_tokens=6))]
    longer = prompt + first + [7, 8, 9]
    timings = Timings()
    again = [t.id for t in engine.generate(longer, SamplingOptions(temperature=0.0, max_tokens=6), timings)]
    assert timings.cached_tokens >= len(prompt) + len(first) - 1
    assert timings.cached_tokens + timings.prompt_tokens == len(longer)
    engine.reset()
    assert [t.id for t in engine.generate(longer, SamplingOptions(temperature=0.0, max_tokens=6))] == again


def test_one_answer_at_a_time(device, folder):
    engine = opened(device, folder)
    first = engine.generate([1, 2], GREEDY)
    next(first)
    with pytest.raises(GenerationError, match="still under way"):
        next(engine.generate([3], GREEDY))
    first.close()
    next(engine.generate([3], GREEDY))


def test_bad_prompts(device, folder):
    engine = opened(device, folder)
    with pytest.raises(ValueError, match="empty"):
        next(engine.generate([], GREEDY))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        next(engine.generate([1, 10**6], GREEDY))
    with pytest.raises(ValueError, match="logit_bias: token id"):
        next(engine.generate([1], SamplingOptions(logit_bias={10**6: 1.0})))
    biased = SamplingOptions(temperature=0.0, logit_bias={5: 100.0}, max_tokens=3)
    assert [t.id for t in engine.generate([1], biased)] == [5, 5, 5]


def test_broken_weights_are_named(device, tmp_path):
    model = write(tmp_path, "llama")
    weights = model.weights()
    weights["norm"] = np.full_like(weights["norm"], np.nan)
    save_file(tiny.hf_state(model.config, weights, model.hf_shapes), tmp_path / "model.safetensors")
    engine = opened(device, tmp_path)
    with pytest.raises(GenerationError, match="NaN or infinity"):
        next(engine.generate([1, 2], GREEDY))


def test_does_not_fit(device, folder):
    file = ModelFile(folder)
    need = file.device_bytes(64, "f32")
    with pytest.raises(DoesNotFit, match=r"does not fit .* needs .* has .* Try --context"):
        load_model(file, device, context=64, kv_dtype="f32", gpu_memory=str(need - 1))
    load_model(file, device, context=64, kv_dtype="f32", gpu_memory=str(need))
    weights = need - kv_bytes(file.config, 64, "f32")
    with pytest.raises(DoesNotFit, match="a smaller model"):
        load_model(file, device, context=64, kv_dtype="f32", gpu_memory=str(weights))
    for wrong in ("lots", "-1", "0", "nan", "1Q"):
        with pytest.raises(ValueError, match="--gpu-memory"):
            load_model(file, device, gpu_memory=wrong)
    with pytest.raises(ValueError, match="context must be from 1 to"):
        load_model(file, device, context=10**7)


def test_dynamic_scaling_stretches_the_context_once(device, tmp_path):
    write(tmp_path, "llama_dynamic")  # trained on 16 positions, factor 2
    file = ModelFile(tmp_path)
    assert file.config.context_max == 32
    with pytest.raises(ValueError, match="context must be from 1 to 32 tokens"):
        load_model(file, device, context=33)


def test_memory_sizes(device):
    assert parse_memory("6G", 0) == 6 << 30
    assert parse_memory("800MiB", 0) == 800 << 20
    assert parse_memory("0.5", 1000) == 500
    assert parse_memory("123456", 0) == 123456
    assert default_memory(device) > 1 << 30


@pytest.mark.weights
@pytest.mark.parametrize("name", real.NAMES)
def test_real_models_equal_transformers(device, name):
    """Logits over a 200-token text: within 2e-3 of their deviation, the same best token wherever that is sure."""
    path = registry.resolve(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache; `anygpu pull {name}` fetches it")
    expected = real.expected(name)
    engine = opened(device, path, context=256, kv_dtype="f32")
    report = expected.compare(engine.logits(expected.ids.tolist()))
    assert report.worst < real.TOLERANCE, report
    assert report.wrong_top == []


@pytest.mark.weights
def test_a_real_answer_equals_recomputing_the_prefix(device):
    """100 tokens of SmolLM2, one by one through the cache, are the most likely ones of the whole text at once."""
    path = registry.resolve("smollm2")
    if path is None:
        pytest.skip("smollm2 is not in the cache; `anygpu pull smollm2` fetches it")
    engine = opened(device, path, context=160, kv_dtype="f32")
    prompt = real.expected("smollm2").ids[:33].tolist()
    answer = [t.id for t in engine.generate(prompt, SamplingOptions(temperature=0.0, max_tokens=100))]
    assert len(answer) == 100
    whole = engine.logits(prompt + answer)[len(prompt) - 1 : -1]
    best = np.sort(whole, axis=1)
    sure = best[:, -1] - best[:, -2] > 1e-3 * whole.std()  # nearer than the two orders of summation: either is right
    assert sure.sum() > 90
    np.testing.assert_array_equal(whole.argmax(1)[sure], np.array(answer)[sure])
