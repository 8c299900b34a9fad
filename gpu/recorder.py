"""Recorder: gathers dispatches. Plan: a recording made ready once and replayed many times.

Nothing is submitted dispatch by dispatch. A recording owns one uniform arena (a 256-byte slot a dispatch, written
once), its bind groups, and references to every buffer, so that replaying is a flat loop of three calls a dispatch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.errors import GpuError, LimitExceeded, ShaderError
from gpu.memory import Buffer, Pending

if TYPE_CHECKING:
    from gpu.device import Device
    from gpu.kernel import Kernel
    from gpu.work import Scope

SLOT = 256  # bytes a dispatch in the uniform arena: the largest offset alignment WebGPU allows
MAX_PER_SUBMIT = 2048  # dispatches a command buffer

Grid = int | tuple[int, int] | tuple[int, int, int]


class Recorder:
    """Call it with a kernel, a grid, buffers by binding name and Params by field name."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._commands: list[tuple[Kernel, dict[str, Buffer], tuple[int, int, int]]] = []
        self._params: list[bytes] = []
        self._keep: list[Buffer] = []
        self._scratch: dict[str, Buffer] = {}
        self._scopes: list[Scope | None] = []
        self._scope: Scope | None = None

    def __len__(self) -> int:
        return len(self._commands)

    def __call__(self, kernel: Kernel, grid: Grid, **operands: Any) -> None:
        """Append one dispatch.

        grid: workgroups; a single number above the device's limit is folded into (x, y), the kernel computes
        wg.y * num_workgroups.x + wg.x and guards the end. A grid of zero workgroups records nothing.
        Raises ShaderError when a name is missing or unknown, LimitExceeded, GpuError on a buffer of another device.
        """
        counts = self._counts(kernel, grid)
        if 0 in counts:
            return
        names = kernel.names
        buffers = {name: value for name, value in operands.items() if name in names}
        if len(buffers) != len(names):
            raise ShaderError(
                f"{kernel.label}: buffers given {sorted(buffers)}, the shader binds {sorted(names)}; "
                f"missing {sorted(names - buffers.keys())}"
            )
        if not kernel.belongs_to(self.device):
            raise GpuError(f"{kernel.label}: this kernel is another device's; make it with this device's kernel()")
        params = kernel.pack({name: value for name, value in operands.items() if name not in names})
        _check_buffers(self.device, kernel, buffers)
        self._commands.append((kernel, buffers, counts))
        self._params.append(params)
        self._scopes.append(self._scope)

    @contextlib.contextmanager
    def scope(self, scope: Scope) -> Iterator[None]:
        """Say what the dispatches recorded in the block are for (gpu/work.py). Costs nothing when they are replayed."""
        scope.parent, self._scope = self._scope, scope
        try:
            yield
        finally:
            self._scope = scope.parent

    def temp(self, nbytes: int) -> Buffer:
        """Scratch memory that lives as long as this recording (and its Plan)."""
        buffer = self.device.alloc(nbytes)
        self._keep.append(buffer)
        return buffer

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """As `temp`, but shared by all who ask for this name: what they leave in it lasts until the next one asks."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._scratch[name] = self.temp(nbytes)
        return buffer

    def keep(self, buffer: Buffer) -> None:
        """Hold a reference to a buffer for as long as this recording lives."""
        self._keep.append(buffer)

    def submit(self) -> None:
        """Run what was recorded, once, and start afresh."""
        self.plan().replay()

    def plan(self, *, per_submit: int = MAX_PER_SUBMIT) -> Plan:
        """Make the recording replayable, and start afresh.

        per_submit: most dispatches a submit. Drivers of laptops kill a submit that runs for seconds, so work whose
        dispatches are long goes out in several.
        """
        plan = Plan(self.device, self._commands, self._params, self._keep, scopes=self._scopes, per_submit=per_submit)
        self._commands, self._params, self._keep, self._scopes = [], [], [], []
        self._scratch = {}
        return plan

    def _counts(self, kernel: Kernel, grid: Grid) -> tuple[int, int, int]:
        limit = self.device.caps.max_workgroups
        sizes = (grid,) if isinstance(grid, int | np.integer) else grid
        whole = isinstance(sizes, tuple | list | np.ndarray) and all(
            isinstance(n, int | np.integer) and n >= 0 for n in sizes
        )
        if not whole or not 1 <= len(sizes) <= 3:
            raise ShaderError(
                f"{kernel.label}: grid is {grid!r}; expected a number of workgroups, 0 or more, or two or three of them"
            )
        if isinstance(grid, int | np.integer):
            n, row = int(grid), self.device.fold_at
            if n <= row:
                return (n, 1, 1)
            rows = -(-n // row)
            if rows > limit:
                raise LimitExceeded(f"{kernel.label}: {n:,} workgroups are more than {limit} x {limit}; split the call")
            return (-(-n // rows), rows, 1)
        x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
        counts = (x, y, z)
        if max(counts) > limit:
            raise LimitExceeded(
                f"{kernel.label}: grid {counts}, at most {limit} workgroups a dimension; split or fold it"
            )
        return counts


def _check_buffers(device: Device, kernel: Kernel, buffers: dict[str, Buffer]) -> None:
    """What either WebGPU implementation rejects, rejected here by name."""
    written: list[tuple[str, Buffer]] = []
    for binding in kernel.storage:
        buffer = buffers[binding.name]
        if not isinstance(buffer, Buffer):
            raise ShaderError(f"{kernel.label}: '{binding.name}' is a {type(buffer).__name__}, expected a Buffer")
        if buffer.device is not device:
            raise GpuError(f"{kernel.label}: '{binding.name}' belongs to another device; upload it to this one")
        if buffer.released:
            raise GpuError(f"{kernel.label}: '{binding.name}' was released; allocate a new buffer")
        if buffer.bound_bytes > device.caps.max_binding:
            device.require_binding(buffer.bound_bytes, f"{kernel.label}: '{binding.name}'")
        if binding.access == "read_write":
            written.append((binding.name, buffer))
    for name, buffer in written:
        for binding in kernel.storage:
            other = buffers[binding.name]
            if binding.name == name or other.raw is not buffer.raw:
                continue
            apart = (
                buffer.offset + buffer.bound_bytes <= other.offset or other.offset + other.bound_bytes <= buffer.offset
            )
            if binding.access == "read" or not apart:
                raise GpuError(
                    f"{kernel.label}: '{name}' is written and '{binding.name}' lies in the same driver buffer; "
                    "one buffer cannot be read and written in one dispatch, write to another one"
                )


class Plan:
    """A flat list of (pipeline, bind groups, workgroup counts), ready to replay."""

    def __init__(
        self,
        device: Device,
        commands: Sequence[tuple[Kernel, dict[str, Buffer], tuple[int, int, int]]],
        params: Sequence[bytes],
        keep: Sequence[Buffer],
        *,
        scopes: Sequence[Scope | None] | None = None,
        per_submit: int = MAX_PER_SUBMIT,
    ) -> None:
        self.device = device
        self.kernels = [kernel for kernel, _, _ in commands]
        self.counts = [counts for _, _, counts in commands]
        self._buffers = [buffers for _, buffers, _ in commands]  # references: a stale handle would abort the process
        self._keep = list(keep)
        self.scopes = list(scopes) if scopes is not None else [None] * len(commands)
        self.period = len(commands)  # after how many dispatches they begin again (`repeated`)
        self._arena = self._write_arena(params)
        with device.backend.errors("record"):
            flat = [
                (kernel.pipeline, self._bind(kernel, buffers, i), counts)
                for i, (kernel, buffers, counts) in enumerate(commands)
            ]
            self.groups = [groups for _, groups, _ in flat]
        self.split(per_submit)

    def __len__(self) -> int:
        return len(self.kernels)

    def bound(self, index: int) -> tuple[tuple[str, int], ...]:
        """Names and bytes of the buffers that a dispatch binds."""
        buffers = self._buffers[index % self.period]
        return tuple((binding.name, buffers[binding.name].nbytes) for binding in self.kernels[index].storage)

    def split(self, per_submit: int, *, first: int | None = None) -> None:
        """Send at most `per_submit` dispatches a submit from now on.

        first: dispatches of the first submit, each later one having twice as many as the one before, so that a device
        that would lie idle starts while the host still encodes.
        """
        self.per_submit = per_submit
        compile_ = self.device.backend.calls.compile
        flat = [
            (k.pipeline, groups, counts)
            for k, groups, counts in zip(self.kernels, self.groups, self.counts, strict=True)
        ]
        self._batches, start, size = [], 0, min(first or per_submit, per_submit)
        while start < len(flat):
            batch = flat[start : start + size]
            self._batches.append((compile_(batch), len(batch)))
            start, size = start + size, min(2 * size, per_submit)

    def repeated(self, times: int) -> Plan:
        """This plan's dispatches `times` times over, sharing its buffers and bind groups."""
        plan = copy.copy(self)
        plan.kernels, plan.counts, plan.groups = self.kernels * times, self.counts * times, self.groups * times
        plan.scopes = self.scopes * times
        plan.split(self.per_submit * times)
        return plan

    def replay(
        self, *, write: tuple[Buffer, bytes] | None = None, read: tuple[Buffer, int] | None = None
    ) -> Pending | None:
        """Encode and submit everything once more.

        write: (buffer, bytes) put at the buffer's start before the first dispatch: the state that changes every replay.
        read: (buffer, nbytes) copied out behind the last dispatch, in the same submit; returned as a Pending, so that
        the next replay can go out before this one's result is looked at.
        """
        device = self.device
        device.require_open()
        backend, calls, memory = device.backend, device.backend.calls, device.memory
        copies: Sequence[Any] = ()
        with backend.errors("replay"), backend.captured("replay"):
            if write is not None:
                write[0].require_range("replay: write", 0, len(write[1]))
                if len(write[1]) % 4:
                    raise GpuError(f"replay: write of {len(write[1])} bytes; whole words of 4 are written")
                calls.write(device.queue_pointer, calls.pointer(write[0].raw), write[0].offset, write[1])
            if read is not None:
                read[0].require_range("replay: read", 0, read[1])
                staging = memory.staging(read[1])
                copies = ((calls.pointer(read[0].raw), read[0].offset, calls.pointer(staging.raw), staging.padded),)
            batches = self._batches or ([([], 0)] if copies else [])
            last = len(batches) - 1
            index, done = None, 0
            for i, (compiled, count) in enumerate(batches):
                ending = copies if i == last else ()
                if device.profile is None:
                    index = calls.run(device.pointer, device.queue_pointer, compiled, ending)
                else:
                    state = None if write is None else write[1]
                    index = device.profile.run(self, done, compiled, ending, state=state)
                done += count
                device.counters.dispatches += count
                device.counters.submits += 1
        if read is None:
            return None
        with backend.errors("replay"):
            return memory.pending(staging, backend.submission(index))

    def _write_arena(self, params: Sequence[bytes]) -> Buffer | None:
        if not any(params):
            return None
        data = np.zeros((len(params), SLOT), np.uint8)
        for i, packed in enumerate(params):
            if len(packed) > SLOT:
                raise ShaderError(f"{self.kernels[i].label}: Params of {len(packed)} bytes; at most {SLOT}")
            data[i, : len(packed)] = np.frombuffer(packed, np.uint8)
        arena = self.device.memory.alloc(data.nbytes, uniform=True)
        arena.write(data)
        return arena

    def _bind(self, kernel: Kernel, buffers: dict[str, Buffer], slot: int) -> list[Any]:
        device = self.device
        groups = []
        for group, layout in zip(kernel.groups, kernel.layouts, strict=True):
            entries = []
            for binding in group:
                if binding.access == "uniform":
                    assert self._arena is not None
                    size = -(-4 * len(kernel.params) // 16) * 16
                    resource = {"buffer": self._arena.raw, "offset": slot * SLOT, "size": size}
                else:
                    buffer = buffers[binding.name]
                    resource = {"buffer": buffer.raw, "offset": buffer.offset, "size": buffer.bound_bytes}
                entries.append({"binding": binding.index, "resource": resource})
            groups.append(device.raw.create_bind_group(layout=layout, entries=entries))
        device.counters.bind_groups += len(groups)
        return groups
