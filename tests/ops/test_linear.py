"""Products with weight matrices: kernels with bounds checks, public functions, choice of kernels, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpu import Device
from nn import functional as F
from nn.check import linear as check
from nn.check import linear_ops, run_case
from nn.check.linear import EPS, Projection, gated, products, rms_norm
from nn.check.quant import random_raw, upload_in
from nn.ops.base import Array, ShapeError, Spec
from nn.ops.linear import GatedMLP, Linear, NormLinear, QKVRope, multiply, variant
from nn.ops.linear_variants import DIGITS, GEMV, Shape, default, gemv_variant, variants
from nn.quant import Weight, dequantize
from nn.tensor import Tensor

CASES = check.cases() + linear_ops.cases()
ROWS = [case for case in CASES if not ("gemv" in case.name or "gemm" in case.name)][::4]


@pytest.fixture(scope="module")
def _checked():
    device = Device.open(checked=True, canary=True)
    yield device
    device.close()


@pytest.mark.parametrize("case", ROWS, ids=[case.name.replace(" ", "_") for case in ROWS])
def test_with_the_drivers_bounds_checks(case, _checked):
    if any(not getattr(_checked.caps, need) for need in case.needs):
        pytest.skip(f"needs {', '.join(case.needs)}")
    assert run_case(case, _checked) is None
    _checked.memory.check_canaries()


def weight(device, rng, format, rows, cols, pieces=1):
    raw = random_raw(rng, format, rows, cols)
    return Tensor(upload_in(device, raw, (rows, cols), format, pieces)), dequantize(raw, format)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 33])
def test_linear_with_bias_and_residual(device, rng, tokens):
    w, matrix = weight(device, rng, "q4_1", 75, 96, pieces=2)
    x, bias = (rng.standard_normal(s).astype(np.float32) for s in ((2, tokens, 96), 75))
    residual = rng.standard_normal((2, tokens, 75)).astype(np.float32)
    out = F.linear(Tensor(x, device), w, Tensor(bias, device), residual=Tensor(residual, device))
    want, atol = products(x.reshape(-1, 96), matrix)
    assert out.shape == (2, tokens, 75) and out.dtype == "f32"
    np.testing.assert_allclose(out.numpy(), want.reshape(2, tokens, 75) + bias + residual, rtol=1e-5, atol=atol)


def test_dense_tensor_as_weight(device, rng):
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 64), (7, 64)))
    want, atol = products(x, w)
    for dtype in ("f32", "f16") if device.caps.f16 else ("f32",):
        stored = w.astype(np.float16) if dtype == "f16" else w
        want, atol = products(x, stored)
        out = F.linear(Tensor(x, device), Tensor(stored, device))
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=atol)


def test_no_tokens_give_no_rows(device, rng):
    w, _ = weight(device, rng, "q8_0", 40, 32)
    x, gain = Tensor(np.zeros((0, 32), np.float32), device), Tensor(np.ones(32, np.float32), device)
    assert F.linear(x, w).numpy().shape == (0, 40)
    assert F.norm_linear(x, gain, w, eps=1e-5).numpy().shape == (0, 40)
    assert F.gated_mlp(x, gain, w, eps=1e-5).numpy().shape == (0, 20)


@pytest.mark.parametrize("tokens", [1, 9])
def test_norm_linear_and_gated_mlp(device, rng, tokens):
    w, matrix = weight(device, rng, "q8_0", 74, 160)
    x, gain = (rng.standard_normal(s).astype(np.float32) for s in ((tokens, 160), 160))
    both, atol = products(rms_norm(x, gain), matrix)
    a, g = Tensor(x, device), Tensor(gain, device)
    np.testing.assert_allclose(F.norm_linear(a, g, w, eps=EPS).numpy(), both, rtol=1e-5, atol=atol)
    for activation in ("silu", "gelu_tanh"):
        got = F.gated_mlp(a, g, w, eps=EPS, activation=activation).numpy()
        want = gated(both[:, :37], both[:, 37:], activation)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2 * atol * (1 + np.abs(both).max()))


def test_tiny_rows_keep_their_scale(device):
    """RMSNorm of [.001, -.001, ...], eps 1e-6 -> +-.707107 (CASES 24), through a product with the identity."""
    x = np.where(np.arange(32) % 2, -0.001, 0.001).astype(np.float32)
    w = Tensor(Weight.from_array(device, np.eye(32, dtype=np.float32)))
    got = F.norm_linear(Tensor(x[None], device), Tensor(np.ones(32, np.float32), device), w, eps=1e-6).numpy()
    np.testing.assert_allclose(got[0], np.sign(x) * np.sqrt(0.5), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5])
def test_qkv_rope_writes_the_cache_it_is_given(device, rng, tokens):
    case = Projection(rng, heads=3, kv_heads=1, head_dim=8, rotated=8, tokens=tokens, valid=tokens)
    w, matrix = weight(device, rng, "q4_1", case.width, 64)
    x, gain = (rng.standard_normal(s).astype(np.float32) for s in ((tokens, 64), 64))
    caches = [Tensor(cache.reshape(case.context, 1, 8), device) for cache in case.caches]
    ends = [Tensor(case.table, device), Tensor(case.step, device)]
    q = F.qkv_rope(Tensor(x, device), Tensor(gain, device), w, *caches, *ends, eps=check.EPS)
    qkv, atol = products(rms_norm(x, gain), matrix)
    want = case.truth(qkv)
    for got, right in zip((q, *caches), want, strict=True):
        np.testing.assert_allclose(got.numpy().reshape(right.shape), right, rtol=1e-5, atol=2 * atol)


def test_the_same_bits_every_time(device, rng):
    w, _ = weight(device, rng, "q6_k", 300, 512)
    x, gain = (Tensor(rng.standard_normal(s).astype(np.float32), device) for s in ((1, 512), 512))
    first = F.norm_linear(x, gain, w, eps=1e-5).numpy()
    for _ in range(3):
        np.testing.assert_array_equal(F.norm_linear(x, gain, w, eps=1e-5).numpy(), first)


def dispatches(device, op, *operands):
    record = device.recorder()
    op.lower(record, *operands)
    return len(record)


def test_one_token_takes_one_dispatch(device, rng):
    """Norm, projection, bias, rotation and cache write in one; so gate and activation, and the residual."""
    w = {n: weight(device, rng, "q4_1", n, 64)[0].node.value for n in (40, 64, 128)}
    buffer = device.alloc(4096)
    x, gain, out = Array(buffer, (1, 64)), Array(buffer, (64,)), Array(device.alloc(4096), (1, 64))
    cache, rope = [Array(device.alloc(4096), (16, 1, 8)) for _ in range(2)], Array(buffer, (16, 4, 2))
    step, q = Array(buffer, (4,), "u32"), Array(device.alloc(4096), (1, 24))
    assert dispatches(device, Linear(residual=True), x, w[64], x, out) == 1
    assert dispatches(device, NormLinear(eps=1e-5), x, gain, w[64], out) == 1
    assert dispatches(device, GatedMLP(eps=1e-5), x, gain, w[128], out) == 1
    assert dispatches(device, QKVRope(eps=1e-5), x, gain, *cache, rope, step, w[40], q) == 1
    if device.caps.max_storage_buffers > 8:
        bias = Array(buffer, (40,))
        assert dispatches(device, QKVRope(eps=1e-5, bias=True), x, gain, *cache, rope, step, w[40], bias, q) == 1


@pytest.mark.parametrize(("memory", "subgroup"), [(16_384, 0), (16_384, 8), (49_152, 32), (32_768, 64)])
def test_variants_fit_the_device_and_cover_all_work(device, memory, subgroup):
    limits = {"max_workgroup_bytes": memory, "subgroups": subgroup > 0, "subgroup_size": subgroup}
    caps = replace(device.caps, kind="gpu", **limits)
    for tokens in (1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 500):
        for rows, cols in ((1, 32), (576, 576), (960, 1536), (49_152, 576), (262_144, 640), (4096, 11_008)):
            for format in ("q4_1", "f16"):
                shape = Shape(tokens, rows, cols, format, paired=rows % 2 == 0)
                found = variants(caps, shape)
                assert default(caps, shape) in found
                assert len({form.name for form in found}) == len(found)
                for form in found:
                    tiles, grid, options = -(-tokens // form.tokens), form.grid(rows, tokens), dict(form.constants)
                    assert grid % tiles == 0 and 0 < grid <= max(tiles, form.most or grid)
                    if form.path == GEMV:  # workgroups go on in rounds until all rows are made
                        bytes_a_block = 112 if "digits" in form.name else 144
                        assert options["CHUNK"] * options["TOKENS"] * bytes_a_block + 8 * options["WG"] <= memory
                        assert options["WG"] % options["LANES"] == 0 and options["WG"] <= caps.max_invocations
                        assert not options["WITHIN"] or options["LANES"] <= subgroup
                        assert options["ROWS"] % 2 == 0 or not shape.paired
                    else:
                        assert (grid - 1) * form.rows * form.tokens < 128 * rows * max(tokens, form.tokens)
                        assert grid * form.rows * form.tokens >= rows * tokens


@pytest.mark.parametrize(("name", "lanes"), [("NVIDIA H200", 32), ("Intel(R) Arc(TM) Graphics", 8)])
def test_runs_of_lanes_lie_in_one_subgroup_only_where_its_size_is_known(device, name, lanes):
    caps = replace(device.caps, kind="gpu", name=name, driver="", subgroups=True, subgroup_size=32)
    for shape in (Shape(1, 4096, 4096, "q4_0"), Shape(4, 49_152, 576, "q8_0"), Shape(1, 576, 576, "f16")):
        forms = [dict(v.constants) for v in variants(caps, shape) if v.path == GEMV]
        assert {f["LANES"] for f in forms if f["WITHIN"]} <= {n for n in (4, 8, 16, 32) if n <= lanes}
        assert any(f["WITHIN"] for f in forms)
        assert all(f["WITHIN"] == (f["LANES"] <= lanes) for f in forms)


def test_no_number_hides_what_is_not_finite(device, rng):
    """A NaN or an infinity among the inputs reaches every sum, whatever the weights that it meets."""
    w = weight(device, rng, "q4_0", 40, 96)[0].node.value
    forms = [variant(device, 1, w)]
    if device.caps.wide_subgroups:
        options = {"rows": 2, "tokens": 1, "lanes": 8, "unroll": 1, "group": 64, "memory": 16_384, "within": True}
        forms.append(gemv_variant(DIGITS, 3, **options))
    for form in forms:
        for bad in (np.nan, np.inf, -np.inf):
            x, out = rng.standard_normal((1, 96)).astype(np.float32), device.alloc(160)
            x[0, 41] = bad
            record = device.recorder()
            multiply(record, form, "linear", w, tokens=1, out=out, out_cols=40, x=device.upload(x))
            record.submit()
            assert not np.isfinite(device.read(out, np.float32, 40)).any(), form.name


def test_software_drivers_get_their_own_kernel(device, rng):
    w = weight(device, rng, "q4_1", 40, 32)[0].node.value
    form = variant(device, 1, w)
    assert form.path.startswith("matmul/row") == (device.caps.kind == "cpu")
    cpu, shape = replace(device.caps, kind="cpu", subgroups=True), Shape(1, *w.shape, w.format)
    for caps, path in (
        (replace(cpu, subgroup_size=8), "matmul/row_broadcast.wgsl"),
        (replace(cpu, subgroup_size=4), "matmul/row.wgsl"),
        (replace(cpu, subgroups=False), "matmul/row.wgsl"),
    ):
        assert default(caps, shape).path == path and default(caps, shape) in variants(caps, shape)


S = Spec


@pytest.mark.parametrize(
    ("op", "specs", "error", "text"),
    [
        (Linear(), [S((2, 64)), S((8, 32), "q8_0")], ShapeError, "x needs a last axis of 32"),
        (Linear(), [S((2, 32), "f16"), S((8, 32), "q8_0")], TypeError, "x is f16; activations are f32"),
        (Linear(), [S((2, 32)), S((8,), "f32")], ShapeError, "expected (N, K) in one of f32, f16"),
        (Linear(), [S((2, 32)), S((8, 32), "i32")], ShapeError, "the weight is i32"),
        (
            Linear(bias=True),
            [S((2, 32)), S((8, 32)), S((9,))],
            ShapeError,
            "bias is f32 of shape (9,); expected f32 (8,)",
        ),
        (Linear(residual=True), [S((2, 32)), S((8, 32)), S((8,))], ShapeError, "residual is f32 of shape (8,)"),
        (NormLinear(eps=1e-5), [S((2, 32)), S((31,)), S((8, 32))], ShapeError, "norm_weight is f32 of shape (31,)"),
        (NormLinear(eps=-1.0), [S((2, 32)), S((32,)), S((8, 32))], ValueError, "eps must be at least 0, got -1.0"),
        (GatedMLP(eps=1e-5), [S((2, 32)), S((32,)), S((7, 32))], ShapeError, "w_gate_up has 7 rows"),
    ],
)
def test_errors_name_the_operand(op, specs, error, text):
    with pytest.raises(error) as caught:
        op.infer(*specs)
    assert text in str(caught.value)


def test_errors_of_qkv_rope():
    x, gain, cache, step = S((2, 32)), S((32,)), S((9, 1, 8)), S((4,), "u32")
    rope, w = S((9, 4, 2)), S((40, 32), "q4_1")

    def message(*specs, **options):
        with pytest.raises(ShapeError) as caught:
            QKVRope(eps=1e-5, **options).infer(*specs)
        return str(caught.value)

    assert QKVRope(eps=1e-5).infer(x, gain, cache, cache, rope, step, w) == S((2, 24))
    assert "expected (T, K)" in message(S((1, 2, 32)), gain, cache, cache, rope, step, w)
    assert "two alike" in message(x, gain, cache, S((9, 1, 8), "f16"), rope, step, w)
    assert "R <= 8" in message(x, gain, cache, cache, S((9, 5, 2)), step, w)
    assert "step is f32" in message(x, gain, cache, cache, rope, S((4,)), w)
    assert "weights of [39] rows" in message(x, gain, cache, cache, rope, step, S((39, 32), "q4_1"))
    assert "weights of [24, 8, 16] rows" in message(
        x, gain, cache, cache, rope, step, S((24, 32)), S((8, 32)), S((16, 32)), weights=3
    )
    assert "bias is f32 of shape (24,)" in message(x, gain, cache, cache, rope, step, w, S((24,)), bias=True)
    with pytest.raises(ValueError, match="q_norm and k_norm go together"):
        F.qkv_rope(*[None] * 7, eps=1e-5, q_norm=object())
    with pytest.raises(ValueError, match=r"got 2 weights; pass one .* or three"):
        F.qkv_rope(None, None, (None, None), *[None] * 4, eps=1e-5)
    with pytest.raises(ValueError, match="expected one of silu, gelu_tanh"):
        GatedMLP(eps=1e-5, activation="relu")
