"""Element-wise functions. Each is one WGSL expression; chains of them become one kernel (nn/graph/fuse.py).

Operands broadcast as in PyTorch. A Python number takes the dtype of the tensors; tensors of different dtypes are an
error, with three exceptions that PyTorch makes too: comparisons give bool, `div` of integers gives f32, and `where`
takes a bool condition. f16 is computed in f32 and rounded when it is stored: once a fused kernel, not once a function.
Integer arithmetic wraps at 32 bits; dividing an integer by zero is not defined.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nn.graph.ir import COMPUTE, FLOATS, INTEGERS, Cast, Expand, Map, View, constant
from nn.ops.bf16 import NarrowBF16, WidenBF16
from nn.tensor import Tensor, add_methods, apply, broadcast_shapes

if TYPE_CHECKING:
    from nn.tensor import Operand

NUMBERS = (*FLOATS, *INTEGERS)
LN2 = math.log(2.0)
TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)


def operands(name: str, *args: Operand) -> tuple[Tensor, ...]:
    """Every argument as a tensor of one shape: numbers become constants of the tensors' dtype, shapes broadcast."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors:
        raise TypeError(f"{name}: got no tensor; use Python's own function for numbers")
    dtype = tensors[-1].dtype
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors[1:]):
        shape = broadcast_shapes(name, [tensor.shape for tensor in tensors])
    return tuple(
        spread(arg if isinstance(arg, Tensor) else number(name, arg, dtype, tensors[0]), shape) for arg in args
    )


def spread(input: Tensor, shape: tuple[int, ...]) -> Tensor:
    """input broadcast to a shape that is known to fit."""
    return input if input.shape == shape else apply(Expand(shape), input)


def number(name: str, value: object, dtype: str, like: Tensor) -> Tensor:
    """A Python (or NumPy) number as a 0-d constant of `dtype`. Raises TypeError where the dtype cannot hold it."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise TypeError(
            f"{name}: got a {type(value).__name__}; operands are tensors and numbers (make one with Tensor(...))"
        )
    if dtype in INTEGERS:
        low, high = (-(2**31), 2**31 - 1) if dtype == "i32" else (0, 2**32 - 1)
        if (isinstance(value, float) and not value.is_integer()) or not low <= value <= high:
            raise TypeError(f"{name}: {value!r} does not fit {dtype}; convert the tensor first, e.g. .to('f32')")
        value = int(value)
    elif dtype == "bool" and not isinstance(value, bool):
        raise TypeError(f"{name}: the number {value!r} meets a bool tensor; convert it first, e.g. .to('i32')")
    elif dtype in FLOATS:
        try:
            value = float(value)
        except OverflowError:
            raise TypeError(f"{name}: an integer of {int(value).bit_length()} bits does not fit {dtype}") from None
    return Tensor(constant(value, dtype), like.device)


def binary(op: Map, input: Operand, other: Operand) -> Tensor:
    return apply(op, *operands(op.name, input, other))


def require_floats(name: str, input: Tensor) -> None:
    """Raise TypeError unless input is of a float type."""
    if input.dtype not in FLOATS:
        raise TypeError(f"{name}: takes {' or '.join(FLOATS)}, got {input.dtype}; convert with .to('f32')")


# --- gradient rules that do not fit a line ----------------------------------------------------------------------------


def no_slope(dy: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Steps: zero wherever there is a derivative."""
    return (zeros_of(dy),) * (len(tensors) - 1)


def zeros_of(dy: Tensor) -> Tensor:
    return spread(number("gradient", 0.0, dy.dtype, dy), dy.shape)


def share(dy: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """dy for the operand that was chosen; half each where both are equal, as torch.maximum."""
    half = dy * 0.5
    return where(first, dy, where(second, 0.0, half)), where(second, dy, where(first, 0.0, half))


def pow_gradient(dy: Tensor, a: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """0 for the base where the exponent is 0, and for the exponent where 0 is raised to 0 or more, as torch.pow."""
    base = where(b == 0.0, 0.0, dy * b * pow(a, b - 1.0))
    return base, where((a == 0.0) & (b >= 0.0), 0.0, dy * y * log(a))


def silu_gradient(dy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    gate = sigmoid(x)
    return dy * (gate + y * (1.0 - gate))


def gelu_gradient(dy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Phi(x) + x phi(x), the normal distribution and its density."""
    below = (erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    return dy * (below + x * exp(square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi)))


def gelu_tanh_gradient(dy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    root = math.sqrt(2.0 / math.pi)
    bent = tanh((x + square(x) * x * 0.044715) * root)
    slope = (square(x) * (3 * 0.044715) + 1.0) * root
    return dy * 0.5 * (bent + 1.0 + x * (1.0 - square(bent)) * slope)


def where_gradient(dy: Tensor, condition: Tensor, a: Tensor, b: Tensor, y: Tensor) -> tuple[None, Tensor, Tensor]:
    return None, where(condition, dy, 0.0), where(condition, 0.0, dy)


# --- arithmetic ------------------------------------------------------------------------------------------------------

ADD = Map("add", "{0} + {1}", NUMBERS, rule=lambda dy, a, b, y: (dy, dy))
SUB = Map("sub", "{0} - {1}", NUMBERS, rule=lambda dy, a, b, y: (dy, -dy))
MUL = Map("mul", "{0} * {1}", NUMBERS, rule=lambda dy, a, b, y: (dy * b, dy * a))
DIV = Map("div", "{0} / {1}", rule=lambda dy, a, b, y: (dy / b, -dy * y / b))
NEG = Map("neg", "-{0}", (*FLOATS, "i32"), rule=lambda dy, x, y: -dy)
ABS = Map("abs", "abs({0})", NUMBERS, rule=lambda dy, x, y: dy * sign(x))
SIGN = Map("sign", "sign_{T}({0})", NUMBERS, rule=no_slope)
REMAINDER = Map("remainder", "remainder_{T}({0}, {1})", NUMBERS, rule=lambda dy, a, b, y: (dy, -dy * floor(a / b)))
FMOD = Map("fmod", "fmod_{T}({0}, {1})", NUMBERS, rule=lambda dy, a, b, y: (dy, -dy * trunc(a / b)))
FLOOR_DIVIDE = Map("floor_divide", "floor_divide_{T}({0}, {1})", NUMBERS, rule=no_slope)
MAXIMUM = Map("maximum", "max_{T}({0}, {1})", NUMBERS, rule=lambda dy, a, b, y: share(dy, a > b, a < b))
MINIMUM = Map("minimum", "min_{T}({0}, {1})", NUMBERS, rule=lambda dy, a, b, y: share(dy, a < b, a > b))
POW = Map("pow", "pow_f32({0}, {1})", rule=pow_gradient)
SQUARE = Map("square", "{0} * {0}", NUMBERS, rule=lambda dy, x, y: dy * x * 2)
RECIPROCAL = Map("reciprocal", "1.0 / {0}", rule=lambda dy, x, y: -dy * y * y)


def add(input: Operand, other: Operand) -> Tensor:
    """input + other."""
    return binary(ADD, input, other)


def sub(input: Operand, other: Operand) -> Tensor:
    """input - other."""
    return binary(SUB, input, other)


def mul(input: Operand, other: Operand) -> Tensor:
    """input * other."""
    return binary(MUL, input, other)


def div(input: Operand, other: Operand) -> Tensor:
    """input / other. Integers are divided as f32, as in PyTorch."""
    input, other = (a.to("f32") if isinstance(a, Tensor) and a.dtype in INTEGERS else a for a in (input, other))
    return binary(DIV, input, other)


def floor_divide(input: Operand, other: Operand) -> Tensor:
    """floor(input / other); floats give a float."""
    return binary(FLOOR_DIVIDE, input, other)


def remainder(input: Operand, other: Operand) -> Tensor:
    """input - floor(input / other) * other: the result has the sign of `other`, as Python's %. f32: exact while
    |input / other| < 2^24."""
    return binary(REMAINDER, input, other)


def fmod(input: Operand, other: Operand) -> Tensor:
    """input - trunc(input / other) * other: the result has the sign of input, as C's fmod.

    f32: exact while |input / other| < 2^24.
    """
    return binary(FMOD, input, other)


def pow(input: Operand, exponent: Operand) -> Tensor:
    """input ** exponent with IEEE's cases (negative bases with integer exponents, 0, infinities).

    Exponents 1, 2, 3, -1 and -0.5 become products and roots. Integer tensors take a number from 0 to 8.
    """
    if isinstance(input, Tensor) and isinstance(exponent, int | float) and not isinstance(exponent, bool):
        if input.dtype in INTEGERS:
            if not (float(exponent).is_integer() and 0 <= exponent <= 8):
                raise TypeError(f"pow: {input.dtype} ** {exponent}; integer tensors take 0..8, convert with .to('f32')")
            result = input * 0 + 1
            for _ in range(int(exponent)):
                result = result * input
            return result
        if exponent == 1:
            return input
        if exponent == 2:
            return square(input)
        if exponent == 3:
            return square(input) * input
        if exponent == -1:
            return reciprocal(input)
        if exponent == -0.5:
            return rsqrt(input)
    return binary(POW, input, exponent)


def neg(input: Tensor) -> Tensor:
    """-input."""
    return apply(NEG, input)


def abs(input: Tensor) -> Tensor:
    """|input|."""
    return apply(ABS, input)


def sign(input: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return apply(SIGN, input)


def square(input: Tensor) -> Tensor:
    """input * input."""
    return apply(SQUARE, input)


def reciprocal(input: Tensor) -> Tensor:
    """1 / input."""
    return apply(RECIPROCAL, input)


def maximum(input: Operand, other: Operand) -> Tensor:
    """The larger of two; NaN if either is."""
    return binary(MAXIMUM, input, other)


def minimum(input: Operand, other: Operand) -> Tensor:
    """The smaller of two; NaN if either is."""
    return binary(MINIMUM, input, other)


def clamp(input: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """input limited to [min, max]; NaN stays NaN."""
    if min is None and max is None:
        raise ValueError("clamp: give min, max or both")
    if min is not None:
        input = where(outside(input, min, LT), min, input)
    return input if max is None else where(outside(input, max, GT), max, input)


def outside(input: Tensor, bound: Operand, compare: Map) -> Tensor:
    """Where clamp takes the bound: past it, or where it is NaN. On the bound the gradient is input's, as in torch."""
    past = binary(compare, input, bound)
    return past | isnan(bound) if isinstance(bound, Tensor) and bound.dtype in FLOATS else past


# --- functions of floats ---------------------------------------------------------------------------------------------

EXP = Map("exp", "exp_f32({0})", rule=lambda dy, x, y: dy * y)
EXP2 = Map("exp2", "exp2_f32({0})", rule=lambda dy, x, y: dy * y * LN2)
EXPM1 = Map("expm1", "expm1_f32({0})", rule=lambda dy, x, y: dy * (y + 1))
LOG = Map("log", "log_f32({0})", rule=lambda dy, x, y: dy / x)
LOG2 = Map("log2", "log2_f32({0})", rule=lambda dy, x, y: dy / (x * LN2))
LOG1P = Map("log1p", "log1p_f32({0})", rule=lambda dy, x, y: dy / (x + 1))
SQRT = Map("sqrt", "sqrt({0})", rule=lambda dy, x, y: dy * 0.5 / y)
RSQRT = Map("rsqrt", "inverseSqrt({0})", rule=lambda dy, x, y: dy * -0.5 * y * y * y)
SIN = Map("sin", "sin({0})", rule=lambda dy, x, y: dy * cos(x))
COS = Map("cos", "cos({0})", rule=lambda dy, x, y: -dy * sin(x))
TAN = Map("tan", "tan({0})", rule=lambda dy, x, y: dy * (square(y) + 1))
TANH = Map("tanh", "tanh_f32({0})", rule=lambda dy, x, y: dy * (1 - square(y)))
ERF = Map("erf", "erf_f32({0})", rule=lambda dy, x, y: dy * exp(-square(x)) * TWO_OVER_ROOT_PI)
FLOOR = Map("floor", "floor({0})", rule=no_slope)
CEIL = Map("ceil", "ceil({0})", rule=no_slope)
TRUNC = Map("trunc", "trunc({0})", rule=no_slope)
ROUND = Map("round", "round({0})", rule=no_slope)
SIGMOID = Map("sigmoid", "sigmoid_f32({0})", rule=lambda dy, x, y: dy * y * (1 - y))
RELU = Map("relu", "max_{T}({0}, {T}(0))", NUMBERS, rule=lambda dy, x, y: where(x > 0, dy, 0.0))
SILU = Map("silu", "silu_f32({0})", rule=silu_gradient)
GELU = Map("gelu", "gelu_f32({0})", rule=gelu_gradient)
GELU_TANH = Map("gelu_tanh", "gelu_tanh_f32({0})", rule=gelu_tanh_gradient)
SOFTPLUS = Map("softplus", "softplus_f32({0})", rule=lambda dy, x, y: dy * sigmoid(x))


def exp(input: Tensor) -> Tensor:
    """e^input."""
    return apply(EXP, input)


def exp2(input: Tensor) -> Tensor:
    """2^input."""
    return apply(EXP2, input)


def expm1(input: Tensor) -> Tensor:
    """e^input - 1, accurate near 0."""
    return apply(EXPM1, input)


def log(input: Tensor) -> Tensor:
    """Natural logarithm; -infinity at 0, NaN below. Subnormal inputs count as the smallest normal number."""
    return apply(LOG, input)


def log2(input: Tensor) -> Tensor:
    """Logarithm to base 2; -infinity at 0, NaN below. Subnormal inputs count as the smallest normal number."""
    return apply(LOG2, input)


def log1p(input: Tensor) -> Tensor:
    """log(1 + input), accurate near 0."""
    return apply(LOG1P, input)


def sqrt(input: Tensor) -> Tensor:
    """Square root."""
    return apply(SQRT, input)


def rsqrt(input: Tensor) -> Tensor:
    """1 / sqrt(input)."""
    return apply(RSQRT, input)


def sin(input: Tensor) -> Tensor:
    """Sine of input in radians. Drivers promise 2^-11 absolute within [-pi, pi] only."""
    return apply(SIN, input)


def cos(input: Tensor) -> Tensor:
    """Cosine of input in radians. Drivers promise 2^-11 absolute within [-pi, pi] only."""
    return apply(COS, input)


def tan(input: Tensor) -> Tensor:
    """Tangent of input in radians."""
    return apply(TAN, input)


def tanh(input: Tensor) -> Tensor:
    """Hyperbolic tangent, -1 and 1 at the ends (no overflow)."""
    return apply(TANH, input)


def erf(input: Tensor) -> Tensor:
    """Error function, to about 3e-7."""
    return apply(ERF, input)


def floor(input: Tensor) -> Tensor:
    """Largest integer not above input."""
    return apply(FLOOR, input)


def ceil(input: Tensor) -> Tensor:
    """Smallest integer not below input."""
    return apply(CEIL, input)


def trunc(input: Tensor) -> Tensor:
    """Toward zero."""
    return apply(TRUNC, input)


def round(input: Tensor) -> Tensor:
    """To the nearest integer, ties to even."""
    return apply(ROUND, input)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + e^-input)."""
    return apply(SIGMOID, input)


def relu(input: Tensor) -> Tensor:
    """max(input, 0)."""
    return apply(RELU, input)


def silu(input: Tensor) -> Tensor:
    """input * sigmoid(input)."""
    return apply(SILU, input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """input * Phi(input), Phi the normal distribution; "tanh" takes the tanh form of Hendrycks & Gimpel 2016."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate={approximate!r}; expected 'none' or 'tanh'")
    return apply(GELU_TANH if approximate == "tanh" else GELU, input)


def softplus(input: Tensor, beta: float = 1.0) -> Tensor:
    """log(1 + e^(beta input)) / beta."""
    if beta <= 0:
        raise ValueError(f"softplus: beta must be > 0, got {beta}")
    return apply(SOFTPLUS, input) if beta == 1 else apply(SOFTPLUS, input * beta) * (1 / beta)


# --- comparisons, logic and bits -------------------------------------------------------------------------------------

EQ = Map("eq", "{0} == {1}", COMPUTE, "bool")
NE = Map("ne", "!({0} == {1})", COMPUTE, "bool")  # naga's != is false for NaN
LT = Map("lt", "{0} < {1}", NUMBERS, "bool")
LE = Map("le", "{0} <= {1}", NUMBERS, "bool")
GT = Map("gt", "{0} > {1}", NUMBERS, "bool")
GE = Map("ge", "{0} >= {1}", NUMBERS, "bool")
ISNAN = Map("isnan", "is_nan({0})", FLOATS, "bool")
ISINF = Map("isinf", "is_inf({0})", FLOATS, "bool")
ISFINITE = Map("isfinite", "is_finite({0})", FLOATS, "bool")
AND = Map("and", "{0} & {1}", (*INTEGERS, "bool"))
OR = Map("or", "{0} | {1}", (*INTEGERS, "bool"))
XOR = Map("xor", "{0} ^ {1}", INTEGERS)
XOR_BOOL = Map("xor", "{0} != {1}", ("bool",))
NOT = Map("not", "~{0}", INTEGERS)
NOT_BOOL = Map("not", "!{0}", ("bool",))
SHIFT_LEFT = Map("left_shift", "{0} << (u32({1}) & 31u)", INTEGERS)
SHIFT_RIGHT = Map("right_shift", "{0} >> (u32({1}) & 31u)", INTEGERS)
WHERE = Map("where", "select({2}, {1}, {0})", COMPUTE, condition=True, rule=where_gradient)


def eq(input: Operand, other: Operand) -> Tensor:
    """input == other, as bool."""
    return binary(EQ, input, other)


def ne(input: Operand, other: Operand) -> Tensor:
    """input != other, as bool."""
    return binary(NE, input, other)


def lt(input: Operand, other: Operand) -> Tensor:
    """input < other, as bool."""
    return binary(LT, input, other)


def le(input: Operand, other: Operand) -> Tensor:
    """input <= other, as bool."""
    return binary(LE, input, other)


def gt(input: Operand, other: Operand) -> Tensor:
    """input > other, as bool."""
    return binary(GT, input, other)


def ge(input: Operand, other: Operand) -> Tensor:
    """input >= other, as bool."""
    return binary(GE, input, other)


def isnan(input: Tensor) -> Tensor:
    """Is input NaN? Decided by its bits."""
    return apply(ISNAN, input)


def isinf(input: Tensor) -> Tensor:
    """Is input infinite? Decided by its bits."""
    return apply(ISINF, input)


def isfinite(input: Tensor) -> Tensor:
    """Is input neither infinite nor NaN? Decided by its bits."""
    return apply(ISFINITE, input)


def logical_not(input: Tensor) -> Tensor:
    """True where input is zero."""
    return apply(NOT_BOOL, cast(input, "bool"))


def logical_and(input: Tensor, other: Tensor) -> Tensor:
    """True where both are nonzero."""
    return binary(AND, cast(input, "bool"), cast(other, "bool"))


def logical_or(input: Tensor, other: Tensor) -> Tensor:
    """True where either is nonzero."""
    return binary(OR, cast(input, "bool"), cast(other, "bool"))


def logical_xor(input: Tensor, other: Tensor) -> Tensor:
    """True where one and only one is nonzero."""
    return binary(XOR_BOOL, cast(input, "bool"), cast(other, "bool"))


def bitwise_and(input: Tensor, other: Operand) -> Tensor:
    """input & other, for integers and bools."""
    return binary(AND, input, other)


def bitwise_or(input: Tensor, other: Operand) -> Tensor:
    """input | other, for integers and bools."""
    return binary(OR, input, other)


def bitwise_xor(input: Tensor, other: Operand) -> Tensor:
    """input ^ other, for integers and bools."""
    return binary(XOR_BOOL if input.dtype == "bool" else XOR, input, other)


def bitwise_not(input: Tensor) -> Tensor:
    """~input for integers, not input for bools."""
    return apply(NOT_BOOL if input.dtype == "bool" else NOT, input)


def bitwise_left_shift(input: Tensor, other: Operand) -> Tensor:
    """input << other; shifts count modulo 32."""
    return binary(SHIFT_LEFT, input, other)


def bitwise_right_shift(input: Tensor, other: Operand) -> Tensor:
    """input >> other (arithmetic for i32); shifts count modulo 32."""
    return binary(SHIFT_RIGHT, input, other)


def where(condition: Tensor, input: Operand, other: Operand) -> Tensor:
    """input where condition is true, else other. condition is bool; the three broadcast."""
    if not isinstance(input, Tensor) and not isinstance(other, Tensor):  # PyTorch's default dtypes
        dtype = "bool" if isinstance(input, bool) and isinstance(other, bool) else "f32"
        if isinstance(input, int) and isinstance(other, int) and dtype != "bool":
            dtype = "i32"
        input, other = (number("where", value, dtype, condition) for value in (input, other))
    elif not isinstance(input, Tensor) and isinstance(other, Tensor):
        input = number("where", input, other.dtype, other)
    return apply(WHERE, *operands("where", condition, input, other))


def masked_fill(input: Tensor, mask: Tensor, value: float) -> Tensor:
    """input with `value` where mask (bool, broadcast to input) is true."""
    return where(mask, value, input)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def cast(input: Tensor, dtype: str) -> Tensor:
    """input as another dtype of f32, f16, bf16, i32, u32, bool.

    Float to integer truncates, saturates, and takes NaN to 0; to f16 and bf16 rounds at once, also inside a fused
    kernel (bf16: to nearest, ties to even; it is storage, and goes through f32).
    """
    if input.dtype == dtype:
        return input
    if input.dtype == "bf16":
        return cast(_widened(input), dtype)
    return apply(NarrowBF16(), cast(input, "f32")) if dtype == "bf16" else apply(Cast(dtype), input)


def _widened(input: Tensor) -> Tensor:
    """bf16 as f32. A view of it becomes the same view of the f32 values: nothing copies bf16 on a device."""
    node = input.node
    if isinstance(node.op, View):
        return apply(node.op, _widened(Tensor(node.inputs[0], input.device)))
    return apply(WidenBF16(), input)


__all__ = [
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "cast", "ceil", "clamp", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor",
    "floor_divide", "fmod", "ge", "gelu", "gt", "isfinite", "isinf", "isnan", "le", "log", "log1p", "log2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "ne",
    "neg", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "silu", "sin", "softplus",
    "sqrt", "square", "sub", "tan", "tanh", "trunc", "where",
]  # fmt: skip
add_methods(globals())
