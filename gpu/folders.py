"""Where files live that are fetched or remembered for a person, and how one is written: as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path


def cache_dir() -> Path:
    """ANYGPU_CACHE, or the platform's cache folder for users. Raises RuntimeError where no home folder is known."""
    if own := os.environ.get("ANYGPU_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path("~/AppData/Local").expanduser()) / "anygpu" / "Cache"
    if sys.platform == "darwin":
        return Path("~/Library/Caches/anygpu").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "anygpu"


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a file in one step: whatever goes wrong, an earlier one stays as it was. Text is UTF-8.

    Devices and pipes (/dev/stdout) are written to directly. Raises OSError with the path that was asked for.
    """
    data = data.encode("utf-8", "replace") if isinstance(data, str) else data
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(data)
        return
    place = Path(os.path.realpath(path))  # a link stays a link
    part = place.with_name(f".{place.name[:100]}.{os.getpid()}.part")
    try:
        if place.exists():
            os.close(os.open(place, os.O_WRONLY))  # a file that is write-protected is not replaced
        part.write_bytes(data)
        if place.exists():
            shutil.copymode(place, part)
        os.replace(part, place)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
