"""The cases of every shader with their float64 NumPy truths: `anygpu check` and the test suite run the same list.

A module of this package that defines `cases()` is a family; there is no second list.
"""

from __future__ import annotations

import importlib
import pkgutil

from nn.check.base import Case, Outcome, compare, run_case

__all__ = ["Case", "Outcome", "all_cases", "compare", "families", "run_case"]


def families() -> list[str]:
    """Names of the modules here that define cases, in order."""
    names = []
    for info in pkgutil.iter_modules(__path__):
        if hasattr(importlib.import_module(f"{__name__}.{info.name}"), "cases"):
            names.append(info.name)
    return names


def all_cases() -> list[Case]:
    """Every case of every family."""
    return [case for name in families() for case in importlib.import_module(f"{__name__}.{name}").cases()]
