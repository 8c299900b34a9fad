"""Every kernel family that operations declare: names, shape classes, defaults, and trials that give right results."""

from __future__ import annotations

import numpy as np
import pytest

from gpu import Device
from gpu.tune_run import compare
from nn import ops
from nn.tensor import Tensor

FAMILIES = ops.families()


def test_there_are_families():
    assert "matmul" in FAMILIES


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_declarations(device, family):
    shapes = family.standard(device.caps)
    assert shapes
    classes = [family.shape_class(shape) for shape in shapes]
    assert len(set(classes)) == len(classes), "two standard shapes of one class: one is measured for nothing"
    for shape, name in zip(shapes, classes, strict=True):
        assert name.isprintable() and len(name) < 200
        variants = family.variants(device.caps, shape)
        names = [v.name for v in variants]
        assert len(set(names)) == len(names) and all(n.isprintable() and len(n) < 100 for n in names)
        assert family.default(device.caps, shape).name in names
        assert family.nbytes is None or family.nbytes(shape) > 0
        assert hash(shape) is not None


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_trials(device, family):
    """What a trial compares is right by its own tolerance, within its memory; how fast it is does not matter here."""
    shape = family.standard(device.caps)[0]
    variants = family.variants(device.caps, shape)
    verdict = compare(device, family, shape, variants, family.default(device.caps, shape), budget=1.0)
    struck = [t for t in verdict.timings if t.left_out.startswith(("wrong", "failed"))]
    assert not struck
    assert verdict.winner in {v.name for v in variants}


def test_an_operation_is_tuned_on_first_use_and_gives_the_same_bits_afterwards(monkeypatch, tmp_path, rng):
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path))
    monkeypatch.setenv("ANYGPU_TUNE", "full")
    a, b = rng.standard_normal((2, 40, 40)).astype(np.float32)
    results, hashes = [], []
    for _ in range(2):
        with Device.open() as device:
            results.append((Tensor(a, device) @ Tensor(b, device)).numpy())
            assert [key[:2] for key in device.tuner.table] == [("matmul", "f32 nn m64 n64 k64 b1")]
            hashes.append(device.tuner.hash())
    np.testing.assert_allclose(results[0], a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    assert results[0].tobytes() == results[1].tobytes() and hashes[0] == hashes[1]
