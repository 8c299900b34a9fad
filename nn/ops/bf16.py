"""bf16 is storage: kernels that turn it into f32 and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nn.ops.base import Array, Op, Spec

if TYPE_CHECKING:
    from gpu import Recorder
    from nn.quant.weight import Weight
    from nn.tensor import Tensor


@dataclass(frozen=True)
class WidenBF16(Op):
    """The same values in f32."""

    group = "movement"
    name = "to f32"

    def infer(self, *inputs: Spec) -> Spec:
        return Spec(inputs[0].shape, "f32")

    def gradient(self, dy: Any, *tensors: Tensor) -> tuple[Tensor]:
        return (dy.to("bf16"),)

    def lower(self, record: Recorder, x: Array | Weight, out: Array) -> None:
        if not isinstance(x, Array):
            raise TypeError(
                f"to: got a weight in format {x.format}; weights can only be operands of linear and embedding "
                "operations"
            )
        record_bf16(record, "widen", x, out)


@dataclass(frozen=True)
class NarrowBF16(Op):
    """f32 rounded to the nearest bf16, ties to even; NaN stays."""

    group = "movement"
    name = "to bf16"

    def infer(self, *inputs: Spec) -> Spec:
        return Spec(inputs[0].shape, "bf16")

    def gradient(self, dy: Any, *tensors: Tensor) -> tuple[Tensor]:
        return (dy.to("f32"),)

    def lower(self, record: Recorder, x: Array, out: Array) -> None:
        record_bf16(record, "narrow", x, out)


def record_bf16(record: Recorder, entry: str, x: Array, out: Array) -> None:
    """One dispatch of shaders/movement/bf16.wgsl."""
    kernel = record.device.kernel("movement/bf16.wgsl", entry)
    record(kernel, -(-x.size // 512), x=x.buffer, out=out.buffer, size=x.size)
