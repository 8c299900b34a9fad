"""What a decoding step of every family says about its work, held against the model's own tables of shapes."""

from __future__ import annotations

import struct

import pytest

from gpu import Cost
from nn.models.config import flops_per_token
from nn.ops.base import Spec, stored_bytes
from tests.fixtures import tiny
from tests.models.test_decoder import opened, write

CONTEXT, POSITION = 32, 20


@pytest.fixture(params=tiny.NAMES)
def family(request, device, tmp_path):
    """(config, engine, scopes of a decoding step, each once)."""
    model = write(tmp_path, request.param)
    engine = opened(device, tmp_path, context=CONTEXT)
    scopes = dict.fromkeys(scope for scope in engine.decode_plan.scopes if scope is not None)
    return model.config, engine, list(scopes)


def outermost(scope):
    return scope if scope.parent is None else outermost(scope.parent)


def test_every_dispatch_has_a_place_a_kind_and_a_cost(family):
    config, engine, _ = family
    scopes = [None if scope is None else outermost(scope) for scope in engine.decode_plan.scopes]
    assert None not in scopes
    assert {scope.kind for scope in scopes} <= {
        "attention", "cache", "element-wise", "embedding", "linear", "movement", "norm", "rope", "sampling",
    }  # fmt: skip
    paths = {scope.path for scope in scopes}
    assert {"embed", "head", "sample"} <= paths
    for layer in range(config.layers):
        assert {f"layers.{layer}.attention", f"layers.{layer}.mlp"} <= paths
    assert all(scope.cost(state(POSITION)) is not None and scope.results is not None for scope in scopes)


def state(position):
    return struct.pack("<4I", position, 1, 0, 0)


def total(scopes, position):
    return sum((scope.cost(state(position)) for scope in scopes if scope.parent is None), Cost())


def test_operations_are_those_of_the_models_shapes(family):
    """Products and attention are what flops_per_token counts; norms, activations, rotation and sampling come on top."""
    config, _, scopes = family
    counted = total(scopes, POSITION).flops
    expected = flops_per_token(config, context=POSITION + 1, phase="decode")
    assert expected < counted < 1.6 * expected  # of models this small, the rest is a large part
    grown = total(scopes, POSITION + 1).flops - counted
    windows = [config.layer_window(i) for i in range(config.layers)]
    longer = sum(1 for window in windows if not window or window > POSITION + 1)  # layers that see one key more
    assert grown == longer * config.heads * (4 * config.head_dim + 4 + 3 * bool(config.attention_softcap))


def test_every_weight_is_read_once(family):
    config, engine, scopes = family
    model = engine.model
    read = total(scopes, POSITION).read
    matrices = [w for block in model.blocks for part in vars(block).values() for w in getattr(part, "weights", ())]
    stored = sum(stored_bytes(Spec(w.shape, w.dtype)) for w in [*matrices, model.head])
    keys = 2 * config.layers * (POSITION + 1) * config.kv_dim * {"f16": 2, "f32": 4}[model.kv_dtype]
    assert stored < read < stored + keys + 0.6 * stored
