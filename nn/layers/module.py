"""Module and Parameter: attributes are the structure, and the path of attributes is the name of a weight."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from nn.graph.ir import leaf
from nn.graph.scopes import named
from nn.ops.base import Array
from nn.quant.weight import Weight
from nn.tape import DIFFERENTIABLE
from nn.tensor import Tensor, host_array

if TYPE_CHECKING:
    from gpu import Device


class StateError(ValueError):
    """A state does not fit a module. The message and the attributes list every name that is at fault."""

    def __init__(
        self, owner: str, missing: list[str], unexpected: list[str], wrong: list[tuple[str, str, str]]
    ) -> None:
        self.missing, self.unexpected, self.wrong = missing, unexpected, wrong
        lines = [f"load_state_dict: the state does not fit {owner}; nothing was loaded"]
        if missing:
            lines.append(f"  missing ({len(missing)}): {', '.join(missing)}")
        if unexpected:
            lines.append(f"  unexpected ({len(unexpected)}): {', '.join(unexpected)}")
        if wrong:
            shown = ", ".join(f"{name} is {got}, expected {want}" for name, got, want in wrong)
            lines.append(f"  wrong ({len(wrong)}): {shown}")
        if not wrong:
            lines.append("  strict=False loads the names that do fit")
        super().__init__("\n".join(lines))


class Keys(NamedTuple):
    """What load_state_dict left out."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Parameter(Tensor):
    """A tensor that belongs to a module and is part of its state.

    Floats need gradients unless told otherwise; weights in block formats cannot.
    """

    __slots__ = ()

    def __init__(
        self, data: Any, device: Device | None = None, *, dtype: str | None = None, requires_grad: bool | None = None
    ) -> None:
        super().__init__(data, device, dtype=dtype)
        self.requires_grad = self.dtype in DIFFERENTIABLE if requires_grad is None else requires_grad


class _Calls(threading.local):
    """The modules of this thread whose forward is running, outermost first."""

    def __init__(self) -> None:
        self.running: list[Module] = []


_calls = _Calls()


class Module:
    """Base of layers and models. Parameters, modules, and lists, tuples and dicts of modules among the attributes make
    up the structure; `self.blocks[3].attention.query.weight` is named "blocks.3.attention.query.weight".
    """

    training: bool = True

    def train(self, mode: bool = True) -> Self:
        """Set `training` here and in all modules below: dropout and batch statistics depend on it. Returns self."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """As train(False)."""
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward. What it makes is named by attribute path in traces and profiles, as parameters are."""
        running = _calls.running
        name = next((name for name, child in running[-1].named_children() if child is self), "") if running else ""
        running.append(self)
        try:
            if not name:
                return self.forward(*args, **kwargs)
            with named(name):
                return self.forward(*args, **kwargs)
        finally:
            running.pop()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward(); define it in the subclass")

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Modules directly below this one, by attribute path."""
        for name, value in vars(self).items():
            yield from modules_in(name, value)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Every parameter by its path, in the order of definition; one that is reachable twice comes once."""
        seen: set[int] = set()
        for path, module in self.named_modules(prefix):
            for name, value in vars(module).items():
                if isinstance(value, Parameter) and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{path}.{name}" if path else name), value

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, in the order of named_parameters."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> parameter. Tied parameters appear under their first name."""
        return dict(self.named_parameters())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Keys:
        """Put values into the parameters, in place: recordings that read them see the new ones.

        Args:
            state: name -> NumPy array or Tensor of the parameter's shape; floats are converted to its dtype.
            strict: every name must be on both sides.
        Raises: StateError with all missing, unexpected and wrong-shape names; then nothing has changed.
        """
        own = dict(self.named_parameters())
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        wrong = [
            (name, describe(state[name]), describe(parameter))
            for name, parameter in own.items()
            if name in state and not fits(state[name], parameter)
        ]
        if wrong or (strict and (missing or unexpected)):
            raise StateError(type(self).__name__, missing, unexpected, wrong)
        for name, parameter in own.items():
            if name in state:
                assign(parameter, state[name])
        return Keys(missing, unexpected)


def modules_in(name: str, value: Any) -> Iterator[tuple[str, Module]]:
    """(path, module) of a module, or of the modules in a list, tuple or dictionary."""
    if isinstance(value, Module):
        yield name, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from modules_in(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from modules_in(f"{name}.{key}", item)


def describe(value: Any) -> str:
    """Dtype and shape, for messages."""
    shape = list(np.shape(value) if not isinstance(value, Tensor) else value.shape)
    return f"{value.dtype if isinstance(value, Tensor | np.ndarray) else type(value).__name__}{shape}"


def fits(value: Any, parameter: Parameter) -> bool:
    """Same shape, and floats for floats, integers for integers; block formats only as they are."""
    if isinstance(value, Tensor):
        same = value.dtype == parameter.dtype or (dense(value) and dense(parameter))
        return value.shape == parameter.shape and same
    floats = parameter.dtype not in ("i32", "u32", "u8", "bool")
    kind = np.asarray(value).dtype.kind
    return np.shape(value) == parameter.shape and (kind == "f" if floats else kind in "iub")


def dense(tensor: Tensor) -> bool:
    """Whether it is plain f32 or f16 numbers, which are converted into each other."""
    return not isinstance(tensor.node.value, Weight) and tensor.dtype in ("f32", "f16")


def assign(parameter: Parameter, value: Any) -> None:
    """Write the value into the parameter's memory."""
    old = parameter.node
    device: Device = parameter.device
    if isinstance(old.value, Weight):
        if isinstance(value, Tensor):
            parameter.node = value.node
        else:
            array = np.asarray(value, np.float32)
            parameter.node = leaf(Weight.from_array(device, array, old.value.format))
        return
    target = parameter.array()
    if isinstance(value, Tensor):
        source = value.to(parameter.dtype).to(device).array()
        if source.buffer is not target.buffer:
            device.memory.copy([(source.buffer, target.buffer)])
    else:
        array, _ = host_array(np.asarray(value), parameter.dtype)
        target.buffer.write(array)
    parameter.node = leaf(Array(target.buffer, target.shape, target.dtype))
    old.stale = "load_state_dict"
