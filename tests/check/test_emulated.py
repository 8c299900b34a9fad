"""Kernels for matrix units on devices without them: the shader's own text with the matrix calls in plain WGSL.

A small tile, so that a software driver compiles it in time; each form of storage, each way of copying, each entry once,
with whole tiles and with tiles over every edge.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from nn.check import compare
from nn.check.linear_wide import wide_rows
from nn.check.matmul_matrix import product
from nn.ops import matmul_matrix
from nn.ops.linear_variants import wide_variant
from nn.ops.matmul_variants import Shape, default, matrix_variant, variants
from tests.check.emulated import matrices

SMALL = matrix_variant(32, 32, 32, 16, 16)


@pytest.mark.parametrize(
    "case",
    [
        {"a": (2, 70, 34), "b": (34, 38)},  # rows of even length: two halves at a time
        {"a": (67, 33), "b": (33, 37), "trans_b": True, "bias": True},
        {"a": (40, 66), "b": (2, 66, 34), "trans_a": True, "fused": True},
        {"a": (2, 33, 35), "b": (2, 35, 41), "trans_a": True, "trans_b": True},
        {"a": (2, 5, 8), "b": (2, 8, 9), "fused": True},
    ],
    ids=["pairs", "single B^T bias", "pairs A^T epilogue", "single A^T B^T", "single epilogue"],
)
def test_products(device, rng, case):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    with matrices(device) as emulating:
        for outcome in product(emulating, rng, chosen=SMALL, **case):
            problem = compare(outcome)
            assert problem is None, problem


def test_matrix_units_are_taken_where_they_are_and_for_f16_only(device):
    wide = Shape(4096, 4096, 4096, dtype="f16")
    with matrices(device) as emulating:
        room = {"max_invocations": 1024, "max_workgroup_bytes": 48 << 10}
        here = replace(emulating.caps, kind="gpu", subgroup_size=32, **room)
        small = replace(here, max_invocations=256, max_workgroup_bytes=16 << 10)
        other = replace(here, subgroup_size=16)
        f32 = Shape(4096, 4096, 4096)
        assert default(here, wide).name.startswith("matrix 128x128")
        assert not default(here, f32).name.startswith("matrix")
        assert default(small, wide).name.startswith("matrix 64x64")
        assert not any(v.name.startswith("matrix") for v in (*variants(here, f32), *variants(other, wide)))
    assert device.caps.matrix_f16 or not any(v.name.startswith("matrix") for v in variants(device.caps, wide))


@pytest.mark.parametrize("format", ["q4_0", "q6_k", "f16"])
def test_products_with_stored_weights(device, rng, format):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    entry, pieces = {"q4_0": ("linear_bias_residual", 2), "q6_k": ("gated_linear", 1), "f16": ("linear", 1)}[format]
    with matrices(device) as emulating:
        for outcome in wide_rows(
            emulating, rng, chosen=wide_variant(32, 32, 16, 16), entry=entry, format=format, rows=70, cols=256,
            tokens=33, pieces=pieces, size=3e5,
        ):  # fmt: skip
            problem = compare(outcome)
            assert problem is None, problem


@pytest.mark.parametrize(
    "case",
    [
        {"a": (2, 61, 45), "b": (2, 45, 39)},
        {"a": (61, 45), "b": (45, 40), "trans_b": True, "bias": True},
        {"a": (67, 46), "b": (46, 70), "trans_a": True},
    ],
    ids=["all odd", "odd lines of k B^T bias", "odd lines of m A^T"],
)
def test_large_products_read_odd_lines_in_pairs(device, rng, case, monkeypatch):
    if not device.caps.f16:
        pytest.skip("the device has no f16")
    monkeypatch.setattr(matmul_matrix, "_LARGE", 0)
    with matrices(device) as emulating:
        for outcome in product(emulating, rng, chosen=SMALL, **case):
            problem = compare(outcome)
            assert problem is None, problem
