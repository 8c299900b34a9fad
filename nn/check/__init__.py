"""The cases of every shader with their float64 NumPy truths: `anygpu check` and the test suite run the same list.

A module of this package that defines `cases()` is a family; there is no second list.
"""

from __future__ import annotations

import importlib
import pkgutil

from nn.check.base import Case, Outcome, compare, lacking, run_case

__all__ = ["Case", "Outcome", "all_cases", "cases_by_family", "compare", "families", "lacking", "run_case"]


def families() -> list[str]:
    """Names of the modules here that define cases, in alphabetical order."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [name for name in names if hasattr(importlib.import_module(f"{__name__}.{name}"), "cases")]


def cases_by_family() -> dict[str, list[Case]]:
    """Every case, in an order that is the same every time."""
    return {name: importlib.import_module(f"{__name__}.{name}").cases() for name in families()}


def all_cases() -> list[Case]:
    """Every case of every family, in the order of `cases_by_family`."""
    return [case for cases in cases_by_family().values() for case in cases]
