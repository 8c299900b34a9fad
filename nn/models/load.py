"""From a model file to a Decoder on a device: names, formats, memory check, upload.

Weights go from the mapped file to the device tensor by tensor, and each tensor's pages are let go, so that little more
than the device buffers is in memory at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nn.io.errors import read_object
from nn.io.gguf import GGUF
from nn.io.weights import DENSE, WeightSource, open_weights
from nn.models.config import ConfigError, ModelConfig, kv_bytes
from nn.models.decoder import Decoder, Parameters
from nn.models.names import Source, check_shapes, gguf_sources, hf_sources
from nn.ops.base import Spec
from nn.quant.formats import FORMATS, bf16_values, dequantize
from nn.quant.repack import plane_offsets
from nn.quant.weight import Weight
from nn.quant.widen import common_format, widen
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Device

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
MAX_CONFIG_BYTES = 1 << 24  # of a config.json
# Matrices of one layer that mix formats are stored alike up to so many weights together, so that one dispatch reads
# them: that saves some microseconds each on a GPU, and costs a few MB.
WIDENED_WEIGHTS = 4 << 20
DEFAULT_CONTEXT = 4096  # tokens, or the model's own limit if that is less


class Loadable(Protocol):
    """What `load_model` needs to know of a model: a ModelFile, or a SyntheticModel (nn/models/synthetic.py)."""

    path: Path
    config: ModelConfig

    def device_bytes(self, context: int, kv_dtype: str) -> int: ...

    def parameters(self, device: Device, progress: Progress | None = None) -> Parameters: ...


class DoesNotFit(ValueError):
    """The model needs more device memory than there is; the message says how much, and what to try."""


class ModelFile:
    """An opened model: its config, its tokenizer's metadata and where each parameter lies. Nothing is on a device yet.

    `path`: a .gguf file, or a folder (or index, or .safetensors file) with config.json beside it.
    Raises FormatError, ConfigError, OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.source: WeightSource = open_weights(self.path)
        names = self.source.names()
        shapes = {name: self.source.spec(name).shape for name in names}
        if isinstance(self.source, GGUF):
            factors = None
            if "rope_freqs.weight" in self.source:
                factors = [float(x) for x in self._values("rope_freqs.weight").reshape(-1)]
            self.config = ModelConfig.from_gguf(self.source.metadata, shapes, rope_factors=factors)
            self.sources = gguf_sources(self.config, names)
        else:
            self.config = ModelConfig.from_json(self._config_json())
            head_name = next((n for n in names if n.endswith("lm_head.weight")), None)
            if not self.config.tied_head and head_name is None:
                self.config = replace(self.config, tied_head=True)
            self.sources = hf_sources(self.config, names)
        check_shapes(self.config, self.sources, shapes)

    def _config_json(self) -> dict[str, Any]:
        folder = self.path if self.path.is_dir() else self.path.parent
        file = folder / "config.json"
        if not file.is_file():
            raise ConfigError(f"{folder}: no config.json beside the weights; it says what the model is made of")
        return read_object(file, most=MAX_CONFIG_BYTES, error=ConfigError)

    @property
    def metadata(self) -> Any:
        """The GGUF metadata, or None for safetensors."""
        return self.source.metadata if isinstance(self.source, GGUF) else None

    def _values(self, name: str) -> np.ndarray:
        """A tensor as f32, decoded where it is stored in blocks."""
        spec, raw = self.source.spec(name), self.source.raw(name)
        if spec.dtype in ("f32", "f64", "f16"):
            return raw.astype(np.float32)
        if spec.dtype == "bf16":
            return bf16_values(raw)
        if spec.dtype in FORMATS:
            return dequantize(raw, spec.dtype).reshape(spec.shape)
        raise ConfigError(f"{self.path}: tensor {name} is stored as {spec.dtype}; supported: {', '.join(FORMATS)}")

    def vector(self, canonical: str) -> np.ndarray | None:
        """A norm weight or bias as f32, or None if the model has none of that name."""
        source = self.sources.get(canonical)
        return None if source is None else source.take(self._values(source.name))

    def spec(self, canonical: str) -> Spec:
        """Shape and storage format a matrix will have on the device."""
        source = self.sources[canonical]
        spec = self.source.spec(source.name)
        shape = spec.shape[::-1] if source.transpose else spec.shape
        rows = shape[0] if source.rows is None else source.rows[1] - source.rows[0]
        return Spec((rows, *shape[1:]), "f32" if spec.dtype == "f64" else spec.dtype)

    def rows(self, canonical: str) -> np.ndarray:
        """A matrix's stored rows as uint8 (rows, bytes a row), of the format that `spec` names."""
        source: Source = self.sources[canonical]
        spec, raw = self.source.spec(source.name), self.source.raw(source.name)
        if spec.dtype not in FORMATS and spec.dtype != "f64":
            raise ConfigError(f"{self.path}: {source.name} is stored as {spec.dtype}; supported: {', '.join(FORMATS)}")
        if spec.dtype in DENSE:
            values = source.take(raw.astype(np.float32) if spec.dtype == "f64" else raw)
            return np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)
        if source.transpose or source.offset:
            raise ConfigError(f"{self.path}: {source.name} is stored as {spec.dtype} but has to be changed on loading")
        return raw if source.rows is None else raw[source.rows[0] : source.rows[1]]

    def device_bytes(self, context: int, kv_dtype: str) -> int:
        """Device memory that the weights (as they will be laid out) and the KV cache take."""
        return kv_bytes(self.config, context, kv_dtype) + sum(map(self.parameter_bytes, self.sources))

    def parameter_bytes(self, canonical: str) -> int:
        """Device memory of one parameter: a matrix in its storage format with padding, a vector in f32."""
        spec = self.spec(canonical)
        if len(spec.shape) == 2 and spec.dtype in FORMATS:
            return plane_offsets(spec.dtype, *spec.shape)[1]
        return 4 * spec.size

    def parameters(self, device: Device, progress: Progress | None = None) -> Parameters:
        """Where a Decoder gets its parameters from."""
        return _Loader(self, device, progress)

    def close(self) -> None:
        """Let go of the file; parameters that are on the device stay."""
        self.source.close()


class _Loader:
    """Parameters for the modules, straight from the file onto the device."""

    def __init__(self, file: ModelFile, device: Device, progress: Progress | None) -> None:
        self.file, self.config, self.device = file, file.config, device
        self._progress, self._done = progress, 0
        self._total = sum(file.source.nbytes(s.name) for s in file.sources.values())

    def vector(self, name: str) -> Tensor | None:
        values = self.file.vector(name)
        if values is None:
            return None
        self._count(name)
        return Tensor(np.ascontiguousarray(values, np.float32), self.device)

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        specs = [self.file.spec(name) for name in names]
        format = joint_format(specs)
        if format is None:
            return tuple(Tensor(self._upload((name,), self.file.spec(name).dtype), self.device) for name in names)
        return (Tensor(self._upload(names, format), self.device),)

    def _upload(self, names: Sequence[str], format: str) -> Weight:
        specs = [self.file.spec(name) for name in names]
        parts = [widen(self.file.rows(name), spec.dtype, format) for name, spec in zip(names, specs, strict=True)]
        raw = parts[0] if len(parts) == 1 else np.concatenate(parts)
        shape = (sum(spec.shape[0] for spec in specs), specs[0].shape[1])
        weight = Weight.upload(self.device, raw, shape, format)
        for name in names:
            self.file.source.release(self.file.sources[name].name)
            self._count(name)
        return weight

    def _count(self, name: str) -> None:
        self._done += self.file.source.nbytes(self.file.sources[name].name)
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def joint_format(specs: Sequence[Spec]) -> str | None:
    """The format in which these matrices of one layer are stored as one; None: each on its own."""
    kinds = {spec.dtype for spec in specs}
    few = len(kinds) == 1 or sum(spec.size for spec in specs) <= WIDENED_WEIGHTS
    return common_format(kinds) if few else None


def parse_memory(text: str | float, total: int) -> int:
    """Bytes of a --gpu-memory value: "6G", "800M", a number of bytes, or a fraction such as "0.5" of `total`."""
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    raw = str(text).strip().lower().removesuffix("b").removesuffix("i")
    try:
        if raw and raw[-1] in units:
            value = float(raw[:-1]) * (1 << units[raw[-1]])
        else:
            value = float(raw)
            value = value * total if value <= 1.0 else value
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"--gpu-memory: '{text}' is not a size; write bytes, 800M, 6G, or a fraction such as 0.5")
    return int(value)


def default_memory(device: Device) -> int:
    """What a model may take where --gpu-memory does not say: WebGPU does not report memory, so this is a rule.

    A software driver lives in main memory: half of what is there. A GPU: 8 GiB, or twice its largest buffer if that is
    more (drivers offer buffers in proportion to their memory).
    """
    if device.caps.kind == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (ValueError, OSError, AttributeError):
            return 4 << 30
    return max(8 << 30, 2 * device.caps.max_buffer)


def check_fit(file: Loadable, device: Device, context: int, kv_dtype: str, limit: int) -> None:
    """Raise DoesNotFit, with a context that would fit if there is one, before anything is loaded."""
    need = file.device_bytes(context, kv_dtype)
    if need <= limit:
        return
    weights = need - kv_bytes(file.config, context, kv_dtype)
    a_position = kv_bytes(file.config, 1, kv_dtype)
    room = (limit - weights) // a_position
    remedy = f"--context {room // 64 * 64 or room}" if room >= 16 else "a smaller model or one with fewer bits a weight"
    raise DoesNotFit(
        f"{file.path.name} does not fit {device.caps.name}: needs {_size(need)} (weights {_size(weights)}, "
        f"KV cache for {context:,} tokens {_size(need - weights)}), has {_size(limit)}. "
        f"Try {remedy}, or raise --gpu-memory."
    )


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes >= 10 << 20 else f"{nbytes / (1 << 10):.0f} KiB"


def load_model(
    file: Loadable,
    device: Device,
    *,
    context: int | None = None,
    kv_dtype: str | None = None,
    gpu_memory: str | float | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Put a model on a device.

    Args:
        context: tokens of prompt and answer together; None takes 4096 or the model's own limit if that is less.
        kv_dtype: "f16" or "f32" storage of keys and values; None takes f16 on GPUs that have it, else f32.
        gpu_memory: see `parse_memory`; None takes `default_memory`.
    Raises: DoesNotFit, ConfigError, ValueError for a context out of range.
    """
    config = file.config
    most = config.context_max
    if context is None:
        context = min(DEFAULT_CONTEXT, most)
    if not isinstance(context, int) or isinstance(context, bool) or not 1 <= context <= most:
        got = f"{context:,}" if isinstance(context, int) else repr(context)
        raise ValueError(f"context must be from 1 to {most:,} tokens, what this model was made for; got {got}")
    if kv_dtype is None:
        kv_dtype = "f16" if device.caps.f16 and device.caps.kind == "gpu" else "f32"
    if kv_dtype not in ("f16", "f32") or (kv_dtype == "f16" and not device.caps.f16):
        raise ValueError(
            f"kv_dtype must be 'f32', or 'f16' where the device has it; got {kv_dtype!r} on {device.caps.name}"
        )
    total = default_memory(device)
    limit = total if gpu_memory is None else parse_memory(gpu_memory, total)
    check_fit(file, device, context, kv_dtype, limit)
    return Decoder(file.parameters(device, progress), context=context, kv_dtype=kv_dtype)
