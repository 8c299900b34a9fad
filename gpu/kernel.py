"""Kernel: one compiled entry point with the names of what it binds; and the cache that compiles each once."""

from __future__ import annotations

import re
import struct
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpu import matrix, wgsl
from gpu.errors import DeviceLost, GpuError, LimitExceeded, OutOfMemory, ShaderError
from gpu.native import MAX_GROUPS
from gpu.work import watched

if TYPE_CHECKING:
    from gpu.device import Device

MAX_NESTING = 100  # Dawn refuses 128, wgpu-native runs out of stack at some thousands


class Kernel:
    """A pipeline and its interface: storage bindings by name, Params fields by name."""

    def __init__(self, device: Device, source: wgsl.Source, entry: str, label: str) -> None:
        self.label, self.source, self.entry = label, source, entry
        self._device = weakref.ref(device)
        used = source.used_by(entry)
        self.storage = tuple(b for b in used if b.access != "uniform")
        self.names = frozenset(b.name for b in self.storage)
        self.uniform = next((b for b in used if b.access == "uniform"), None)
        self.params = source.params if self.uniform else ()
        self.param_names = frozenset(name for name, _ in self.params)
        self._pack = struct.Struct("<" + "".join(wgsl.SCALARS[t] for _, t in self.params)) if self.params else None
        if len(self.storage) > device.caps.max_storage_buffers:
            raise LimitExceeded(
                f"{label}: binds {len(self.storage)} storage buffers, {device.caps.name} allows "
                f"{device.caps.max_storage_buffers} a shader; split the operation"
            )
        groups = max((b.group for b in used), default=0) + 1
        if groups > MAX_GROUPS:
            raise ShaderError(f"{label}: uses @group({groups - 1}); kernels have groups 0 to {MAX_GROUPS - 1}")
        self.groups = tuple(tuple(b for b in used if b.group == g) for g in range(groups))
        self.layouts, self.pipeline = _build(device, source, entry, label, self.groups)

    def belongs_to(self, device: Device) -> bool:
        """Whether it was compiled for this device."""
        return self._device() is device

    def pack(self, params: Mapping[str, Any]) -> bytes:
        """The uniform bytes of these Params. Raises ShaderError on a missing, unknown or unrepresentable value."""
        if params.keys() != self.param_names:
            raise ShaderError(
                f"{self.label}: params given {sorted(params)}, the shader has {sorted(self.param_names)}; "
                f"missing {sorted(self.param_names - params.keys())}, "
                f"unknown {sorted(params.keys() - self.param_names)}"
            )
        if self._pack is None:
            return b""
        try:
            return self._pack.pack(*[params[name] for name, _ in self.params])
        except (struct.error, OverflowError) as error:
            shown = ", ".join(f"{name}: {type_} = {params[name]!r}" for name, type_ in self.params)
            raise ShaderError(f"{self.label}: a parameter does not fit its type ({error}); {shown}") from error

    def __repr__(self) -> str:
        return f"Kernel({self.label}: {', '.join(b.name for b in self.storage)})"


def _build(
    device: Device, source: wgsl.Source, entry: str, label: str, groups: tuple[tuple[wgsl.Binding, ...], ...]
) -> tuple[list[Any], Any]:
    device.require_open()
    raw = device.raw
    stage = device.backend.module.ShaderStage.COMPUTE
    kinds = {"read": "read-only-storage", "read_write": "storage", "uniform": "uniform"}
    code = _header(device, source, label) + (matrix.to_naga(source) if device.backend.naga else source.code)
    if (depth := _nesting(source.code)) > MAX_NESTING:
        raise ShaderError(
            f"{label}: brackets are nested {depth} deep, at most {MAX_NESTING} are compiled; use variables in between"
        )
    try:
        module = device.backend.shader_module(raw, code, label, trusted=not device.caps.checked)
        layouts = [
            raw.create_bind_group_layout(
                entries=[{"binding": b.index, "visibility": stage, "buffer": {"type": kinds[b.access]}} for b in group]
            )
            for group in groups
        ]
        pipeline = raw.create_compute_pipeline(
            label=label,
            layout=raw.create_pipeline_layout(bind_group_layouts=layouts),
            compute={"module": module, "entry_point": entry, "constants": dict(source.constants)},
        )
    except Exception as error:
        translated = device.backend.translate(error, label)
        if isinstance(translated, OutOfMemory | DeviceLost):
            raise translated from error
        if isinstance(translated, GpuError) or isinstance(error, device.backend.module.GPUError):
            raise _shader_error(str(error), source) from error
        raise
    device.counters.pipelines += 1
    return layouts, pipeline


def _nesting(code: str) -> int:
    """How deep brackets are nested. A driver's parser may run out of stack, which ends the process."""
    depth = deepest = 0
    for found in re.finditer(r"//[^\n]*|[([{]|[)\]}]", code):
        mark = found[0]
        depth += 0 if mark[0] == "/" else 1 if mark in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _shader_error(text: str, source: wgsl.Source) -> ShaderError:
    """The driver's complaint with the file and line a person wrote, found through the loader's line map."""
    m = re.search(r"wgsl:(\d+):(\d+)", text) or re.search(r"(?:^|\s):(\d+):(\d+)", text)
    place = source.where(int(m[1])) if m else source.path
    line = source.code.splitlines()[int(m[1]) - 1].strip() if m and int(m[1]) <= len(source.lines) else ""
    return ShaderError(f"{place}: {text.strip()}" + (f"\n  in: {line}" if line else ""))


def _header(device: Device, source: wgsl.Source, label: str) -> str:
    """The `enable` lines this backend wants, put before line 1 without a line of their own."""
    header = ""
    extensions = source.extensions()
    if "f16" in extensions:
        if not device.caps.f16:
            raise ShaderError(f"{label}: uses f16, which {device.caps.name} does not have; use f32")
        header += "enable f16; "
    if "subgroups" in extensions:
        if not device.caps.subgroups:
            raise ShaderError(f"{label}: uses subgroups, which {device.caps.name} does not have; pass subgroups=False")
        if device.backend.needs_enable_subgroups:
            header += "enable subgroups; diagnostic(off, subgroup_uniformity); "
    if "matrices" in extensions:
        if not (device.caps.matrix_f16 or device.caps.matrix_i8):
            raise ShaderError(
                f"{label}: uses subgroup matrices, which {device.caps.name} does not have through "
                f"{device.caps.backend}; choose a variant without them (caps.matrix_f16, caps.matrix_i8)"
            )
        header += matrix.NAGA_LINE if device.backend.naga else matrix.TINT_LINE
    return header


class KernelCache:
    """Compiles each (source, entry, options) once for its device."""

    def __init__(self, device: Device) -> None:
        self._device = weakref.ref(device)
        self._kernels: dict[Any, Kernel] = {}

    def get(
        self,
        path: str,
        entry: str,
        *,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        parts: Mapping[str, str],
        slots: Mapping[str, str],
        subgroups: bool,
    ) -> Kernel:
        """The kernel with these options; see Device.kernel."""
        key = (path, entry, _frozen(types), _frozen(constants), _frozen(parts), _frozen(slots), subgroups)
        kernel = self._kernels.get(key)
        if kernel is None:
            source = wgsl.load(path, types=types, constants=constants, parts=parts, slots=slots, subgroups=subgroups)
            kernel = self._kernels[key] = self._make(source, entry, f"{path.removesuffix('.wgsl')}:{entry}")
        return kernel

    def get_source(self, text: str, entry: str, *, label: str, constants: Mapping[str, Any]) -> Kernel:
        """The kernel of a text; see Device.kernel_source."""
        key = (text, entry, _frozen(constants))
        kernel = self._kernels.get(key)
        if kernel is None:
            lines = text.splitlines()
            source = wgsl.assemble(label, lines, [(label, i) for i in range(1, len(lines) + 1)], constants=constants)
            kernel = self._kernels[key] = self._make(source, entry, label)
        return kernel

    def _make(self, source: wgsl.Source, entry: str, label: str) -> Kernel:
        device = self._device()
        if device is None:
            raise DeviceLost(f"{label}: the device is gone; open a new Device")
        with watched(device, "compile", kernel=label):
            return Kernel(device, source, entry, label)

    def clear(self) -> None:
        """Forget every kernel; those in use go on to work."""
        self._kernels.clear()


def _frozen(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))
