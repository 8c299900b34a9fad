"""Dense matrix products: the kernels with bounds checks, torch's shape rules, and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpu import Device
from nn import functional as F
from nn.check import matmul as check
from nn.check import run_case
from nn.ops.base import ShapeError, Spec
from nn.ops.matmul import MatMul
from nn.ops.matmul_variants import BLOCK, PACKED, SERIAL, TILED, Shape, default, variants
from nn.quant.weight import Weight
from nn.tensor import Tensor

CASES = check.cases()


@pytest.fixture(scope="module")
def _checked():
    device = Device.open(checked=True, canary=True)
    yield device
    device.close()


@pytest.mark.parametrize("case", CASES[::3], ids=[case.name.replace(" ", "_") for case in CASES[::3]])
def test_with_the_drivers_bounds_checks(case, _checked):
    if any(not getattr(_checked.caps, need) for need in case.needs):
        pytest.skip(f"needs {', '.join(case.needs)}")
    assert run_case(case, _checked) is None
    _checked.memory.check_canaries()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((5, 2, 3), (3,)),
        ((3,), (5, 3, 4)),
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((6, 1, 2, 3), (5, 3, 4)),
        ((2, 0), (0, 3)),
        ((0, 3), (3, 2)),
        ((0,), (0,)),
        ((70, 130), (130, 67)),
    ],
    ids=str,
)
def test_torchs_shapes(device, rng, a, b):
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in (a, b))
    got = Tensor(x, device) @ Tensor(y, device)
    want = x.astype(np.float64) @ y.astype(np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)


def test_transposed_operands_are_read_in_place(device, rng):
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 7, 5), (2, 9, 7)))
    a, b = Tensor(x, device), Tensor(y, device)
    before = device.counters.dispatches
    got = F.matmul(a.permute(0, 2, 1), b.permute(0, 2, 1)).numpy()
    assert device.counters.dispatches == before + 1
    want = x.astype(np.float64).swapaxes(1, 2) @ y.astype(np.float64).swapaxes(1, 2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_other_views_are_copied_first(device, rng):
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 10), (5, 6)))
    got = F.matmul(Tensor(x, device)[::2, 5:], Tensor(y, device)).numpy()
    np.testing.assert_allclose(got, x[::2, 5:].astype(np.float64) @ y, rtol=1e-5, atol=1e-5)


def test_empty_sum_gives_zeros(device):  # CASES 7: (2,0)@(0,3) -> zeros (2,3)
    got = (Tensor(np.zeros((2, 0), np.float32), device) @ Tensor(np.zeros((0, 3), np.float32), device)).numpy()
    np.testing.assert_array_equal(got, np.zeros((2, 3), np.float32))


def test_small_integers_are_exact_and_repeat(device):  # CASES 13
    i = np.arange(32)
    a, b = ((i[:, None] + i) % 3).astype(np.float32), ((i[:, None] * i) % 5).astype(np.float32)
    first = (Tensor(a, device) @ Tensor(b, device)).numpy()
    assert (first[0, 1], first[31, 31], first.sum()) == (61.0, 62.0, 50_013.0)
    np.testing.assert_array_equal((Tensor(a, device) @ Tensor(b, device)).numpy(), first)


def test_long_f16_sums_are_f32(device):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    a, b = np.ones((1, 4096), np.float16), np.full((4096, 1), 0.25, np.float16)
    got = (Tensor(a, device) @ Tensor(b, device)).numpy()
    assert got.dtype == np.float16 and got[0, 0] == 1024.0


def test_software_drivers_get_their_own_kernel(device):
    for m, n in ((1, 1), (16, 4096), (17, 17), (4096, 4096)):
        shape = Shape(m, n, 64)
        chosen = default(device.caps, shape)
        assert (chosen.path in (SERIAL, PACKED)) == (device.caps.kind == "cpu")
        assert chosen in variants(device.caps, shape)


def test_gpus_get_blocks_and_cut_long_sums_of_few_tiles(device):
    caps = replace(device.caps, kind="gpu", max_workgroup_bytes=1 << 15, max_invocations=1024, max_binding=1 << 31)
    for shape, split in (
        (Shape(4096, 4096, 4096), 1),
        (Shape(16384, 1152, 384, trans_b=True), 1),
        (Shape(384, 384, 16384, trans_a=True), 32),
        (Shape(768, 3072, 8192, trans_a=True), 4),
        (Shape(65, 384, 16384, trans_a=True), 32),
    ):
        chosen = default(caps, shape)
        assert (chosen.path, chosen.split) == (BLOCK, split)
        assert chosen in variants(caps, shape)
    small = replace(caps, max_workgroup_bytes=1 << 12)  # no tile fits
    assert default(small, Shape(4096, 4096, 4096)).path == TILED
    # One part that has all of k already is no variant: the others would add zeros.
    assert all(v.split == 1 for v in variants(caps, Shape(128, 128, 16)))


def test_panels_need_subgroups_of_eight_and_bindings_that_hold_them(device):
    caps = replace(device.caps, kind="cpu", subgroups=True, subgroup_size=8, max_binding=1 << 27)
    shape = Shape(1024, 1024, 1024)
    assert default(caps, shape).path == PACKED
    for other in (replace(caps, subgroups=False), replace(caps, subgroup_size=4), replace(caps, max_binding=1 << 22)):
        assert default(other, shape).path == SERIAL
        assert all(v.path != PACKED for v in variants(other, shape))
    assert default(caps, replace(shape, batches=40)).path == SERIAL


@pytest.mark.parametrize(
    ("specs", "error", "text"),
    [
        ([Spec((2, 3)), Spec((4, 5))], ShapeError, "the first needs as many columns as the second has rows"),
        ([Spec((2, 3)), Spec((3, 5), "f16")], TypeError, "operands are f32 and f16"),
        ([Spec((2, 3), "i32"), Spec((3, 5), "i32")], TypeError, "expected both f32, both f16 or both bf16"),
        ([Spec((2, 4, 3)), Spec((3, 3, 5))], ShapeError, "batch axes [2] and [3] do not broadcast"),
    ],
)
def test_errors_name_the_shapes(specs, error, text):
    with pytest.raises(error) as caught:
        MatMul().infer(*specs)
    assert text in str(caught.value)


def test_scalars_are_refused(device):
    with pytest.raises(ShapeError, match="both need an axis"):
        F.matmul(Tensor(np.float32(1.0), device), Tensor(np.ones(3, np.float32), device))


def test_views_of_bf16_are_operands(device, rng):
    (a, b, c), values = zip(
        *(
            (x, x.numpy().astype(np.float64))
            for x in (
                Tensor(rng.standard_normal(s).astype(np.float32), device, dtype="bf16")
                for s in ((3, 33, 17), (17, 65), (9, 256))
            )
        ),
        strict=True,
    )
    a64, b64, c64 = values
    shared, three = c.reshape(3, 3, 256).realize(), c64.reshape(3, 3, 256)
    for got, want in (
        (b.mT @ a.mT, b64.T @ a64.swapaxes(1, 2)),
        (c[1:4] @ c[2:].mT, c64[1:4] @ c64[2:].T),
        (c[:, 1:4] @ c[:3, 5:14], c64[:, 1:4] @ c64[:3, 5:14]),
        (a[0, 3] @ b, a64[0, 3] @ b64),
        (b.flip(0).mT @ b, b64[::-1].T @ b64),
        (shared @ shared.mT, three @ three.swapaxes(1, 2)),
    ):
        np.testing.assert_allclose(got.numpy(), want, rtol=2**-8, atol=1e-3)
    weight = Tensor(Weight.from_array(device, np.ones((2, 32), np.float32), "bf16"))
    with pytest.raises(TypeError, match="weights can only be operands of linear and embedding"):
        (weight @ weight.mT).numpy()


def test_bf16_is_storage(device, rng):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 33), (33, 7)))
    x, y = (Tensor(v, device, dtype="bf16") for v in (a, b))
    out = x @ y
    assert out.dtype == "bf16"
    want = x.numpy().astype(np.float64) @ y.numpy().astype(np.float64)
    np.testing.assert_allclose(out.numpy(), want, rtol=2**-8, atol=1e-5)
    np.testing.assert_array_equal(x.to("f32").to("bf16").numpy(), x.numpy())
    np.testing.assert_array_equal(x.to("f16").numpy(), x.numpy().astype(np.float16))


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (
            (3,),
            (4, 2),
            r"shapes \[3\] and \[4, 2\] do not fit: the first's last axis has 3 elements, the second's second",
        ),
        ((2, 3), (4,), r"shapes \[2, 3\] and \[4\] do not fit: .*the second's only axis 4; they must be equal"),
    ],
)
def test_the_message_shows_the_shapes_that_were_given(device, a, b, text):
    with pytest.raises(ShapeError, match=text):
        Tensor(np.zeros(a, np.float32), device) @ Tensor(np.zeros(b, np.float32), device)
