"""What an operation is: a node of the lazy graph that knows its result's shape and which kernels compute it.

An Op holds its options (a frozen dataclass, so that it can be hashed and compared), never its operands.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpu.work import Cost

if TYPE_CHECKING:
    from gpu import Buffer, Recorder
    from nn.tensor import Tensor

# Dense element types, their bytes in a storage buffer, and the NumPy type they are read back as (bf16: its bits).
DTYPES: dict[str, tuple[int, Any]] = {
    "f32": (4, np.float32),
    "f16": (2, np.float16),
    "bf16": (2, np.uint16),
    "i32": (4, np.int32),
    "u32": (4, np.uint32),
    "u8": (1, np.uint8),
    "bool": (4, np.uint32),
}
FLOATS = ("f32", "f16")  # those that kernels compute with
STEP_SHAPE = (4,)  # of struct Step in the shaders: position, tokens, seed, draw; u32


class ShapeError(ValueError):
    """Operands whose shapes do not fit together; the message names the function, what it got and what it wanted."""


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a value that may not exist yet. `dtype`: a key of DTYPES or a block format such as "q4_1"."""

    shape: tuple[int, ...]
    dtype: str = "f32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of a dense value of this shape and dtype."""
        return self.size * DTYPES[self.dtype][0]


@dataclass(frozen=True)
class Array:
    """A value in device memory: the buffer, its shape and its dtype. Dense and row-major, unless `strides` says (in
    elements) where its elements lie, which only operations with `Op.strided` or `Op.layout` meet."""

    buffer: Buffer
    shape: tuple[int, ...]
    dtype: str = "f32"
    strides: tuple[int, ...] | None = None

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def cols(self) -> int:
        """Length of the last axis (1 for a scalar)."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Product of all axes but the last."""
        return math.prod(self.shape[:-1])


def check_step(name: str, step: Spec) -> None:
    """Raise ShapeError unless `step` is the state of a step, as every operation around the KV cache reads it."""
    if step != Spec(STEP_SHAPE, "u32"):
        raise ShapeError(f"{name}: step is {step.dtype} {step.shape}; expected u32 (4,): position, tokens, seed, draw")


@dataclass(frozen=True)
class Progress:
    """How far a step has come, for costs that depend on it: `tokens` rows whose first stands at `position`."""

    position: int
    tokens: int

    @staticmethod
    def of(state: bytes | None, turn: int = 0) -> Progress | None:
        """Out of the bytes of a struct Step, `turn` steps later; None where there is none, or something else."""
        if state is None or len(state) != 16:
            return None
        position, tokens, _, _ = struct.unpack("<4I", state)
        return Progress(position + turn * tokens, tokens)


def stored_bytes(spec: Spec) -> int:
    """Bytes that a value takes, in a dense type or a block format."""
    if spec.dtype in DTYPES:
        return spec.nbytes
    from nn.quant.formats import format_of  # here: that package's first module imports this one

    return math.prod(spec.shape[:-1]) * format_of(spec.dtype).row_bytes(spec.shape[-1])


@dataclass(frozen=True)
class Epilogue:
    """Element-wise work that a kernel does with what it makes: text for the shader's slots `epilogue` and `Params`, the
    numbers of the new Params fields, and the buffers of the new bindings."""

    text: str
    params: str
    fields: dict[str, Any]
    buffers: dict[str, Buffer]

    @property
    def slots(self) -> dict[str, str]:
        return {"epilogue": self.text, "Params": self.params}


class Op:
    """Base of every operation. Subclasses are frozen dataclasses whose fields are the options.

    `mutates` lists the positions of operands that `lower` also writes (a KV cache); such a node is never merged with
    an equal one and runs once, in graph order.
    """

    mutates: tuple[int, ...] = ()
    takes_epilogue: ClassVar[bool] = False  # whether `lower_with` is there
    strided: ClassVar[tuple[int, ...]] = ()  # operands whose rows, contiguous along the last axis, may lie anywhere
    group: ClassVar[str] = "other"  # what its time is counted under: "linear", "attention", "norm", ...

    def infer(self, *inputs: Spec) -> Spec | tuple[Spec, ...]:
        """The result's spec (or specs) for operands of these specs. Raises ShapeError."""
        raise NotImplementedError

    def fold_transpose(self, position: int) -> Op | None:
        """The operation that reads operand `position` with its last two axes swapped, or None if there is none."""
        return None

    def layout(self, spec: Spec) -> tuple[int, ...] | None:
        """The strides in which it writes a result of this spec, which fills its memory; None: row-major."""
        return None

    def gradient(self, dy: Any, *tensors: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the operands, by the chain rule; None where there is none (integers, constants).

        Args:
            dy: the gradient of the result, of its shape and dtype (a tuple of them where there are several results).
            tensors: the operands, then the results.
        Written with public functions, so that it is differentiated, fused and tested like everything else. What nobody
        uses costs nothing: the graph is lazy.
        """
        raise NotImplementedError(
            f"{getattr(self, 'name', type(self).__name__)} has no gradient rule; define gradient() in its Op, "
            ".detach() its operands, or compute it under no_grad()"
        )

    def cost(self, operands: Sequence[Spec], results: Sequence[Spec], progress: Progress | None = None) -> Cost:
        """Operations, bytes read and bytes written, each piece of memory once; for traces, not for choosing kernels.

        Unless told otherwise: every operand is read, every result and mutated operand written, one operation an
        element of the results. progress: where a decoding step stands, for operations whose work depends on it; None
        counts the longest case.
        """
        written = [*results, *(operands[i] for i in self.mutates)]
        return Cost(
            sum(spec.size for spec in results),
            sum(stored_bytes(spec) for spec in operands),
            sum(stored_bytes(spec) for spec in written),
        )

    def lower(self, record: Recorder, *arrays: Any) -> None:
        """Record the dispatches. `arrays`: the operands, then the results, as Array (or Weight for block formats)."""
        raise NotImplementedError

    def lower_with(self, record: Recorder, epilogue: Epilogue, *arrays: Any) -> None:
        """As lower, with element-wise work on each value before it is written. Where takes_epilogue is true."""
        raise NotImplementedError
