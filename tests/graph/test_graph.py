"""What the graph does before it runs: rewriting, fusing, ordering of writes, memory sharing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import nn.functional as F
from gpu import LimitExceeded
from nn.graph import codegen, schedule
from nn.graph.codegen import MapStep
from nn.graph.fold import FoldStep
from nn.graph.ir import Strided, topological
from nn.graph.rewrite import rewrite
from nn.ops.base import Array, Op, Spec
from nn.tensor import Tensor, apply, realize

KERNELS = """
struct Params { n: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> cache: array<f32>;
@group(0) @binding(2) var<storage, read_write> low: array<f32>;
@group(0) @binding(3) var<storage, read_write> high: array<f32>;
@group(0) @binding(4) var<uniform> p: Params;
@compute @workgroup_size(64)
fn halves(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= p.n) { return; }
  low[id.x] = x[id.x] - 0.5;
  high[id.x] = x[id.x] + 0.5;
}
@compute @workgroup_size(64)
fn store(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= p.n) { return; }
  cache[id.x] = x[id.x];
}
"""


@dataclass(frozen=True)
class Halves(Op):
    """(x - 1/2, x + 1/2)."""

    def infer(self, x: Spec) -> tuple[Spec, ...]:
        return (x, x)

    def lower(self, record, x: Array, low: Array, high: Array) -> None:
        kernel = record.device.kernel_source(KERNELS, "halves", label="halves")
        record(kernel, grid=-(-x.size // 64), x=x.buffer, low=low.buffer, high=high.buffer, n=x.size)


@dataclass(frozen=True)
class Store(Op):
    """cache = x, in place; no result."""

    mutates = (1,)

    def infer(self, x: Spec, cache: Spec) -> tuple[Spec, ...]:
        assert x.shape == cache.shape
        return ()

    def lower(self, record, x: Array, cache: Array) -> None:
        kernel = record.device.kernel_source(KERNELS, "store", label="store")
        record(kernel, grid=-(-x.size // 64), x=x.buffer, cache=cache.buffer, n=x.size)


def program(*tensors):
    return schedule.compile_program(tensors[0].device, [t.node for t in tensors])


def dispatches(device, *tensors):
    before = device.counters.dispatches
    realize(*tensors)
    return device.counters.dispatches - before


@pytest.fixture
def x(device, rng):
    return Tensor(np.float32(rng.standard_normal((6, 10))), device)


# --- rewriting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        lambda x: x * 1, lambda x: 1 * x, lambda x: x + 0, lambda x: 0 + x, lambda x: x - 0, lambda x: x / 1,
        lambda x: x.T.T, lambda x: x.permute(1, 0).permute(1, 0), lambda x: x.reshape(60).reshape(3, 20).reshape(6, 10),
        lambda x: x.expand(6, 10), lambda x: x[:, :], lambda x: x.neg().neg(), lambda x: x.to("f32"), lambda x: x[...],
        lambda x: F.cat([x], 0), lambda x: F.where(x > 0, x, x), lambda x: x.reshape(6, 1, 10).sum(1),
        lambda x: F.cat([x, x[:0]], 0), lambda x: x.unsqueeze(0).squeeze(0),
    ],
)  # fmt: skip
def test_identities_cost_nothing(x, same):
    y = same(x)
    assert dispatches(x.device, y) == 0
    np.testing.assert_array_equal(y.numpy(), x.numpy())


def test_equal_expressions_are_one_node(x):
    y = (x * 2).exp() + (x * 2).exp()
    (node,) = rewrite([y.node])
    assert sum(getattr(n.op, "name", "") == "exp" for n in topological([node])) == 1


def test_constants_fold(device):
    y = F.full((4,), 3.0, device=device) * 2 + 1 - F.full((4,), 2, device=device).to("f32")
    (node,) = rewrite([y.node])
    assert {type(n.op).__name__ for n in topological([node])} == {"Constant", "Expand"}
    np.testing.assert_array_equal(y.numpy(), np.full(4, 5, np.float32))


def test_signed_zeros_and_bools_are_different_constants(device):
    zero = F.full((3,), 0.0, device=device)
    minus = F.full((3,), -0.0, device=device)
    false = F.full((3,), False, device=device)
    realize(zero, minus, false)
    assert not np.signbit(zero.numpy()).any() and np.signbit(minus.numpy()).all()
    assert false.numpy().dtype == np.bool_


def test_transposes_fold_into_kernels_that_say_they_can(device, rng):
    @dataclass(frozen=True)
    class Product(Op):
        flipped: bool = False

        def infer(self, a, b):
            return Spec((a.shape[0], b.shape[0 if self.flipped else 1]))

        def fold_transpose(self, position):
            return replace(self, flipped=not self.flipped) if position == 1 else None

    a, b = Tensor(np.zeros((2, 3), np.float32), device), Tensor(np.zeros((5, 3), np.float32), device)
    (node,) = rewrite([apply(Product(), a, b.T).node])
    assert node.op == Product(flipped=True) and node.inputs == (a.node, b.node)
    (node,) = rewrite([apply(Product(), a.T.T, b.T.reshape(3, 5)).node])
    assert node.op == Product(flipped=True)


# --- fusing ----------------------------------------------------------------------------------------------------------


def test_a_chain_is_one_dispatch_and_its_text_is_readable(x):
    y = ((x * 2 + 1).tanh() * x.sum().detach()).exp()
    (fold, fused) = program(y).steps
    assert isinstance(fold, FoldStep) and isinstance(fused, MapStep)
    y = (x * 2 + 1).tanh()
    assert dispatches(x.device, y) == 1
    body = codegen.Body(program((x * 2 + 1).tanh()).steps[0].expr)
    assert body.title == "mul, add, tanh"
    assert "\n".join(body.function()) == (
        "fn element(a0: f32) -> f32 {\n  let t0 = a0 * p.k0;\n  let t1 = t0 + p.k1;\n  return tanh_f32(t1);\n}"
    )


def test_producers_fuse_into_reductions(x):
    assert dispatches(x.device, (x.T * 2 + x.T[0]).square().sum(1)) == 1


def test_views_between_element_wise_nodes_do_not_copy(x):
    y = ((x * 2).T[::2].reshape(5, 2, 3) + 1).permute(2, 0, 1).exp()
    assert dispatches(x.device, y) == 1
    want = np.exp(((x.numpy() * 2).T[::2].reshape(5, 2, 3) + 1).transpose(2, 0, 1))
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-5)


def test_other_sizes_and_numbers_reuse_the_pipeline(device):
    def f(n, m, k):
        return (Tensor(np.ones((n, m), np.float32), device) * k + F.arange(m, device=device).to("f32")).numpy()

    f(3, 5, 2.0)
    before = device.counters.pipelines
    for n, m, k in ((4, 7, 3.0), (9, 13, 0.5), (2, 5, 1e30)):
        np.testing.assert_allclose(f(n, m, k), np.ones((n, m)) * k + np.arange(m), rtol=1e-6)
    assert device.counters.pipelines == before


def test_more_than_seven_operands_split(device):
    total = Tensor(np.full(5, 1, np.float32), device)
    for i in range(2, 13):
        total = total + Tensor(np.full(5, i, np.float32), device)
    assert len(program(total).steps) == 2
    np.testing.assert_array_equal(total.numpy(), np.full(5, 78, np.float32))


def test_high_ranks_stay_within_params(device, rng):
    a = np.float32(rng.standard_normal((2, 3, 2, 2, 3, 2, 2, 2)))
    x = Tensor(a, device)
    axes = (7, 2, 5, 0, 3, 6, 1, 4)
    y = x.permute(axes)
    z = (y + y[:1]) * y.flip(3) + y[:, :, ::2].sum(2, keepdim=True) - y.amax(7, keepdim=True)
    v = a.astype(np.float64).transpose(axes)
    want = (v + v[:1]) * v[:, :, :, ::-1] + v[:, :, ::2].sum(2, keepdims=True) - v.max(7, keepdims=True)
    np.testing.assert_allclose(z.numpy(), want, rtol=1e-5, atol=1e-5)


def test_expensive_shared_values_are_stored_cheap_ones_are_not(device, rng):
    a, b = (Tensor(np.float32(rng.standard_normal(64)), device) for _ in range(2))
    e = (a * b).exp()
    assert len(program(e.sum(), e.amax()).steps) == 3
    e = a.exp()
    assert len(program(e.sum(), e.amax()).steps) == 2


def test_long_chains_do_not_recurse(device):
    x = Tensor(np.zeros(4, np.float32), device)
    y = x
    for i in range(3000):
        y = (y + 1).T if i % 7 == 0 else y + 1
    np.testing.assert_array_equal(y.numpy(), np.full(4, 3000, np.float32))


# --- kernels, order and memory ---------------------------------------------------------------------------------------


def test_several_results(x):
    low, high = apply(Halves(), x)
    np.testing.assert_allclose((high * low).numpy(), x.numpy() ** 2 - 0.25, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(low.numpy(), x.numpy() - np.float32(0.5))


def test_a_kernel_runs_once_whichever_result_is_read(x):
    low, high = apply(Halves(), x)
    assert dispatches(x.device, low) == 1
    assert dispatches(x.device, high) == 0


def test_kernels_get_contiguous_operands(x):
    low, _ = apply(Halves(), x.T[1:])
    np.testing.assert_array_equal(low.numpy(), x.numpy().T[1:] - np.float32(0.5))
    low, _ = apply(Halves(), x.reshape(3, 20))
    assert dispatches(x.device, low) == 1  # a reshape is no copy


def test_aligned_rows_are_bound_in_place(device, rng):
    a = np.float32(rng.standard_normal((4, 64)))
    low, _ = apply(Halves(), Tensor(a, device)[2:])
    assert dispatches(device, low) == 1
    np.testing.assert_array_equal(low.numpy(), a[2:] - np.float32(0.5))


def test_readers_of_the_old_value_run_before_the_write(device):
    cache = Tensor(np.zeros(5, np.float32), device)
    old = cache * 2 + 1
    total = cache.sum()
    view = cache[1:]
    apply(Store(), Tensor(np.full(5, 7, np.float32), device), cache)
    new = cache + old
    realize(new, old, total, view)
    np.testing.assert_array_equal(old.numpy(), np.ones(5))
    np.testing.assert_array_equal(new.numpy(), np.full(5, 8))
    np.testing.assert_array_equal(view.numpy(), np.zeros(4))
    assert total.item() == 0
    np.testing.assert_array_equal(cache.numpy(), np.full(5, 7))


def test_writes_run_in_order_and_once(device):
    cache = Tensor(np.zeros(3, np.float32), device)
    seen = []
    for value in (1, 2, 3):
        apply(Store(), cache + value, cache)
        seen.append(cache * 1)
    realize(*reversed(seen))
    assert [t.numpy()[0] for t in seen] == [1, 3, 6]
    np.testing.assert_array_equal(cache.numpy(), np.full(3, 6))


def test_a_reader_left_behind_is_refused(device):
    cache = Tensor(np.zeros(3, np.float32), device)
    late = cache + 1
    apply(Store(), Tensor(np.ones(3, np.float32), device), cache)
    cache.numpy()
    with pytest.raises(RuntimeError, match=r"read after Store has written over its memory"):
        late.numpy()


def test_values_that_share_memory_with_a_written_tensor_are_refused(device):
    ones = Tensor(np.ones(64, np.float32), device)
    for shared in (lambda c: c * 1, lambda c: c.reshape(8, 8), lambda c: c.contiguous()):
        cache = Tensor(np.zeros(64, np.float32), device)
        early = shared(cache).realize()
        apply(Store(), ones, cache)
        late = shared(cache).realize()
        assert late.numpy().sum() == 64
        with pytest.raises(RuntimeError, match="Store has written over its memory"):
            early.numpy()
        apply(Store(), ones + 1, cache)
        cache.realize()
        with pytest.raises(RuntimeError, match="Store has written over its memory"):
            (late + 1).numpy()


def test_writing_into_a_view_is_refused_and_lazy_operands_get_memory(device):
    ones = Tensor(np.ones(3, np.float32), device)
    with pytest.raises(ValueError, match=r"pass that tensor, or \.clone"):
        apply(Store(), ones, Tensor(np.zeros((2, 3), np.float32), device).T[:, 0])
    cache = ones * 0
    apply(Store(), ones, cache)
    np.testing.assert_array_equal(cache.numpy(), np.ones(3))


def test_clone_is_memory_of_its_own(device):
    cache = Tensor(np.zeros(3, np.float32), device)
    copy = cache.clone().realize()
    apply(Store(), Tensor(np.ones(3, np.float32), device), cache)
    cache.realize()
    np.testing.assert_array_equal(copy.numpy(), np.zeros(3))


def test_temporaries_share_memory(device, rng):
    x = Tensor(np.float32(rng.standard_normal(1000)), device)
    y = x
    for _ in range(8):
        low, high = apply(Halves(), y)
        y = low.tanh() * high
    made = program(y)
    assert len(made.slot_of) >= 20
    assert made.temporary_bytes <= 5 * 4000 < made.unshared_bytes
    want = x.numpy().astype(np.float64)
    for _ in range(8):
        want = np.tanh(want - 0.5) * (want + 0.5)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-5, atol=2e-5)  # rounds amplify the first one's rounding


def test_realize_keeps_the_value(x):
    y = (x * 3).realize()
    assert dispatches(x.device, y) == 0
    assert y.node.inputs == ()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_more_elements_than_memory_is_refused_by_name(device):
    elements = 2**30 + 3
    if device.caps.max_buffer >= 4 * elements:
        pytest.skip("this device holds 4 GiB in one buffer")
    with pytest.raises(LimitExceeded, match="split"):
        F.full((elements,), 1.0, device=device).realize()
    with pytest.raises(LimitExceeded, match="indices are 32 bits"):
        F.full((2**32,), 1.0, device=device).realize()
    assert F.full((elements,), 1.0, device=device)[-1].item() == 1  # no memory is needed for this


def test_a_weight_is_no_element_wise_operand(device, rng):
    from nn.quant.weight import Weight

    w = Tensor(Weight.from_array(device, rng.standard_normal((4, 32)).astype(np.float32), "q8_0"))
    assert (w.shape, w.dtype) == ((4, 32), "q8_0")
    for use in (lambda w: w * 2, lambda w: w.T, lambda w: w.sum(), lambda w: w[1:]):
        for format in ("q8_0", "f32"):
            w = Tensor(Weight.from_array(device, rng.standard_normal((4, 32)).astype(np.float32), format))
            with pytest.raises(TypeError, match=f"{format}"):
                use(w).numpy()


def test_strides_of_reshapes():
    dense = Strided.dense((4, 6))
    assert dense.reshape((2, 2, 3, 2)) == Strided((2, 2, 3, 2), (12, 6, 2, 1))
    turned = Strided((6, 4), (1, 6))
    assert turned.reshape((24,)) is None
    assert turned.reshape((2, 3, 4)) == Strided((2, 3, 4), (3, 1, 6))
    assert turned.reshape((1, 6, 1, 4, 1)) is not None
    assert Strided((1, 1), (5, 9)).reshape(()) == Strided((), ())


def test_a_call_over_a_limit_names_the_operation_and_its_shapes(device):
    a, b = (F.zeros(*size, device=device) for size in ((200_000, 4), (4, 200_000)))
    name = r"mat_?mul \(f32 200000x4, f32 4x200000 -> f32 200000x200000\): .*split"
    with pytest.raises(LimitExceeded, match=name):
        (a @ b).numpy()
    assert (F.zeros(2, 3, device=device) @ F.zeros(3, 2, device=device)).numpy().shape == (2, 2)
