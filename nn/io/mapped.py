"""A file mapped read-only: views of its bytes that cost no memory of their own, and a way to give its pages back."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from nn.io.errors import FormatError


class MappedFile:
    """The bytes of a regular file, mapped for reading.

    Views stay valid after `close`: the mapping goes away with the last of them.
    Raises OSError if the file cannot be opened, FormatError if it is empty or not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # asked before opening: a pipe would block
            kind = "a folder" if self.path.is_dir() else "something else"
            raise FormatError(self.path, None, "file", "a regular file", kind, "name a file")
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(self.path, 0, "file", "at least one byte", "an empty file")
            self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(self._map)

    @property
    def buffer(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path}: the file was closed; open it again to read from it")
        return self._map

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Read-only uint8 view of `nbytes` bytes from `offset`; no copy."""
        if not nbytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(self.buffer, np.uint8, nbytes, offset)

    def release(self, offset: int, nbytes: int) -> None:
        """Let the system drop these pages from memory; a later read brings them back. Does nothing on Windows."""
        if nbytes and hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.buffer.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)

    def close(self) -> None:
        held, self._map = self._map, None
        if held is not None:
            with contextlib.suppress(BufferError):  # views are alive: they hold the mapping and end it
                held.close()
