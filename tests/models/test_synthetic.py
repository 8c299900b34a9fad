"""Models with random weights: the bytes of their files, the path of a real model, numbers that stay finite."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.tune_store import Entry
from nn.check import reference
from nn.generate.engine import Engine
from nn.generate.options import SamplingOptions
from nn.io import registry
from nn.models.config import ConfigError, ModelConfig, Rope
from nn.models.load import DoesNotFit, ModelFile, load_model
from nn.models.synthetic import Recipe, SyntheticModel

TINY = Recipe(
    ModelConfig(
        family="llama",
        layers=2,
        dim=64,
        ffn_dim=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=130,
        context_max=64,
        norm_eps=1e-5,
        rope=Rope(base=10_000.0, dims=16),
    ),
    {"embed": "f16", "head": "q8_0", "v": ("q8_0", "q4_0")},
)
IDS = [5, 9, 100, 3, 129, 0, 7]


@pytest.mark.weights
@pytest.mark.parametrize("name, like", [("smollm2", "smollm2-135m-q4_1"), ("gemma3", "gemma3-270m-q4_k")])
def test_every_parameter_is_stored_as_in_the_file(name, like):
    if registry.resolve(name) is None:
        pytest.skip(f"{name} is not in the cache; `anygpu pull {name}` fetches it")
    file, model = ModelFile(registry.resolve(name)), SyntheticModel.named(like)
    assert {key: file.spec(key) for key in file.sources} == {key: model.spec(key) for key in model.shapes}
    assert file.device_bytes(100, "f16") == model.device_bytes(100, "f16")
    file.close()


def test_llama_7b_takes_the_bytes_of_its_file():
    model = SyntheticModel.named("llama-7b-q4_0")  # whose Q4_0 file is 3.83 GB, tokenizer included
    assert sum(map(model.parameter_bytes, model.shapes)) == pytest.approx(3.825e9, rel=1e-3)


def test_the_same_seed_gives_the_same_model(device):
    def logits(seed):
        model = SyntheticModel(TINY, name="synthetic:tiny", seed=seed)
        return Engine(load_model(model, device, kv_dtype="f32")).logits(IDS)

    first, again, other = logits(0), logits(0), logits(1)
    assert np.isfinite(first).all() and 0.1 < first.std() < 10
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_logits_are_those_of_the_weights(device):
    """The decoder on random weights beside float64 NumPy on the same weights, read back."""
    model = SyntheticModel(TINY, name="synthetic:tiny", seed=3)
    seen: dict[str, np.ndarray] = {}

    class Watched(type(model.parameters(device))):
        def vector(self, name):
            made = super().vector(name)
            if made is not None:
                seen[name] = made.numpy().astype(np.float64)
            return made

        def matrices(self, *names):
            made = super().matrices(*names)
            values = np.concatenate([tensor.numpy() for tensor in made]).astype(np.float64)
            at = 0
            for name in names:
                rows = model.spec(name).shape[0]
                seen[name], at = values[at : at + rows], at + rows
            return made

    from nn.models.decoder import Decoder

    decoder = Decoder(Watched(model, device, None), context=32)
    got = Engine(decoder).logits(IDS)
    want = reference.forward(model.config, seen, IDS)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-3)


def test_it_is_loaded_as_a_file_is(device):
    model = SyntheticModel(TINY, name="synthetic:tiny")
    steps: list[tuple[int, int]] = []
    engine = Engine(load_model(model, device, context=32, progress=lambda done, total: steps.append((done, total))))
    assert steps[-1][0] == steps[-1][1] and steps == sorted(steps)
    answer = [token.id for token in engine.generate(IDS, SamplingOptions(temperature=0.0, max_tokens=8))]
    assert len(answer) == 8
    with pytest.raises(DoesNotFit, match="synthetic:tiny does not fit"):
        load_model(model, device, gpu_memory=1000)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="synthetic:nothing is not known; there are smollm2"):
        SyntheticModel.named("nothing")
    with pytest.raises(ConfigError, match=r"blocks.0.down has rows of 96, no multiple of a q4_k block"):
        SyntheticModel(Recipe(TINY.config, {"down": "q4_k"}), name="wrong")


def test_a_tuning_file_changes_no_answer(device, monkeypatch):
    """Another variant of every kernel that has one: the same logits but for rounding, and the same bits twice."""
    model = SyntheticModel(TINY, name="synthetic:tiny", seed=2)
    tuner = device.tuner

    def logits():
        return Engine(load_model(model, device, kv_dtype="f32")).logits(IDS)

    with tuner.watched() as met:
        plain = logits()
    table = {}
    for family, shape in met:
        variants = family.variants(device.caps, shape)
        default = family.default(device.caps, shape).name
        other = next((v.name for v in reversed(variants) if v.name != default), None)
        if other is not None:
            key = (family.name, family.shape_class(shape), family.code(variants))
            table[key] = Entry(*key, winner=other, default=default, ratio=2.0, stamp=0.0)
    assert table, "no family has a second variant for this model"
    monkeypatch.setattr(tuner, "mode", "use")
    monkeypatch.setattr(tuner, "_table", table)
    monkeypatch.setattr(tuner, "_picked", {})
    tuned, again = logits(), logits()
    assert tuner._picked and any(tuner._picked.values())
    np.testing.assert_array_equal(tuned, again)
    np.testing.assert_allclose(tuned, plain, rtol=1e-4, atol=1e-4)
