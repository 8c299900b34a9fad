"""Device memory: buffers out of a size-class pool, with live and peak counters, uploads and read-backs."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.errors import GpuError, LimitExceeded, OutOfMemory
from gpu.work import watched

if TYPE_CHECKING:
    from gpu.device import Device

UPLOAD_CHUNK = 16 << 20  # bytes a write_buffer call
UPLOAD_BUDGET = 64 << 20  # bytes of staging copies that may pile up before a submit and a small read-back
CANARY_BYTES = 256
CANARY_WORD = 0x7FA5C3E1  # a NaN with a payload as f32, odd as integers


@dataclass
class Counters:
    """What the device has done and holds. `allocations` counts driver buffers made, not pool hits."""

    allocations: int = 0
    bytes_live: int = 0
    bytes_peak: int = 0
    bytes_pooled: int = 0
    pipelines: int = 0
    bind_groups: int = 0
    dispatches: int = 0
    submits: int = 0


def size_class(nbytes: int) -> int:
    """Pool sizes: multiples of 256 up to 4 KiB, then eight steps to each power of two (at most 12.5 % waste)."""
    nbytes = max(nbytes, 256)
    if nbytes <= 4096:
        return -(-nbytes // 256) * 256
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def whole_words(nbytes: int) -> int:
    """Bytes rounded up to words of four, at least one: what WebGPU can bind and copy."""
    return -(-max(nbytes, 4) // 4) * 4


def host_bytes(doing: str, array: np.ndarray | bytes) -> np.ndarray:
    """The bytes of host data in C order, as u8. Raises GpuError for what is no array of numbers."""
    if isinstance(array, bytes | bytearray | memoryview):
        return np.frombuffer(array, np.uint8)
    data = np.ascontiguousarray(array)
    if data.dtype.kind not in "biufcV" or data.dtype.hasobject:
        raise GpuError(f"{doing}: got {type(array).__name__} data of type {data.dtype}; expected bytes or numbers")
    return data.reshape(-1).view(np.uint8)


class Buffer:
    """A range of device memory. Freed (to the pool) when the last reference goes, or by `release()`.

    nbytes: size asked for. offset: where it starts in `raw`, the driver's buffer. A view shares its parent's memory.
    """

    __slots__ = ("__weakref__", "_finalizer", "bound_bytes", "device", "nbytes", "offset", "parent", "raw")

    def __init__(
        self,
        device: Device,
        raw: Any,
        nbytes: int,
        *,
        offset: int = 0,
        bound_bytes: int = 0,
        parent: Buffer | None = None,
    ) -> None:
        self.device, self.raw, self.nbytes, self.offset, self.parent = device, raw, nbytes, offset, parent
        self.bound_bytes = bound_bytes or whole_words(nbytes)
        self._finalizer: Any = None

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Bytes [offset, offset + nbytes) as a buffer of their own. offset must be a multiple of 256."""
        if offset % 256 or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise GpuError(
                f"view({offset}, {nbytes}) of a buffer of {self.nbytes} bytes: the offset must be a multiple of 256 "
                "and the range must lie inside the buffer"
            )
        return Buffer(self.device, self.raw, nbytes, offset=self.offset + offset, parent=self)

    def write(self, array: np.ndarray | bytes, offset: int = 0) -> None:
        """Copy host data to byte `offset` (a multiple of 4), before any work submitted later."""
        self.device.memory.write(self, array, offset)

    def release(self) -> None:
        """Give the memory back now. Recording, reading or writing the buffer or a view of it raises afterwards."""
        if self._finalizer is not None:
            self._finalizer()

    @property
    def released(self) -> bool:
        """Whether the memory has been given back, and may belong to another buffer."""
        owner = self
        while owner.parent is not None:
            owner = owner.parent
        return owner._finalizer is not None and not owner._finalizer.alive

    def require_range(self, doing: str, offset: int, nbytes: int) -> None:
        """Raise GpuError unless [offset, offset + nbytes) are whole words' worth of live bytes of this buffer."""
        if self.released:
            raise GpuError(f"{doing}: the buffer ({self.nbytes} bytes) was released; allocate a new one")
        if offset % 4 or offset < 0 or nbytes < 0 or offset + nbytes > whole_words(self.nbytes):
            raise GpuError(
                f"{doing}: {nbytes} bytes at offset {offset} of a buffer of {self.nbytes}; "
                "the offset must be a multiple of 4 and the range must lie inside"
            )

    def __repr__(self) -> str:
        return f"Buffer({self.nbytes} bytes at {self.offset} of {self.raw.size})"


class Memory:
    """The pool of one device."""

    def __init__(self, device: Device, *, canary: bool) -> None:
        self._device = weakref.ref(device)
        self._canary = canary
        self._free: dict[tuple[int, bool], list[Any]] = defaultdict(list)
        self._live: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._staging: dict[int, list[Any]] = defaultdict(list)
        self._unsubmitted = 0
        self._ceiling: int | None = None
        self._quarantine: list[tuple[Any, int, int, int]] = []
        self.damaged: list[str] = []

    @property
    def device(self) -> Device:
        device = self._device()
        if device is None:
            raise GpuError("this buffer's Device is closed: keep the Device as long as its buffers")
        return device

    def alloc(self, nbytes: int, *, uniform: bool = False) -> Buffer:
        """A buffer from the pool or the driver, contents undefined. Raises LimitExceeded, OutOfMemory."""
        device = self.device
        device.require_open()
        if not isinstance(nbytes, int | np.integer) or nbytes < 0:
            raise GpuError(f"alloc: {nbytes!r} bytes asked for; a size is a whole number, 0 or more")
        padded = bound = whole_words(int(nbytes))
        if self._canary and not uniform:
            bound = padded + CANARY_BYTES
            if len(self._quarantine) >= 64:
                self._check_quarantine()
        capacity = size_class(bound)
        caps = device.caps
        if capacity > caps.max_buffer:
            capacity = bound
        if capacity > caps.max_buffer:
            raise LimitExceeded(
                f"alloc: {nbytes:,} bytes asked for, one buffer of {caps.name} holds at most {caps.max_buffer:,}; "
                "split the tensor"
            )
        free = self._free[capacity, uniform]
        counters = device.counters
        if self._ceiling is not None and counters.bytes_live + capacity > self._ceiling:
            over = counters.bytes_live + capacity - self._ceiling
            raise LimitExceeded(
                f"alloc: {nbytes:,} bytes more are {over:,} over what may be allocated here; at_most set that"
            )
        if free:
            raw = free.pop()
            counters.bytes_pooled -= capacity
        else:
            raw = self._create(capacity, uniform=uniform)
        counters.bytes_live += capacity
        counters.bytes_peak = max(counters.bytes_peak, counters.bytes_live)
        buffer = Buffer(device, raw, nbytes, bound_bytes=bound)
        buffer._finalizer = weakref.finalize(buffer, Memory._give_back, self, raw, capacity, uniform, nbytes, padded)
        buffer._finalizer.atexit = False
        if self._canary and not uniform:
            device.raw.queue.write_buffer(raw, padded, np.full(CANARY_BYTES // 4, CANARY_WORD, np.uint32))
            self._live.add(buffer)
        return buffer

    @contextlib.contextmanager
    def at_most(self, nbytes: int) -> Iterator[None]:
        """Inside the block, allocations over what is live now plus nbytes raise LimitExceeded."""
        before, self._ceiling = self._ceiling, self.device.counters.bytes_live + nbytes
        try:
            yield
        finally:
            self._ceiling = before

    def _create(self, capacity: int, *, uniform: bool) -> Any:
        device = self.device
        usage = device.backend.module.BufferUsage
        flags = (usage.UNIFORM if uniform else usage.STORAGE | usage.COPY_SRC) | usage.COPY_DST
        for attempt in (0, 1):
            try:
                with device.backend.errors(f"alloc {capacity:,} bytes"):
                    raw = device.raw.create_buffer(size=capacity, usage=flags)
                break
            except OutOfMemory:
                if attempt or not self.trim():
                    raise
        device.counters.allocations += 1
        return raw

    def _give_back(self, raw: Any, capacity: int, uniform: bool, nbytes: int, padded: int) -> None:
        device = self._device()
        if device is None or device.closed:
            return
        device.counters.bytes_live -= capacity
        if self._canary and not uniform:  # looked at later: this may run inside any other call
            self._quarantine.append((raw, capacity, padded, nbytes))
            return
        device.counters.bytes_pooled += capacity
        self._free[capacity, uniform].append(raw)

    def check_canaries(self) -> None:
        """Raise if any kernel wrote behind a buffer. Only with Device.open(canary=True), which checks and tests use."""
        self._check_quarantine()
        live = [buffer for buffer in list(self._live) if not buffer.released]
        self._check_tails([(buffer.raw, whole_words(buffer.nbytes), buffer.nbytes) for buffer in live])
        if self.damaged:
            damaged, self.damaged = self.damaged, []
            raise GpuError("a kernel wrote behind the end of its buffer: " + "; ".join(damaged))

    def _check_quarantine(self) -> None:
        quarantine, self._quarantine = self._quarantine, []
        self._check_tails([(raw, padded, nbytes) for raw, _, padded, nbytes in quarantine])
        for raw, capacity, _, _ in quarantine:
            self.device.counters.bytes_pooled += capacity
            self._free[capacity, False].append(raw)

    def _check_tails(self, places: list[tuple[Any, int, int]]) -> None:
        """Read the canaries at (driver's buffer, offset, size asked for) in one submit and note the damaged ones."""
        if not places:
            return
        copies = [(raw, padded, CANARY_BYTES) for raw, padded, _ in places]
        tails = np.frombuffer(self._start_copies(copies).result(), np.uint32).reshape(len(places), -1)
        for i in np.flatnonzero((tails != CANARY_WORD).any(1)):
            first = int(np.flatnonzero(tails[i] != CANARY_WORD)[0])
            _, padded, nbytes = places[i]
            self.damaged.append(
                f"{nbytes} bytes asked for, byte {padded + 4 * first} overwritten with {tails[i, first]:#010x}"
            )

    def trim(self) -> int:
        """Give pooled buffers back to the driver; returns the bytes freed."""
        freed = 0
        for (capacity, _), free in self._free.items():
            freed += capacity * len(free)
            for raw in free:
                raw.destroy()
            free.clear()
        self.device.counters.bytes_pooled -= freed
        return freed

    def write(self, buffer: Buffer, array: np.ndarray | bytes, offset: int) -> None:
        """Copy the array's bytes in C order to byte `offset`; odd sizes are filled up with zeros to a word."""
        data = host_bytes("write", array)
        buffer.require_range("write", offset, data.size)
        if data.size == 0:
            return
        if data.size % 4:  # copies are whole words: fill up the last one
            data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
        device = self.device
        device.require_open()
        with device.backend.errors("upload"), watched(device, "upload", bytes=int(data.size)):
            for start in range(0, data.size, UPLOAD_CHUNK):
                chunk = data[start : start + UPLOAD_CHUNK]
                device.raw.queue.write_buffer(buffer.raw, buffer.offset + offset + start, chunk)
                self._unsubmitted += chunk.size
                if self._unsubmitted >= UPLOAD_BUDGET:
                    self.read_raw(buffer.raw, buffer.offset + offset, 4)

    def read(self, buffer: Buffer, nbytes: int, offset: int = 0) -> bytes:
        """Bytes [offset, offset + nbytes) after everything submitted so far. Waits."""
        return self.start_read(buffer, nbytes, offset).result()

    def start_read(self, buffer: Buffer, nbytes: int, offset: int = 0) -> Pending:
        """The same, to be fetched later."""
        buffer.require_range("read", offset, nbytes)
        return self._start_read(buffer.raw, buffer.offset + offset, nbytes)

    def read_raw(self, raw: Any, offset: int, nbytes: int) -> bytes:
        """Bytes of a driver's buffer."""
        return self._start_read(raw, offset, nbytes).result()

    def _start_read(self, raw: Any, offset: int, nbytes: int) -> Pending:
        return self._start_copies([(raw, offset, nbytes)])

    def _start_copies(self, places: Sequence[tuple[Any, int, int]]) -> Pending:
        """Read (driver's buffer, offset, bytes) one after another; all but the last are whole words."""
        device = self.device
        device.require_open()
        nbytes = sum(size for _, _, size in places)
        with device.backend.errors(f"read {nbytes:,} bytes"):
            staging = self.staging(nbytes)
            encoder, at = device.raw.create_command_encoder(), 0
            for raw, offset, size in places:
                encoder.copy_buffer_to_buffer(raw, offset, staging.raw, at, whole_words(size))
                at += size
            submission = device.backend.submit(device.raw, encoder.finish())
            device.counters.submits += 1
            self._unsubmitted = 0
            return self.pending(staging, submission)

    def copy(self, pairs: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Copy the first buffer of each pair over the second (whole words of the first one's size), after everything
        submitted so far. Two parts of one driver buffer cannot be copied into each other."""
        device = self.device
        device.require_open()
        with device.backend.errors("copy"):
            encoder = device.raw.create_command_encoder()
            for source, target in pairs:
                nbytes = whole_words(source.nbytes)
                source.require_range("copy", 0, nbytes)
                target.require_range("copy", 0, nbytes)
                encoder.copy_buffer_to_buffer(source.raw, source.offset, target.raw, target.offset, nbytes)
            device.backend.submit(device.raw, encoder.finish())
            device.counters.submits += 1
            self._unsubmitted = 0

    def staging(self, nbytes: int) -> Staging:
        """A buffer to read nbytes back through, out of the pool."""
        device = self.device
        padded = whole_words(nbytes)
        capacity = size_class(padded)
        usage = device.backend.module.BufferUsage
        free = self._staging[capacity]
        raw = free.pop() if free else None
        if raw is None:
            raw = device.raw.create_buffer(size=capacity, usage=usage.COPY_DST | usage.MAP_READ)
            device.counters.allocations += 1
        return Staging(raw, capacity, nbytes, padded)

    def reserve_staging(self, nbytes: int, count: int) -> None:
        """Have `count` buffers ready for reading nbytes back, so that a steady state allocates none."""
        for staging in [self.staging(nbytes) for _ in range(count)]:
            self.return_staging(staging)

    def pending(self, staging: Staging, submission: Any) -> Pending:
        """Map a staging buffer whose copy has been submitted."""
        device = self.device
        return Pending(self, staging, device.backend.start_map(device.raw, staging.raw, staging.padded), submission)

    def return_staging(self, staging: Staging) -> None:
        """Back to the pool; large ones are freed, they would double what a big read-back costs."""
        if staging.capacity <= 4 << 20:
            self._staging[staging.capacity].append(staging.raw)
        else:
            staging.raw.destroy()


@dataclass(frozen=True)
class Staging:
    """A mappable buffer in use: capacity of the pool class, nbytes wanted, padded to whole words."""

    raw: Any
    capacity: int
    nbytes: int
    padded: int


class Pending:
    """A read-back under way. `result()` waits for it and gives the bytes; once only."""

    def __init__(self, memory: Memory, staging: Staging, token: Any, submission: Any) -> None:
        self._memory, self._token, self._submission = memory, token, submission
        self._staging: Staging | None = staging

    def result(self) -> bytes:
        """Wait for the copy and return its bytes. Raises GpuError the second time."""
        device, staging = self._memory.device, self._staging
        device.require_open()
        if staging is None:
            raise GpuError("read back: this result was already fetched; keep the bytes")
        self._staging = None
        with device.backend.errors("read back"), watched(device, "wait", bytes=staging.nbytes):
            data = device.backend.finish_map(device.raw, staging.raw, self._token, self._submission, staging.padded)
        self._memory.return_staging(staging)
        return data[: staging.nbytes]
