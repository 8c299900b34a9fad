"""The gradients of LayerNorm and RMSNorm in two dispatches: x and dy are read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.work import Cost
from nn import tape
from nn.ops.base import Array, Op, Progress, Spec
from nn.ops.parts import record_parts
from nn.tensor import Tensor, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu import Recorder
    from gpu.device import Capabilities

BUSY = 1 << 16  # invocations that keep a large GPU busy
MOST = {4: 8, 1: 16}  # packs of so many elements that an invocation keeps at most


@dataclass(frozen=True)
class NormGradVariant:
    """lanes: invocations a row; held: packs of `pack` elements each keeps, all of a row together; each: rows a run."""

    lanes: int
    held: int
    each: int
    wg: int = 64
    pack: int = 1
    subgroups: bool = False


def norm_grad_variant(caps: Capabilities, rows: int, cols: int) -> NormGradVariant | None:
    """The kernel for rows of this length; None where they are too long for it."""
    pack = 4 if cols % 4 == 0 else 1
    packs, lanes = cols // pack, 8
    while lanes < caps.max_invocations and lanes < 256 and lanes * (MOST[pack] // 2) < packs:
        lanes *= 2
    held = -(-packs // lanes)
    if held > MOST[pack]:
        return None
    return NormGradVariant(lanes, held, min(max(rows * lanes // BUSY, 1), 64), max(lanes, 64), pack, caps.subgroups)


def norm_gradient(
    dy: Tensor, x: Tensor, *weights: Tensor, axes: int, eps: float, centred: bool
) -> tuple[Tensor, ...] | None:
    """The gradients of x and the weights by the fused kernel; None where the composite rule is better: on software
    drivers, for very long rows, and where gradients are to be differentiated again."""
    caps = x.device.caps
    cols = math.prod(x.shape[x.ndim - axes :])
    rows = x.numel() // max(cols, 1)
    if tape.is_grad_enabled() or caps.kind == "cpu" or rows * cols == 0:
        return None
    if norm_grad_variant(caps, rows, cols) is None:
        return None
    made = apply(NormGrad(axes, eps, centred), x, dy, *weights)
    return made if isinstance(made, tuple) else (made,)


@dataclass(frozen=True)
class NormGrad(Op):
    """Operands x, dy and, optionally, gain, then bias, of which only the type is looked at. Results: dx, and a gradient
    for each of those."""

    axes: int
    eps: float
    centred: bool
    group = "norm"

    def infer(self, *inputs: Spec) -> tuple[Spec, ...]:
        return (inputs[0], *inputs[2:])

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        moved = super().cost(operands, results)
        return Cost(16 * operands[0].size, moved.read, moved.written)

    def lower(self, record: Recorder, *arrays: Array) -> None:
        weights = (len(arrays) - 3) // 2
        x, dy, *rest = arrays
        gain = rest[0] if weights else None
        record_norm_grad(record, x, dy, gain, *rest[weights:], axes=self.axes, eps=self.eps, centred=self.centred)


def record_norm_grad(
    record: Recorder,
    x: Array,
    dy: Array,
    gain: Array | None,
    dx: Array,
    dgain: Array | None = None,
    dbias: Array | None = None,
    *,
    axes: int = 1,
    eps: float,
    centred: bool,
    variant: NormGradVariant | None = None,
) -> None:
    """One dispatch of shaders/norm/norm_grad.wgsl and, with a gain, one of shaders/reduce/parts.wgsl."""
    device, first = record.device, len(x.shape) - axes
    rows, cols = math.prod(x.shape[:first]), math.prod(x.shape[first:])
    chosen = variant or norm_grad_variant(device.caps, rows, cols)
    assert chosen is not None, "norm_gradient takes the composite rule for rows of this length"
    runs = -(-rows // chosen.each)
    entry = "norm_grad" if gain is None else "norm_grad_gain" if dbias is None else "norm_grad_affine"
    gain_type = "f32" if gain is None else gain.dtype
    types = {"Elem": x.dtype, "Gain": f"vec4<{gain_type}>" if chosen.pack == 4 else gain_type}
    buffers = {"x": x.buffer, "dy": dy.buffer, "out": dx.buffer}
    if gain is not None:
        buffers["gain"] = gain.buffer
        buffers["parts"] = record.temp(runs * cols * 4 * (1 if dbias is None else 2))
    kernel = device.kernel(
        "norm/norm_grad.wgsl",
        entry,
        types=types,
        constants={"WG": chosen.wg, "LANES": chosen.lanes, "HELD": chosen.held, "CENTRED": centred},
        parts={"pack": f"lib/pack{chosen.pack}.wgsl"},
        subgroups=chosen.subgroups,
    )
    record(
        kernel, -(-runs // (chosen.wg // chosen.lanes)), rows=rows, packs=cols // chosen.pack, cols=cols,
        each=chosen.each, runs=runs, eps=eps, **buffers,
    )  # fmt: skip
    if dgain is not None:
        record_parts(record, buffers["parts"], dgain, dbias, rows=runs)


__all__: list[str] = []
