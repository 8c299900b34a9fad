"""jit: the second call compiles and allocates nothing, results are right, writes happen, misuse is named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import nn.functional as F
from nn.graph.jit import jit
from nn.ops.base import Array, Op, Spec
from nn.tensor import Tensor, apply

ADD_INTO = """
struct Params { n: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> cache: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;
@compute @workgroup_size(64)
fn add_into(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= p.n) { return; }
  cache[i] += x[i];
  out[i] = 2.0 * cache[i];
}
"""


@dataclass(frozen=True)
class AddInto(Op):
    """cache += x; gives 2 * cache."""

    mutates = (1,)

    def infer(self, x: Spec, cache: Spec) -> Spec:
        return x

    def lower(self, record, x: Array, cache: Array, out: Array) -> None:
        kernel = record.device.kernel_source(ADD_INTO, "add_into", label="add_into")
        record(kernel, grid=-(-x.size // 64), x=x.buffer, cache=cache.buffer, out=out.buffer, n=x.size)


def counts(device):
    return device.counters.pipelines, device.counters.allocations


def test_second_call_compiles_and_allocates_nothing(device, rng):
    w = Tensor(np.float32(rng.standard_normal((5, 7))), device)
    bias = Tensor(np.float32(rng.standard_normal(7)), device) * 2
    calls = []

    @jit
    def step(x, scale):
        calls.append(1)
        y = (x * w).sum(0) * scale + bias
        return {"y": y, "both": (y.exp(), y.reshape(7, 1))}

    inputs = [Tensor(np.float32(rng.standard_normal((5, 7))), device) for _ in range(4)]
    step(inputs[0], 3)
    device.wait()
    before = counts(device)
    for x in inputs[1:]:
        out = step(x, 3)
    assert counts(device) == before
    assert calls == [1]
    want = (inputs[-1].numpy().astype(np.float64) * w.numpy()).sum(0) * 3 + bias.numpy()
    np.testing.assert_allclose(out["y"].numpy(), want, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(out["both"][0].numpy(), np.exp(want), rtol=1e-4)
    np.testing.assert_allclose(out["both"][1].numpy()[:, 0], want, rtol=1e-6, atol=1e-5)


def test_signature_is_shape_dtype_and_static_values(device):
    calls = []

    @jit
    def double(x, times=2):
        calls.append(x.shape)
        return x * times

    for x, times in (([1.0, 2], 2), ([3.0, 4], 2), ([1.0], 2), ([1.0, 2], 3), ([1, 2], 2), ([1.0, 2], 2)):
        t = Tensor(x, device)
        np.testing.assert_array_equal(double(t, times=times).numpy(), np.array(x) * times)
    assert len(calls) == 4


def test_output_fed_back(device):
    step = jit(lambda x: x * 2 + 1)
    x = Tensor(np.zeros(3, np.float32), device)
    for _ in range(5):
        x = step(x)
    np.testing.assert_array_equal(x.numpy(), np.full(3, 31, np.float32))


def test_old_results_are_refused_not_wrong(device):
    step = jit(lambda x: x + 1)
    first = step(Tensor([1.0], device))
    later = first * 5
    kept = first.clone().realize()
    second = step(Tensor([5.0], device))
    assert second.item() == 6 and kept.item() == 2
    with pytest.raises(RuntimeError, match=r"written over its memory.*clone"):
        first.item()
    with pytest.raises(RuntimeError, match="written over its memory"):
        later.item()


def test_reading_a_value_while_tracing_is_named(device):
    for read in (lambda x: x.item(), lambda x: bool(x > 0), lambda x: (x * 2).numpy()):
        with pytest.raises(RuntimeError, match="jit: the traced function reads a value"):
            jit(lambda x, read=read: x * read(x))(Tensor([1.0], device))


def test_writes_in_place_happen_on_every_call(device):
    cache = Tensor(np.zeros(3, np.float32), device)

    @jit
    def step(x):
        apply(AddInto(), x, cache)  # its result is not returned
        y = apply(AddInto(), x, cache)
        return y + 1

    x = Tensor(np.ones(3, np.float32), device)
    for n in range(1, 4):
        y = step(x)
        np.testing.assert_array_equal(cache.numpy(), np.full(3, 2 * n, np.float32))
        np.testing.assert_array_equal(y.numpy(), np.full(3, 4 * n + 1, np.float32))
    before = cache * 1
    step(x)
    with pytest.raises(RuntimeError, match="written over its memory"):
        before.numpy()


def test_writing_into_an_argument_is_refused(device):
    with pytest.raises(ValueError, match="writes in place into an argument of a jitted function"):
        jit(lambda x, cache: apply(AddInto(), x, cache))(Tensor([1.0], device), Tensor([1.0], device))


def test_jit_inside_jit_and_views(device):
    inner = jit(lambda x: x.T * 2)
    outer = jit(lambda x: inner(x + 1).reshape(-1)[1:])
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(outer(Tensor(a, device)).numpy(), ((a + 1).T * 2).reshape(-1)[1:])


def test_constants_outside_are_computed_once(device):
    lazy = F.arange(8, device=device).to("f32").exp()
    step = jit(lambda x: x * lazy)
    x = Tensor(np.ones(8, np.float32), device)
    step(x)
    before = device.counters.dispatches
    got = step(x).numpy()
    assert device.counters.dispatches - before == 1
    np.testing.assert_allclose(got, np.exp(np.arange(8.0)), rtol=1e-5)


def test_no_tensor_is_an_error(device):
    with pytest.raises(TypeError, match="takes at least one tensor"):
        jit(lambda n: n)(3)
