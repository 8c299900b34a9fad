"""Where files live that are fetched or remembered for a person."""

from __future__ import annotations

import os
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
