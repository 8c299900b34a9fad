"""Every check that `anygpu check` runs, as tests; and that the checks leave no shader out.

Coverage is looked at without compiling anything (dry.py), so that it holds in one process of a parallel run too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu import Device
from nn.check import all_cases, cases_by_family, lacking, run_case
from tests.check import dry

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])
def test_case(case, device):
    if missing := lacking(case, device):
        pytest.skip(missing)
    problem = run_case(case, device, twice=True)
    assert problem is None, problem


@pytest.fixture(scope="module")
def seen():
    with Device.open() as device:
        caps = device.caps
        if not (caps.f16 and caps.wide_subgroups and caps.max_storage_buffers > 8):
            pytest.skip("cases reach everything only with f16, subgroups of eight or more, and nine storage buffers")
        # Nothing is compiled: what needs a GPU's matrix units and workgroups is seen here too.
        device.caps = replace(caps, matrix_f16=True, matrix_i8=True, subgroup_size=32, max_workgroup_bytes=48 << 10)
        yield dry.look(CASES, device)


def test_names_are_unique_and_the_order_is_fixed():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert names == [case.name for cases in cases_by_family().values() for case in cases]


def test_shaders_that_cases_name_are_there():
    files = set(dry.shader_files())
    for case in CASES:
        assert set(case.shaders) <= files, case.name


def test_every_file_is_named_by_a_case():
    assert set(dry.shader_files()) - {file for case in CASES for file in case.shaders} == set()


def test_every_entry_point_is_run_by_a_case(seen):
    run = {function for what in seen.values() for function in what.functions}
    there = {(file, entry) for file in dry.shader_files() for entry in dry.entries_of(file)}
    assert len(there) > 40
    assert there - run == set()


def test_every_function_is_reached_by_a_case(seen):
    """Also those that only some variants call."""
    run = {function for what in seen.values() for function in what.functions}
    there = {(file, function.name) for file in dry.shader_files() for function in dry.functions_of(file)}
    assert there - run == set()


def test_cases_run_a_shader_that_they_name(seen):
    """Names are what --filter and a bug report go by. A case that names none runs generated kernels alone."""
    for case in CASES:
        if case.name in seen:
            files = seen[case.name].files
            assert set(case.shaders) & files if case.shaders else not files, f"{case.name} runs {sorted(files)}"
