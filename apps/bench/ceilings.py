"""What this device can do at most, the denominator of every row: gpu/ceilings.py's measurements, and matrix units.

copy     bytes read and written, a second
fma      FLOP a second of f32 multiply-adds in registers
matrix   FLOP a second of f16 products with f32 sums in matrix units, operands in registers; 0 where there are none
launch   seconds from an empty dispatch to the next one that depends on it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.ceilings import measure as measure_common
from nn.quant.fill import uniform

if TYPE_CHECKING:
    from apps.bench.measure import Stopwatch
    from gpu import Device

TILE, SIDE, SUBGROUPS = 16, 4, 4  # a subgroup holds SIDE x SIDE sums of TILE x TILE


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second, FLOP a second (matrix 0: no matrix units) and seconds a dispatch."""

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


def measure(device: Device, watch: Stopwatch) -> Ceilings:
    """All four, in a second or two."""
    common = measure_common(device)
    return Ceilings(
        copy=common.copy_bytes_per_s,
        fma=common.f32_flops,
        matrix=matrix_rate(device, watch) if device.caps.matrix_f16 else 0.0,
        launch=common.launch_s,
    )


def matrix_rate(device: Device, watch: Stopwatch, *, limit: float = 0.5) -> float:
    """FLOP a second of matrix units on operands in registers, which are random: zeros would draw less power."""
    workgroups, rounds = 1056, 64
    size = device.caps.subgroup_size
    operands = uniform(device, (2 * SIDE * TILE * TILE,), "f16", seed=1)
    out = device.alloc(workgroups * SUBGROUPS * TILE * TILE * 4)
    kernel = device.kernel_source(matrix_text(size, rounds), "matrices", label="bench matrix units")
    record = device.recorder()
    record(kernel, workgroups, operands=operands.buffer, out=out)
    seconds = watch.time([record.plan()], limit=limit).median
    return 2.0 * TILE**3 * SIDE**2 * rounds * SUBGROUPS * workgroups / seconds


def matrix_text(subgroup_size: int, rounds: int) -> str:
    """WGSL: every sum takes a product a round; each is stored, so that none can be left out."""
    sides = range(SIDE)
    area = TILE * TILE
    left, right = (f"subgroup_matrix_{side}<f16, {TILE}, {TILE}>" for side in ("left", "right"))
    load = [
        f"let {name}{i} = subgroupMatrixLoad<{kind}>(&operands, {(i + start) * area}u, false, {TILE}u);"
        for name, kind, start in (("a", left, 0), ("b", right, SIDE))
        for i in sides
    ]
    sums = [(i, j) for i in sides for j in sides]
    declare = [f"var s{i}{j}: subgroup_matrix_result<f32, {TILE}, {TILE}>;" for i, j in sums]
    step = [f"s{i}{j} = subgroupMatrixMultiplyAccumulate(a{i}, b{j}, s{i}{j});" for i, j in sums]
    place = f"(wg.x * {SUBGROUPS}u + lane / {subgroup_size}u) * {area}u"
    store = [f"subgroupMatrixStore(&out, {place}, s{i}{j}, false, {TILE}u);" for i, j in sums]
    parts = [*load, *declare, f"for (var r = 0u; r < {rounds}u; r++) {{", *step, "}", *store]
    body = "\n  ".join(parts)
    return f"""@group(0) @binding(0) var<storage, read> operands: array<f16>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@compute @workgroup_size({SUBGROUPS * subgroup_size})
fn matrices(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
  {body}
}}
"""
