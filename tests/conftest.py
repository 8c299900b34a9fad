"""Fixtures: one device a process, and a canary behind every buffer, looked at after each test."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpu import Device, GpuError

os.environ.setdefault("ANYGPU_TUNE", "off")  # not what was measured on this machine once


@pytest.fixture(scope="session")
def _device():
    """No adapter is a failure, not a skip: every machine that runs these tests has at least a software driver."""
    device = Device.open(canary=True)
    yield device
    device.close()


@pytest.fixture
def device(_device):
    """The session's device; after the test no byte behind any buffer may have changed."""
    yield _device
    if not _device.closed:
        _device.memory.check_canaries()


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name: fresh inputs a test, the same every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


def pytest_report_header():
    try:
        with Device.open() as device:
            caps = device.caps
            extras = f"f16 {caps.f16} subgroups {caps.subgroup_size} checked {caps.checked}"
            return f"device: {caps.name} | {caps.backend_version} | {extras}"
    except GpuError as error:
        return f"device: none ({error})"
