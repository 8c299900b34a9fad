"""A weight matrix in device memory, in any storage format, cut into row windows that fit one binding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nn.ops.base import Array, ShapeError, Spec
from nn.quant.formats import format_of, quantize
from nn.quant.repack import BLOCK, plane_offsets, planes

if TYPE_CHECKING:
    from gpu import Buffer, Device

_MARGIN = 256  # bytes a device may bind past the end of a buffer (the canary of checked runs)
_READ_BYTES = 64 << 20  # bytes decoded at a time by `to_numpy`


@dataclass(frozen=True)
class Window:
    """Rows [row0, row0 + rows) of a matrix in a buffer of their own, which holds all planes of these rows."""

    row0: int
    rows: int
    buffer: Buffer


@dataclass(frozen=True)
class Weight:
    """A matrix (N rows, K columns) for linear layers (y = x W^T) and embedding tables.

    `format` is a name of nn.quant.formats; the layout on the device is that of nn.quant.repack. Kernels read it through
    the part shaders/quant/<format>.wgsl (`shader`), one dispatch a window, with w_rows = window.rows and cols = K.
    """

    shape: tuple[int, int]
    format: str
    windows: tuple[Window, ...]

    @classmethod
    def upload(
        cls,
        device: Device,
        raw: np.ndarray,
        shape: tuple[int, int],
        format: str,
        *,
        window_bytes: int | None = None,
    ) -> Weight:
        """Put stored rows on the device.

        Args:
            raw: uint8, N * row_bytes bytes in row order, of any shape (a memory-mapped file will do). It is read once,
                a few MB at a time.
            shape: (N, K). format: "f32", "f16", "bf16" or a block format such as "q4_1".
            window_bytes: cut into windows of at most this size; what the device binds at a time if not given.
        Raises: ValueError for an unknown format, a K that does not divide into blocks, or a wrong number of bytes.
        """
        rows, cols = shape
        fmt = format_of(format)
        row_bytes = fmt.row_bytes(cols)
        if raw.dtype != np.uint8 or raw.size != rows * row_bytes or rows <= 0:
            raise ValueError(
                f"Weight.upload: got {raw.dtype} with {raw.size:,} elements; a {format} matrix of {rows} x {cols} is "
                f"uint8 with {rows * row_bytes:,} (rows of {row_bytes} bytes)"
            )
        raw = raw.reshape(rows, row_bytes)
        limit = min(device.caps.max_binding, device.caps.max_buffer) - _MARGIN
        step = window_rows(format, rows, cols, min(limit, window_bytes or limit))
        windows = []
        for row0 in range(0, rows, step):
            part = raw[row0 : row0 + step]
            buffer = device.alloc(plane_offsets(format, len(part), cols)[1])
            for offset, piece in planes(part, format, cols):
                buffer.write(piece, offset)
            windows.append(Window(row0, len(part), buffer))
        return cls((rows, cols), format, tuple(windows))

    @classmethod
    def of(cls, array: Array) -> Weight:
        """A dense matrix that is on the device already, as a Weight: the same memory, nothing is copied.

        Raises ShapeError if it is not an f32, f16 or bf16 matrix whose rows are a multiple of 32 wide.
        """
        if len(array.shape) != 2 or array.dtype not in ("f32", "f16", "bf16") or array.cols % BLOCK:
            raise ShapeError(
                f"Weight.of: got {array.dtype} of shape {array.shape}; a matrix (N, K) of f32, f16 or bf16 with K a "
                f"multiple of {BLOCK} can be read in place, for others use Weight.from_array"
            )
        rows, cols = array.shape
        return cls((rows, cols), array.dtype, (Window(0, rows, array.buffer),))

    @classmethod
    def from_array(cls, device: Device, array: np.ndarray, format: str = "f32") -> Weight:
        """Encode a float matrix (N, K) in `format` and put it on the device. Raises ValueError as `quantize` does."""
        if array.ndim != 2:
            raise ShapeError(f"Weight.from_array: got shape {array.shape}; expected a matrix (N, K)")
        return cls.upload(device, quantize(array, format), (array.shape[0], array.shape[1]), format)

    @property
    def shader(self) -> str:
        """The part that reads this format: parts={"format": weight.shader}."""
        return f"quant/{self.format}.wgsl"

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.format)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, padding included."""
        return sum(window.buffer.nbytes for window in self.windows)

    def to_numpy(self, device: Device) -> np.ndarray:
        """Decode on the device and read back: (N, K) float32. For tests; a product kernel decodes as it reads."""
        rows, cols = self.shape
        kernel = device.kernel("quant/decode.wgsl", "decode", parts={"format": self.shader})
        out = np.empty((rows, cols), np.float32)
        blocks = -(-cols // BLOCK)
        step = max(1, min(_READ_BYTES, device.caps.max_binding - _MARGIN) // (4 * cols))
        for window in self.windows:
            for first in range(0, window.rows, step):
                count = min(step, window.rows - first)
                decoded = device.alloc(count * cols * 4)
                record = device.recorder()
                record(
                    kernel,
                    grid=-(-count * blocks // 64),
                    w=window.buffer,
                    out=decoded,
                    w_rows=window.rows,
                    cols=cols,
                    first=first,
                    rows=count,
                )
                record.submit()
                at = window.row0 + first
                out[at : at + count] = device.read(decoded, np.float32, (count, cols))
        return out


def window_rows(format: str, rows: int, cols: int, limit: int) -> int:
    """Rows a window so that each fits `limit` bytes and all are about the same size.

    Raises ValueError where a single row does not fit.
    """
    fit = min(rows, limit * 8 // plane_offsets(format, 8, cols)[1])
    while fit > 0 and plane_offsets(format, fit, cols)[1] > limit:
        fit -= 1
    if fit <= 0:
        raise ValueError(
            f"a {format} row of {cols} weights takes more than the {limit:,} bytes that this device binds at a time; "
            "use a format with fewer bits a weight"
        )
    return -(-rows // -(-rows // fit))
