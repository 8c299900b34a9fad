"""Every check that `anygpu check` runs, as tests: each shader in each variant against float64 NumPy."""

from __future__ import annotations

import pytest

from nn.check import all_cases, run_case

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])
def test_case(case, device):
    missing = [need for need in sorted(case.needs) if not getattr(device.caps, need)]
    if missing:
        pytest.skip(f"the device has no {', '.join(missing)}")
    problem = run_case(case, device)
    assert problem is None, problem


def test_case_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
