"""What this device can do at most, measured by kernels that do nothing else: the denominators of every row.

copy     vec4 copy between two buffers; bytes read plus bytes written, a second
fma      multiply-adds of f32 in registers; two FLOP each
matrix   multiply-adds of f16 by matrix units in registers, sums in f32 (devices that have them)
launch   one empty dispatch that waits for the one before it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from apps.bench.measure import Stopwatch

if TYPE_CHECKING:
    from gpu import Device, Plan

COPY = """@group(0) @binding(0) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> b: array<vec4<u32>>;
@compute @workgroup_size(256) fn copy(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                                      @builtin(local_invocation_index) lane: u32) {
  let first = (wg.y * grid.x + wg.x) * 256u * EACHu + lane;
  for (var i = 0u; i < EACHu; i++) { b[first + i * 256u] = a[first + i * 256u]; }
}"""
CHAINS = 8
FMA = """@group(0) @binding(0) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> rounds: array<u32>;
@compute @workgroup_size(256) fn multiply_add(@builtin(global_invocation_id) g: vec3<u32>) {
  let m = vec4(0.9999 - f32(g.x & 7u) * 1e-6);
  let c = vec4(0.25);
  DECLARE
  for (var i = 0u; i < rounds[0]; i++) { BODY BODY BODY BODY }
  out[g.x] = TOTAL;
}"""
EMPTY = """@group(0) @binding(0) var<storage, read_write> a: array<u32>;
@compute @workgroup_size(32) fn empty(@builtin(global_invocation_id) g: vec3<u32>) {
  if (g.x == 7777777u) { a[0] = 1u; }
}"""


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second, FLOP a second (0: no matrix units) and seconds a dispatch."""

    copy: float
    fma: float
    matrix: float
    launch: float

    def bound(self, flops: float, nbytes: float, *, matrix: bool = False) -> tuple[float, str]:
        """The least seconds that this device needs for so much, and by which ceiling."""
        unit = "matrix" if matrix and self.matrix else "fma"
        compute = flops / (self.matrix if unit == "matrix" else self.fma)
        memory = nbytes / self.copy
        return (compute, unit) if compute > memory else (memory, "copy")


def measure(device: Device, watch: Stopwatch, *, limit: float = 0.5) -> Ceilings:
    """All four. limit: seconds for each of them."""
    return Ceilings(
        copy=copy_rate(device, watch, limit),
        fma=fma_rate(device, watch, limit),
        matrix=matrix_rate(device, watch, limit) if getattr(device.caps, "matrix_f16", False) else 0.0,
        launch=launch_seconds(device, watch, limit),
    )


def copy_rate(device: Device, watch: Stopwatch, limit: float) -> float:
    """Bytes a second, the best of several shapes of the loop."""
    nbytes = 512 << 20 if device.caps.kind == "gpu" else 32 << 20
    while nbytes > min(device.caps.max_binding, device.caps.max_buffer):
        nbytes //= 2
    a, b = device.alloc(nbytes), device.alloc(nbytes)
    best = float("inf")
    for each in (1, 4, 8):
        kernel = device.kernel_source(COPY.replace("EACH", str(each)), "copy", label=f"bench copy {each}")
        record = device.recorder()
        record(kernel, grid=nbytes // 16 // 256 // each, a=a, b=b)
        best = min(best, watch.time([record.plan()], limit=limit / 3).median)
    return 2 * nbytes / best


def fma_rate(device: Device, watch: Stopwatch, limit: float) -> float:
    """FLOP a second, the best of several numbers of independent chains an invocation."""
    workgroups = 8192 if device.caps.kind == "gpu" else 8
    out = device.alloc(16 * 256 * workgroups)
    best = 0.0
    for chains in (CHAINS // 2, CHAINS, 2 * CHAINS):
        names = [f"v{i}" for i in range(chains)]
        text = FMA.replace("DECLARE", " ".join(f"var {v} = vec4(f32(g.x + {i}u));" for i, v in enumerate(names)))
        text = text.replace("BODY", " ".join(f"{v} = fma({v}, m, c);" for v in names))
        kernel = device.kernel_source(
            text.replace("TOTAL", " + ".join(names)), "multiply_add", label=f"bench fma {chains}"
        )
        rounds = 16
        while True:
            record = device.recorder()
            record(kernel, grid=workgroups, out=out, rounds=device.upload(_words(rounds)))
            plan = record.plan()
            if watch.batch([plan], 1) > 1e-3 or rounds >= 4096:
                break
            rounds *= 4
        seconds = watch.time([plan], limit=limit / 3).median
        best = max(best, 2.0 * 4 * chains * 4 * rounds * 256 * workgroups / seconds)
    return best


def launch_plan(device: Device, dispatches: int) -> Plan:
    """Empty dispatches on one buffer, which each of them may write."""
    kernel = device.kernel_source(EMPTY, "empty", label="bench empty")
    buffer = device.alloc(256)
    record = device.recorder()
    for _ in range(dispatches):
        record(kernel, grid=1, a=buffer)
    return record.plan()


def launch_seconds(device: Device, watch: Stopwatch, limit: float) -> float:
    dispatches = 500 if device.caps.kind == "gpu" else 50
    return watch.time([launch_plan(device, dispatches)], limit=limit, calls=dispatches).median


def matrix_rate(device: Device, watch: Stopwatch, limit: float) -> float:
    return 0.0


def _words(value: int) -> bytes:
    return value.to_bytes(4, "little")
