"""Tensor: a shape, a dtype, a device and a node of the lazy graph. Nothing runs until a value is asked for.

Names and semantics are PyTorch's, with these differences, each stated where it bites:
dtypes are strings ("f32 f16 i32 u32 bool"; "u8 bf16" are storage that only kernels read); two tensors of different
dtypes are never promoted; a Python number takes the dtype of the tensor that it meets.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from nn import tape
from nn.arguments import axis_of, broadcast_shapes, host_array, sizes
from nn.graph import ir, schedule, scopes
from nn.ops.base import DTYPES, Array, Op, Spec
from nn.quant.formats import bf16_values
from nn.quant.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpu import Device

Scalar = bool | int | float


class Tensor:
    """An n-dimensional array on a device, possibly not computed yet.

    Args:
        data: a NumPy array, (nested) list or number, which is uploaded; or an Array or Weight that is on the device.
            float64 arrays need dtype="f32" said out loud; int64 becomes i32 where every value fits. Lists of floats
            become f32, of ints i32, of bools bool.
        device: where it lives. Not needed for an Array or Weight.
        dtype: a key of nn.ops.base.DTYPES; the data is converted (bf16: to nearest, ties to even).
        requires_grad: whether backward puts a gradient into .grad; floats only.
    Raises: TypeError for a dtype that would lose values, ValueError for integers that do not fit.
    """

    __slots__ = ("__weakref__", "_device", "_grad", "_hooks", "_wants_grad", "history", "node")
    __array_ufunc__ = None  # numpy_scalar * tensor comes to __rmul__
    __hash__ = object.__hash__

    def __init__(
        self, data: Any, device: Device | None = None, *, dtype: str | None = None, requires_grad: bool = False
    ) -> None:
        self.history: tuple[tape.History, int] | None = None  # the operation that made it, and which of its results
        self._grad: Tensor | None = None
        self._hooks: dict[int, tape.Hook] | None = None
        self._wants_grad = False
        self._place(data, device, dtype)
        if requires_grad:
            self.requires_grad = True

    def _place(self, data: Any, device: Device | None, dtype: str | None) -> None:
        """Find or make the node."""
        if isinstance(data, ir.Node):
            if device is None:
                raise TypeError("Tensor: a node needs its device; pass device=")
            self._device, self.node = device, data
            return
        if isinstance(data, Tensor):
            raise TypeError("Tensor: got a Tensor; use .clone() for a copy or .to(...) to convert")
        if isinstance(data, Array | Weight):
            if dtype is not None and dtype != (data.dtype if isinstance(data, Array) else data.format):
                raise TypeError(
                    f"Tensor: the value on the device is not {dtype}; wrap it as it is, then use .to({dtype!r})"
                )
            buffer = data.buffer if isinstance(data, Array) else data.windows[0].buffer
            self._device, self.node = device or buffer.device, ir.leaf(data)
            return
        if device is None:
            raise TypeError("Tensor: data from the host needs a device; pass device=Device.open()")
        if not hasattr(device, "upload"):
            raise TypeError(f"Tensor: device is {device!r}; expected an open Device, as Device.open() gives")
        array, dtype = host_array(data, dtype)
        buffer = device.upload(array) if array.size else device.alloc(4)
        self._device, self.node = device, ir.leaf(Array(buffer, array.shape, dtype))

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.node.spec.shape

    @property
    def dtype(self) -> str:
        """A key of DTYPES, or the block format of a Weight such as "q4_1"."""
        return self.node.spec.dtype

    @property
    def device(self) -> Device:
        return self._device

    @property
    def ndim(self) -> int:
        return len(self.node.spec.shape)

    @overload
    def size(self, dim: None = None) -> tuple[int, ...]: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        """The shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[axis_of("size", dim, self.ndim)]

    def numel(self) -> int:
        return self.node.spec.size

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        state = "in memory" if self.node.value is not None else f"lazy: {ir.name_of(self.node.op)}"
        needs = ", requires_grad" if self.requires_grad else ""
        return f"Tensor({list(self.shape)}, {self.dtype}, {state}{needs})"

    # --- gradients ---------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are taken of it: it was asked for, or an operand of what made it needs one."""
        return self._wants_grad or self.history is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if self.history is not None:
            if not wanted:
                raise RuntimeError("requires_grad: this tensor is a result; .detach() gives it without its history")
            return
        if wanted and self.dtype not in tape.DIFFERENTIABLE:
            raise TypeError(
                f"requires_grad: the tensor is {self.dtype}; gradients are taken of {', '.join(tape.DIFFERENTIABLE)}"
            )
        self._wants_grad = bool(wanted)

    @property
    def grad(self) -> Tensor | None:
        """The gradient that backward() added up here, if any."""
        return self._grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        trace = scopes.current_trace()
        if trace is not None:
            trace.set_grad(self, self._grad, added=False)
        self._grad = gradient

    def add_grad(self, gradient: Tensor) -> None:
        """Add to .grad, as backward does."""
        trace = scopes.current_trace()
        if trace is not None:
            trace.set_grad(self, self._grad, added=True)
        self._grad = gradient if self._grad is None else self._grad + gradient

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Ask for a gradient, or no more. Returns self."""
        self.requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no remembered operation made it."""
        return self.history is None

    @property
    def grad_fn(self) -> tape.History | None:
        """The remembered operation that made it, if any."""
        return None if self.history is None else self.history[0]

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Add d self / d leaf to the .grad of every leaf that needs it, as torch.Tensor.backward.

        Args:
            gradient: of self's shape and dtype, what the derivative is multiplied with; None is 1 for a single element.
            retain_graph: keep the history for another walk; None: as create_graph.
            create_graph: remember the operations of the walk too, for second derivatives.
            inputs: only these tensors get a .grad.
        Raises: RuntimeError where no gradient is needed, was walked already, or an operand was overwritten since.
        """
        from nn.autograd import backward

        backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)

    def register_hook(self, hook: tape.Hook) -> tape.HookHandle:
        """Call hook(gradient) when self's gradient is known; a tensor that it returns replaces the gradient."""
        if not self.requires_grad:
            raise RuntimeError("register_hook: the tensor needs no gradient; set requires_grad first")
        if self.history is not None:
            history, index = self.history
            return tape.add_hook(history.hooks.setdefault(index, {}), hook)
        if self._hooks is None:
            self._hooks = {}
        return tape.add_hook(self._hooks, hook)

    def retain_grad(self) -> None:
        """Have backward leave the gradient in .grad although self is no leaf."""
        if not self.requires_grad:
            raise RuntimeError("retain_grad: the tensor needs no gradient; set requires_grad first")
        if self.history is not None:
            history, index = self.history
            history.kept[index] = weakref.ref(self)

    # --- values ------------------------------------------------------------------------------------------------------

    def realize(self) -> Tensor:
        """Compute the value now and keep it on the device. Returns self."""
        schedule.realize(self._device, [self.node])
        return self

    def numpy(self) -> np.ndarray:
        """The value on the host (waits for the device). bf16 comes back as f32, which holds it exactly; a weight is
        decoded to f32."""
        self.realize()
        if isinstance(self.node.value, Weight):
            return self.node.value.to_numpy(self._device)
        value = self.array()
        kind = DTYPES[value.dtype][1]
        if value.size == 0:
            out = np.zeros(value.shape, kind)
        else:
            out = self._device.read(value.buffer, kind, value.shape)
        if value.dtype == "bool":
            return out.astype(np.bool_)
        if value.dtype == "bf16":
            return bf16_values(out)
        return out

    def array(self) -> Array:
        """The dense value in device memory, computed if need be: what kernels and recorders take."""
        self.realize()
        if not isinstance(self.node.value, Array):
            raise TypeError(
                f"this tensor is a weight in format {self.dtype}; only linear and embedding operations read it"
            )
        return self.node.value

    def item(self) -> Any:
        """The only element as a Python number."""
        if self.numel() != 1:
            raise ValueError(f"item: the tensor has {self.numel()} elements, it takes one; use .numpy()")
        return self.numpy().reshape(-1)[0].item()

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = self.numpy()
        return out if dtype is None else out.astype(dtype)

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise ValueError(f"the truth of a tensor with {self.numel()} elements is ambiguous; use .any() or .all()")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(len(self)):
            yield self[i]

    # --- operators ---------------------------------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Tensor:
        return elementwise.add(self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return elementwise.add(other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return elementwise.sub(self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return elementwise.sub(other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return elementwise.mul(self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return elementwise.mul(other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return elementwise.div(self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return elementwise.div(other, self)

    def __floordiv__(self, other: Operand) -> Tensor:
        return elementwise.floor_divide(self, other)

    def __rfloordiv__(self, other: Operand) -> Tensor:
        return elementwise.floor_divide(other, self)

    def __mod__(self, other: Operand) -> Tensor:
        return elementwise.remainder(self, other)

    def __rmod__(self, other: Operand) -> Tensor:
        return elementwise.remainder(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return elementwise.pow(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return elementwise.pow(other, self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return matmul.matmul(self, other)

    def __neg__(self) -> Tensor:
        return elementwise.neg(self)

    def __abs__(self) -> Tensor:
        return elementwise.abs(self)

    def __invert__(self) -> Tensor:
        return elementwise.bitwise_not(self)

    def __and__(self, other: Operand) -> Tensor:
        return elementwise.bitwise_and(self, other)

    def __or__(self, other: Operand) -> Tensor:
        return elementwise.bitwise_or(self, other)

    def __xor__(self, other: Operand) -> Tensor:
        return elementwise.bitwise_xor(self, other)

    def __lshift__(self, other: Operand) -> Tensor:
        return elementwise.bitwise_left_shift(self, other)

    def __rshift__(self, other: Operand) -> Tensor:
        return elementwise.bitwise_right_shift(self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lt__(self, other: Operand) -> Tensor:
        return elementwise.lt(self, other)

    def __le__(self, other: Operand) -> Tensor:
        return elementwise.le(self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return elementwise.gt(self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return elementwise.ge(self, other)

    def __eq__(self, other: Operand) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return elementwise.eq(self, other)

    def __ne__(self, other: Operand) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return elementwise.ne(self, other)

    def __getitem__(self, index: Any) -> Tensor:
        return movement.index(self, index)

    # --- shapes ------------------------------------------------------------------------------------------------------

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        return movement.reshape(self, sizes(shape))

    def view(self, *shape: int | Sequence[int]) -> Tensor:
        """As reshape: the graph decides whether elements move, so no layout is an error."""
        return movement.reshape(self, sizes(shape))

    def permute(self, *dims: int | Sequence[int]) -> Tensor:
        return movement.permute(self, sizes(dims))

    def expand(self, *size: int | Sequence[int]) -> Tensor:
        return movement.expand(self, sizes(size))

    @property
    def T(self) -> Tensor:
        """All axes reversed (for a matrix, its transpose)."""
        return movement.permute(self, tuple(reversed(range(self.ndim))))

    @property
    def mT(self) -> Tensor:
        return movement.transpose(self, -2, -1)

    # --- dtypes and memory -------------------------------------------------------------------------------------------

    def to(self, target: str | Device) -> Tensor:
        """Convert to a dtype, or copy to another device (through the host)."""
        if isinstance(target, str):
            return elementwise.cast(self, target)
        return self if target is self._device else Tensor(self.numpy(), target, dtype=self.dtype)

    def float(self) -> Tensor:
        return self.to("f32")

    def half(self) -> Tensor:
        return self.to("f16")

    def int(self) -> Tensor:
        return self.to("i32")

    def bool(self) -> Tensor:
        return self.to("bool")

    def detach(self) -> Tensor:
        """The same value, cut from the operations that made it."""
        return Tensor(self.node, self._device)

    # --- functions ---------------------------------------------------------------------------------------------------

    def where(self, condition: Tensor, other: Operand) -> Tensor:
        """self where condition is true, else other."""
        return elementwise.where(condition, self, other)

    if TYPE_CHECKING:  # set by the modules themselves, see add_methods
        from nn.ops.elementwise import abs as abs
        from nn.ops.elementwise import add as add
        from nn.ops.elementwise import (
            ceil,
            clamp,
            cos,
            eq,
            erf,
            exp,
            exp2,
            expm1,
            floor,
            floor_divide,
            fmod,
            ge,
            gelu,
            gt,
            isfinite,
            isinf,
            isnan,
            le,
            log,
            log1p,
            log2,
            logical_and,
            logical_not,
            logical_or,
            logical_xor,
            lt,
            masked_fill,
            maximum,
            minimum,
            mul,
            ne,
            neg,
            pow,
            reciprocal,
            relu,
            remainder,
            round,
            rsqrt,
            sigmoid,
            sign,
            silu,
            sin,
            softplus,
            sqrt,
            square,
            sub,
            tan,
            tanh,
            trunc,
        )
        from nn.ops.elementwise import div as div
        from nn.ops.matmul import matmul
        from nn.ops.movement import (
            chunk,
            clone,
            contiguous,
            flatten,
            flip,
            narrow,
            pad,
            repeat,
            split,
            squeeze,
            transpose,
            tril,
            triu,
            unflatten,
            unsqueeze,
        )
        from nn.ops.reduce import all, amax, amin, any, argmax, argmin, logsumexp, max, mean, min, prod, std, sum, var
        from nn.ops.softmax import log_softmax, softmax


Operand = Tensor | bool | int | float


def apply(op: Op, *tensors: Tensor) -> Any:
    """Add an operation to the graph: a Tensor, or a tuple of them where `op.infer` gives several specs.

    Operands that `op.mutates` names have to be in memory of their own (they are computed now if they are lazy): after
    this call those Tensors stand for the written state, and whoever still holds a lazy reader of the old state gets an
    error when it runs after the write.
    """
    if not tensors:
        raise TypeError(f"{ir.name_of(op)}: apply needs at least one tensor; sources come from nn.ops.create")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{ir.name_of(op)}: got a {type(tensor).__name__}; operands are tensors (make one with Tensor(...))"
            )
    device = tensors[0]._device
    for tensor in tensors:
        if tensor._device is not device:
            raise TypeError(f"{ir.name_of(op)}: operands live on two devices; move one with .to(device)")
    for position in op.mutates:
        own_memory(op, tensors[position])
    inputs = tuple(tensor.node for tensor in tensors)
    specs = op.infer(*(node.spec for node in inputs))
    if isinstance(specs, Spec) and not op.mutates:
        result = Tensor(ir.Node(op, inputs, (specs,)), device)
        tape.remember(op, tensors, inputs, (result,))
        return result
    several = () if specs is None else (specs,) if isinstance(specs, Spec) else tuple(specs)
    node = ir.Node(op, inputs, several)
    results = tuple(Tensor(node.item(i, spec), device) for i, spec in enumerate(several))
    tape.remember(op, tensors, inputs, results)
    trace = scopes.current_trace()
    for i, position in enumerate(op.mutates):
        tensors[position].node = node.item(len(several) + i, inputs[position].spec)
        if trace is not None:
            trace.wrote(tensors[position], inputs[position])
    return results[0] if isinstance(specs, Spec) else results


def realize(*tensors: Tensor) -> None:
    """Compute several tensors in one recording."""
    for device in {tensor._device for tensor in tensors}:
        schedule.realize(device, [tensor.node for tensor in tensors if tensor._device is device])


def own_memory(op: Op, tensor: Tensor) -> None:
    """Make sure that an operand which is about to be written has memory that nothing else is made of."""
    node = tensor.node
    if isinstance(node.op, ir.Placeholder):
        raise ValueError(
            f"{ir.name_of(op)}: writes in place into an argument of a jitted function, which is a copy of the caller's "
            "tensor; let the function take that tensor from outside (a closure or an attribute)"
        )
    if node.value is not None or isinstance(node.op, ir.Item):
        return
    if isinstance(node.op, ir.View):
        raise ValueError(
            f"{ir.name_of(op)}: writes into an operand that is a {ir.name_of(node.op)} of another tensor; "
            "pass that tensor, or .clone() the view"
        )
    tensor.realize()


def add_methods(module: dict[str, Any]) -> None:
    """Make methods of a module's public functions whose first argument is `input`, where Tensor has none of that name.

    Called at the end of a module, so that it does not matter which module is imported first.
    """
    for name in module["__all__"]:
        function = module[name]
        if function.__code__.co_varnames[:1] == ("input",) and name not in Tensor.__dict__:
            setattr(Tensor, name, function)


from nn.ops import elementwise, matmul, movement, reduce, softmax  # noqa: E402, F401  (written with Tensor and apply)

__all__ = [
    "Tensor", "add_methods", "apply", "axis_of", "broadcast_shapes", "host_array", "realize", "sizes",
]  # fmt: skip
