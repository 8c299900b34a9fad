"""torch.nn.functional's and torch's functions by name, and our own: whatever the modules of nn/ops offer in __all__."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

import nn.ops

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def _collect() -> dict[str, Any]:
    """Name -> public function, over every module of nn/ops. Raises ImportError where two modules share a name."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(nn.ops.__path__):
        module = importlib.import_module(f"nn.ops.{info.name}")
        for name in getattr(module, "__all__", ()):
            if name in found:
                raise ImportError(
                    f"nn.functional: {name} is offered by {found[name].__module__} and nn.ops.{info.name}"
                )
            found[name] = getattr(module, name)
    return found


globals().update(_collect())
__all__ = sorted(_collect())  # pyright: ignore[reportUnsupportedDunderAll]
