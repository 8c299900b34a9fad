"""The tuning files: what was measured on a device, kept in the user's cache folder.

One JSON file a device, driver, WebGPU implementation with its version, and checked or trusted shaders. Several
processes may write it: each takes the lock, reads what is there, merges and replaces the file in one step. A file that
cannot be read, is damaged, or was made by something else is ignored with a warning: nothing here raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpu.folders import cache_dir

FORMAT = 1
MAX_BYTES = 8 << 20  # a larger file is none of ours
MAX_ENTRIES = 4000  # about 1 MB; the oldest go
MAX_NAME = 500  # characters of a name
LOCK_SECONDS = 5.0

log = logging.getLogger("anygpu")

Key = tuple[str, str, str]  # family, shape class, code


@dataclass(frozen=True)
class Entry:
    """What was found out about one shape class. ratio: the default's time over the winner's; stamp: Unix seconds."""

    family: str
    shape_class: str
    code: str  # of the shaders and variants that were compared: Family.code
    winner: str
    default: str
    ratio: float
    stamp: float

    @property
    def key(self) -> Key:
        """What the entry is an answer for."""
        return (self.family, self.shape_class, self.code)

    @property
    def order(self) -> tuple[float, str]:
        """Of two entries with one key, the larger is kept, whatever the order they are seen in."""
        return (self.stamp, json.dumps(asdict(self), sort_keys=True))


Table = dict[Key, Entry]


def merge(*tables: Mapping[Key, Entry]) -> Table:
    """The newest entry of every key, of at most MAX_ENTRIES keys. In any order and grouping it gives the same."""
    found: Table = {}
    for table in tables:
        for key, entry in table.items():
            if key not in found or found[key].order < entry.order:
                found[key] = entry
    newest = sorted(found.values(), key=lambda entry: entry.order, reverse=True)[:MAX_ENTRIES]
    return {entry.key: entry for entry in sorted(newest, key=lambda entry: entry.key)}


def path_of(identity: Mapping[str, Any]) -> Path:
    """The file for a device: a readable name, and a hash of all that identifies it. Raises RuntimeError: no home."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    words = f"{identity.get('name', '')} {identity.get('backend', '')}".lower()
    readable = re.sub(r"[^a-z0-9]+", "-", words)[:60].strip("-")
    return cache_dir() / "tune" / f"{readable}-{digest}.v{FORMAT}.json"


def to_text(identity: Mapping[str, Any], table: Mapping[Key, Entry]) -> str:
    """The file's text: one entry a line, in an order that is the same every time."""
    lines = [json.dumps(asdict(entry), ensure_ascii=False) for _, entry in sorted(table.items())]
    head = {"format": FORMAT, "device": dict(identity)}
    return json.dumps(head, ensure_ascii=False)[:-1] + ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def from_text(text: str, identity: Mapping[str, Any]) -> Table:
    """The entries of a file's text. Raises ValueError if it is not a tuning file of this format and device."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    if data.get("device") != dict(identity):
        raise ValueError("it is of another device")
    listed = data.get("entries")
    if not isinstance(listed, list) or len(listed) > MAX_ENTRIES:
        raise ValueError(f"its entries are not a list of at most {MAX_ENTRIES}")
    entries = [_entry(item) for item in listed]
    return merge(*({entry.key: entry} for entry in entries))


def _entry(item: Any) -> Entry:
    names = [f.name for f in fields(Entry)]
    if not isinstance(item, dict) or item.keys() != set(names):
        raise ValueError(f"an entry does not have the fields {', '.join(names)}")
    for name, value in item.items():
        if name in ("ratio", "stamp"):
            good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
        else:
            good = isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable()
        if not good:
            raise ValueError(f"an entry's {name} is {str(value)[:40]!r}")
    return Entry(**{**item, "ratio": float(item["ratio"]), "stamp": float(item["stamp"])})


def read(path: Path, identity: Mapping[str, Any]) -> Table:
    """The entries of a file, none if there is no file. Warns where it cannot be used."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would block, a folder cannot be read
            raise ValueError("it is not a file")
        if about.st_size > MAX_BYTES:
            raise ValueError(f"its size is {about.st_size:,} bytes")
        return from_text(path.read_text(encoding="utf-8"), identity)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("anygpu: the tuning file %s is ignored: %s. anygpu tune --clear removes it", path, _why(error))
        return {}


def save(path: Path, identity: Mapping[str, Any], table: Mapping[Key, Entry]) -> Table:
    """Merge these entries into the file; gives what the file then holds. Warns where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            merged = merge(read(path, identity), table)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(to_text(identity, merged))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        return merged
    except OSError as error:
        log.warning("anygpu: what was tuned could not be kept in %s: %s", path, _why(error))
        return merge(table)


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when the process ends. After LOCK_SECONDS, go on without."""
    with open(path, "ab") as file:
        give_up = time.monotonic() + LOCK_SECONDS
        while not _try_lock(file.fileno()) and time.monotonic() < give_up:
            time.sleep(0.01)
        yield  # closing the file gives the lock back


def _try_lock(descriptor: int) -> bool:
    """Lock it without waiting; True if that is done, or if this system or file system has no locks."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
