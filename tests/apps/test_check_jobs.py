"""`anygpu check --jobs`: the same report from several processes, and one that dies costs one case."""

from __future__ import annotations

import json

import pytest

from apps import cli
from apps.check import MODES, Check
from apps.check_jobs import default_jobs, run_in_processes
from gpu import NoAdapter
from tests.fixtures.check_families import families


def test_a_process_that_dies_costs_the_case_it_was_at():
    check, seen = Check(families(), MODES), []
    run_in_processes(check, families, 3, lambda done, total: seen.append((done, total)))
    status = {(r.mode, r.case): (r.status, r.message) for r in check.results}
    assert len(check.results) == check.total == 22 == len(status)
    for mode in MODES:
        assert status[mode, "dies"] == ("failed", "the process that ran this case ended with exit code 7")
        assert status[mode, "wrong"][0] == "failed" and "third" in status[mode, "wrong"][1]
    assert sum(s == "passed" for s, _ in status.values()) == 18
    assert check.header["device"]["name"] and seen[-1][1] == 22


def test_the_report_is_that_of_one_process(capsys):
    reports = []
    for jobs in ("1", "2"):
        assert cli.main(["check", "--json", "--filter", "cache/cache", "--jobs", jobs]) == 0
        report = json.loads(capsys.readouterr().out)
        for result in report["results"]:
            del result["seconds"]
        del report["seconds"]
        reports.append(report)
    assert reports[0] == reports[1] and reports[0]["counts"]["passed"] > 0


def test_a_device_that_does_not_open_is_an_error():
    with pytest.raises(NoAdapter, match="nosuch"):
        run_in_processes(Check(families(), MODES, "nosuch"), families, 2, lambda done, total: None)


def test_jobs(capsys):
    assert default_jobs("cpu") == 1 and 1 <= default_jobs("gpu") <= 8
    assert cli.main(["check", "--jobs", "0"]) == 2
    assert "--jobs must be a whole number over 0" in capsys.readouterr().err
    assert cli.main(["check", "--jobs", "99999"]) == 2
    assert "--jobs 99999: each opens devices of its own; at most" in capsys.readouterr().err
