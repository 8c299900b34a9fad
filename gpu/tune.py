"""The tuner: a kernel family declares its variants once, and each device uses the one that is fastest on it.

A family is declared beside the operation that uses it, and the operation's lowering calls `pick`:

    MATMUL = Family(name="matmul", variants=variants, default=default, shape_class=shape_class, trial=trial, ...)
    chosen = MATMUL.pick(record.device, shape)

ANYGPU_TUNE says what `pick` does. "off": the shipped default, always. "use" (unset): the winner that was measured on
this device before, else the default. "full": as "use", and what was not measured yet is measured first (tune_run.py),
which takes a second or two a shape class. Winners are kept in the user's cache folder (tune_store.py).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from gpu import wgsl
from gpu.errors import GpuError

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.device import Capabilities, Device
    from gpu.memory import Buffer
    from gpu.recorder import Recorder

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
        """The variant to use for this shape on this device; see ANYGPU_TUNE above. Only DeviceLost is raised."""
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
        self._picked: dict[tuple[str, str, str], str] = {}  # what this process has settled on, so that it stays

    def pick(self, family: Family[S, V], shape: S) -> V:
        """See Family.pick."""
        device = self._device()
        assert device is not None
        return family.default(device.caps, shape)


__all__ = ["Family", "Named", "Result", "Trial", "Tuner", "mode_from_environment"]
