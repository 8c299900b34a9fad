"""What a model loader asks of a file of weights, whatever its format, and how a path becomes one."""

from __future__ import annotations

import difflib
import math
import os
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from nn.io.mapped import MappedFile
from nn.ops.base import Spec

# Dense storage types: the NumPy type their raw values are viewed as. bf16 and the 8-bit floats travel as their bits.
DENSE: dict[str, np.dtype] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f8_e4m3": np.dtype(np.uint8),
    "f8_e5m2": np.dtype(np.uint8),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u64": np.dtype(np.uint64),
    "u32": np.dtype(np.uint32),
    "u16": np.dtype(np.uint16),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.uint8),
}


class TensorInfo(NamedTuple):
    """Where one tensor is. `shape` has rows first; `offset` counts bytes from the start of its file.

    `dtype`: a key of DENSE, or a block format such as "q4_1".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    file: int = 0  # which shard


class WeightSource:
    """Named tensors in mapped files: what the readers of all formats give. Close it, or use it in a `with`.

    Attributes: `path`, `tensors` by name in file order. After `close`, views given out before stay valid.
    """

    def __init__(self, path: Path, files: list[MappedFile], tensors: dict[str, TensorInfo]) -> None:
        self.path, self.tensors, self._files = path, tensors, files

    @property
    def file_bytes(self) -> int:
        """Size of all files together, bytes."""
        return sum(file.size for file in self._files)

    def names(self) -> list[str]:
        """Tensor names in file order."""
        return list(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Where a tensor is. Raises KeyError with the nearest names there are."""
        try:
            return self.tensors[name]
        except KeyError:
            held = list(self.tensors)
            near = ", ".join(difflib.get_close_matches(name, held[:2000], n=3) or held[:3]) or "(none)"
            raise KeyError(f"{self.path}: no tensor {name!r}; of the {len(held)} in it, near: {near}") from None

    def spec(self, name: str) -> Spec:
        """Shape (rows first) and storage type: a key of DENSE or a block format such as "q4_1". Raises KeyError."""
        info = self.info(name)
        return Spec(info.shape, info.dtype)

    def nbytes(self, name: str) -> int:
        """Stored size of one tensor, bytes."""
        return self.info(name).nbytes

    def raw(self, name: str) -> np.ndarray:
        """Read-only view of the stored values, no copy, little-endian.

        Dense types: the tensor's shape, type DENSE[dtype] (bf16 as uint16). Block formats: uint8 of shape
        (product of all axes but the last, bytes a row). Raises KeyError.
        """
        info = self.info(name)
        stored = self._files[info.file].view(info.offset, info.nbytes)
        if info.dtype in DENSE:
            return stored.view(DENSE[info.dtype]).reshape(info.shape)
        return stored.reshape(math.prod(info.shape[:-1]), -1)

    def release(self, name: str) -> None:
        """Let the system drop the tensor's pages from memory, once it is on the device. Reading again is fine."""
        info = self.info(name)
        self._files[info.file].release(info.offset, info.nbytes)

    def close(self) -> None:
        """Drop the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open a GGUF file, a .safetensors file, its index, or a folder that holds safetensors files.

    The content decides, not the file's name. Raises OSError, FormatError.
    """
    from nn.io.gguf import GGUF, MAGIC
    from nn.io.safetensors import Checkpoint

    path = Path(path)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return GGUF.open(path)
    return Checkpoint.open(path)
