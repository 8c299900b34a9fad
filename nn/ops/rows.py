"""Kernels that work row by row: a workgroup a row on GPUs, an invocation a row on software drivers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu import Recorder
    from nn.ops.base import Array


def record_rows(
    record: Recorder,
    path: str,
    entry: str,
    x: Array,
    out: Array,
    *,
    axes: int = 1,
    types: dict[str, str] | None = None,
    serial: bool | None = None,
    subgroups: bool | None = None,
    **operands: object,
) -> None:
    """One dispatch over the rows of x, which are its last `axes` axes; out has its shape.

    serial: entry_serial of path_serial.wgsl (an invocation a row), not entry of path.wgsl (a workgroup a row); None
    takes this device's better one. types: those besides Elem, which is x's. operands: what else the entry binds, and
    its Params besides rows and cols.
    """
    first = len(x.shape) - axes
    rows, cols = math.prod(x.shape[:first]), math.prod(x.shape[first:])
    if rows == 0 or cols == 0:
        return
    device, types = record.device, {"Elem": x.dtype, **(types or {})}
    operands |= {"x": x.buffer, "out": out.buffer, "rows": rows, "cols": cols}
    if device.caps.kind == "cpu" if serial is None else serial:
        kernel = device.kernel(f"{path}_serial.wgsl", f"{entry}_serial", types=types, subgroups=False)
        record(kernel, -(-rows // 8), **operands)
        return
    constants = {"WG": 64 if cols <= 512 else 256}
    kernel = device.kernel(f"{path}.wgsl", entry, types=types, constants=constants, subgroups=subgroups)
    record(kernel, rows, **operands)
