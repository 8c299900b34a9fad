"""Layers with parameters; torch.nn's names and signatures, plus the device they live on."""

from nn.layers.container import Sequential
from nn.layers.linear import Embedding, Linear
from nn.layers.module import Keys, Module, Parameter, StateError
from nn.layers.norm import LayerNorm, RMSNorm

__all__ = ["Embedding", "Keys", "LayerNorm", "Linear", "Module", "Parameter", "RMSNorm", "Sequential", "StateError"]
