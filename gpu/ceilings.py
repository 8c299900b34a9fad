"""What this device can do at most: bytes a second, multiply-adds a second, and what a dispatch costs that does nothing.

`measure` takes about a second, once a device. Nothing here is looked up: a claim such as "60 % of the bandwidth" is a
ratio of two times measured in one process. Kernels are those of shaders/measure/ceilings.wgsl, on warm clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.profile import Stopwatch

if TYPE_CHECKING:
    from gpu.device import Device
    from gpu.recorder import Plan, Recorder

SHADER = "measure/ceilings.wgsl"
WG, SPAN = 256, 4
FLOPS_A_ROUND = 256  # of an invocation of multiply_add: eight chains of vec4, four steps, two operations
RUNS = 5
TICKS = 256  # dependent dispatches that the launch cost is the mean of
WARM_SECONDS = 0.3  # clocks of an idle GPU are low; this is how long they are given to rise
LEAST_SECONDS = {"gpu": 2e-3, "cpu": 20e-3}  # of a timed piece of arithmetic
MATRIX, MATRIX_SIDE, MATRIX_SUBGROUPS = 16, 4, 4  # a subgroup holds SIDE x SIDE sums of MATRIX x MATRIX
COPY_BYTES = {"gpu": 256 << 20, "cpu": 64 << 20}  # larger than the caches in front of the memory


@dataclass(frozen=True)
class Ceilings:
    """copy_bytes_per_s: bytes read and bytes written, together. f32_flops, matrix_flops: operations a second, a
    multiply-add is two; matrix_flops is f16 products with f32 sums in matrix units, None where there are none.
    launch_s: GPU seconds from one tiny dispatch to the next one that depends on it. by_timestamps: measured with the
    device's own clock; False: by the host's, which adds the cost of a submit spread over the repeats.
    """

    copy_bytes_per_s: float
    f32_flops: float
    matrix_flops: float | None
    launch_s: float
    by_timestamps: bool

    def as_dict(self) -> dict[str, float | bool | None]:
        """Names and numbers, for JSON."""
        return asdict(self)


def measure(device: Device, *, again: bool = False) -> Ceilings:
    """The device's ceilings, measured at the first call and remembered. again: measure anew.

    Allocates two buffers of up to 256 MB (64 MB on software drivers) for the time of the call.
    """
    if again or device.ceilings is None:
        device.ceilings = _measure(device)
    return device.ceilings


def _measure(device: Device) -> Ceilings:
    flops = max(_flops(device, fused=fused) for fused in (1, 0))
    copied = _copy(device)
    device.memory.trim()
    matrix = _matrix(device) if device.caps.matrix_f16 else None
    return Ceilings(copied, flops, matrix, _launch(device), device.caps.timestamps)


def _flops(device: Device, *, fused: int) -> float:
    """Operations a second of independent multiply-adds in registers."""
    kernel = device.kernel(SHADER, "multiply_add", constants={"WG": WG, "FUSED": fused})
    groups = 8192 if device.caps.kind == "gpu" else 64
    out = device.alloc(groups * WG * 16)

    def plan(rounds: int) -> Plan:
        def one(record: Recorder) -> None:
            record(kernel, groups, out=out, n=groups * WG, rounds=rounds, scale=0.5, shift=1.0)

        return _planned(device, one)

    rounds, least, seconds_of = 1, LEAST_SECONDS[device.caps.kind], Stopwatch(device).seconds
    seconds_of(plan(1))  # the first run may include compilation by the driver
    while (took := seconds_of(plan(rounds))) < least:
        rounds = min(4 * rounds, int(rounds * 1.5 * least / max(took, 1e-9)) + 1)
    longer = plan(rounds)
    end = time.perf_counter() + WARM_SECONDS * (device.caps.kind == "gpu")
    while time.perf_counter() < end:
        seconds_of(longer)
    best = min(seconds_of(longer) for _ in range(RUNS))
    return groups * WG * FLOPS_A_ROUND * rounds / best


def _copy(device: Device) -> float:
    """Bytes a second, read and written, of a kernel that copies more than the caches hold."""
    size = min(COPY_BYTES[device.caps.kind], device.caps.max_binding - 512, device.caps.max_buffer - 512) // 4096 * 4096
    kernel = device.kernel(SHADER, "copy", constants={"WG": WG, "SPAN": SPAN})
    x, out, n = device.alloc(size), device.alloc(size), size // 16

    def there_and_back(record: Recorder) -> None:
        for a, b in ((x, out), (out, x)):
            record(kernel, -(-n // (WG * SPAN)), x=a, out=b, n=n, rounds=0, scale=0.0, shift=0.0)

    plan, seconds_of = _planned(device, there_and_back), Stopwatch(device).seconds
    seconds_of(plan)
    best = min(seconds_of(plan, runs=2) for _ in range(RUNS))
    return 4 * size / best


def _launch(device: Device) -> float:
    """Seconds between dispatches that do nothing but depend on each other."""
    kernel = device.kernel(SHADER, "tick")
    out = device.upload(np.zeros(4, np.float32))

    def ticks(record: Recorder) -> None:
        for _ in range(TICKS):
            record(kernel, 1, out=out)

    plan, seconds_of = _planned(device, ticks), Stopwatch(device).seconds
    seconds_of(plan)
    return float(np.median([seconds_of(plan) for _ in range(RUNS)])) / TICKS


def _matrix(device: Device) -> float:
    """Operations a second of matrix units on operands in registers, which are random: zeros would draw less power."""
    groups, rounds = 1056, 64
    values = np.random.default_rng(1).uniform(-1, 1, 2 * MATRIX_SIDE * MATRIX * MATRIX)
    operands = device.upload(values.astype(np.float16))
    out = device.alloc(groups * MATRIX_SUBGROUPS * MATRIX * MATRIX * 4)
    text = matrix_text(device.caps.subgroup_size, rounds)
    kernel = device.kernel_source(text, "matrices", label="matrix units")
    plan, watch = _planned(device, lambda record: record(kernel, groups, operands=operands, out=out)), Stopwatch(device)
    best = min(watch.seconds(plan, runs=4) for _ in range(RUNS))
    return 2.0 * MATRIX**3 * MATRIX_SIDE**2 * rounds * MATRIX_SUBGROUPS * groups / best


def matrix_text(subgroup_size: int, rounds: int) -> str:
    """WGSL: every sum takes a product a round; each is stored, so that none can be left out."""
    sides = range(MATRIX_SIDE)
    area = MATRIX * MATRIX
    left, right = (f"subgroup_matrix_{side}<f16, {MATRIX}, {MATRIX}>" for side in ("left", "right"))
    load = [
        f"let {name}{i} = subgroupMatrixLoad<{kind}>(&operands, {(i + start) * area}u, false, {MATRIX}u);"
        for name, kind, start in (("a", left, 0), ("b", right, MATRIX_SIDE))
        for i in sides
    ]
    sums = [(i, j) for i in sides for j in sides]
    declare = [f"var s{i}{j}: subgroup_matrix_result<f32, {MATRIX}, {MATRIX}>;" for i, j in sums]
    step = [f"s{i}{j} = subgroupMatrixMultiplyAccumulate(a{i}, b{j}, s{i}{j});" for i, j in sums]
    place = f"(wg.x * {MATRIX_SUBGROUPS}u + lane / {subgroup_size}u) * {area}u"
    store = [f"subgroupMatrixStore(&out, {place}, s{i}{j}, false, {MATRIX}u);" for i, j in sums]
    parts = [*load, *declare, f"for (var r = 0u; r < {rounds}u; r++) {{", *step, "}", *store]
    body = "\n  ".join(parts)
    return f"""@group(0) @binding(0) var<storage, read> operands: array<f16>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@compute @workgroup_size({MATRIX_SUBGROUPS * subgroup_size})
fn matrices(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
  {body}
}}
"""


def _planned(device: Device, fill: Callable[[Recorder], Any]) -> Plan:
    record = device.recorder()
    fill(record)
    return record.plan()
