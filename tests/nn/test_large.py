"""Tensors larger than one binding of the device."""

from __future__ import annotations

import numpy as np

from nn.tensor import Tensor


def test_rows_of_a_table_over_the_binding_limit(device):
    """33,000 x 1,024 f32 is 135 MB; many drivers bind 128 MiB. Row r holds r."""
    table = np.broadcast_to(np.arange(33_000, dtype=np.float32)[:, None], (33_000, 1024))
    x = Tensor(np.ascontiguousarray(table), device)
    for r in (0, 32_767, 32_999):
        np.testing.assert_array_equal((x[r] + 0.5).numpy(), np.full(1024, r + 0.5, np.float32))
    y = (x * 2 + x[:, :1]).realize()
    last = y[-2:].clone().numpy()
    np.testing.assert_array_equal(last, np.repeat(np.float32([[3 * 32_998], [3 * 32_999]]), 1024, 1))
    np.testing.assert_array_equal(y[::5000, 7].numpy(), 3 * np.arange(0, 33_000, 5000, dtype=np.float32))
