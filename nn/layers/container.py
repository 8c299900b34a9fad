"""Modules in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nn.layers.module import Module, modules_in


class Sequential(Module):
    """Calls its layers one after another: modules, or functions such as nn.functional.relu. Named "0", "1", ..."""

    def __init__(self, *layers: Module | Callable[..., Any]) -> None:
        self.layers = layers

    def named_children(self) -> Iterator[tuple[str, Module]]:
        for i, layer in enumerate(self.layers):
            yield from modules_in(str(i), layer)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __getitem__(self, i: int) -> Module | Callable[..., Any]:
        return self.layers[i]

    def __len__(self) -> int:
        return len(self.layers)
