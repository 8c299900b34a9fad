"""What the tests of gpu/ share."""

from __future__ import annotations

import pytest

from gpu import Device


@pytest.fixture
def fresh():
    """A device of its own, without canaries: its counters start at what the probes made."""
    with Device.open() as device:
        yield device
