"""Optimizers, with torch.optim's names and arguments; all parameters of a group are updated by one dispatch."""

from nn.optim.adam import Adam, AdamW
from nn.optim.optimizer import Optimizer

__all__ = ["Adam", "AdamW", "Optimizer"]
