"""Products of many rows with stored weights on matrix units: both operands as halves, then the f16 product.

Weights are decoded to f16 once a call, into temporary memory: 60 us for 22,016 x 4,096 on an H200, where the product of
512 rows takes 500. Activations keep 11 bits, scaled row by row so that none overflows (shaders/matmul/halve_rows.wgsl).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu.work import Cost, Scope
from nn.ops import matmul_matrix
from nn.ops.matmul_variants import Shape as Product
from nn.quant.repack import BLOCK

if TYPE_CHECKING:
    from gpu import Buffer, Recorder
    from gpu.device import Capabilities
    from nn.ops.linear_variants import Shape, Variant
    from nn.quant.weight import Weight

MOST = 256 << 20  # bytes of temporary memory for a decoded matrix


def fits(caps: Capabilities, chosen: Variant, shape: Shape) -> bool:
    """Whether the device has matrix units that the tile fits, and room for the weights as halves."""
    product = Product(shape.tokens, shape.rows, shape.cols, 1, "f16", False, True)
    nbytes = 2 * shape.rows * shape.cols
    return (
        shape.cols % BLOCK == 0
        and nbytes <= min(MOST, caps.max_binding - 512)
        and matmul_matrix.fits(dict(chosen.constants), caps, product)
    )


def record_wide(
    record: Recorder,
    chosen: Variant,
    entry: str,
    w: Weight,
    *,
    tokens: int,
    x: Buffer,
    out: Buffer,
    out_cols: int,
    first_col: int = 0,
    bias: Buffer | None = None,
    residual: Buffer | None = None,
    gelu: int = 0,
) -> None:
    """linear, linear_bias, linear_residual, linear_bias_residual or gated_linear, as shaders/matmul/entries.wgsl."""
    rows, cols = w.shape
    if entry == "gated_linear":
        both = record.temp(4 * tokens * rows)
        record_wide(record, chosen, "linear", w, tokens=tokens, x=x, out=both, out_cols=rows)
        kernel = record.device.kernel("matmul/rows.wgsl", "gate", constants={"GELU": gelu})
        record(kernel, grid=-(-tokens * out_cols // 64), x=both, out=out, rows=tokens, cols=rows, out_cols=out_cols)
        return
    device = record.device
    halves, scales = record.temp(2 * tokens * cols), record.temp(4 * tokens)
    sizes = {"rows": tokens, "cols": cols, "out_cols": out_cols, "first_col": first_col}
    with record.scope(Scope("halve_rows", kind="linear", cost=Cost(0, 4 * tokens * cols, 2 * tokens * cols))):
        record(
            device.kernel("matmul/halve_rows.wgsl", "halve_rows"), grid=tokens, x=x, out=halves, scales=scales, **sizes
        )
    product = device.kernel(
        matmul_matrix.MATRIX, "matmul", types={"Elem": "f16"}, parts={"halves": "matmul/halves_linear.wgsl"},
        constants={**dict(chosen.constants), "A_COLUMNS": False, "B_COLUMNS": True},
    )  # fmt: skip
    for window in w.windows:
        wide = window.buffer
        if w.format != "f16":
            wide = record.temp(2 * window.rows * cols)
            moved = Cost(0, window.buffer.nbytes, 2 * window.rows * cols)
            with record.scope(Scope("widen", kind="linear", cost=moved)):
                decode = device.kernel("quant/widen.wgsl", "widen", parts={"format": w.shader})
                record(
                    decode,
                    grid=-(-window.rows * cols // 1024),
                    w=window.buffer,
                    out=wide,
                    w_rows=window.rows,
                    cols=cols,
                )
        record(
            product, grid=-(-tokens // chosen.tokens) * -(-window.rows // chosen.rows), a=halves, b=wide, out=out,
            scales=scales, m=tokens, n=window.rows, k=cols, batches=1, out_offset=0, out_cols=out_cols,
            first_col=first_col + window.row0, a_row=cols, a_col=1, b_row=1, b_col=cols,
        )  # fmt: skip
    if bias is not None or residual is not None:
        more = {name: b for name, b in (("bias", bias), ("residual", residual)) if b is not None}
        sizes["cols"] = rows
        add = device.kernel("matmul/halve_rows.wgsl", "_".join(("add", *more)))
        record(add, grid=-(-tokens * rows // 256), result=out, **sizes, **more)
