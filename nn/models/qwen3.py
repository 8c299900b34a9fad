"""Qwen 3: the llama block with an RMSNorm of each query and key head. Source: Yang et al. 2025, arXiv:2505.09388."""

from nn.models.llama import Block

__all__ = ["Block"]
