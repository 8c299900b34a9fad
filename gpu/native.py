"""How a Plan is encoded: the C functions of webgpu.h called without letting go of the GIL, or the public Python API.

cffi drops the GIL at every call: beside one busy Python thread each drop can cost a whole switch interval (5 ms), and
a replay makes hundreds of calls. DirectCalls go through ctypes.PYFUNCTYPE on the same function addresses, which keeps
it; none of them blocks. Waiting for the device goes through the binding itself, which lets other threads run.
PublicCalls does the same work through the binding's documented API; it is what a device falls back to when a probe
finds that the direct calls do not work (another version of the binding, another calling convention).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Counts = tuple[int, int, int]
Command = tuple[ctypes.c_void_p | None, ctypes.c_void_p, ctypes.c_void_p | None, int, int, int]
MAX_GROUPS = 2  # bind groups a kernel may have: its own, and the extra operands of fused code

# name -> result of the functions called directly
_FUNCTIONS = {
    "wgpuDeviceCreateCommandEncoder": ctypes.c_void_p,
    "wgpuCommandEncoderBeginComputePass": ctypes.c_void_p,
    "wgpuComputePassEncoderSetPipeline": None,
    "wgpuComputePassEncoderSetBindGroup": None,
    "wgpuComputePassEncoderDispatchWorkgroups": None,
    "wgpuComputePassEncoderEnd": None,
    "wgpuCommandEncoderCopyBufferToBuffer": None,
    "wgpuCommandEncoderResolveQuerySet": None,
    "wgpuCommandEncoderFinish": ctypes.c_void_p,
    "wgpuComputePassEncoderRelease": None,
    "wgpuCommandEncoderRelease": None,
    "wgpuCommandBufferRelease": None,
    "wgpuQueueWriteBuffer": None,
    "wgpuQueueSubmit": None,
    "wgpuQueueSubmitForIndex": ctypes.c_uint64,  # wgpu-native: a wait can end with this submission
}


@dataclass
class TimestampPasses:
    """Descriptions of compute passes that write timestamps, and the query set; `keep` is what they point into."""

    descriptions: Sequence[Any]
    queries: Any
    keep: Any = None


class DirectCalls:
    """`lib` and `ffi` of a binding, as functions on plain addresses. Pointers are ctypes.c_void_p throughout."""

    def __init__(self, lib: Any, ffi: Any, *, submit: str, failed: Callable[[], bool]) -> None:
        """submit: name of the submitting function. failed: whether an error has been reported since the replay began.

        Raises AttributeError when the library lacks a function.
        """
        self._ffi = ffi
        self._failed = failed

        def held(name: str) -> Any:
            return ctypes.PYFUNCTYPE(_FUNCTIONS[name])(int(ffi.cast("uintptr_t", ffi.addressof(lib, name))))

        self._create_encoder = held("wgpuDeviceCreateCommandEncoder")
        self._begin_pass = held("wgpuCommandEncoderBeginComputePass")
        self._set_pipeline = held("wgpuComputePassEncoderSetPipeline")
        self._set_group = held("wgpuComputePassEncoderSetBindGroup")
        self._dispatch = held("wgpuComputePassEncoderDispatchWorkgroups")
        self._end_pass = held("wgpuComputePassEncoderEnd")
        self._copy = held("wgpuCommandEncoderCopyBufferToBuffer")
        self._resolve = held("wgpuCommandEncoderResolveQuerySet")
        self._finish = held("wgpuCommandEncoderFinish")
        self._release_pass = held("wgpuComputePassEncoderRelease")
        self._release_encoder = held("wgpuCommandEncoderRelease")
        self._release_commands = held("wgpuCommandBufferRelease")
        self._write = held("wgpuQueueWriteBuffer")
        self._submit = held(submit)

    def pointer(self, wrapper: Any) -> ctypes.c_void_p:
        """The address behind a wrapper. The caller keeps the wrapper alive: a stale address aborts the process."""
        return ctypes.c_void_p(int(self._ffi.cast("uintptr_t", wrapper._internal)))

    def compile(self, commands: Sequence[tuple[Any, Sequence[Any], Counts]]) -> list[Command]:
        """(pipeline, bind groups, counts) of wrappers -> addresses, with repeated pipelines left out."""
        compiled: list[Command] = []
        last = None
        for pipeline, groups, (x, y, z) in commands:
            first = None if pipeline is last else self.pointer(pipeline)
            second = self.pointer(groups[1]) if len(groups) > 1 else None
            compiled.append((first, self.pointer(groups[0]), second, x, y, z))
            last = pipeline
        return compiled

    def write(self, queue: ctypes.c_void_p, buffer: ctypes.c_void_p, offset: int, data: bytes) -> None:
        """queue.write_buffer of a few bytes."""
        self._write(queue, buffer, ctypes.c_uint64(offset), data, ctypes.c_size_t(len(data)))

    def run(
        self,
        device: ctypes.c_void_p,
        queue: ctypes.c_void_p,
        commands: Sequence[Command],
        copies: Sequence[tuple[ctypes.c_void_p, int, ctypes.c_void_p, int]] = (),
    ) -> int | None:
        """Encode one compute pass, then copies (source, offset, target, bytes); finish, submit. Returns the index.

        Nothing is submitted once an error has been reported: wgpu-native ends the process when a submit is refused.
        """
        set_pipeline, set_group, dispatch = self._set_pipeline, self._set_group, self._dispatch
        none, zero = None, ctypes.c_size_t(0)
        encoder = ctypes.c_void_p(self._create_encoder(device, none))
        compute = ctypes.c_void_p(self._begin_pass(encoder, none))
        for pipeline, group0, group1, x, y, z in commands:
            if pipeline is not None:
                set_pipeline(compute, pipeline)
            set_group(compute, 0, group0, zero, none)
            if group1 is not None:
                set_group(compute, 1, group1, zero, none)
            dispatch(compute, x, y, z)
        self._end_pass(compute)
        self._release_pass(compute)
        index, _ = self._end(queue, encoder, copies)
        return index

    def timestamp_passes(self, queries: Any, count: int) -> TimestampPasses:
        """Descriptions of `count` compute passes; pass i writes queries 2 i and 2 i + 1 where it begins and ends."""
        ffi = self._ffi
        writes = [
            ffi.new(
                "WGPUPassTimestampWrites *",
                {"querySet": queries._internal, "beginningOfPassWriteIndex": 2 * i, "endOfPassWriteIndex": 2 * i + 1},
            )
            for i in range(count)
        ]
        descriptors = [ffi.new("WGPUComputePassDescriptor *", {"timestampWrites": w}) for w in writes]
        addresses = [ctypes.c_void_p(int(ffi.cast("uintptr_t", d))) for d in descriptors]
        return TimestampPasses(addresses, self.pointer(queries), (queries, writes, descriptors))

    def run_timed(
        self,
        device: ctypes.c_void_p,
        queue: ctypes.c_void_p,
        batches: Sequence[Sequence[Command]],
        passes: TimestampPasses,
        resolved: ctypes.c_void_p,
        copies: Sequence[tuple[ctypes.c_void_p, int, ctypes.c_void_p, int]] = (),
    ) -> tuple[int | None, float]:
        """As `run`, each of the batches in a pass of its own between timestamps, which are resolved into `resolved`.

        Each batch is compiled by itself. Returns the index, and perf_counter at the submit.
        """
        none, zero = None, ctypes.c_size_t(0)
        encoder = ctypes.c_void_p(self._create_encoder(device, none))
        for batch, description in zip(batches, passes.descriptions):
            compute = ctypes.c_void_p(self._begin_pass(encoder, description))
            for pipeline, group0, group1, x, y, z in batch:
                if pipeline is not None:
                    self._set_pipeline(compute, pipeline)
                self._set_group(compute, 0, group0, zero, none)
                if group1 is not None:
                    self._set_group(compute, 1, group1, zero, none)
                self._dispatch(compute, x, y, z)
            self._end_pass(compute)
            self._release_pass(compute)
        if batches:
            self._resolve(encoder, passes.queries, 0, 2 * len(batches), resolved, ctypes.c_uint64(0))
        return self._end(queue, encoder, copies)

    def _end(
        self,
        queue: ctypes.c_void_p,
        encoder: ctypes.c_void_p,
        copies: Sequence[tuple[ctypes.c_void_p, int, ctypes.c_void_p, int]],
    ) -> tuple[int | None, float]:
        """Copy, finish, submit. Returns the index, and perf_counter at the submit."""
        for source, offset, target, nbytes in copies:
            self._copy(encoder, source, ctypes.c_uint64(offset), target, ctypes.c_uint64(0), ctypes.c_uint64(nbytes))
        finished = ctypes.c_void_p(self._finish(encoder, None))
        index, submitted = None, time.perf_counter()
        if not self._failed():
            handles = (ctypes.c_void_p * 1)(finished)
            index = self._submit(queue, ctypes.c_size_t(1), handles)
        self._release_commands(finished)
        self._release_encoder(encoder)
        return index, submitted


class PublicCalls:
    """The interface of DirectCalls on the binding's documented API; "addresses" are its own objects here."""

    def pointer(self, wrapper: Any) -> Any:
        """As DirectCalls.pointer."""
        return wrapper

    def compile(self, commands: Sequence[tuple[Any, Sequence[Any], Counts]]) -> list[Any]:
        """As DirectCalls.compile."""
        return [(pipeline, list(groups), counts) for pipeline, groups, counts in commands]

    def write(self, queue: Any, buffer: Any, offset: int, data: bytes) -> None:
        """As DirectCalls.write."""
        queue.write_buffer(buffer, offset, data)

    def run(self, device: Any, queue: Any, commands: Sequence[Any], copies: Sequence[Any] = ()) -> None:
        """As DirectCalls.run; no index: a wait then lasts until everything submitted is done."""
        encoder = device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        for pipeline, groups, counts in commands:
            compute.set_pipeline(pipeline)
            for index, group in enumerate(groups):
                compute.set_bind_group(index, group)
            compute.dispatch_workgroups(*counts)
        compute.end()
        self._end(queue, encoder, copies)

    def timestamp_passes(self, queries: Any, count: int) -> TimestampPasses:
        """As DirectCalls.timestamp_passes."""
        names = ("beginning_of_pass_write_index", "end_of_pass_write_index")
        return TimestampPasses(
            [{"query_set": queries} | {name: 2 * i + j for j, name in enumerate(names)} for i in range(count)], queries
        )

    def run_timed(
        self,
        device: Any,
        queue: Any,
        batches: Sequence[Sequence[Any]],
        passes: TimestampPasses,
        resolved: Any,
        copies: Sequence[Any] = (),
    ) -> tuple[None, float]:
        """As DirectCalls.run_timed."""
        encoder = device.create_command_encoder()
        for batch, description in zip(batches, passes.descriptions):
            compute = encoder.begin_compute_pass(timestamp_writes=description)
            for pipeline, groups, counts in batch:
                compute.set_pipeline(pipeline)
                for index, group in enumerate(groups):
                    compute.set_bind_group(index, group)
                compute.dispatch_workgroups(*counts)
            compute.end()
        if batches:
            encoder.resolve_query_set(passes.queries, 0, 2 * len(batches), resolved, 0)
        return None, self._end(queue, encoder, copies)

    def _end(self, queue: Any, encoder: Any, copies: Sequence[Any]) -> float:
        for source, offset, target, nbytes in copies:
            encoder.copy_buffer_to_buffer(source, offset, target, 0, nbytes)
        finished, submitted = encoder.finish(), time.perf_counter()
        queue.submit([finished])
        return submitted
