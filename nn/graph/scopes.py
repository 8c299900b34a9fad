"""Where nodes are being made: in which part of a model, and in which recomputation."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Here(threading.local):
    """Of this thread: the path in a model, and the number of the recomputation (0: none)."""

    path = ""
    region = 0


here = _Here()
_regions = itertools.count(1)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Nodes made in the block belong to this part of a model: `named("layers.3")`, and in it `named("attention")`, give
    the path "layers.3.attention". For traces and profiles; nothing else depends on it."""
    before = here.path
    here.path = f"{before}.{name}" if before else name
    try:
        yield
    finally:
        here.path = before


@contextlib.contextmanager
def in_region(region: int) -> Iterator[None]:
    """Nodes made in the block belong to the recomputation of this number."""
    before = here.region
    here.region = region
    try:
        yield
    finally:
        here.region = before


@contextlib.contextmanager
def recomputation() -> Iterator[None]:
    """Nodes made in the block are computed although equal ones are there, so that those need not be kept."""
    with in_region(next(_regions)):
        yield
