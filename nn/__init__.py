"""nn: tensors, models and text generation on any GPU, through gpu/."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nn.checkpointing import checkpoint
    from nn.graph.explain import explain
    from nn.graph.jit import jit
    from nn.llm import LLM

__all__ = ["LLM", "checkpoint", "explain", "jit"]
_HOME = {"LLM": "nn.llm", "checkpoint": "nn.checkpointing", "explain": "nn.graph.explain", "jit": "nn.graph.jit"}


def __getattr__(name: str) -> Any:
    if name in _HOME:  # imported on use: the tokenizer's packages come with anygpu[chat]
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nn' has no attribute {name!r}")
