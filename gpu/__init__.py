"""gpu: a thin WebGPU wrapper that records command buffers of WGSL compute shaders. Knows no neural network."""

from gpu.device import AdapterInfo, Capabilities, Device, list_adapters
from gpu.errors import DeviceLost, GpuError, LimitExceeded, NoAdapter, OutOfMemory, ShaderError
from gpu.kernel import Kernel
from gpu.memory import Buffer, Counters, Pending
from gpu.profile import Stopwatch
from gpu.recorder import Plan, Recorder
from gpu.tracing import Profile, profile
from gpu.tune import Family, Result, Trial
from gpu.work import Cost, Scope

__all__ = [
    "AdapterInfo",
    "Buffer",
    "Capabilities",
    "Cost",
    "Counters",
    "Device",
    "DeviceLost",
    "Family",
    "GpuError",
    "Kernel",
    "LimitExceeded",
    "NoAdapter",
    "OutOfMemory",
    "Pending",
    "Plan",
    "Profile",
    "Recorder",
    "Result",
    "Scope",
    "ShaderError",
    "Stopwatch",
    "Trial",
    "list_adapters",
    "profile",
]
