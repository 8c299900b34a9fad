"""A device: which adapter, what it really can do, and the memory, kernels and recorders that belong to it."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpu.backend import Backend, open_backend
from gpu.backend_choice import choose_backend
from gpu.errors import DeviceLost, GpuError, LimitExceeded, NoAdapter
from gpu.kernel import Kernel, KernelCache
from gpu.memory import Buffer, Counters, Memory, Pending, host_bytes
from gpu.native import DirectCalls, PublicCalls
from gpu.probe import probe_calls, probe_features
from gpu.recorder import Recorder
from gpu.tune import Tuner
from gpu.work import watched

if TYPE_CHECKING:
    from gpu.ceilings import Ceilings
    from gpu.tracing import Profile

# The limits every WebGPU implementation gives (the specification's defaults); ANYGPU_LIMITS=default asks for no more.
DEFAULT_LIMITS = {
    "max-bind-groups": 4,
    "max-storage-buffers-per-shader-stage": 8,
    "max-storage-buffer-binding-size": 134_217_728,
    "max-buffer-size": 268_435_456,
    "max-compute-workgroup-storage-size": 16_384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroups-per-dimension": 65_535,
}
UNUSED_APIS = ("OpenGL", "OpenGLES", "Null")  # adapters of these are taken only by number, or if there are no others
_PREFERENCE = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}  # by adapter type, the first is taken


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter as the driver describes it. kind: "gpu" or "cpu" (a software driver)."""

    index: int
    name: str
    vendor: str
    driver: str
    type: str
    api: str
    kind: str


@dataclass(frozen=True)
class Capabilities:
    """What a device can do; features are here only if a probe kernel gave the right result. Sizes in bytes."""

    name: str
    kind: str
    backend: str
    backend_version: str
    driver: str
    api: str
    f16: bool
    subgroups: bool
    subgroup_size: int  # as probed with a workgroup of 64; 0 without subgroups
    timestamps: bool
    matrix_f16: bool  # matrix units: f16 x f16 -> f32 at 16x16x16
    matrix_i8: bool  # matrix units: i8 x i8 -> i32, 16x16 from 32 of each
    checked: bool
    max_binding: int
    max_buffer: int
    max_storage_buffers: int
    max_workgroup_bytes: int
    max_invocations: int
    max_workgroups: int
    offset_alignment: int

    @property
    def wide_subgroups(self) -> bool:
        """Subgroups of eight invocations or more: what kernels that share a row among eight need."""
        return self.subgroups and self.subgroup_size >= 8


def list_adapters(backend: str | None = None) -> list[AdapterInfo]:
    """Every adapter of a backend, in the driver's order. Empty when there is none."""
    return [_describe(i, adapter) for i, adapter in enumerate(open_backend(backend).adapters())]


def _describe(index: int, adapter: Any) -> AdapterInfo:
    info = adapter.info
    type_ = info.get("adapter_type") or "Unknown"
    return AdapterInfo(
        index=index,
        name=info.get("device") or info.get("description") or "unnamed adapter",
        vendor=info.get("vendor") or "",
        driver=info.get("description") or "",
        type=type_,
        api=info.get("backend_type") or "",
        kind="cpu" if type_ == "CPU" else "gpu",
    )


def choose(adapters: list[AdapterInfo], wanted: str | None) -> tuple[AdapterInfo, str]:
    """The adapter to use and why. `wanted` is an index or a part of a name (any case); None takes the fastest kind."""
    usable = [a for a in adapters if a.api not in UNUSED_APIS] or adapters
    if not usable:
        raise NoAdapter(
            "no WebGPU adapter found: this system has no Vulkan, Metal or D3D12 driver. "
            "On Debian or Ubuntu: apt-get install mesa-vulkan-drivers (a software driver is part of it)."
        )
    if wanted is None or wanted == "":
        best = min(usable, key=lambda a: (_PREFERENCE.get(a.type, _PREFERENCE["Unknown"]), a.index))
        return best, "the fastest kind of adapter here" if len(usable) > 1 else "the only adapter here"
    if wanted.isdigit():
        for adapter in adapters:
            if adapter.index == int(wanted):
                return adapter, f"asked for by number ({wanted})"
    else:
        for adapter in usable:
            if wanted.lower() in f"{adapter.name} {adapter.driver}".lower():
                return adapter, f"asked for by name ('{wanted}')"
    listing = "; ".join(f"{a.index}: {a.name} ({a.type}, {a.api})" for a in adapters)
    raise NoAdapter(
        f"no adapter matches '{wanted}'. Here are: {listing}. Choose one by number or by a part of its name."
    )


def _same_adapter(backend: str, adapter: AdapterInfo) -> tuple[Backend, list[Any], AdapterInfo] | None:
    """This implementation, its adapters, and among them the one of that name; None if it cannot be used."""
    try:
        engine = open_backend(backend)
        raw_adapters = engine.adapters()
    except GpuError as error:
        logging.getLogger("anygpu").warning("anygpu: %s is faster here, but does not open: %s", backend, error)
        return None
    described = (_describe(i, a) for i, a in enumerate(raw_adapters))
    same = [a for a in described if (a.name, a.api) == (adapter.name, adapter.api)]
    return (engine, raw_adapters, same[0]) if same else None


_refused: set[tuple[str, str, tuple[str, ...]]] = set()  # (backend, adapter, features) of requests that failed


def _request(
    engine: Backend,
    raw_adapter: Any,
    adapter: AdapterInfo,
    features: Sequence[str],
    *,
    uncertain: Sequence[str],
    limits: dict[str, int],
    trusted: bool,
) -> tuple[Any, list[str]]:
    """A device with the `uncertain` features too, or without them if that fails; and the features that it has.

    wgpu-native lists features that it refuses to enable. That is tried once a process, and never ends in an error.
    """
    key = (engine.name, adapter.name, tuple(uncertain))
    if uncertain and key not in _refused:
        wanted = [*features, *uncertain]
        try:
            return engine.request_device(raw_adapter, features=wanted, limits=limits, trusted=trusted), wanted
        except Exception as error:
            logging.getLogger("anygpu").info("%s: no device with %s (%s)", adapter.name, ", ".join(uncertain), error)
            _refused.add(key)
            raw_adapter = engine.adapters()[adapter.index]  # a request may use an adapter up
    wanted = list(features)
    return engine.request_device(raw_adapter, features=wanted, limits=limits, trusted=trusted), wanted


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value not in ("", "0", "1"):
        raise GpuError(f"{variable}={value}: expected 1 (on) or 0 (off)")
    return value == "1"


class Device:
    """One open device. Everything made from it (buffers, kernels, plans) lives as long as it.

    Use `Device.open`. A device is not thread-safe: one thread records and submits.
    """

    _all: ClassVar[weakref.WeakSet[Device]] = weakref.WeakSet()

    def __init__(
        self, backend: Backend, raw: Any, adapter: AdapterInfo, caps: Capabilities, *, why: str, canary: bool
    ) -> None:
        self.backend, self.raw, self.adapter, self.caps, self.why = backend, raw, adapter, caps, why
        self.use_calls(backend.calls)
        self.closed = False
        self.fold_at = caps.max_workgroups  # grids of one number above it are folded into rows; checks lower it
        self.counters = Counters()
        self.profile: Profile | None = None  # who watches: gpu.profile
        self.ceilings: Ceilings | None = None  # once measured: gpu.ceilings.measure
        self._all.add(self)
        self.memory = Memory(self, canary=canary)
        self.kernels = KernelCache(self)
        self.tuner = Tuner(self)
        self.backend_why = "asked for"

    @classmethod
    def open(
        cls,
        name: str | None = None,
        *,
        backend: str | None = None,
        checked: bool | None = None,
        limits: str | None = None,
        features: str | None = None,
        workload: str | None = None,
        canary: bool = False,
    ) -> Device:
        """Open a device and probe it.

        Args:
            name: adapter number or part of its name; default ANYGPU_DEVICE, else the fastest kind of adapter.
            backend: "wgpu" or "dawn"; default ANYGPU_BACKEND, else what was measured to be faster for `workload`, else
                wgpu.
            checked: keep the driver's bounds checks in shaders; default ANYGPU_CHECKED=1, else off.
            limits: "default" asks for WebGPU's defaults only, "max" for all the adapter has; default ANYGPU_LIMITS.
            features: "none" asks for no optional feature, "all" for what the engine uses; default ANYGPU_FEATURES.
            workload: "chat", "prompt", "decode" or "gemm_f16": what the device is for (gpu.backend_choice).
            canary: put sentinel bytes behind every buffer, inside the bound range, for `memory.check_canaries`.
        Raises: NoAdapter, GpuError. Warns once for each feature that the device offers but does not have.
        """
        name = str(name) if name is not None else os.environ.get("ANYGPU_DEVICE")
        checked = checked if checked is not None else _switch("ANYGPU_CHECKED")
        limits = limits or os.environ.get("ANYGPU_LIMITS") or "max"
        features = features or os.environ.get("ANYGPU_FEATURES") or "all"
        for what, value, allowed in (("limits", limits, ("default", "max")), ("features", features, ("none", "all"))):
            if value not in allowed:
                raise GpuError(
                    f"Device.open: {what}='{value}' (or ANYGPU_{what.upper()}); expected one of {', '.join(allowed)}"
                )
        engine = open_backend(backend)
        raw_adapters = engine.adapters()
        adapters = [_describe(i, a) for i, a in enumerate(raw_adapters)]
        adapter, why = choose(adapters, name)
        backend_why = "asked for"
        if backend is None:
            found, backend_why = choose_backend(workload, adapter.name)
            if found != engine.name:
                if (other := _same_adapter(found, adapter)) is not None:
                    engine, raw_adapters, adapter = other
                else:
                    backend_why = f"{found} is faster here, but cannot open this adapter now"
        raw_adapter = raw_adapters[adapter.index]
        wanted = [] if features == "none" else ["shader-f16", *engine.subgroup_features, "timestamp-query"]
        granted = [f for f in wanted if f in raw_adapter.features]
        limit_values = {
            key: (default if limits == "default" else max(default, raw_adapter.limits.get(key, default)))
            for key, default in DEFAULT_LIMITS.items()
        }
        matrices = [] if features == "none" else [f for f in engine.matrix_features if f in raw_adapter.features]
        with engine.errors(f"open {adapter.name}"):
            raw, granted = _request(
                engine, raw_adapter, adapter, granted, uncertain=matrices, limits=limit_values, trusted=not checked
            )
        has_matrices = engine.matrix_features[0] in granted
        caps = Capabilities(
            name=adapter.name,
            kind=adapter.kind,
            backend=engine.name,
            backend_version=engine.version,
            driver=adapter.driver,
            api=adapter.api,
            f16="shader-f16" in granted,
            subgroups=engine.subgroup_features[0] in granted,
            subgroup_size=0,
            timestamps="timestamp-query" in granted,
            matrix_f16=has_matrices and engine.offers_matrix(raw_adapter, "f16", "f32", 16, 16, 16),
            matrix_i8=has_matrices and engine.offers_matrix(raw_adapter, "i8", "i32", 16, 16, 32),
            checked=checked,
            max_binding=limit_values["max-storage-buffer-binding-size"] // 4 * 4,
            max_buffer=limit_values["max-buffer-size"] // 4 * 4,
            max_storage_buffers=limit_values["max-storage-buffers-per-shader-stage"],
            max_workgroup_bytes=limit_values["max-compute-workgroup-storage-size"],
            max_invocations=limit_values["max-compute-invocations-per-workgroup"],
            max_workgroups=limit_values["max-compute-workgroups-per-dimension"],
            offset_alignment=256,
        )
        device = cls(engine, raw, adapter, caps, why=why, canary=canary)
        device.backend_why = backend_why
        try:
            probe_calls(device)
            device.caps = probe_features(device)
        except BaseException:
            device.close()
            raise
        if adapter.kind == "cpu" and not name:
            # a warning of the log: on stderr unless the program set up logging in another way
            logging.getLogger("anygpu").warning("anygpu: no GPU found, running on the CPU through %s", adapter.name)
        return device

    @classmethod
    def all_open(cls) -> list[Device]:
        """The devices of this process that are open."""
        return [device for device in cls._all if not device.closed]

    # Memory ------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Buffer:
        """A buffer of nbytes, contents undefined. Raises LimitExceeded, OutOfMemory."""
        return self.memory.alloc(nbytes)

    def upload(self, array: np.ndarray | bytes) -> Buffer:
        """A buffer holding a copy of the array's bytes in C order."""
        data = host_bytes("upload", array)
        buffer = self.memory.alloc(data.nbytes)
        self.memory.write(buffer, data, 0)
        return buffer

    def read(self, buffer: Buffer, dtype: Any, shape: int | tuple[int, ...]) -> np.ndarray:
        """Wait for all submitted work and copy the buffer out as an array of this NumPy dtype and shape."""
        shape = (shape,) if isinstance(shape, int | np.integer) else shape
        sizes = shape if isinstance(shape, tuple | list) else (None,)
        if not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
            raise GpuError(f"read: shape is {shape!r}; expected whole numbers, 0 or more")
        count = math.prod(int(n) for n in shape)
        dtype = np.dtype(dtype)
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(self.memory.read(buffer, count * dtype.itemsize), dtype).reshape(shape).copy()

    def read_later(self, buffer: Buffer, nbytes: int, offset: int = 0) -> Pending:
        """Start a read-back that overlaps later submits; `.result()` waits and gives bytes."""
        return self.memory.start_read(buffer, nbytes, offset)

    # Kernels and recording ---------------------------------------------------------------------------------------

    def kernel(
        self,
        path: str,
        entry: str,
        *,
        types: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
        parts: Mapping[str, str] | None = None,
        slots: Mapping[str, str] | None = None,
        subgroups: bool | None = None,
    ) -> Kernel:
        """The compiled entry point of a file below shaders/, from the cache after the first time.

        subgroups=None takes the subgroup variants of included files where the device has subgroups.
        Raises ShaderError with the file and line.
        """
        use = self.caps.subgroups if subgroups is None else subgroups
        options = {"types": types or {}, "constants": constants or {}, "parts": parts or {}, "slots": slots or {}}
        return self.kernels.get(path, entry, **options, subgroups=use)

    def kernel_source(self, text: str, entry: str, *, label: str, constants: Mapping[str, Any] | None = None) -> Kernel:
        """A kernel from WGSL text made at run time (fused operations); cached by the text."""
        return self.kernels.get_source(text, entry, label=label, constants=constants or {})

    def recorder(self) -> Recorder:
        """A new, empty recording."""
        self.require_open()
        return Recorder(self)

    def wait(self) -> None:
        """Block until everything submitted is done. Raises what the driver reports meanwhile."""
        self.require_open()
        with self.backend.errors("wait"), watched(self, "wait"):
            self.backend.wait(self.raw)
        self.require_open()

    def require_open(self) -> None:
        """Raise DeviceLost after `close`, and whatever the driver reported outside any call since the last one."""
        if self.closed:
            raise DeviceLost(f"the device {self.caps.name} was closed: open a new Device and load again")
        self.backend.check(self.raw)

    def use_calls(self, calls: DirectCalls | PublicCalls) -> None:
        """Encode Plans through these from now on. Plans made before must not be replayed."""
        self.backend.calls = calls
        self.pointer, self.queue_pointer = calls.pointer(self.raw), calls.pointer(self.raw.queue)

    def require_binding(self, nbytes: int, what: str) -> None:
        """Raise LimitExceeded if so many bytes cannot be bound at once."""
        if nbytes > self.caps.max_binding:
            raise LimitExceeded(
                f"{what}: {nbytes:,} bytes in one binding; {self.caps.name} binds at most "
                f"{self.caps.max_binding:,}; split it"
            )

    def close(self) -> None:
        """Free everything. Buffers, kernels and plans of this device must not be used afterwards."""
        if self.closed:
            return
        self.closed = True
        self.kernels.clear()
        self.raw.destroy()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Device({self.caps.name}, {self.caps.backend})"
