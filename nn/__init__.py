"""nn: tensors, models, training and text generation on any GPU, through gpu/."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nn.checkpointing import checkpoint
    from nn.functions import grad, value_and_grad
    from nn.graph.explain import explain
    from nn.graph.jit import jit
    from nn.llm import LLM
    from nn.random import Generator
    from nn.tape import enable_grad, no_grad
    from nn.tensor import Tensor

__all__ = [
    "LLM", "Generator", "Tensor", "checkpoint", "enable_grad", "explain", "grad", "jit", "no_grad", "value_and_grad",
]  # fmt: skip
_HOME = {
    "LLM": "nn.llm", "Generator": "nn.random", "Tensor": "nn.tensor", "checkpoint": "nn.checkpointing",
    "enable_grad": "nn.tape", "explain": "nn.graph.explain", "grad": "nn.functions", "jit": "nn.graph.jit",
    "no_grad": "nn.tape", "value_and_grad": "nn.functions",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:  # imported on use: the tokenizer's packages come with anygpu[chat]
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nn' has no attribute {name!r}")
