"""Kernels that work row by row, and which variant of them a device and a shape get.

On GPUs a run of invocations makes a row and keeps it in registers between its passes, so that it is read once and
written once. On software drivers an invocation makes a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder
    from gpu.device import Capabilities
    from nn.ops.base import Array

HELD = {4: 8, 1: 16}  # most packs of so many elements that an invocation keeps: 32 and 16 registers
BUSY = 1 << 16  # invocations that keep a large GPU busy


@dataclass(frozen=True)
class RowVariant:
    """Constants of a row kernel. lanes: invocations a row; held: packs of `pack` elements each keeps; wg: a workgroup.

    lanes 0 stands for the kernel of software drivers (path_serial.wgsl, an invocation a row, `wg` rows a workgroup).
    """

    lanes: int
    held: int = 1
    wg: int = 256
    pack: int = 1
    subgroups: bool = False

    @property
    def name(self) -> str:
        if not self.lanes:
            return f"serial {self.wg}"
        how = "subgroups" if self.subgroups else "tree"
        return f"{self.lanes} lanes of {self.held}x{self.pack}, {how} {self.wg}"


SERIAL = RowVariant(0, wg=8)


def default(caps: Capabilities, rows: int, cols: int) -> RowVariant:
    """Few invocations a row with much to keep each, as long as there are rows enough to keep the device busy."""
    if caps.kind == "cpu":
        return SERIAL
    pack = 4 if cols % 4 == 0 else 1
    packs = cols // pack
    lanes = 4
    while 2 * lanes <= min(caps.max_invocations, 1024) and (
        lanes * HELD[pack] < packs or (rows * lanes < BUSY and lanes < min(packs, 256))
    ):
        lanes *= 2
    held = min(-(-packs // lanes), HELD[pack])
    return RowVariant(lanes, held, max(lanes, 128 if rows * lanes >= BUSY else 32), pack, caps.subgroups)


def variants(caps: Capabilities, rows: int, cols: int) -> Sequence[RowVariant]:
    """All that are worth trying for rows of this length, in a fixed order."""
    found = [SERIAL]
    for pack in (4, 1) if cols % 4 == 0 else (1,):
        for lanes in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
            if lanes > caps.max_invocations or (lanes > 4 and lanes >= 2 * (cols // pack)):
                break
            held = min(-(-cols // pack // lanes), HELD[pack])
            found += [
                RowVariant(lanes, held, max(lanes, wg), pack, subgroups)
                for wg in (64, 256) if max(lanes, wg) <= caps.max_invocations
                for subgroups in ((True, False) if caps.subgroups else (False,))
            ]  # fmt: skip
    return list(dict.fromkeys(found))


def record_rows(
    record: Recorder,
    path: str,
    entry: str,
    x: Array,
    out: Array,
    *,
    axes: int = 1,
    gain_type: str | None = None,
    variant: RowVariant | None = None,
    **operands: object,
) -> None:
    """One dispatch over the rows of x, which are its last `axes` axes; out has its shape.

    gain_type: dtype of what belongs to the columns, for kernels with an alias Gain. variant: None takes this device's
    default. operands: what else the entry binds, and its Params besides rows, packs and cols.
    """
    first = len(x.shape) - axes
    rows, cols = math.prod(x.shape[:first]), math.prod(x.shape[first:])
    if rows == 0 or cols == 0:
        return
    device = record.device
    chosen = variant or default(device.caps, rows, cols)
    types = {"Elem": x.dtype}
    operands |= {"x": x.buffer, "out": out.buffer, "rows": rows}
    if not chosen.lanes:
        types |= {"Gain": gain_type} if gain_type else {}
        kernel = device.kernel(
            f"{path}_serial.wgsl", f"{entry}_serial", types=types, constants={"WG": chosen.wg}, subgroups=False
        )
        if "packs" in kernel.param_names:
            operands["packs"] = cols
        record(kernel, -(-rows // chosen.wg), cols=cols, **operands)
        return
    if gain_type:
        types["Gain"] = f"vec4<{gain_type}>" if chosen.pack == 4 else gain_type
    kernel = device.kernel(
        f"{path}.wgsl",
        entry,
        types=types,
        constants={"WG": chosen.wg, "LANES": chosen.lanes, "HELD": chosen.held},
        parts={"pack": f"lib/pack{chosen.pack}.wgsl"},
        subgroups=chosen.subgroups,
    )
    if "cols" in kernel.param_names:
        operands["cols"] = cols
    record(kernel, -(-rows // (chosen.wg // chosen.lanes)), packs=cols // chosen.pack, **operands)
