"""What a model loader asks of a file of weights, whatever its format, and how a path becomes one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

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


class WeightSource(Protocol):
    """Named tensors in mapped files. Implemented by `nn.io.gguf.GGUF` and `nn.io.safetensors.Checkpoint`."""

    path: Path

    @property
    def file_bytes(self) -> int:
        """Size of all files together, bytes."""
        ...

    def names(self) -> list[str]:
        """Tensor names in file order."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def spec(self, name: str) -> Spec:
        """Shape (rows first) and storage type: a key of DENSE or a block format such as "q4_1". Raises KeyError."""
        ...

    def nbytes(self, name: str) -> int:
        """Stored size of one tensor, bytes."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """Read-only view of the stored values, no copy, little-endian.

        Dense types: the tensor's shape, type DENSE[dtype] (bf16 as uint16). Block formats: uint8 of shape
        (product of all axes but the last, bytes a row). Raises KeyError.
        """
        ...

    def release(self, name: str) -> None:
        """Let the system drop the tensor's pages from memory, once it is on the device. Reading again is fine."""
        ...

    def close(self) -> None:
        """Drop the files. Views given out before stay valid."""
        ...

    def __enter__(self) -> WeightSource: ...

    def __exit__(self, *_: object) -> None: ...


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


def no_tensor(path: Path, name: str, names: Iterable[str]) -> KeyError:
    """The error for a name that a file does not hold, with the nearest ones that it does."""
    held = list(names)
    near = difflib.get_close_matches(name, held[:2000], n=3) or held[:3]
    return KeyError(f"{path}: no tensor {name!r}; of the {len(held)} in it, near: {', '.join(near) or '(none)'}")
