"""Operations, a file a family; and the kernel families that the tuner knows."""

from __future__ import annotations

import importlib
import pkgutil

from gpu.tune import Family


def families() -> dict[str, Family]:
    """Every gpu.tune.Family that a module here declares, by name. Raises ImportError where two share a name."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{info.name}")).values():
            if isinstance(value, Family) and found.setdefault(value.name, value) is not value:
                raise ImportError(f"nn.ops: two kernel families are called {value.name}; give one of them another name")
    return dict(sorted(found.items()))
