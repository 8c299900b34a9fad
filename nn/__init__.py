"""nn: tensors, models and text generation on any GPU, through gpu/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nn.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on use: the tokenizer's packages come with anygpu[chat]
        from nn.llm import LLM

        return LLM
    raise AttributeError(f"module 'nn' has no attribute {name!r}")
