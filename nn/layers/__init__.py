"""Layers with parameters; torch.nn's names and signatures, plus the device they live on."""

from nn.layers.container import Sequential
from nn.layers.dropout import Dropout
from nn.layers.linear import Embedding, Linear
from nn.layers.module import Keys, Module, Parameter, StateError
from nn.layers.norm import LayerNorm, RMSNorm

__all__ = [
    "Dropout",
    "Embedding",
    "Keys",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "RMSNorm",
    "Sequential",
    "StateError",
]
