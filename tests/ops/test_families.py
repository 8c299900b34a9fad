"""Every kernel family that operations declare: names, shape classes, defaults, and trials that give right results."""

from __future__ import annotations

import pytest

from gpu.tune_run import compare
from nn import ops

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
