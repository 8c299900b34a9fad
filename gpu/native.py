"""The C functions of webgpu.h that replaying a Plan needs, called without letting go of the GIL.

cffi drops the GIL at every call: beside one busy Python thread each drop can cost a whole switch interval (5 ms), and
a replay makes hundreds of calls. These go through ctypes.PYFUNCTYPE on the same function addresses, which keeps it;
none of them blocks. Waiting for the device goes through the binding itself, which lets other threads run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

Command = tuple[ctypes.c_void_p | None, ctypes.c_void_p, ctypes.c_void_p | None, int, int, int]


class Native:
    """`lib` and `ffi` of a binding, as functions on plain addresses. Pointers are ctypes.c_void_p throughout."""

    def __init__(self, lib: Any, ffi: Any, *, submit_for_index: bool) -> None:
        self._ffi = ffi

        def held(name: str, result: Any = None) -> Any:
            return ctypes.PYFUNCTYPE(result)(int(ffi.cast("uintptr_t", ffi.addressof(lib, name))))

        self._create_encoder = held("wgpuDeviceCreateCommandEncoder", ctypes.c_void_p)
        self._begin_pass = held("wgpuCommandEncoderBeginComputePass", ctypes.c_void_p)
        self._set_pipeline = held("wgpuComputePassEncoderSetPipeline")
        self._set_group = held("wgpuComputePassEncoderSetBindGroup")
        self._dispatch = held("wgpuComputePassEncoderDispatchWorkgroups")
        self._end_pass = held("wgpuComputePassEncoderEnd")
        self._copy = held("wgpuCommandEncoderCopyBufferToBuffer")
        self._finish = held("wgpuCommandEncoderFinish", ctypes.c_void_p)
        self._release_pass = held("wgpuComputePassEncoderRelease")
        self._release_encoder = held("wgpuCommandEncoderRelease")
        self._release_commands = held("wgpuCommandBufferRelease")
        self._write = held("wgpuQueueWriteBuffer")
        # wgpu-native can name a submission, so that a wait ends with it and not with everything submitted since
        self._submit = held(
            "wgpuQueueSubmitForIndex" if submit_for_index else "wgpuQueueSubmit",
            ctypes.c_uint64 if submit_for_index else None,
        )

    def pointer(self, wrapper: Any) -> ctypes.c_void_p:
        """The address behind a wrapper. The caller keeps the wrapper alive: a stale address aborts the process."""
        return ctypes.c_void_p(int(self._ffi.cast("uintptr_t", wrapper._internal)))

    def compile(self, commands: Sequence[tuple[Any, Sequence[Any], tuple[int, int, int]]]) -> list[Command]:
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
        """Encode one compute pass, then copies (source, offset, target, bytes); finish, submit. Returns the index."""
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
        for source, offset, target, nbytes in copies:
            self._copy(encoder, source, ctypes.c_uint64(offset), target, ctypes.c_uint64(0), ctypes.c_uint64(nbytes))
        finished = ctypes.c_void_p(self._finish(encoder, none))
        handles = (ctypes.c_void_p * 1)(finished)
        index = self._submit(queue, ctypes.c_size_t(1), handles)
        self._release_commands(finished)
        self._release_encoder(encoder)
        return index
