"""The errors of the engine. Every message says who, what was given, what was expected and what to do next."""

from __future__ import annotations


class GpuError(RuntimeError):
    """Base of every error that the engine raises on purpose."""


class NoAdapter(GpuError):
    """No WebGPU adapter was found, or none matches what was asked for."""


class OutOfMemory(GpuError):
    """The device could not give the memory. Free something (or open a new Device) and go on."""


class DeviceLost(GpuError):
    """The device is gone: driver reset, unplugged, or closed. Open a new Device and load again."""


class LimitExceeded(GpuError):
    """A request is over a limit of this device; the message names the limit and its value."""


class ShaderError(GpuError):
    """A shader does not compile, or was called with bindings, parameters or constants it does not have."""
