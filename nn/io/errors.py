"""What a reader raises when a file is not what its format says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DAMAGED = "the file is damaged or incomplete: fetch it again"


class FormatError(ValueError):
    """A file breaks its format. One sentence: which file, byte and field, what was wanted, what was there, what to do.

    Attributes: `path`, `offset` (byte in the file, None where no single byte is meant), `field`, `wanted`, `got`,
    `hint`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int | None,
        field: str,
        wanted: str,
        got: object,
        hint: str = DAMAGED,
    ) -> None:
        super().__init__(os.fspath(path), offset, field, wanted, got, hint)  # the arguments, so that it can be pickled
        self.path, self.offset, self.field = os.fspath(path), offset, field
        self.wanted, self.got, self.hint = wanted, got, hint

    def __str__(self) -> str:
        place = "" if self.offset is None else f"byte {self.offset}, "
        return f"{self.path}: {place}{self.field}: wanted {self.wanted}, got {self.got}; {self.hint}"


def quote(text: str | bytes, limit: int = 60) -> str:
    """Text from a file as it may be shown: control characters escaped, cut to `limit` characters."""
    shown = repr(text[: limit + 1])
    return shown if len(text) <= limit else f"{text[:limit]!r} (cut, {len(text)} in all)"


def read_object(path: Path, *, most: int, error: type[ValueError]) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes; an `error` that names the file if it holds anything else."""
    size = path.stat().st_size
    if size > most:
        raise error(f"{path}: {size} bytes; expected at most {most}: this is not such a file, fetch the model again")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not JSON ({problem}); the file is damaged, fetch it again") from None
    if not isinstance(value, dict):
        raise error(f"{path}: a JSON {type(value).__name__}; expected an object: fetch the file again")
    return value
