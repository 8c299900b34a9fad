"""Which WebGPU: wgpu-native through `wgpu` (the default) or Dawn through `wgpudawn`. Private API is used here only
(native.py takes the addresses behind its objects).

Both packages have the same Python API. What differs, and lives in this file: trusted shader modules (no injected
bounds checks), waiting, reading back without a polling thread, errors reported outside any call, and feature names.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu.errors import DeviceLost, GpuError, OutOfMemory
from gpu.native import DirectCalls, PublicCalls

NAMES = ("wgpu", "dawn")


def default_name() -> str:
    """The backend asked for by ANYGPU_BACKEND, or "wgpu"."""
    name = os.environ.get("ANYGPU_BACKEND", "").strip().lower() or "wgpu"
    if name not in NAMES:
        raise GpuError(f"ANYGPU_BACKEND={name}: expected one of {', '.join(NAMES)}; unset it for wgpu")
    return name


def open_backend(name: str | None = None) -> Backend:
    """The binding by name. Raises GpuError naming the package to install when it is missing."""
    name = name or default_name()
    if name not in NAMES:
        raise GpuError(f"backend '{name}' is unknown: expected one of {', '.join(NAMES)}")
    try:
        return WgpuBackend() if name == "wgpu" else DawnBackend()
    except ImportError as error:
        package = "anygpu[dawn]" if name == "dawn" else "wgpu"
        raise GpuError(
            f"backend '{name}' needs a package that is not installed ({error}): pip install '{package}'"
        ) from error


class Backend:
    """What the engine needs beyond the common Python API. One per Device."""

    name: str
    module: Any
    version: str
    needs_enable_subgroups: bool  # does WGSL need `enable subgroups;`
    subgroup_features: tuple[str, ...]
    matrix_features: tuple[str, ...]  # without them no matrix units; offered does not mean granted
    naga: bool  # which compiler reads the WGSL: naga, else Tint
    calls: DirectCalls | PublicCalls  # how Plans are encoded

    def adapters(self) -> list[Any]:
        """The binding's adapters in the driver's order."""
        return list(self.module.gpu.enumerate_adapters_sync())

    def request_device(self, adapter: Any, *, features: Sequence[str], limits: dict[str, int], trusted: bool) -> Any:
        """A device of the binding. trusted: without the bounds checks that drivers put into shaders."""
        raise NotImplementedError

    def matrix_configs(self, adapter: Any) -> list[dict[str, Any]]:
        """Matrix units as the implementation lists them: component_type, result_component_type, m, n, k, ..."""
        return []

    def offers_matrix(self, adapter: Any, inner: str, outer: str, m: int, n: int, k: int) -> bool:
        """Whether matrix units of these element types and sizes are listed, where the implementation lists them."""
        keys = ("component_type", "result_component_type", "m", "n", "k")
        return (inner, outer, m, n, k) in [tuple(c[key] for key in keys) for c in self.matrix_configs(adapter)]

    def shader_module(self, device: Any, code: str, label: str, *, trusted: bool) -> Any:
        """A shader module of the binding; raises the binding's error when the code does not compile."""
        raise NotImplementedError

    def wait(self, device: Any, submission: Any = None) -> None:
        """Block until all submitted work (or what `submission` names) is done."""
        raise NotImplementedError

    def submit(self, device: Any, command_buffer: Any) -> Any:
        """Submit and return a token for `wait`."""
        raise NotImplementedError

    def start_map(self, device: Any, buffer: Any, nbytes: int) -> Any:
        """Begin mapping a MAP_READ buffer; the result goes to `finish_map`."""
        raise NotImplementedError

    def finish_map(self, device: Any, buffer: Any, token: Any, submission: Any, nbytes: int) -> bytes:
        """Wait for the mapping, copy the bytes out, unmap."""
        raise NotImplementedError

    def check(self, device: Any) -> None:
        """Raise what the driver reported about this device outside any call: DeviceLost, OutOfMemory or GpuError."""
        raise NotImplementedError

    @contextlib.contextmanager
    def captured(self, name: str) -> Iterator[None]:
        """Raise what the device's error callback reports during raw C calls of this thread."""
        raise NotImplementedError
        yield

    def timestamp_period(self, device: Any) -> float:
        """Nanoseconds a timestamp tick."""
        return 1.0

    def submission(self, index: int | None) -> Any:
        """The token for `wait` of a submit made through `calls.run`."""
        return None

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turn the binding's errors into ours."""
        try:
            yield
        except GpuError:
            raise
        except Exception as error:
            # A binding's error is in a reference cycle with frames that hold a view of the bytes being written; CPython
            # can crash when its collector takes that cycle apart. Emptying the finished frames breaks it here.
            traceback.clear_frames(error.__traceback__)
            raise self.translate(error, doing) from error

    def translate(self, error: Exception, doing: str) -> Exception:
        """The binding's error as one of ours, or as it is when it is none of the driver's."""
        text = str(error)
        kind = type(error).__name__
        if "OutOfMemory" in kind or "out of memory" in text.lower() or "not enough memory" in text.lower():
            return OutOfMemory(
                f"{doing}: the device is out of memory ({_first_line(text)}). "
                "Free buffers, or use a smaller model or context."
            )
        if _LOST.search(text):
            return _lost(doing, next(line.strip() for line in text.splitlines() if _LOST.search(line)))
        if isinstance(error, self.module.GPUError):
            return GpuError(f"{doing}: {text.strip()}")
        return error

    def _choose_calls(self, make: Callable[[], DirectCalls]) -> DirectCalls | PublicCalls:
        """The direct calls, or the public ones when the library lacks a function (the probe then says so)."""
        try:
            return make()
        except (AttributeError, TypeError):
            return PublicCalls()


def _lost(doing: str, reason: str) -> DeviceLost:
    return DeviceLost(f"{doing}: the device was lost ({reason}). Open a new Device and load again.")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


_LOST = re.compile(r"device\]? (?:is |was )?lost\b", re.IGNORECASE)


class _LostFilter(logging.Filter):
    """Keeps the bindings' own lines about a lost device off the terminal: the engine raises DeviceLost instead."""

    def filter(self, record: logging.LogRecord) -> bool:
        return _LOST.search(record.getMessage()) is None


def _quiet(logger: logging.Logger) -> None:
    if not any(isinstance(f, _LostFilter) for f in logger.filters):
        logger.addFilter(_LostFilter())


class WgpuBackend(Backend):
    name = "wgpu"
    needs_enable_subgroups = False
    subgroup_features = ("subgroup", "subgroup-barrier")
    matrix_features = ("cooperative-matrix",)
    naga = True
    _requesting = threading.Lock()  # one request at a time sees its callbacks replaced

    def __init__(self) -> None:
        self.module = importlib.import_module("wgpu")
        private = importlib.import_module("wgpu.backends.wgpu_native._api")
        native = importlib.import_module("wgpu.backends.wgpu_native._ffi")
        self._lib, self._ffi = native.lib, native.ffi
        self._handler = private.error_handler
        self._private = private
        self.version = f"wgpu {self.module.__version__} (wgpu-native {'.'.join(map(str, native.lib_version_info))})"
        _quiet(logging.getLogger("wgpu"))
        self.calls = self._choose_calls(
            lambda: DirectCalls(self._lib, self._ffi, submit="wgpuQueueSubmitForIndex", failed=self._failed)
        )
        callback = self._ffi.callback
        self._on_mapped = callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", self._mapped)
        self._on_lost = callback(
            "void(WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView, void *, void *)", self._device_lost
        )
        self._on_error = callback(
            "void(WGPUDevice const *, WGPUErrorType, WGPUStringView, void *, void *)", self._device_error
        )
        self._map_status: dict[int, int] = {}
        self._map_count = 0
        self._lost: str | None = None
        self._reported: list[tuple[str, str]] = []

    def request_device(self, adapter: Any, *, features: Sequence[str], limits: dict[str, int], trusted: bool) -> Any:
        calls = self._private.libf
        request = calls.wgpuAdapterRequestDevice

        def request_with_our_callbacks(adapter_pointer: Any, descriptor: Any, *rest: Any) -> Any:
            descriptor.deviceLostCallbackInfo.callback = self._on_lost
            descriptor.uncapturedErrorCallbackInfo.callback = self._on_error
            return request(adapter_pointer, descriptor, *rest)

        with self._requesting:  # the binding's own callbacks only log, and cannot be replaced later
            calls.wgpuAdapterRequestDevice = request_with_our_callbacks
            try:
                device = adapter.request_device_sync(required_features=list(features), required_limits=limits)
            finally:
                calls.wgpuAdapterRequestDevice = request
        # the driver may call them until its device is released, so they live as long as its wrapper
        device._uncaptured_error_callback, device._device_lost_callback = self._on_error, self._on_lost
        return device

    def offers_matrix(self, adapter: Any, inner: str, outer: str, m: int, n: int, k: int) -> bool:
        return inner == "f16" and m == n == k  # naga has square ones only, and nothing tells which of them work

    def _device_lost(self, _device: Any, _reason: int, message: Any, _user1: Any, _user2: Any) -> None:
        self._lost = self._text(message)

    def _device_error(self, _device: Any, kind: int, message: Any, _user1: Any, _user2: Any) -> None:
        name = self._private.enum_int2str["ErrorType"].get(kind, "Unknown")
        text = "\n".join(line.rstrip() for line in self._text(message).splitlines())
        if self._handler._get_proxy_stack():  # a call of this thread is under way: it raises
            self._handler.handle_error(name, text)
        else:
            self._reported.append((name, text))

    def _text(self, view: Any) -> str:
        return self._private.from_c_string_view(view)

    def _failed(self) -> bool:
        stack = self._handler._get_proxy_stack()
        return bool(stack) and stack[-1].message is not None

    def check(self, device: Any) -> None:
        if self._lost is not None:
            raise _lost("before this call", self._lost or "no reason given")
        if self._reported:
            reported, self._reported = self._reported, []
            raise self.translate(self._error(*reported[0]), "an earlier call failed later on")

    def _error(self, kind: str, message: str) -> Exception:
        kinds = {"OutOfMemory": self.module.GPUOutOfMemoryError, "Validation": self.module.GPUValidationError}
        return kinds.get(kind, self.module.GPUError)(message)

    def shader_module(self, device: Any, code: str, label: str, *, trusted: bool) -> Any:
        if not trusted:
            return device.create_shader_module(code=code, label=label)
        private, ffi = self._private, self._ffi
        source = private.new_struct_p("WGPUShaderSourceWGSL *", code=private.to_c_string_view(code))
        source[0].chain.next = ffi.NULL
        source[0].chain.sType = self._lib.WGPUSType_ShaderSourceWGSL
        descriptor = private.new_struct_p(
            "WGPUShaderModuleDescriptor *",
            nextInChain=ffi.cast("WGPUChainedStruct *", source),
            label=private.to_c_string_view(label),
        )
        with self.captured("create shader module"):
            handle = self._lib.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
        return private.GPUShaderModule(label, handle, device)

    @contextlib.contextmanager
    def captured(self, name: str) -> Iterator[None]:
        """Raise what the device's error callback reports during raw C calls of this thread."""
        self._handler.capture(name)
        try:
            yield
        finally:
            problem = self._handler.release(name)
        if problem:
            raise self._error(*problem)

    def wait(self, device: Any, submission: Any = None) -> None:
        index = self._ffi.NULL if submission is None else submission
        self._lib.wgpuDevicePoll(device._internal, True, index)

    def _notice_loss(self, device: Any) -> None:
        """Raise if the device is lost. A poll does not report that; making an encoder does, and costs a microsecond."""
        with self.captured("notice loss"):
            encoder = self._lib.wgpuDeviceCreateCommandEncoder(device._internal, self._ffi.NULL)
            self._lib.wgpuCommandEncoderRelease(encoder)
        self.check(device)

    def submit(self, device: Any, command_buffer: Any) -> Any:
        handles = self._ffi.new("WGPUCommandBuffer[1]", [command_buffer._internal])
        with self.captured("submit"):
            index = self._lib.wgpuQueueSubmitForIndex(device.queue._internal, 1, handles)
        return self._ffi.new("WGPUSubmissionIndex *", index)

    def _mapped(self, status: int, message: Any, key: Any, _unused: Any) -> None:
        self._map_status[int(self._ffi.cast("uintptr_t", key))] = int(status)

    def start_map(self, device: Any, buffer: Any, nbytes: int) -> Any:
        self._map_count += 1
        key = self._map_count
        info = self._private.new_struct(
            "WGPUBufferMapCallbackInfo",
            mode=self._lib.WGPUCallbackMode_AllowSpontaneous,
            callback=self._on_mapped,
            userdata1=self._ffi.cast("void *", key),
        )
        with self.captured("map"):
            self._lib.wgpuBufferMapAsync(buffer._internal, self._lib.WGPUMapMode_Read, 0, nbytes, info)
        return key

    def finish_map(self, device: Any, buffer: Any, token: Any, submission: Any, nbytes: int) -> bytes:
        if token not in self._map_status:
            self.wait(device, submission)
        if token not in self._map_status:  # the callback of a finished submission may need one more round
            self.wait(device)
        status = self._map_status.pop(token, None)
        self._notice_loss(device)  # asking for the bytes of a lost device would end the process
        if status is None:
            raise GpuError("read back: no answer came; a Device is used by one thread at a time, are there several?")
        if status != self._lib.WGPUMapAsyncStatus_Success:
            raise _lost("read back", f"mapping ended with status {status}")
        pointer = self._lib.wgpuBufferGetConstMappedRange(buffer._internal, 0, nbytes)
        data = bytes(self._ffi.buffer(pointer, nbytes))
        self._lib.wgpuBufferUnmap(buffer._internal)
        return data

    def timestamp_period(self, device: Any) -> float:
        return float(self._lib.wgpuQueueGetTimestampPeriod(device.queue._internal))

    def submission(self, index: int | None) -> Any:
        return None if index is None else self._ffi.new("WGPUSubmissionIndex *", index)


class DawnBackend(Backend):
    name = "dawn"
    needs_enable_subgroups = True
    subgroup_features = ("subgroups",)
    matrix_features = ("chromium-experimental-subgroup-matrix",)
    naga = False

    def __init__(self) -> None:
        self.module = importlib.import_module("wgpudawn")
        native = importlib.import_module("wgpudawn.backends.dawn._ffi")
        self._extras = importlib.import_module("wgpudawn.backends.dawn.extras")
        self._lib, self._ffi = native.lib, native.ffi
        self._handler = importlib.import_module("wgpudawn.backends.dawn._api").error_handler
        self.calls = self._choose_calls(
            lambda: DirectCalls(self._lib, self._ffi, submit="wgpuQueueSubmit", failed=self._failed)
        )
        self.version = f"wgpudawn {self.module.__version__} (Dawn {'.'.join(map(str, native.lib_version_info))})"
        _quiet(logging.getLogger("wgpudawn"))
        with contextlib.suppress(RuntimeError):  # set once a process, before the first adapter
            self._extras.set_instance_extras(
                enable_toggles=["allow_unsafe_apis", "vulkan_enable_f16_on_nvidia"],
            )

    def adapters(self) -> list[Any]:
        with _without_lines(_DAWN_NOISE):
            return super().adapters()

    def request_device(self, adapter: Any, *, features: Sequence[str], limits: dict[str, int], trusted: bool) -> Any:
        return self._extras.request_device_sync(
            adapter,
            required_features=list(features),
            required_limits=limits,
            enable_toggles=["disable_robustness"] if trusted else [],
            disable_toggles=["timestamp_quantization"],  # to steps of 65 us, which hides every kernel
        )

    def matrix_configs(self, adapter: Any) -> list[dict[str, Any]]:
        return list(self._extras.get_adapter_properties(adapter).get("subgroup_matrix_configs", []))

    def shader_module(self, device: Any, code: str, label: str, *, trusted: bool) -> Any:
        return device.create_shader_module(code=code, label=label)

    def wait(self, device: Any, submission: Any = None) -> None:
        device.queue.on_submitted_work_done_sync()

    def submit(self, device: Any, command_buffer: Any) -> Any:
        device.queue.submit([command_buffer])
        return None

    def start_map(self, device: Any, buffer: Any, nbytes: int) -> Any:
        return buffer.map_async("READ", 0, nbytes)

    def finish_map(self, device: Any, buffer: Any, token: Any, submission: Any, nbytes: int) -> bytes:
        try:
            token.sync_wait()
        except RuntimeError as error:
            self.check(device)
            raise _lost("read back", str(error)) from error
        data = bytes(buffer.read_mapped(0, nbytes))
        buffer.unmap()
        return data

    def _failed(self) -> bool:
        return bool(self._handler.pending)

    def check(self, device: Any) -> None:
        if device._lost_promise._state != "pending":
            reason = device._lost_promise._value
            raise _lost("before this call", getattr(reason, "message", None) or "no reason given")
        with self.errors("an earlier call failed later on"), self.captured("check"):
            pass

    @contextlib.contextmanager
    def captured(self, name: str) -> Iterator[None]:
        yield
        if self._handler.pending:
            self._handler.raise_pending()


_DAWN_NOISE = re.compile(rb"Warning: max\w+ artificially reduced from \d+ to \d+ to fit dynamic offset")


@contextlib.contextmanager
def _without_lines(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Keep lines that begin with `pattern` out of what C code writes to stderr meanwhile; pass on everything else.

    Dawn prints them past every callback and toggle: two lines, on drivers with large limits, when it lists adapters.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            saved = os.dup(2)
            cleanup.callback(os.close, saved)
            caught = cleanup.enter_context(tempfile.TemporaryFile())
            os.dup2(caught.fileno(), 2)
        except OSError:  # no stderr, or nowhere to keep it: nothing to filter
            yield
            return
        try:
            yield
        finally:
            os.dup2(saved, 2)
            caught.seek(0)
            for line in caught:
                if not pattern.match(line):
                    os.write(2, line)
