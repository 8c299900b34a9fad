"""The tuner's contract: modes, and what a family declares."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpu import Device, GpuError
from gpu.tune import Family


@dataclass(frozen=True)
class Size:
    n: int


@dataclass(frozen=True)
class Choice:
    name: str


ONE, TWO = Choice("one"), Choice("two")


def family(**changes):
    options = {
        "name": "fake",
        "variants": lambda caps, shape: (ONE, TWO),
        "default": lambda caps, shape: TWO if shape.n > 8 else ONE,
        "shape_class": lambda shape: f"n{shape.n}",
        "trial": None,
    }
    return Family(**{**options, **changes})


@pytest.mark.parametrize("mode", ["off", "use", ""])
def test_without_measurements_the_default_is_taken(monkeypatch, mode):
    monkeypatch.setenv("ANYGPU_TUNE", mode)
    with Device.open() as device:
        assert family().pick(device, Size(4)) == ONE
        assert family().pick(device, Size(9)) == TWO


def test_a_mode_that_is_none(monkeypatch):
    monkeypatch.setenv("ANYGPU_TUNE", "yes")
    with pytest.raises(GpuError, match="ANYGPU_TUNE=yes: expected one of off, use, full; unset it for use"):
        Device.open()


def test_the_code_of_a_family_follows_its_shaders_and_names():
    given = family(shaders=("norm",))
    code = given.code((ONE, TWO))
    assert code == given.code((TWO, ONE))  # their order is no difference
    assert len({code, given.code((ONE,)), family(shaders=("matmul",)).code((ONE, TWO)), family().code((ONE, TWO))}) == 4
    with_include = family(shaders=("norm/rms_norm.wgsl",)).code((ONE,))
    assert with_include != family(shaders=("lib/index.wgsl",)).code((ONE,))
