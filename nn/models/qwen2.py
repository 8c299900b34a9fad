"""Qwen 2 and 2.5: the llama block with biases on q, k and v. Source: Yang et al. 2024, arXiv:2407.10671."""

from nn.models.llama import Block

__all__ = ["Block"]
