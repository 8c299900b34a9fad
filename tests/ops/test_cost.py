"""What operations say about their work: counted by hand here, on shapes small enough for that."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from gpu import Cost
from nn import functional as F
from nn.graph.schedule import compile_program
from nn.graph.scopes import named
from nn.ops.attention import Attention, CachedAttention
from nn.ops.base import Progress, Spec
from nn.ops.cache import LastRow, StoreQKV
from nn.ops.embedding import Embedding
from nn.ops.linear import GatedMLP, Linear, NormLinear, QKVRope
from nn.ops.matmul import MatMul
from nn.ops.norm import AddRMSNormRows, LayerNormRows, RMSNormRows
from nn.ops.rope import RopeHeads
from nn.ops.sample import SampleToken
from nn.ops.softmax import SoftmaxRows
from nn.tensor import Tensor

STEP = Spec((4,), "u32")


def cost(op, *operands, progress=None):
    made = op.infer(*operands)
    results = (made,) if isinstance(made, Spec) else made
    return op.cost(operands, results, progress)


def test_products_read_a_weight_as_it_is_stored():
    x, q4 = Spec((3, 64)), Spec((10, 64), "q4_1")  # two blocks of 20 bytes a row
    weight = 10 * 2 * 20
    assert cost(Linear(), x, q4) == Cost(2 * 3 * 10 * 64, 3 * 64 * 4 + weight, 3 * 10 * 4)
    with_both = cost(Linear(bias=True, residual=True), x, q4, Spec((10,)), Spec((3, 10)))
    assert with_both == Cost(3840 + 2 * 30, 768 + weight + 40 + 120, 120)
    assert cost(NormLinear(eps=0.0), x, Spec((64,)), q4) == Cost(3840 + 4 * 192, 768 + weight + 256, 120)
    gated = cost(GatedMLP(eps=0.0), x, Spec((64,)), q4)
    assert gated == Cost(3840 + 4 * 192 + 2 * 15, 768 + weight + 256, 60)
    assert cost(Linear(), x, Spec((10, 64), "f16")).read == 768 + 10 * 64 * 2


@pytest.mark.parametrize("tokens", [1, 2])
def test_qkv_writes_only_the_rows_of_the_cache_that_are_new(tokens):
    cache = Spec((100, 2, 4), "f16")
    operands = [Spec((2, 64)), Spec((64,)), cache, cache, Spec((100, 2, 2)), STEP, Spec((32, 64), "q4_1")]
    got = cost(QKVRope(eps=0.0), *operands, progress=Progress(7, tokens))
    rows = 4 + 2 * 2  # heads of q, then of k and v, four features each
    assert rows * 4 == 32
    assert got.flops == 2 * 2 * 32 * 64 + 4 * 128 + 3 * 2 * (16 + 8)
    assert got.read == 512 + 32 * 40 + 256 + 16 + tokens * 4 * 4
    assert got.written == 2 * 16 * 4 + 2 * tokens * 8 * 2


def test_dense_products_of_batches():
    got = cost(MatMul(trans_a=True, bias=True), Spec((5, 7, 3)), Spec((7, 4)), Spec((4,)))
    assert got == Cost(5 * 3 * 4 * (2 * 7 + 1), 4 * (105 + 28 + 4), 4 * 60)


def brute(q_len, offset, window, keys):
    """(pairs, different keys) of causal attention, one pair at a time."""
    seen = {
        (i, j) for i in range(q_len) for j in range(keys) if j <= i + offset and (not window or j > i + offset - window)
    }
    columns = {j for _, j in seen}
    return len(seen), len(columns)


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("position, tokens", [(0, 1), (0, 5), (9, 1), (9, 5), (15, 5), (2, 3)])
def test_attention_over_a_cache_counts_what_the_position_shows(window, position, tokens):
    op = CachedAttention(heads=4, kv_heads=2, scale=1.0, window=window, softcap=0.0)
    cache = Spec((20, 2, 8), "f16")
    got = cost(op, Spec((5, 32)), cache, cache, STEP, progress=Progress(position, tokens))
    pairs, keys = brute(tokens, position, window, 20)
    assert got.flops == 4 * pairs * (4 * 8 + 4)
    assert got.read == 5 * 32 * 4 + 2 * keys * 16 * 2 + 16
    assert got.written == 5 * 32 * 4


def test_attention_over_a_cache_of_unknown_fill_counts_the_longest_case():
    op = CachedAttention(heads=4, kv_heads=2, scale=1.0, window=0, softcap=0.0)
    cache = Spec((20, 2, 8), "f32")
    specs = (Spec((1, 32)), cache, cache, STEP)
    assert cost(op, *specs) == cost(op, *specs, progress=Progress(19, 1))


@pytest.mark.parametrize("causal, offset, window", [(False, 0, 0), (True, 0, 0), (True, 3, 0), (True, 3, 2)])
def test_attention_counts_pairs_and_mask(causal, offset, window):
    op = Attention(causal=causal, offset=offset, window=window, softcap=0.0 if causal else 30.0, scale=1.0)
    q, k, mask = Spec((2, 4, 3, 8), "f16"), Spec((2, 2, 6, 8), "f16"), Spec((1, 1, 3, 6), "bool")
    got = cost(op, q, k, k, mask)
    pairs, keys = brute(3, offset if causal else 6, window, 6)
    assert got.flops == 2 * 4 * pairs * (4 * 8 + 4 + (0 if causal else 3))
    assert got.read == 2 * 4 * 3 * 8 * 2 + 2 * (2 * 2 * keys * 8 * 2) + 18 * 4
    assert got.written == 2 * 4 * 3 * 8 * 2


def test_row_operations():
    x, gain = Spec((3, 10), "f16"), Spec((10,))
    assert cost(RMSNormRows(axes=1, eps=0.0), x) == Cost(3 * 30, 60, 60)
    assert cost(RMSNormRows(axes=1, eps=0.0), x, gain) == Cost(4 * 30, 100, 60)
    assert cost(AddRMSNormRows(eps=0.0), x, x, gain) == Cost(5 * 30, 160, 60)
    assert cost(LayerNormRows(axes=1, eps=0.0), x, gain, gain) == Cost(7 * 30, 140, 60)
    assert cost(SoftmaxRows(log=False), x) == Cost(5 * 30, 60, 60)


def test_only_rows_that_are_looked_up_are_read():
    got = cost(Embedding(2.0), Spec((3,), "u32"), Spec((1000, 64), "q4_1"))
    assert got == Cost(3 * 64, 3 * 4 + 3 * 40, 3 * 64 * 4)
    assert cost(Embedding(), Spec((3,), "u32"), Spec((1000, 64), "q4_1")).flops == 0
    assert cost(LastRow(), Spec((8, 64)), STEP) == Cost(0, 256 + 16, 256)


def test_the_cache_without_rotation_writes_its_new_rows():
    cache = Spec((100, 2, 4), "f16")
    got = cost(StoreQKV(), Spec((3, 32)), cache, cache, STEP, progress=Progress(0, 2))
    assert got == Cost(0, 3 * 32 * 4 + 16, 3 * 16 * 4 + 2 * 2 * 8 * 2)


def test_the_default_counts_operands_and_results():
    x = Spec((1, 2, 3, 4), "f16")
    assert cost(RopeHeads(interleaved=False), x, Spec((9, 2, 2)), Spec((2,), "i32")) == Cost(24, 48 + 144 + 8, 48)


def test_sampling_goes_over_the_vocabulary():
    logits, seen = Spec((1, 50)), Spec((50,), "u32")
    got = cost(SampleToken(), logits, Spec((8,), "u32"), STEP, seen, Spec((4,), "u32"))
    assert got == Cost(300, (200 + 32 + 200) + (200 + 32 + 16), 200 + 16 + 16 + 4)


def scopes_of(device, *tensors):
    record = device.recorder()
    compile_program(device, [t.node for t in tensors]).record(record)
    return record.plan().scopes


def test_fused_kernels_count_expressions_and_memory_once(device):
    x, row = (Tensor(np.ones(shape, np.float32), device) for shape in ((6, 10), (10,)))
    with named("block"), named("inner"):
        y = (x * 2.0 + row) * x
    (scope,) = scopes_of(device, y)
    assert scope.cost(None) == Cost(3 * 60, 240 + 40, 240)
    assert (scope.kind, scope.path, scope.name) == ("element-wise", "block.inner", "fused mul, add, mul")
    assert (set(scope.operands), list(scope.results)) == ({"f32 6x10", "f32 10"}, ["f32 6x10"])


def test_a_view_that_leaves_out_elements_reads_fewer(device):
    x = Tensor(np.ones((6, 10), np.float32), device)
    (scope,) = scopes_of(device, x[1:3, ::2] + 1.0)
    assert scope.cost(None) == Cost(10, 40, 40)


def test_reductions_count_their_producer(device):
    x = Tensor(np.ones((6, 10), np.float32), device)
    (scope,) = scopes_of(device, (x * 2.0).sum(1))
    assert scope.cost(None) == Cost(2 * 60, 240, 24)
    assert (scope.kind, scope.name) == ("reduction", "sum(mul)")


def test_kernels_are_named_after_operations_and_where_they_were_made(device):
    x, gain = (Tensor(np.ones(shape, np.float32), device) for shape in ((3, 64), (64,)))
    with named("layers.1"):
        normed = F.rms_norm(x, 64, gain, 1e-6)
    with named("head"):
        y = normed.transpose(0, 1) * 3.0
    scopes = scopes_of(device, y)
    assert [(s.path, s.kind) for s in scopes] == [("layers.1", "norm"), ("head", "element-wise")]
    assert scopes[0].name == "rms_norm_rows"
    assert scopes[0].cost(struct.pack("<4I", 1, 1, 0, 0)) == Cost(4 * 192, 768 + 256, 768)
