"""Models of a known architecture with random weights, made on the device: for measuring, where no file is at hand.

    load_model(SyntheticModel.named("llama-7b-q4_0"), device)

The shapes and storage formats are those of the model's usual GGUF file, so a token costs the same bytes and FLOPs.
Weights have a standard deviation of 1 / sqrt(K), so that activations keep their size through the layers. What such a
model says means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nn.models.config import ConfigError, ModelConfig, Rope, kv_bytes, tensor_table
from nn.models.load import joint_format
from nn.ops.base import Spec
from nn.quant.fill import random_weight, uniform
from nn.quant.formats import FORMATS
from nn.quant.repack import plane_offsets
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device
    from nn.models.load import Progress

_MORE_BITS = (
    0,
    1,
    4,
    7,
    10,
    13,
    15,
    16,
    17,
)  # layers of the 18 that a Q4_K_M file of Gemma 3 270M stores with more bits


def _by_layer(layers: int, some: Sequence[int], theirs: str, others: str) -> tuple[str, ...]:
    return tuple(theirs if i in some else others for i in range(layers))


@dataclass(frozen=True)
class Recipe:
    """A config and the storage format of every matrix: by leaf name (nn/models/names.py), one or one a layer."""

    config: ModelConfig
    formats: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    otherwise: str = "q4_0"

    def format_of(self, canonical: str) -> str:
        """Storage format of one matrix."""
        head, _, leaf = canonical.rpartition(".")
        found = self.formats.get(leaf, self.otherwise)
        return found if isinstance(found, str) else found[int(head.rpartition(".")[2])]


RECIPES = {
    "smollm2-135m-q4_1": Recipe(
        ModelConfig(
            family="llama", layers=30, dim=576, ffn_dim=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
            context_max=8192, norm_eps=1e-5, rope=Rope(base=100_000.0, dims=64, pairing="interleaved"), tied_head=True,
        ),
        {"embed": "q8_0"},
        "q4_1",
    ),
    "gemma3-270m-q4_k": Recipe(
        ModelConfig(
            family="gemma3", layers=18, dim=640, ffn_dim=2048, heads=4, kv_heads=1, head_dim=256, vocab=262_144,
            context_max=32_768, norm_eps=1e-6, rope=Rope(base=1_000_000.0, dims=256, local_base=10_000.0),
            activation="gelu_tanh", attention_scale=0.0625, window=512, sliding=tuple(i % 6 != 5 for i in range(18)),
            embedding_scale=math.sqrt(640.0), tied_head=True, qk_norm=True, sandwich_norm=True,
        ),
        {
            "embed": "q8_0", "o": "q4_k",
            "v": _by_layer(18, _MORE_BITS, "q8_0", "q5_0"), "down": _by_layer(18, _MORE_BITS, "q6_k", "q4_k"),
        },
        "q5_0",
    ),
    "llama-7b-q4_0": Recipe(
        ModelConfig(
            family="llama", layers=32, dim=4096, ffn_dim=11_008, heads=32, kv_heads=32, head_dim=128, vocab=32_000,
            context_max=4096, norm_eps=1e-5, rope=Rope(base=10_000.0, dims=128, pairing="interleaved"),
        ),
        {"head": "q6_k"},
    ),
}  # fmt: skip


class SyntheticModel:
    """What `load_model` takes in place of a ModelFile."""

    def __init__(self, recipe: Recipe, *, name: str, seed: int = 0) -> None:
        self.recipe, self.config, self.seed = recipe, recipe.config, seed
        self.path = Path(name)  # how messages call it; there is no such file
        self.shapes = tensor_table(recipe.config)
        for canonical in self.shapes:
            self.spec(canonical)

    @classmethod
    def named(cls, name: str, *, seed: int = 0) -> SyntheticModel:
        """One of RECIPES. Raises ConfigError listing them."""
        if name not in RECIPES:
            raise ConfigError(f"synthetic:{name} is not known; there are {', '.join(RECIPES)}")
        return cls(RECIPES[name], name=f"synthetic:{name}", seed=seed)

    def spec(self, canonical: str) -> Spec:
        """Shape and storage format of a parameter. Raises ConfigError where its rows do not divide into blocks."""
        shape = self.shapes[canonical]
        if len(shape) == 1:
            return Spec(shape, "f32")
        format = self.recipe.format_of(canonical)
        if shape[1] % FORMATS[format].block:
            raise ConfigError(f"{self.path}: {canonical} has rows of {shape[1]}, no multiple of a {format} block")
        return Spec(shape, format)

    def parameter_bytes(self, canonical: str) -> int:
        """Device memory of one parameter."""
        spec = self.spec(canonical)
        return 4 * spec.size if len(spec.shape) == 1 else plane_offsets(spec.dtype, spec.shape[0], spec.shape[1])[1]

    def device_bytes(self, context: int, kv_dtype: str) -> int:
        """Device memory that the weights and the KV cache take."""
        return kv_bytes(self.config, context, kv_dtype) + sum(map(self.parameter_bytes, self.shapes))

    def parameters(self, device: Device, progress: Progress | None = None) -> _Maker:
        """Where the modules get their parameters from."""
        return _Maker(self, device, progress)

    def close(self) -> None:
        """Nothing is open."""


class _Maker:
    """Parameters for the modules (nn.models.decoder.Parameters), made when they are asked for."""

    def __init__(self, model: SyntheticModel, device: Device, progress: Progress | None) -> None:
        self.model, self.config, self.device = model, model.config, device
        self._progress, self._done = progress, 0
        self._total = sum(map(model.parameter_bytes, model.shapes))
        self._order = {name: i for i, name in enumerate(model.shapes)}

    def vector(self, name: str) -> Tensor | None:
        """Norm weights about 1, biases about 0."""
        if name not in self.model.shapes:
            return None
        low, high = (-0.1, 0.1) if name.endswith("_bias") else (0.9, 1.1)
        array = uniform(self.device, self.model.shapes[name], seed=self._seed(name), low=low, high=high)
        self._count(name)
        return Tensor(array)

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        """One weight with the rows of all names, or one a name, as a file's would be stored."""
        specs = [self.model.spec(name) for name in names]
        format = joint_format(specs)
        if format is None:
            return tuple(self._make((name,), spec.dtype) for name, spec in zip(names, specs))
        return (self._make(names, format),)

    def _make(self, names: Sequence[str], format: str) -> Tensor:
        shapes = [self.model.shapes[name] for name in names]
        rows, cols = sum(shape[0] for shape in shapes), shapes[0][1]
        seed = self._seed(names[0])
        weight = random_weight(self.device, (rows, cols), format, seed=seed, std=1.0 / math.sqrt(cols))
        for name in names:
            self._count(name)
        return Tensor(weight, self.device)

    def _seed(self, name: str) -> int:
        return self.model.seed * 1_000_003 + 104_729 * (self._order[name] + 1)

    def _count(self, name: str) -> None:
        self._done += self.model.parameter_bytes(name)
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
