"""Element-wise functions. Each is one WGSL expression; chains of them become one kernel (nn/graph/fuse.py).

Operands broadcast as in PyTorch. A Python number takes the dtype of the tensors; tensors of different dtypes are an
error, with three exceptions that PyTorch makes too: comparisons give bool, `div` of integers gives f32, and `where`
takes a bool condition. f16 is computed in f32 and rounded when it is stored: once a fused kernel, not once a function.
Integer arithmetic wraps at 32 bits; dividing an integer by zero is not defined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nn.graph.ir import COMPUTE, FLOATS, INTEGERS, Cast, Expand, Map, constant
from nn.tensor import Tensor, apply, broadcast_shapes

if TYPE_CHECKING:
    from nn.tensor import Operand

NUMBERS = (*FLOATS, *INTEGERS)


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


def spread(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x if x.shape == shape else apply(Expand(shape), x)


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
        value = float(value)
    return Tensor(constant(value, dtype), like.device)


def binary(op: Map, x: Operand, other: Operand) -> Tensor:
    return apply(op, *operands(op.name, x, other))


def floating(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: takes {' or '.join(FLOATS)}, got {x.dtype}; convert with .to('f32')")


# --- arithmetic ------------------------------------------------------------------------------------------------------

ADD = Map("add", "{0} + {1}", NUMBERS)
SUB = Map("sub", "{0} - {1}", NUMBERS)
MUL = Map("mul", "{0} * {1}", NUMBERS)
DIV = Map("div", "{0} / {1}")
NEG = Map("neg", "-{0}", (*FLOATS, "i32"))
ABS = Map("abs", "abs({0})", NUMBERS)
SIGN = Map("sign", "sign_{T}({0})", NUMBERS)
REMAINDER = Map("remainder", "remainder_{T}({0}, {1})", NUMBERS)
FMOD = Map("fmod", "fmod_{T}({0}, {1})", NUMBERS)
FLOOR_DIVIDE = Map("floor_divide", "floor_divide_{T}({0}, {1})", NUMBERS)
MAXIMUM = Map("maximum", "max_{T}({0}, {1})", NUMBERS)
MINIMUM = Map("minimum", "min_{T}({0}, {1})", NUMBERS)
POW = Map("pow", "pow_f32({0}, {1})")
SQUARE = Map("square", "{0} * {0}", NUMBERS)
RECIPROCAL = Map("reciprocal", "1.0 / {0}")


def add(x: Operand, other: Operand) -> Tensor:
    """x + other."""
    return binary(ADD, x, other)


def sub(x: Operand, other: Operand) -> Tensor:
    """x - other."""
    return binary(SUB, x, other)


def mul(x: Operand, other: Operand) -> Tensor:
    """x * other."""
    return binary(MUL, x, other)


def div(x: Operand, other: Operand) -> Tensor:
    """x / other. Integers are divided as f32, as in PyTorch."""
    x, other = (a.to("f32") if isinstance(a, Tensor) and a.dtype in INTEGERS else a for a in (x, other))
    return binary(DIV, x, other)


def floor_divide(x: Operand, other: Operand) -> Tensor:
    """floor(x / other); floats give a float."""
    return binary(FLOOR_DIVIDE, x, other)


def remainder(x: Operand, other: Operand) -> Tensor:
    """x - floor(x / other) * other: the result has the sign of `other`, as Python's %. f32: exact while
    |x / other| < 2^24."""
    return binary(REMAINDER, x, other)


def fmod(x: Operand, other: Operand) -> Tensor:
    """x - trunc(x / other) * other: the result has the sign of x, as C's fmod. f32: exact while |x / other| < 2^24."""
    return binary(FMOD, x, other)


def pow(x: Operand, exponent: Operand) -> Tensor:
    """x ** exponent with IEEE's cases (negative bases with integer exponents, 0, infinities).

    Exponents 2, 3, -1, 0.5 and -0.5 become products and roots. Integer tensors take a number from 0 to 8.
    """
    if isinstance(x, Tensor) and isinstance(exponent, int | float) and not isinstance(exponent, bool):
        if x.dtype in INTEGERS:
            if not (float(exponent).is_integer() and 0 <= exponent <= 8):
                raise TypeError(f"pow: {x.dtype} ** {exponent}; integer tensors take 0..8, convert with .to('f32')")
            result = x * 0 + 1
            for _ in range(int(exponent)):
                result = result * x
            return result
        if exponent == 1:
            return x
        if exponent == 2:
            return square(x)
        if exponent == 3:
            return square(x) * x
        if exponent == -1:
            return reciprocal(x)
        if exponent == -0.5:
            return rsqrt(x)
    return binary(POW, x, exponent)


def neg(x: Tensor) -> Tensor:
    """-x."""
    return apply(NEG, x)


def abs(x: Tensor) -> Tensor:
    """|x|."""
    return apply(ABS, x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return apply(SIGN, x)


def square(x: Tensor) -> Tensor:
    """x * x."""
    return apply(SQUARE, x)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x."""
    return apply(RECIPROCAL, x)


def maximum(x: Operand, other: Operand) -> Tensor:
    """The larger of two; NaN if either is."""
    return binary(MAXIMUM, x, other)


def minimum(x: Operand, other: Operand) -> Tensor:
    """The smaller of two; NaN if either is."""
    return binary(MINIMUM, x, other)


def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """x limited to [min, max]; NaN stays NaN."""
    if min is None and max is None:
        raise ValueError("clamp: give min, max or both")
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


# --- functions of floats ---------------------------------------------------------------------------------------------

EXP = Map("exp", "exp_f32({0})")
EXP2 = Map("exp2", "exp2_f32({0})")
EXPM1 = Map("expm1", "expm1_f32({0})")
LOG = Map("log", "log_f32({0})")
LOG2 = Map("log2", "log2_f32({0})")
LOG1P = Map("log1p", "log1p_f32({0})")
SQRT = Map("sqrt", "sqrt({0})")
RSQRT = Map("rsqrt", "inverseSqrt({0})")
SIN = Map("sin", "sin({0})")
COS = Map("cos", "cos({0})")
TAN = Map("tan", "tan({0})")
TANH = Map("tanh", "tanh_f32({0})")
ERF = Map("erf", "erf_f32({0})")
FLOOR = Map("floor", "floor({0})")
CEIL = Map("ceil", "ceil({0})")
TRUNC = Map("trunc", "trunc({0})")
ROUND = Map("round", "round({0})")
SIGMOID = Map("sigmoid", "sigmoid_f32({0})")
RELU = Map("relu", "max_{T}({0}, {T}(0))", NUMBERS)
SILU = Map("silu", "silu_f32({0})")
GELU = Map("gelu", "gelu_f32({0})")
GELU_TANH = Map("gelu_tanh", "gelu_tanh_f32({0})")
SOFTPLUS = Map("softplus", "softplus_f32({0})")


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return apply(EXP, x)


def exp2(x: Tensor) -> Tensor:
    """2^x."""
    return apply(EXP2, x)


def expm1(x: Tensor) -> Tensor:
    """e^x - 1, accurate near 0."""
    return apply(EXPM1, x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm; -infinity at 0, NaN below. Subnormal x count as the smallest normal number."""
    return apply(LOG, x)


def log2(x: Tensor) -> Tensor:
    """Logarithm to base 2; -infinity at 0, NaN below. Subnormal x count as the smallest normal number."""
    return apply(LOG2, x)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), accurate near 0."""
    return apply(LOG1P, x)


def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return apply(SQRT, x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return apply(RSQRT, x)


def sin(x: Tensor) -> Tensor:
    """Sine of x in radians. Drivers promise 2^-11 absolute within [-pi, pi] only."""
    return apply(SIN, x)


def cos(x: Tensor) -> Tensor:
    """Cosine of x in radians. Drivers promise 2^-11 absolute within [-pi, pi] only."""
    return apply(COS, x)


def tan(x: Tensor) -> Tensor:
    """Tangent of x in radians."""
    return apply(TAN, x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, -1 and 1 at the ends (no overflow)."""
    return apply(TANH, x)


def erf(x: Tensor) -> Tensor:
    """Error function, to about 3e-7."""
    return apply(ERF, x)


def floor(x: Tensor) -> Tensor:
    """Largest integer not above x."""
    return apply(FLOOR, x)


def ceil(x: Tensor) -> Tensor:
    """Smallest integer not below x."""
    return apply(CEIL, x)


def trunc(x: Tensor) -> Tensor:
    """Toward zero."""
    return apply(TRUNC, x)


def round(x: Tensor) -> Tensor:
    """To the nearest integer, ties to even."""
    return apply(ROUND, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return apply(SIGMOID, x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return apply(RELU, x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return apply(SILU, x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x * Phi(x), Phi the normal distribution; approximate="tanh" takes the tanh form of Hendrycks & Gimpel 2016."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate={approximate!r}; expected 'none' or 'tanh'")
    return apply(GELU_TANH if approximate == "tanh" else GELU, x)


def softplus(x: Tensor, beta: float = 1.0) -> Tensor:
    """log(1 + e^(beta x)) / beta."""
    if beta <= 0:
        raise ValueError(f"softplus: beta must be > 0, got {beta}")
    return apply(SOFTPLUS, x) if beta == 1 else apply(SOFTPLUS, x * beta) * (1 / beta)


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
WHERE = Map("where", "select({2}, {1}, {0})", COMPUTE, condition=True)


def eq(x: Operand, other: Operand) -> Tensor:
    """x == other, as bool."""
    return binary(EQ, x, other)


def ne(x: Operand, other: Operand) -> Tensor:
    """x != other, as bool."""
    return binary(NE, x, other)


def lt(x: Operand, other: Operand) -> Tensor:
    """x < other, as bool."""
    return binary(LT, x, other)


def le(x: Operand, other: Operand) -> Tensor:
    """x <= other, as bool."""
    return binary(LE, x, other)


def gt(x: Operand, other: Operand) -> Tensor:
    """x > other, as bool."""
    return binary(GT, x, other)


def ge(x: Operand, other: Operand) -> Tensor:
    """x >= other, as bool."""
    return binary(GE, x, other)


def isnan(x: Tensor) -> Tensor:
    """Is x NaN? Decided by its bits."""
    return apply(ISNAN, x)


def isinf(x: Tensor) -> Tensor:
    """Is x infinite? Decided by its bits."""
    return apply(ISINF, x)


def isfinite(x: Tensor) -> Tensor:
    """Is x neither infinite nor NaN? Decided by its bits."""
    return apply(ISFINITE, x)


def logical_not(x: Tensor) -> Tensor:
    """True where x is zero."""
    return apply(NOT_BOOL, cast(x, "bool"))


def logical_and(x: Tensor, other: Tensor) -> Tensor:
    """True where both are nonzero."""
    return binary(AND, cast(x, "bool"), cast(other, "bool"))


def logical_or(x: Tensor, other: Tensor) -> Tensor:
    """True where either is nonzero."""
    return binary(OR, cast(x, "bool"), cast(other, "bool"))


def logical_xor(x: Tensor, other: Tensor) -> Tensor:
    """True where one and only one is nonzero."""
    return binary(XOR_BOOL, cast(x, "bool"), cast(other, "bool"))


def bitwise_and(x: Tensor, other: Operand) -> Tensor:
    """x & other, for integers and bools."""
    return binary(AND, x, other)


def bitwise_or(x: Tensor, other: Operand) -> Tensor:
    """x | other, for integers and bools."""
    return binary(OR, x, other)


def bitwise_xor(x: Tensor, other: Operand) -> Tensor:
    """x ^ other, for integers and bools."""
    return binary(XOR_BOOL if x.dtype == "bool" else XOR, x, other)


def bitwise_not(x: Tensor) -> Tensor:
    """~x for integers, not x for bools."""
    return apply(NOT_BOOL if x.dtype == "bool" else NOT, x)


def bitwise_left_shift(x: Tensor, other: Operand) -> Tensor:
    """x << other; shifts count modulo 32."""
    return binary(SHIFT_LEFT, x, other)


def bitwise_right_shift(x: Tensor, other: Operand) -> Tensor:
    """x >> other (arithmetic for i32); shifts count modulo 32."""
    return binary(SHIFT_RIGHT, x, other)


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


def masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """x with `value` where mask (bool, broadcast to x) is true."""
    return where(mask, value, x)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def cast(x: Tensor, dtype: str) -> Tensor:
    """x as another dtype of f32, f16, i32, u32, bool. Float to integer truncates, saturates, and takes NaN to 0; to
    f16 rounds at once, also inside a fused kernel."""
    return x if x.dtype == dtype else apply(Cast(dtype), x)


__all__ = [
    "abs", "add", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "cast", "ceil", "clamp", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor",
    "floor_divide", "fmod", "ge", "gelu", "gt", "isfinite", "isinf", "isnan", "le", "log", "log1p", "log2",
    "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "ne",
    "neg", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "silu", "sin", "softplus",
    "sqrt", "square", "sub", "tan", "tanh", "trunc", "where",
]  # fmt: skip
