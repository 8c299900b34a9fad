"""The public attention functions; the kernels' variants and edges are in nn/check/attention.py."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpu import LimitExceeded
from nn.check import reference
from nn.check.attention import attention as truth
from nn.check.attention import visible
from nn.ops.attention import (
    Heads,
    attention,
    cached_attention,
    record_attention,
    scaled_dot_product_attention,
)
from nn.ops.attention_variants import (
    DECODE,
    NARROW,
    SMALL_LANES,
    SMALL_SPLIT,
    SMALL_TILE,
    Shape,
    default,
    lanes_variant,
    variants,
)
from nn.ops.base import Array, ShapeError
from nn.tensor import Tensor

NAME = "scaled_dot_product_attention"


@pytest.fixture(params=(SMALL_TILE, DECODE, NARROW, SMALL_LANES, lanes_variant(64, 1, splits=3)), ids=lambda v: v.name)
def variant(request, device):
    if not request.param.fits(device.caps, Shape(1, 1, 1, 1, 64)):
        pytest.skip(f"{request.param.name} does not fit this device")
    return request.param


def tensors(device, rng, *shapes):
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return arrays, [Tensor(a, device) for a in arrays]


def test_query_heads_map_to_key_heads_in_blocks(device, variant):  # CASES 8
    v = np.stack([np.full((5, 4), 1.0), np.full((5, 4), 2.0)])[None].astype(np.float32)  # (1, 2, 5, 4)
    q, k = np.zeros((1, 6, 1, 4), np.float32), np.ones((1, 2, 5, 4), np.float32)
    out = Array(device.alloc(6 * 4 * 4), (1, 6, 1, 4))
    record = device.recorder()
    views = [Heads.of(Array(device.upload(x), x.shape)) for x in (q, k, v)]
    record_attention(record, *views, Heads.of(out), scale=1.0, variant=variant)
    record.submit()
    got = device.read(out.buffer, np.float32, out.shape)
    np.testing.assert_allclose(got[0, :, 0, 0], [1, 1, 1, 2, 2, 2], rtol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_nan_in_a_query_or_key_reaches_the_rows_that_see_it(device, rng, variant, softcap):
    """NaN is not a masked key: a broken model has to show."""
    base = [rng.standard_normal((1, 1, n, 8)).astype(np.float32) for n in (4, 70, 70)]
    for broken, place in ((0, 2), (1, 1), (1, 66)):
        q, k, v = (x.copy() for x in base)
        (q, k)[broken][0, 0, place, 3] = np.nan
        out = Array(device.alloc(4 * 8 * 4), (1, 1, 4, 8))
        record = device.recorder()
        views = [Heads.of(Array(device.upload(x), x.shape)) for x in (q, k, v)]
        record_attention(record, *views, Heads.of(out), scale=1.0, softcap=softcap, variant=variant)
        record.submit()
        rows = np.isnan(device.read(out.buffer, np.float32, out.shape)[0, 0]).all(1)
        assert rows.tolist() == ([False, False, True, False] if broken == 0 else [True] * 4)


def test_nan_and_minus_infinity_in_a_mask(device, rng):
    _, (q, k, v) = tensors(device, rng, (1, 1, 2, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    mask = np.array([[0.0, np.nan, 0.0], [0.0, -np.inf, 0.0]], np.float32)
    got = scaled_dot_product_attention(q, k, v, attn_mask=Tensor(mask, device)).numpy()[0, 0]
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


@pytest.mark.parametrize("d", [63, 80, 96, 256])
def test_padding_of_the_last_block_is_not_counted(device, d):  # CASES 9
    q, k = np.zeros((1, 1, 1, d), np.float32), np.ones((1, 1, 77, d), np.float32)
    v = np.broadcast_to(np.arange(77, dtype=np.float32)[None, None, :, None], (1, 1, 77, d))
    got = scaled_dot_product_attention(*(Tensor(np.ascontiguousarray(x), device) for x in (q, k, v))).numpy()
    np.testing.assert_allclose(got, np.full((1, 1, 1, d), 38.0), rtol=1e-6)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_leading_axes_and_causal_as_torch_counts(device, rng, lead):
    (q, k, v), (tq, tk, tv) = tensors(device, rng, (*lead, 5, 8), (*lead, 9, 8), (*lead, 9, 8))
    got = scaled_dot_product_attention(tq, tk, tv, is_causal=True).numpy()
    four = [x.reshape(-1, 1, *x.shape[-2:]).astype(np.float64) for x in (q, k, v)]
    want = truth(*four, scale=8**-0.5, seen=visible(5, 9, offset=0)).reshape(q.shape)  # from the upper left
    assert got.shape == q.shape
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("shape", [(5, 9), (1, 9), (3, 5, 9), (2, 1, 5, 9), (1, 1, 1, 9)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "f32"])
def test_masks_broadcast_and_rows_that_see_nothing_are_zero(device, rng, shape, kind):
    (q, k, v), (tq, tk, tv) = tensors(device, rng, (2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8))
    allowed = rng.random(shape) < 0.6
    allowed[..., 0, :] = shape[-2] == 1  # the first query sees nothing, where the mask has rows
    if kind == "bool":
        mask, bias = allowed, None
    else:
        mask = np.where(allowed, rng.standard_normal(shape), -np.inf).astype(np.float32)
        bias = mask.astype(np.float64)
    got = scaled_dot_product_attention(tq, tk, tv, Tensor(mask, device)).numpy()
    want = truth(*(x.astype(np.float64) for x in (q, k, v)), scale=8**-0.5, seen=allowed, bias=bias)
    np.testing.assert_allclose(got, want, atol=3e-6)
    if shape[-2] > 1:
        assert (got[:, :, 0] == 0).all()


def test_mask_over_extra_leading_axes(device, rng):
    _, (tq, tk, tv) = tensors(device, rng, (2, 2, 3, 4, 8), (2, 2, 3, 6, 8), (2, 2, 3, 6, 8))
    mask = rng.random((2, 1, 1, 4, 6)) < 0.7
    got = scaled_dot_product_attention(tq, tk, tv, Tensor(mask, device)).numpy()
    q, k, v = (t.numpy().reshape(4, 3, *t.shape[-2:]).astype(np.float64) for t in (tq, tk, tv))
    seen = np.broadcast_to(mask, (2, 2, 1, 4, 6)).reshape(4, 1, 4, 6)
    np.testing.assert_allclose(got.reshape(q.shape), truth(q, k, v, scale=8**-0.5, seen=seen), atol=3e-6)


def test_window_softcap_scale_and_grouped_heads(device, rng):
    (q, k, v), (tq, tk, tv) = tensors(device, rng, (1, 4, 6, 16), (1, 2, 20, 16), (1, 2, 20, 16))
    got = attention(
        tq * 5, tk, tv, causal=True, window=7, softcap=4.0, scale=0.3
    ).numpy()  # offset 14: the last sees all
    exact = [x.astype(np.float64)[0].transpose(1, 0, 2) for x in (q * 5, k, v)]
    want = reference.attend(*exact, scale=0.3, window=7, cap=4.0).transpose(1, 0, 2)[None]
    np.testing.assert_allclose(got, want, atol=1e-5)
    uncapped = attention(tq * 5, tk, tv, causal=True, window=7, scale=0.3).numpy()
    assert np.abs(uncapped - want).max() > 1e-2  # the cap matters here


def test_softcap_of_scores_beyond_the_range_of_exp(device):  # CASES 3: tanh(1000) is 1, not NaN
    q = Tensor(np.full((1, 1, 1, 4), 100.0, np.float32), device)
    k = Tensor(np.array([[100.0] * 4, [-100.0] * 4], np.float32).reshape(1, 1, 2, 4), device)
    v = Tensor(np.array([1.0, 0.0], np.float32)[:, None].repeat(4, 1).reshape(1, 1, 2, 4), device)
    got = attention(q, k, v, softcap=1.0, scale=1.0).numpy()
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-2.0)), rtol=1e-6)


def test_cached_attention_equals_a_model_forward(device, rng):
    heads, kv, d, context = 6, 2, 16, 40
    (q, k, v), (tq, tk, tv) = tensors(device, rng, (5, heads * d), (context, kv * d), (context, kv * d))
    for position, tokens in ((0, 5), (11, 3), (35, 5)):
        step = Tensor(np.array([position, tokens, 0, 0], np.uint32), device)
        got = cached_attention(tq, tk, tv, step, heads=heads, kv_heads=kv, scale=0.25, window=9).numpy()
        filled = position + tokens
        exact = q[:tokens].reshape(tokens, heads, d), *(x[:filled].reshape(filled, kv, d) for x in (k, v))
        want = reference.attend(*(x.astype(np.float64) for x in exact), scale=0.25, window=9)
        np.testing.assert_allclose(got[:tokens], want.reshape(tokens, heads * d), atol=3e-6)
        assert (got[tokens:] == 0).all()


def test_a_position_past_the_cache_stays_inside_it(device, rng):
    _, (tq, tk, tv) = tensors(device, rng, (2, 8), (6, 1, 8), (6, 1, 8))
    step = Tensor(np.array([2**32 - 1, 2, 0, 0], np.uint32), device)
    got = cached_attention(tq, tk, tv, step, heads=1, kv_heads=1, scale=1.0).numpy()
    q, k, v = (t.numpy().astype(np.float64).reshape(-1, 1, 8).transpose(1, 0, 2)[None] for t in (tq, tk, tv))
    np.testing.assert_allclose(got, truth(q, k, v, scale=1.0)[0, 0], atol=1e-5)


def test_the_same_bits_every_run(device, rng, variant):
    q, k, v = (
        Array(device.upload(rng.standard_normal((1, 2, n, 64)).astype(np.float32)), (1, 2, n, 64)) for n in (70, 90, 90)
    )
    seen = set()
    for _ in range(3):
        out = Array(device.alloc(2 * 70 * 64 * 4), (1, 2, 70, 64))
        record = device.recorder()
        record_attention(record, Heads.of(q), Heads.of(k), Heads.of(v), Heads.of(out), scale=0.125, variant=variant)
        record.submit()
        seen.add(device.read(out.buffer, np.uint32, out.shape).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("many", [True, False], ids=["256k queries", "one query"])
def test_memory_beyond_inputs_and_outputs(device, many):
    """No scores are kept: 256k keys take what their inputs and outputs take. Recorded only."""
    tokens, d = 1 << 18, 8
    variant = SMALL_TILE if many else SMALL_SPLIT
    if not variant.fits(device.caps, Shape(1, tokens, 1, 1, d)):
        pytest.skip(f"{variant.name} does not fit this device")
    shape = (1, 1, tokens if many else 1, d)
    q, out = (Heads.of(Array(device.alloc(4 * math.prod(shape)), shape)) for _ in range(2))
    k, v = (Heads.of(Array(device.alloc(4 * tokens * d), (1, 1, tokens, d))) for _ in range(2))
    given = sum(view.buffer.nbytes for view in (q, k, v, out))
    before = device.counters.bytes_live
    record = device.recorder()
    record_attention(record, q, k, v, out, scale=1.0, causal=many, variant=variant)
    assert len(record) == (1 if many else 2)
    assert device.counters.bytes_live - before <= 0.05 * given


def test_the_default_fits_every_device_and_shape(device):
    large = {"max_workgroup_bytes": 48 << 10, "max_invocations": 1024}
    for changed in ({}, {"kind": "gpu"}, {"kind": "gpu", "subgroups": False, "f16": False}, {"kind": "gpu", **large}):
        for size, matrices in ((8, False), (32, True), (64, False)):
            caps = replace(device.caps, subgroup_size=size, matrix_f16=matrices, **changed)
            for d in (1, 63, 64, 80, 128, 256):
                for rows, keys, limit in (
                    (1, 1, 0),
                    (1, 300, 0),
                    (8, 5000, 0),
                    (8, 5000, 100),
                    (17, 9, 0),
                    (600, 600, 0),
                ):
                    for elem in ("f32", "f16") if caps.f16 else ("f32",):
                        aligned = {"wide": d % 4 == 0, "wide8": d % 8 == 0}
                        shape = Shape(rows, keys, 12, 3, d, elem=elem, kv=elem, step=True, limit=limit, **aligned)
                        assert default(caps, shape) in variants(caps, shape), (caps, shape)


def test_a_promised_limit_does_not_change_the_result(device, rng):
    _, (tq, tk, tv) = tensors(device, rng, (2, 8), (40, 1, 8), (40, 1, 8))
    step = Tensor(np.array([20, 2, 0, 0], np.uint32), device)
    both = [cached_attention(tq, tk, tv, step, heads=1, kv_heads=1, scale=1.0, limit=n).numpy() for n in (None, 8)]
    np.testing.assert_allclose(*both, atol=3e-6)
    with pytest.raises(ValueError, match="limit is 0; it counts keys"):
        cached_attention(tq, tk, tv, step, heads=1, kv_heads=1, scale=1.0, limit=0)


def test_a_variant_that_does_not_fit_is_refused(device):
    x = Heads.of(Array(device.alloc(4 * 64), (1, 1, 1, 64)))
    huge = lanes_variant(1 << 14, 4)
    with pytest.raises(LimitExceeded, match="attention: the variant 'lanes 16384x4 heads 1' cannot run Shape"):
        record_attention(device.recorder(), x, x, x, x, scale=1.0, variant=huge)


def test_no_queries_and_no_keys(device):
    empty = Tensor(np.zeros((1, 2, 0, 8), np.float32), device)
    some = Tensor(np.ones((1, 2, 3, 8), np.float32), device)
    assert scaled_dot_product_attention(empty, some, some).numpy().shape == (1, 2, 0, 8)
    np.testing.assert_array_equal(scaled_dot_product_attention(some, empty, empty).numpy(), np.zeros((1, 2, 3, 8)))


def test_errors_name_the_thing_and_the_remedy(device):
    def zeros(*shape, dtype=np.float32):
        return Tensor(np.zeros(shape, dtype), device)

    x = zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=rf"{NAME}: dropout_p is 0.1.*pass 0.0"):
        scaled_dot_product_attention(x, x, x, dropout_p=0.1)
    with pytest.raises(ValueError, match="attn_mask and is_causal are both given"):
        scaled_dot_product_attention(x, x, x, zeros(3, 3), is_causal=True)
    with pytest.raises(ShapeError, match="query has 4 heads, key 2; pass enable_gqa=True"):
        scaled_dot_product_attention(zeros(1, 4, 3, 8), x, x)
    with pytest.raises(ShapeError, match="3 query heads, 2 key/value heads"):
        scaled_dot_product_attention(zeros(1, 3, 3, 8), x, x, enable_gqa=True)
    with pytest.raises(ShapeError, match="heads of 257 features; expected 1 to 256"):
        scaled_dot_product_attention(*[zeros(1, 1, 1, 257)] * 3)
    with pytest.raises(ShapeError, match=r"mask has shape \(1, 1, 3, 4\).*\(1, 2, 3, 3\)"):
        scaled_dot_product_attention(x, x, x, zeros(3, 4))
    with pytest.raises(TypeError, match="mask is i32; expected bool"):
        scaled_dot_product_attention(x, x, x, zeros(3, 3, dtype=np.int32))
    with pytest.raises(TypeError, match="q is i32"):
        attention(zeros(1, 2, 3, 8, dtype=np.int32), x, x)
    with pytest.raises(ValueError, match="window=4 without causal=True"):
        attention(x, x, x, window=4)
    with pytest.raises(ValueError, match=r"softcap is 0\.0.*must be > 0"):
        attention(x, x, x, softcap=0.0)
    cache, step = zeros(10, 1, 8), Tensor(np.zeros(4, np.uint32), device)
    with pytest.raises(ShapeError, match=r"k_cache has shape \(10, 1, 8\).*\(context, 2, 8\)"):
        cached_attention(zeros(3, 16), cache, cache, step, heads=2, kv_heads=2, scale=1.0)
    with pytest.raises(ShapeError, match=r"step is f32 \(10, 1, 8\); expected u32 \(4,\)"):
        cached_attention(zeros(3, 16), cache, cache, cache, heads=2, kv_heads=1, scale=1.0)


def test_many_rows_fold_the_grid(device, rng):
    (q, k, v), given = tensors(device, rng, (1, 2, 37, 8), (1, 1, 9, 8), (1, 1, 9, 8))
    before, device.fold_at = device.fold_at, 4
    try:
        got = attention(*given).numpy()
    finally:
        device.fold_at = before
    scores = np.einsum("bhid,bjd->bhij", q.astype(np.float64), k[:, 0]) / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhij,bjd->bhid", weights / weights.sum(-1, keepdims=True), v[:, 0])
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_is_finite(device, rng, scale):
    _, given = tensors(device, rng, (1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4))
    with pytest.raises(ValueError, match=r"attention: scale is \w+; expected a finite number, or None for 1 / sqrt"):
        attention(*given, scale=scale)
