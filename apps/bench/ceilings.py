"""What this device can do at most, the denominator of every row: gpu/ceilings.py's measurements.

copy     bytes read and written, a second
fma      FLOP a second of f32 multiply-adds in registers
matrix   FLOP a second of f16 products with f32 sums in matrix units, operands in registers; 0 where there are none
launch   seconds from an empty dispatch to the next one that depends on it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.ceilings import measure as measure_common

if TYPE_CHECKING:
    from gpu import Device


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


def measure(device: Device) -> Ceilings:
    """All four, in a second or two."""
    common = measure_common(device)
    return Ceilings(
        copy=common.copy_bytes_per_s,
        fma=common.f32_flops,
        matrix=common.matrix_flops or 0.0,
        launch=common.launch_s,
    )
