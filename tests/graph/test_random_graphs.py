"""Random small graphs of views, element-wise functions, reductions and joins equal NumPy in float64."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nn.functional as F
from nn.tensor import Tensor

UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "square": lambda v: np.clip(v, -3, 3) ** 2,
    "tanh": np.tanh,
    "relu": lambda v: np.maximum(v, 0),
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": lambda a, b: np.clip(a, -3, 3) * np.clip(b, -3, 3),
    "maximum": np.maximum,
}


def bounded(t):
    return t.clamp(-3, 3)


def unary(name, t):
    return bounded(t).square() if name == "square" else getattr(t, name)()


def binary(name, a, b):
    return bounded(a) * bounded(b) if name == "mul" else getattr(F, name)(a, b)


@st.composite
def programs(draw):
    """A list of steps; each takes earlier values by position and appends one."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    steps = [("leaf", tuple(shape)), ("leaf", tuple(shape))]
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(
            st.sampled_from(
                [
                    "unary",
                    "binary",
                    "number",
                    "permute",
                    "reshape",
                    "slice",
                    "reduce",
                    "cat",
                    "flip",
                    "leaf",
                    "matmul",
                    "split",
                ]
            )
        )
        steps.append((kind, draw(st.integers(0, 2**16)), draw(st.integers(0, 2**16)), draw(st.integers(0, 2**16))))
    return steps, draw(st.integers(0, 2**16))


def run(program, device):
    """[(tensor, float64 truth)] of every step."""
    steps, seed = program
    rng = np.random.default_rng(seed)
    values = []
    for step in steps:
        kind = step[0]
        if kind == "leaf" and len(step) == 2:
            a = rng.standard_normal(step[1]).astype(np.float32)
            values.append((Tensor(a, device), a.astype(np.float64)))
            continue
        _, p, q, r = step
        t, v = values[p % len(values)]
        if kind == "unary":
            name = sorted(UNARY)[q % len(UNARY)]
            t, v = unary(name, t), UNARY[name](v)
        elif kind == "binary":
            u, w = values[r % len(values)]
            if any(n != m and 1 not in (n, m) for n, m in zip(reversed(v.shape), reversed(w.shape))):
                u, w = u.sum(), w.sum()
            name = sorted(BINARY)[q % len(BINARY)]
            t, v = binary(name, t, u), BINARY[name](v, w)
        elif kind == "number":
            t, v = [(t * 0.5, v * 0.5), (1 - t, 1 - v), (t + 0, v), (t * 1, v), (t - 2, v - 2)][q % 5]
        elif kind == "permute":
            axes = np.random.default_rng(q).permutation(v.ndim)
            t, v = t.permute([int(a) for a in axes]), v.transpose(axes)
        elif kind == "reshape":
            shapes = [(-1,), (1, -1), (-1, 1), (v.shape[0] if v.ndim else 1, -1), tuple(reversed(v.shape))]
            shape = shapes[q % len(shapes)]
            t, v = t.reshape(shape), v.reshape(shape)
        elif kind == "slice" and v.ndim:
            key = tuple(
                [slice(None), slice(1, None), slice(None, None, 2), 0, slice(0, 2)][(q >> 3 * a) % 5]
                for a in range(v.ndim)
            )
            if 0 in v[key].shape:
                key = ...
            t, v = t[key], v[key]
        elif kind == "reduce" and v.ndim:
            axis, keep = q % v.ndim, bool(r & 1)
            how = ["sum", "mean", "amax", "amin"][(r >> 1) % 4]
            t, v = getattr(t, how)(axis, keep), getattr(np, how)(v, axis, keepdims=keep)
        elif kind == "cat" and v.ndim:
            axis = q % v.ndim
            t, v = F.cat([t, t * 2, t], axis), np.concatenate([v, v * 2, v], axis)
        elif kind == "matmul" and v.ndim >= 2:
            other = values[r % len(values)]
            if q % 2 or other[1].ndim != 2 or other[1].shape[0] != v.shape[-1]:
                other = (t.mT, v.swapaxes(-1, -2))
            t, v = bounded(t) @ bounded(other[0]) * 0.125, np.clip(v, -3, 3) @ np.clip(other[1], -3, 3) * 0.125
        elif kind == "split" and v.ndim and v.shape[q % v.ndim] > 1:  # and joined again, as the gradient of a split is
            axis = q % v.ndim
            n = v.shape[axis]
            at = 1 + r % (n - 1)
            around = [0, 0] * (v.ndim - 1 - axis)
            left = F.pad(t.narrow(axis, 0, at) * 2, [*around, 0, n - at])
            right = F.pad(t.narrow(axis, at, n - at) * 3, [*around, at, 0])
            two = np.take(v, range(at), axis) * 2, np.take(v, range(at, n), axis) * 3
            t, v = left + right, np.concatenate(two, axis)
        elif kind == "flip" and v.ndim:
            axis = q % v.ndim
            t, v = t.flip(axis), np.flip(v, axis)
        if v.size > 4096:
            t, v = t.sum(), v.sum()
        values.append((t, np.asarray(v)))
    return values


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_graphs_equal_numpy(_device, program):
    values = run(program, _device)
    order = np.random.default_rng(program[1]).permutation(len(values))[:4]
    for i in [len(values) - 1, *order]:
        t, v = values[i]
        scale = max(1.0, float(np.abs(v).max(initial=0)))
        assert t.shape == v.shape
        np.testing.assert_allclose(t.numpy(), v, rtol=2e-5, atol=1e-5 * scale)
    _device.memory.check_canaries()
