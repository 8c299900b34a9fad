"""Optimizers, with torch.optim's names and arguments; all parameters of a group are updated by one dispatch."""

from nn.optim.adam import Adam, AdamW
from nn.optim.clip import clip_grad_norm_, clip_grad_value_
from nn.optim.optimizer import Optimizer
from nn.optim.schedule import LambdaLR, constant, cosine, linear, one_cycle, steps
from nn.optim.sgd import SGD, Lion

__all__ = [
    "SGD", "Adam", "AdamW", "LambdaLR", "Lion", "Optimizer", "clip_grad_norm_", "clip_grad_value_", "constant",
    "cosine", "linear", "one_cycle", "steps",
]  # fmt: skip
