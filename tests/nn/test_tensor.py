"""Tensor: what it takes and gives, PyTorch's semantics, and errors that say what to do."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import nn.functional as F
from gpu import Device, ShaderError
from nn.ops import elementwise, movement, reduce
from nn.ops.base import Array, ShapeError
from nn.quant.formats import bf16_bits
from nn.tensor import Tensor


@pytest.fixture
def t(device):
    return lambda values, dtype=None: Tensor(values, device, dtype=dtype)


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        ([1.5, 2], "f32", (2,)), ([[1, 2]], "i32", (1, 2)), ([True], "bool", (1,)), (3, "i32", ()), (2.5, "f32", ()),
        (np.zeros((2, 0), np.float32), "f32", (2, 0)), (np.int64([5]), "i32", (1,)), (np.uint32([2**32 - 1]),
        "u32", (1,)),
        (np.float32(3), "f32", ()), (np.uint8([1, 2, 3]), "u8", (3,)), (np.float16([1, 2, 3]), "f16", (3,)),
        (np.zeros((3, 4), np.float32).T, "f32", (4, 3)),
    ],
)  # fmt: skip
def test_dtype_and_shape_come_from_the_data(t, data, dtype, shape):
    x = t(data)
    assert (x.dtype, x.shape, x.ndim, x.numel()) == (dtype, shape, len(shape), int(np.prod(shape)))
    np.testing.assert_array_equal(x.numpy(), np.asarray(data))
    assert x.size() == shape and all(x.size(i) == n for i, n in enumerate(shape))


def test_what_would_lose_values_is_refused(t):
    with pytest.raises(TypeError, match=r"float64 data has no dtype.*dtype='f32'"):
        t(np.zeros(2))
    with pytest.raises(ValueError, match=r"values 0..2147483648 do not fit i32"):
        t([0, 2**31])
    with pytest.raises(ValueError, match="do not fit u8"):
        t([300], "u8")
    with pytest.raises(TypeError, match="'float32' is not one of f32, f16"):
        t([1.0], "float32")
    with pytest.raises(TypeError, match="needs a device"):
        Tensor([1.0])
    with pytest.raises(TypeError, match=r"use \.clone"):
        t(t([1.0]))
    np.testing.assert_array_equal(t(np.zeros(2), "f32").numpy(), np.zeros(2, np.float32))


def test_bf16_bits(t):
    bits = np.uint32([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001])
    got = bf16_bits(bits.view(np.float32))
    assert [hex(v) for v in got[:4]] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80"]
    assert np.isnan((got[4:].astype(np.uint32) << 16).view(np.float32)).all()
    x = t([1.0, 1 + 2**-7, 3e38], "bf16")
    assert x.dtype == "bf16" and x.array().buffer.nbytes == 6
    np.testing.assert_array_equal(x.numpy(), np.uint32([0x3F800000, 0x3F810000, 0x7F620000]).view(np.float32))
    with pytest.raises(TypeError, match="bf16"):
        (x + x).numpy()


def test_wraps_device_memory_without_copying(device):
    array = Array(device.upload(np.float32([1, 2])), (2,), "f32")
    x = Tensor(array)
    assert x.array() is array and x.device is device
    with pytest.raises(TypeError, match=r"use .to\('f16'\)"):
        Tensor(array, dtype="f16")


def test_odd_f16_lengths_leave_neighbours_alone(t, device):
    if not device.caps.f16:
        with pytest.raises(ShaderError, match=r"uses f16, which .* does not have; use f32"):
            (t([1, 2, 3], "f16") * 2).numpy()
        return
    a, b = t([1, 2, 3], "f16"), t([9.0], "f16")
    y, z = (a * 2).realize(), (b * 1.5).realize()
    np.testing.assert_array_equal(y.numpy(), np.float16([2, 4, 6]))
    np.testing.assert_array_equal(z.numpy(), np.float16([13.5]))
    np.testing.assert_array_equal(b.numpy(), np.float16([9]))


# --- values ----------------------------------------------------------------------------------------------------------


def test_item_truth_and_iteration(t):
    assert t([[4.5]]).item() == 4.5 and isinstance(t([3]).item(), int) and t(True).item() is True
    assert t([1.0]) and not t(0)
    assert float(t([2.5])) == 2.5 and int(t([2])) == 2 and len(t([1, 2, 3])) == 3
    assert [row.tolist() for row in t([[1, 2], [3, 4]])] == [[1, 2], [3, 4]]
    np.testing.assert_array_equal(np.asarray(t([1.5]) * 2), [3])
    with pytest.raises(ValueError, match="has 2 elements"):
        t([1, 2]).item()
    with pytest.raises(ValueError, match=r"ambiguous; use .any\(\) or .all\(\)"):
        bool(t([1, 2]))
    with pytest.raises(TypeError, match="0-d"):
        len(t(1))
    assert "lazy: add" in repr(t([1.0]) + 1) and "in memory" in repr(t([1.0]))


def test_tensors_hash_by_identity(t):
    x, y = t([1.0]), t([1.0])
    assert len({x, y, x}) == 2


# --- dtypes ----------------------------------------------------------------------------------------------------------


def test_numbers_take_the_tensors_dtype(t):
    for dtype in ("f32", "f16", "i32", "u32"):
        x = t([1, 2], dtype)
        for y in (x + 1, 1 + x, x * 2, 3 - x, x % 2, np.float32(2) * x if dtype[0] == "f" else x * np.int64(2)):
            assert y.dtype == dtype
    assert (t([1, 2]) / 2).dtype == "f32" and (t([1, 2]) / 2).tolist() == [0.5, 1.0]
    assert (t([1.0]) < 2).dtype == "bool"


def test_dtypes_are_never_promoted_silently(t):
    with pytest.raises(TypeError, match=r"add: operands are f32 and i32.*\.to\('i32'\)"):
        t([1.0]) + t([1])
    with pytest.raises(TypeError, match=r"mul: 2.5 does not fit i32"):
        t([1]) * 2.5
    with pytest.raises(TypeError, match="does not fit u32"):
        t([1], "u32") - 2**32
    with pytest.raises(TypeError, match="meets a bool tensor"):
        t([True]) + 1
    with pytest.raises(TypeError, match=r"exp: takes f32, f16, got i32"):
        t([1]).exp()
    with pytest.raises(TypeError, match="condition is i32"):
        F.where(t([1]), 1.0, 2.0)
    with pytest.raises(TypeError, match=r"mean: takes f32 or f16"):
        t([1]).mean()
    with pytest.raises(TypeError, match="got a str"):
        t([1.0]) + "1"


def test_two_devices_do_not_mix(t):
    with Device.open() as other:
        x, y = t([1.0, 2.0]), Tensor([3.0, 4.0], other)
        with pytest.raises(TypeError, match=r"add: operands live on two devices; move one with .to\(device\)"):
            x + y
        moved = x.to(other)
        assert moved.device is other and (moved + y).tolist() == [4.0, 6.0]
        assert x.to(x.device) is x


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_broadcasting(t, rng):
    for a, b in (
        ((3, 1), (1, 4)),
        ((4,), (2, 3, 4)),
        ((), (2, 2)),
        ((1,), (5,)),
        ((2, 1, 3), (4, 1)),
        ((0, 3), (1, 3)),
    ):
        x, y = np.float32(rng.standard_normal(a)), np.float32(rng.standard_normal(b))
        np.testing.assert_array_equal((t(x) - t(y)).numpy(), x - y)
    with pytest.raises(
        ShapeError, match=r"add: shapes \[2, 3\] and \[2, 4\] do not broadcast: axis -1 has lengths \[3, 4\]"
    ):
        t(np.zeros((2, 3), np.float32)) + t(np.zeros((2, 4), np.float32))


KEYS = [
    0, -1, slice(None), slice(1, None), slice(None, None, 2), slice(-2, None), slice(5, 2), ..., None,
    (0, 1), (slice(1, 3), 2), (..., 0), (0, ..., -1), (None, 0), (slice(None), None, slice(1, 2)),
    (1, slice(None, None, 3), None),
    (slice(0, 0), ...), (2, 3, 4), (..., None), (slice(1, 100), slice(-100, 2)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing(t, key):
    a = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    got = t(a)[key]
    assert got.shape == a[key].shape
    np.testing.assert_array_equal(got.numpy(), a[key])


def test_indexing_errors(t):
    x = t(np.zeros((2, 3), np.float32))
    with pytest.raises(IndexError, match="2 is out of range for axis 0 of length 2"):
        x[2]
    with pytest.raises(IndexError, match="3 indices for 2 axes"):
        x[0, 0, 0]
    with pytest.raises(ValueError, match="use flip"):
        x[::-1]
    with pytest.raises(IndexError, match="embedding"):
        x[t([0])]


def test_movement(t, rng):
    a = np.float32(rng.standard_normal((2, 3, 4)))
    x = t(a)
    for got, want in (
        (x.reshape(6, 4), a.reshape(6, 4)), (x.view(-1), a.reshape(-1)), (x.reshape((4, -1)), a.reshape(4, -1)),
        (x.permute(2, 0, 1), a.transpose(2, 0, 1)), (x.transpose(0, -1), a.swapaxes(0, -1)), (x.T, a.T),
        (x.mT, a.swapaxes(-1, -2)), (x[0].expand(5, 3, 4), np.broadcast_to(a[0], (5, 3, 4))),
        (x[:, :1].expand(-1, 7, -1), np.broadcast_to(a[:, :1], (2, 7, 4))), (x.flatten(), a.reshape(-1)),
        (x.flatten(1), a.reshape(2, 12)), (x.flatten(0, 1), a.reshape(6, 4)), (x.unflatten(2, (2, -1)),
        a.reshape(2, 3, 2, 2)),
        (x.unsqueeze(0), a[None]), (x.unsqueeze(-1), a[..., None]), (x[:1].squeeze(), a[0]), (x[:1].squeeze(0), a[0]),
        (x.squeeze(1), a), (x.narrow(1, 1, 2), a[:, 1:3]), (x.narrow(2, -1, 1), a[..., -1:]), (x.flip((0, 2)),
        a[::-1, :, ::-1]),
        (x.repeat(2, 1, 3), np.tile(a, (2, 1, 3))), (x[0].repeat(2, 1, 1), np.tile(a[0], (2, 1, 1))),
        (x.clone(), a), (x.T.contiguous(), a.T),
        (F.cat([x, x[:, :1]], 1), np.concatenate([a, a[:, :1]], 1)), (F.stack([x, x], -1), np.stack([a, a], -1)),
        (F.pad(x, (1, 2)), np.pad(a, ((0, 0), (0, 0), (1, 2)))), (F.tril(x), np.tril(a)), (F.triu(x, 1), np.triu(a, 1)),
    ):  # fmt: skip
        assert got.shape == want.shape
        np.testing.assert_array_equal(got.numpy(), want)
    for pieces, want in (
        (x.split(2, 2), np.split(a, 2, 2)),
        (x.split([1, 2], 1), np.split(a, [1], 1)),
        (x.chunk(2, 1), [a[:, :2], a[:, 2:]]),
    ):
        assert [p.shape for p in pieces] == [w.shape for w in want]
        for piece, part in zip(pieces, want):
            np.testing.assert_array_equal(piece.numpy(), part)


def test_movement_errors(t):
    x = t(np.zeros((2, 3), np.float32))
    for use, error, message in (
        (lambda: x.reshape(4, 2), ShapeError, r"\[2, 3\] has 6 elements, \[4, 2\] has 8"),
        (lambda: x.reshape(-1, 4), ShapeError, "do not divide"), (lambda: x.reshape(-1, -1),
        ShapeError, "at most one is -1"),
        (lambda: x.permute(0), ShapeError, "name each once"), (lambda: x.permute(0, 0), ShapeError, "once"),
        (lambda: x.expand(2, 4), ShapeError, "only axes of length 1 repeat"), (lambda: x.transpose(0, 2),
        IndexError, "dim 2"),
        (lambda: x.narrow(0, 1, 2), IndexError, "leave an axis of length 2"), (lambda: x.split([1, 1], 1),
        ShapeError, "add up"),
        (lambda: F.cat([x, x.T]), ShapeError, "differ outside axis 0"), (lambda: F.cat([]), ValueError, "no tensors"),
        (lambda: x.sum(2), IndexError, "dim 2 is out of range"), (lambda: x.sum((0, 0)), ValueError, "twice"),
        (lambda: x[:, :0].amax(1), ValueError, "no elements"), (lambda: x.clamp(), ValueError, "min, max or both"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            use()


def test_zero_sizes(t, device):
    x = t(np.zeros((0, 3), np.float32))
    assert x.T.shape == (3, 0) and x.T.numpy().shape == (3, 0)
    np.testing.assert_array_equal(x.sum(0).numpy(), np.zeros(3, np.float32))
    part = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(F.cat([x, t(part)]).numpy(), part)
    assert F.where(x[:, 0] > 0, x[:, 0], 1.0).numpy().shape == (0,)
    assert ((x + 1).exp().reshape(3, 0) * 2).numpy().shape == (3, 0)
    assert x.sum().item() == 0 and x.amax(1).numpy().shape == (0,)
    assert F.zeros(0, device=device).numpy().shape == (0,)


def test_to_numpy_is_a_copy(t):
    x = t([1.0, 2.0])
    x.numpy()[0] = 9
    assert x.tolist() == [1.0, 2.0]


# --- one list of functions -------------------------------------------------------------------------------------------


def test_methods_are_the_functions(t):
    for module in (elementwise, reduce, movement):
        for name in module.__all__:
            first = next(iter(inspect.signature(getattr(module, name)).parameters))
            assert hasattr(Tensor, name) == (first == "input" or name in ("where", "broadcast_to")), name
    typed = inspect.getsource(Tensor).split("if TYPE_CHECKING:")[1].split("Operand =")[0]
    named = set(re.findall(r"^ {8,12}(\w+),$|import (\w+) as", typed, re.MULTILINE))
    assert named
    for pair in named:
        assert hasattr(Tensor, pair[0] or pair[1]), pair


def test_functional_has_every_public_function():
    for module in (elementwise, reduce, movement):
        for name in module.__all__:
            assert getattr(F, name) is getattr(module, name)
    assert {"linear", "embedding", "rms_norm", "layer_norm", "softmax"} <= set(F.__all__)


def test_softmax_method(t):
    np.testing.assert_allclose(
        t([[1000.0, 1002, 999]]).softmax(-1).numpy(), [[0.114195, 0.843795, 0.042010]], atol=1e-6
    )


# What is not a tensor, a device, an axis, a size or a value of the dtype is said by name, not by Python's internals.


def test_things_that_are_no_tensors(device):
    t = Tensor([[1.0, 2.0]], device)
    for call in (lambda: t @ np.ones((2, 1), np.float32), lambda: F.cat([np.ones(2), np.ones(2)])):
        with pytest.raises(TypeError, match="got a ndarray; operands are tensors"):
            call()
    with pytest.raises(TypeError, match=r"device is 'cpu'; expected an open Device"):
        Tensor([1.0], "cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="cat: tensors without axes"):
        F.cat([Tensor(1.0, device), Tensor(2.0, device)])


@pytest.mark.parametrize("dim", ["a", 0.0, None])
def test_axes_are_whole_numbers(device, dim):
    t = Tensor([[1.0, 2.0]], device)
    for call in (F.sum, F.argmax, F.softmax, F.unsqueeze) if dim is not None else (F.softmax, F.unsqueeze):
        with pytest.raises(TypeError, match=r"dim is .*; expected a whole number"):
            call(t, dim)


def test_sizes_are_whole_numbers_of_0_or_more(device):
    t = Tensor([[1.0, 2.0]], device)
    for call in (lambda: F.zeros(-1, device=device), lambda: F.full((2, -3), 1.0, device=device)):
        with pytest.raises(ShapeError, match="lengths are 0 or more"):
            call()
    with pytest.raises(ShapeError):
        t.expand(-1, 1, 2)
    for size in (None, 1.5, "12"):
        with pytest.raises(TypeError, match="sizes are whole numbers, got"):
            t.reshape(size)


@pytest.mark.parametrize(
    "values, dtype",
    [([np.nan], "i32"), ([np.inf], "u32"), ([-1.0], "u32"), ([3e9], "i32"), ([300], "u8"), ([-1], "u32")],
)
def test_values_that_an_integer_type_cannot_hold(device, values, dtype):
    with pytest.raises(ValueError, match=f"do not fit {dtype}"):
        Tensor(np.array(values), device, dtype=dtype)


def test_floats_are_cut_to_integers_that_hold_them(device):
    assert Tensor(np.array([-0.5, 1.9, 4294967295.0]), device, dtype="u32").tolist() == [0, 1, 4294967295]
    assert Tensor(np.array([-2147483648.9, 2147483647.5]), device, dtype="i32").tolist() == [-(2**31), 2**31 - 1]


def test_too_large_for_a_float_is_infinity(device):
    assert Tensor([1e300, -1e300], device).tolist() == [np.inf, -np.inf]
    if device.caps.f16:
        assert Tensor([1e6], device, dtype="f16").tolist() == [np.inf]


def test_filled_and_counted_tensors_hold_what_their_type_can(device):
    for fill, dtype in ((2**31, "i32"), (-1, "u32"), (np.nan, "i32"), (1.5, "i32"), (10**400, "f32")):
        with pytest.raises(ValueError, match=f"full: .* does not fit {dtype}"):
            F.full((2,), fill, device=device, dtype=dtype)
    with pytest.raises(TypeError, match="full: got 'a'; expected a number"):
        F.full((2,), "a", device=device)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="arange: 2147483649 does not fit i32"):
        F.arange(2**31 - 2, 2**31 + 2, device=device)
    with pytest.raises(ValueError, match="arange: -3 does not fit u32"):
        F.arange(-3, 3, device=device, dtype="u32")
    for end in (np.inf, np.nan):
        with pytest.raises(ValueError, match="expected finite numbers"):
            F.arange(0, end, device=device)
    with pytest.raises(TypeError, match="an integer of 1329 bits does not fit f32"):
        Tensor([1.0], device) + 10**400
