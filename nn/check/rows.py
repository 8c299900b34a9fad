"""What the checks of row kernels (softmax.py, norm.py) share: variants and, for each, shapes around its switches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpu.device import Capabilities
from nn.ops.rows import SERIAL, RowVariant, default

HOWS = ("serial", "tree", "subgroups")

# One element; odd; rows around the serial kernel's workgroup of 8; columns around its vec4 loop.
_SERIAL_SHAPES = [(1, 1), (3, 5), (7, 64), (8, 65), (9, 6), (2, 257)]
_SINGLE = [(1, 1), (3, 5), (9, 6), (8, 65), (2, 257), (2, 1031)]
_FOURS = [(1, 4), (3, 12), (17, 64), (2, 260), (3, 512), (2, 1028)]

# Runs within a subgroup and across several; several rows a workgroup, with some left over; rows that are held as a
# whole and rows that are not (packs past lanes * held are read again).
FEW = (RowVariant(4, 2, 64, 4), RowVariant(64, 1, 64, 1))
ALL = (*FEW, RowVariant(256, 4, 256, 4), RowVariant(8, 3, 32, 1))
FOLDED = {"serial": (524_289, 2), "tree": (65_537, 3)}  # one workgroup past 65,535 of them


def runs(
    caps: Capabilities, how: str, *, every: bool, folded: bool = False
) -> Iterator[tuple[RowVariant, tuple[int, int]]]:
    """Variants with the shapes to check them at. every: all of them, and what a GPU would take by default."""
    if how == "serial":
        for shape in _SERIAL_SHAPES + ([FOLDED[how]] if folded else []):
            yield SERIAL, shape
        return
    for variant in ALL if every else FEW:
        variant = replace(variant, subgroups=how == "subgroups")
        for shape in _FOURS if variant.pack == 4 else _SINGLE:
            yield variant, shape
        if variant.pack == 4 and variant.lanes == 256:
            yield variant, (2, 4 * variant.lanes * variant.held + 4)
        if folded and how == "tree" and variant.wg == variant.lanes == 64:
            yield variant, FOLDED[how]
    if every:
        gpu = replace(caps, kind="gpu", subgroups=how == "subgroups")
        for shape in ((3, 5), (2, 1028), (700, 260), (1, 9000)):
            yield default(gpu, *shape), shape


def needs(how: str, *dtypes: str) -> frozenset[str]:
    """Capabilities that a case needs."""
    return frozenset(({"f16"} if "f16" in dtypes else set()) | ({"subgroups"} if how == "subgroups" else set()))


def libraries(how: str) -> tuple[str, ...]:
    """Files that the row kernels include."""
    if how == "serial":
        return ()
    return (f"lib/runs{'_subgroup' if how == 'subgroups' else ''}.wgsl", "lib/pack1.wgsl", "lib/pack4.wgsl")
