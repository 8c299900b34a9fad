"""A row of a benchmark: what is run, how many FLOP and bytes it needs, how it is checked, who it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nn.graph.schedule import compile_program
from nn.ops.base import DTYPES, Array
from nn.quant.formats import bf16_values

if TYPE_CHECKING:
    from apps.bench.ceilings import Ceilings
    from apps.bench.measure import Stopwatch
    from gpu import Device, Plan
    from nn.tensor import Tensor

SAMPLE = 24  # rows and columns of a result that are compared


class Skip(Exception):
    """This row cannot be run here; the text says why."""


@dataclass(frozen=True)
class Work:
    """A case made ready: plans to run in turn, and a check of the result that the first one has just given.

    check() gives None, or what is wrong. calls: how many calls a plan holds. note, extra: what else there is
    to say, in words and in numbers.
    """

    plans: Sequence[Plan]
    check: Callable[[], str | None]
    calls: int = 1
    note: str = ""
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row. key: the shape as it is printed; with the suite it names the row from run to run.

    flops, nbytes: what the task needs at least (every operand read once, every result written once).
    need, largest: bytes of device memory that it takes, and of the largest single buffer.
    beside: (key of a row measured before, least ratio wanted or 0): the ratio of the rates is shown behind the row; of
        items a second where there are some.
    torch, numpy: make the same work for a peer: given the peer, a function to be timed.
    level: 1 for rows that always run, 2 for those that run while there is time.
    """

    suite: str
    key: str
    dtype: str
    make: Callable[[Run], Work]
    flops: float = 0.0
    nbytes: float = 0.0
    need: int = 0
    largest: int = 0
    level: int = 1
    matrix: bool = False  # f16 products: matrix units may be used
    unit: str = ""  # "GFLOP/s" or "GB/s"; empty: whichever bounds it
    beside: tuple[str, float] | None = None
    items: float = 0.0  # rows or tokens a call, for "items a second"
    torch: Callable[[Any], Callable[[], Any]] | None = None
    numpy: Callable[[np.random.Generator], Callable[[], Any]] | None = None


@dataclass
class Row:
    """What a case gave. status: "ok", "wrong", "failed" or "skipped"; `note` says why, or what else there is to say."""

    suite: str
    key: str
    dtype: str
    status: str = "ok"
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    spread: float = 0.0
    batches: int = 0
    clock: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    rate: float = 0.0
    unit: str = ""
    ceiling: str = ""
    share: float = 0.0  # of the ceiling
    peer: str = ""
    peer_seconds: float = 0.0
    ratio: float = 0.0  # peer's seconds over ours: above 1, this project is faster
    items: float = 0.0  # a second
    beside: float = 0.0  # our rate over that of the row `beside_key`
    beside_key: str = ""
    rule: float = 0.0  # the least that `beside` should be
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Without what is empty, numbers at seven digits."""
        return {
            k: float(f"{v:.7g}") if isinstance(v, float) else v
            for k, v in asdict(self).items()
            if v not in ("", 0.0, {})
        }


@dataclass
class Run:
    """What cases are made with: the device, a generator of inputs, the ceilings, and one thing kept between cases."""

    device: Device
    watch: Stopwatch
    ceilings: Ceilings
    rng: np.random.Generator
    _kept: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def seed(self) -> int:
        """For inputs made on the device."""
        return int(self.rng.integers(1 << 32))

    def kept(self, what: str, key: Any, make: Callable[[], Any]) -> Any:
        """The last `what` again if it was made for the same key, else a new one; the old one's memory goes first."""
        if what not in self._kept or self._kept[what][0] != key:
            self._kept.pop(what, None)
            self._kept[what] = (key, make())
        return self._kept[what][1]

    def drop(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()
        self.device.memory.trim()


# --- plans ------------------------------------------------------------------------------------------------------------


def plan_of(device: Device, *tensors: Tensor) -> tuple[Plan, list[Array]]:
    """One recording that computes these lazy tensors, and where the results lie."""
    record = device.recorder()
    values = compile_program(device, [t.node for t in tensors]).record(record)
    arrays = [value for value in values if isinstance(value, Array)]
    return record.plan(), arrays


def lowered(record: Any, tensor: Tensor, out: Array) -> None:
    """Record the operation that made this lazy tensor, whose operands are in memory, with its result going to `out`."""
    node = tensor.node
    node.op.lower(record, *(source.value for source in node.inputs), out)


# --- reading back and comparing ---------------------------------------------------------------------------------------


def values(device: Device, array: Array) -> np.ndarray:
    """All of an array in float64."""
    return _decoded(device.read(array.buffer, DTYPES[array.dtype][1], array.shape), array.dtype)


def rows_of(device: Device, array: Array, rows: Iterable[Any]) -> np.ndarray:
    """Some rows of an array, all axes but the last taken as one, in float64."""
    width = array.cols * DTYPES[array.dtype][0]
    kind = DTYPES[array.dtype][1]
    found = []
    for row in rows:
        start = int(row) * width
        skip = start % 4
        raw = device.memory.read(array.buffer, -(-(width + skip) // 4) * 4, start - skip)
        found.append(np.frombuffer(raw[skip : skip + width], kind))
    return _decoded(np.stack(found), array.dtype)


def _decoded(stored: np.ndarray, dtype: str) -> np.ndarray:
    return (bf16_values(stored) if dtype == "bf16" else stored).astype(np.float64)


def pick(rng: np.random.Generator, size: int, count: int = SAMPLE) -> np.ndarray:
    """Some of the indices 0..size-1, first and last among them, in order."""
    if size <= count:
        return np.arange(size)
    inner = rng.choice(np.arange(1, size - 1), count - 2, replace=False)
    return np.sort(np.concatenate([[0, size - 1], inner]))


STORED = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}  # relative error of storing a result


def differ(got: np.ndarray, want: np.ndarray, *, atol: float | np.ndarray, dtype: str = "f32") -> str | None:
    """None if every value is within atol plus the rounding of `dtype`; else the worst one."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got - want)
        bad = ~(error <= atol + STORED[dtype] * np.abs(want))
    if not bad.any():
        return None
    worst = int(np.argmax(np.where(bad, np.nan_to_num(error, nan=np.inf), -1.0)))
    return (
        f"{int(bad.sum())} of {bad.size} sampled values are wrong, "
        f"one is {got.flat[worst]:.6g} instead of {want.flat[worst]:.6g}"
    )
