"""The tuner: a kernel family declares its variants once, and each device uses the one that is fastest on it.

A family is declared beside the operation that uses it, and the operation's lowering calls `pick`:

    MATMUL = Family(name="matmul", variants=variants, default=default, shape_class=shape_class, trial=trial, ...)
    chosen = MATMUL.pick(record.device, shape)

ANYGPU_TUNE says what `pick` does. "off": the shipped default, always. "use" (unset): the winner that was measured on
this device before, else the default. "full": as "use", and what was not measured yet is measured first (tune_run.py),
which takes a second or two a shape class. Winners are kept in the user's cache folder (tune_store.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from gpu import tune_store, wgsl
from gpu.errors import DeviceLost, GpuError

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.device import Capabilities, Device
    from gpu.memory import Buffer
    from gpu.recorder import Recorder
    from gpu.tune_run import Verdict

MODES = ("off", "use", "full")
BUDGET = 1.5  # seconds of running on the device a shape class; compiling comes on top
EXTRA_BYTES = 64 << 20  # what tuning may allocate beyond the bytes of the call itself

log = logging.getLogger("anygpu")


class Named(Protocol):
    """A variant: a frozen dataclass with a short name that stays the same from version to version."""

    @property
    def name(self) -> str: ...


S = TypeVar("S")
V = TypeVar("V", bound=Named)


@dataclass(frozen=True)
class Result:
    """An output of a trial: dense values of a NumPy dtype, the buffer's nbytes of them.

    A variant is right where |its value - the plain variant's| <= atol + rtol * |the plain variant's|.
    """

    buffer: Buffer
    dtype: Any = np.float32
    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True)
class Trial(Generic[V]):
    """One call of a family on operands made for it (random values; zeros would hide what is wrong).

    record(recorder, variant, turn) records the call. Where operands fit into a GPU's cache but would not in real use
    (one weight matrix after another), allocate several and take the set of number `turn`, which counts up to `turns`;
    results are compared after turn 0 alone.
    """

    record: Callable[[Recorder, V, int], None]
    results: Sequence[Result]
    turns: int = 1


@dataclass(frozen=True)
class Family(Generic[S, V]):
    """A kernel family: what it can be computed with, and how to find out what is best.

    S is a frozen dataclass of sizes, dtypes and flags; V a frozen dataclass with a `name`.

    Attributes:
        name: "matmul".
        variants: all that are valid for this device and shape, by limits and features.
        default: the shipped choice, one of them: good without tuning.
        shape_class: a coarse bucket, "f32 nt m64 n4096 k4096": one tuning serves the bucket.
        trial: allocates operands and says how to record one call of the shape and what it writes.
        nbytes: bytes of a call's operands and results. The trial may allocate these and 64 MB; without `nbytes`, 64 MB.
        standard: shapes worth tuning beforehand, for `anygpu tune`.
        shaders: files or folders below shaders/ that the variants use, included files apart: when one changes, what was
            measured with it counts no more. Empty: all of them.
    """

    name: str
    variants: Callable[[Capabilities, S], Sequence[V]]
    default: Callable[[Capabilities, S], V]
    shape_class: Callable[[S], str]
    trial: Callable[[Device, S], Trial[V]]
    nbytes: Callable[[S], int] | None = None
    standard: Callable[[Capabilities], Sequence[S]] = lambda caps: ()
    shaders: tuple[str, ...] = ()

    def pick(self, device: Device, shape: S) -> V:
        """The variant to use for this shape on this device; see ANYGPU_TUNE above. Of tuning's errors, only DeviceLost
        is raised."""
        return device.tuner.pick(self, shape)

    def code(self, variants: Sequence[V]) -> str:
        """Identifies what was compared: the shaders' text and the names of the variants valid for a shape."""
        names = "\n".join(sorted(v.name for v in variants))
        return hashlib.sha256(f"{_shader_hash(self.shaders)}\n{names}".encode()).hexdigest()[:12]


@functools.cache
def _shader_hash(paths: tuple[str, ...]) -> str:
    """Of the text of these files and folders below shaders/ and of all that they include."""
    root = wgsl.SHADERS
    todo: list[Path] = []
    for path in paths or (".",):
        place = root / path
        todo += sorted(place.rglob("*.wgsl")) if place.is_dir() else [place]
    seen: dict[Path, bytes] = {}
    while todo:
        place = todo.pop()
        if place in seen or not place.is_file():
            continue
        seen[place] = place.read_bytes()
        for name in re.findall(r"//\s*include\s+(\S+)\.wgsl", seen[place].decode("utf-8")):
            todo += [root / f"{name}.wgsl", root / f"{name}_subgroup.wgsl"]
    digest = hashlib.sha256()
    for place in sorted(seen):
        digest.update(place.relative_to(root).as_posix().encode() + b"\n" + seen[place])
    return digest.hexdigest()


def mode_from_environment() -> str:
    """ANYGPU_TUNE, or "use". Raises GpuError for another value."""
    mode = os.environ.get("ANYGPU_TUNE", "").strip().lower() or "use"
    if mode not in MODES:
        raise GpuError(f"ANYGPU_TUNE={mode}: expected one of {', '.join(MODES)}; unset it for use")
    return mode


class Tuner:
    """The choices of one device. `mode` and `budget` (seconds a shape class) may be set."""

    def __init__(self, device: Device) -> None:
        self._device = weakref.ref(device)
        self.mode = mode_from_environment()
        self.budget = BUDGET
        self._table: tune_store.Table | None = None  # read when it is first asked for
        self._picked: dict[tune_store.Key, str] = {}  # what this process has settled on, so that it stays
        self._measuring = False
        self._met: dict[tuple[str, str], tuple[Family[Any, Any], Any]] | None = None

    def pick(self, family: Family[S, V], shape: S) -> V:
        """See Family.pick."""
        device = self.device
        default = family.default(device.caps, shape)
        if self._met is not None:
            self._met.setdefault((family.name, family.shape_class(shape)), (family, shape))
        if self.mode == "off" or (self.mode == "use" and not self.table):
            return default
        variants = family.variants(device.caps, shape)
        key = (family.name, family.shape_class(shape), family.code(variants))
        if key not in self._picked:
            entry = self.table.get(key)
            if entry is None and self.mode == "full" and not self._measuring:
                verdict = self.measure(family, shape)
                entry = None if verdict is None else self.table.get(key)
            elif entry is None:
                return default
            # "" stands for the default of each shape: a class may hold shapes of different defaults
            self._picked[key] = "" if entry is None or entry.winner == entry.default else entry.winner
        wanted = self._picked[key]
        return next((v for v in variants if v.name == wanted), default)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Collection[tuple[Family[Any, Any], Any]]]:
        """What is asked for inside the block, as (family, shape), one of each class; filled as it comes."""
        before, self._met = self._met, {}
        try:
            yield self._met.values()
        finally:
            self._met = before

    def measure(self, family: Family[S, V], shape: S, *, budget: float | None = None) -> Verdict | None:
        """Time the variants on this shape and remember the winner, here and in the tuning file.

        None where nothing could be compared (a line in the log says why). Only DeviceLost is raised.
        """
        from gpu.tune_run import compare

        device = self.device
        variants = family.variants(device.caps, shape)
        default = family.default(device.caps, shape)
        name = f"{family.name} {family.shape_class(shape)}"
        self._measuring = True
        try:
            verdict = compare(device, family, shape, variants, default, budget=budget or self.budget)
        except DeviceLost:
            raise
        except Exception as error:  # the shipped default is there: no fault of tuning ends a person's work
            log.warning("anygpu: %s is not tuned: %s", name, error)
            return None
        finally:
            self._measuring = False
            device.memory.trim()
        key = (family.name, family.shape_class(shape), family.code(variants))
        known = self.table.get(key)
        entry = tune_store.Entry(
            family=family.name,
            shape_class=key[1],
            code=key[2],
            winner=verdict.winner,
            default=verdict.default,
            ratio=round(verdict.ratio, 4),
            stamp=round(max(time.time(), known.stamp + 0.001 if known else 0.0), 3),  # the later one counts
        )
        self._table = tune_store.merge(self.table, {entry.key: entry})
        if self.path is not None:
            tune_store.save(self.path, self.identity, {entry.key: entry})
        log.info("anygpu: %s: %s takes %.2f of the time of %s", name, entry.winner, 1 / entry.ratio, entry.default)
        return verdict

    def hash(self) -> str:
        """Identifies the choices in force: "default", or 12 hex digits of all winners that are not the default.

        Results are the same bits from run to run for a device, driver and hash.
        """
        won = sorted((*e.key, e.winner) for e in self.table.values() if e.winner != e.default)
        if self.mode == "off" or not won:
            return "default"
        return hashlib.sha256(json.dumps(won).encode()).hexdigest()[:12]

    def clear(self) -> None:
        """Forget everything measured on this device, the file included. Raises OSError."""
        self._table, self._picked = {}, {}
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    @property
    def device(self) -> Device:
        device = self._device()
        if device is None:
            raise DeviceLost("tuner: its Device is gone; open a new one")
        return device

    @property
    def identity(self) -> dict[str, Any]:
        """What a measurement holds for; another driver or version has a file of its own."""
        caps = self.device.caps
        names = ("name", "driver", "api", "backend", "backend_version", "checked")
        return {name: getattr(caps, name) for name in names}

    @property
    def path(self) -> Path | None:
        """The tuning file, which need not be there; None where the user has no home folder."""
        try:
            return tune_store.path_of(self.identity)
        except RuntimeError:
            return None

    @property
    def table(self) -> tune_store.Table:
        """What is known of this device, from the file as it was when it was first asked for, and since then."""
        if self._table is None:
            self._table = {} if self.path is None else tune_store.read(self.path, self.identity)
        return self._table


__all__ = ["Family", "Named", "Result", "Trial", "Tuner", "mode_from_environment"]
