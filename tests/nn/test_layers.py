"""Modules: names, state, strict loading; layers against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import nn.functional as F
from nn.graph.jit import jit
from nn.graph.schedule import compile_program
from nn.layers import Embedding, LayerNorm, Linear, Module, Parameter, RMSNorm, Sequential, StateError
from nn.ops.base import ShapeError
from nn.tensor import Tensor


class Block(Module):
    def __init__(self, dim, device, rng):
        self.norm = RMSNorm(dim, 1e-6, device=device)
        self.up = Linear(dim, 2 * dim, device=device, rng=rng)
        self.act = F.gelu
        self.down = Linear(2 * dim, dim, bias=False, device=device, rng=rng)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(Module):
    def __init__(self, device, rng):
        self.embed = Embedding(11, 32, device=device, rng=rng)
        self.blocks = [Block(32, device, rng), Block(32, device, rng)]
        self.heads = {"a": Linear(32, 3, device=device, rng=rng)}
        self.scale = Parameter(np.float32([2.0]), device)
        self.count = 3

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) * self.scale


@pytest.fixture
def net(device, rng):
    return Net(device, rng)


def test_names_are_attribute_paths(net):
    names = [name for name, _ in net.named_parameters()]
    block = ["norm.weight", "up.weight", "up.bias", "down.weight"]
    blocks = [f"blocks.{i}.{name}" for i in (0, 1) for name in block]
    assert sorted(names) == sorted(["scale", "embed.weight", *blocks, "heads.a.weight", "heads.a.bias"])
    assert list(net.state_dict()) == names
    assert len(list(net.parameters())) == len(names)


def test_a_tied_parameter_comes_once(device, rng):
    net = Net(device, rng)
    net.heads["a"].weight = net.embed.weight
    assert "heads.a.weight" not in net.state_dict() and "embed.weight" in net.state_dict()


def test_state_round_trip_in_place(net, device, rng):
    ids = Tensor([1, 5, 10], device)
    run = jit(net)
    run(ids)
    state = {name: np.float32(rng.standard_normal(p.shape)) for name, p in net.named_parameters()}
    buffer = net.scale.array().buffer
    assert net.load_state_dict(state) == ([], [])
    assert net.scale.array().buffer is buffer
    for name, parameter in net.named_parameters():
        np.testing.assert_array_equal(parameter.numpy(), state[name])
    other = Net(device, rng)
    other.load_state_dict(net.state_dict())
    np.testing.assert_allclose(run(ids).numpy(), other(ids).numpy(), rtol=1e-5, atol=1e-5)  # the recording sees them


def test_strict_loading_lists_every_name(net, rng):
    state = {name: p.numpy() for name, p in net.named_parameters()}
    before = net.scale.numpy()
    for name in ("scale", "blocks.1.up.bias"):
        del state[name]
    state |= {"extra.weight": np.zeros(3), "blocks.2.norm.weight": np.zeros(3)}
    state["embed.weight"] = np.zeros((11, 33), np.float32)
    state["heads.a.bias"] = np.zeros(3, np.int32)
    with pytest.raises(StateError) as caught:
        net.load_state_dict(state)
    error = caught.value
    assert set(error.missing) == {"scale", "blocks.1.up.bias"}
    assert set(error.unexpected) == {"extra.weight", "blocks.2.norm.weight"}
    assert {name for name, _, _ in error.wrong} == {"embed.weight", "heads.a.bias"}
    for text in (
        "missing (2)",
        "unexpected (2)",
        "wrong (2)",
        "embed.weight is float32[11, 33], expected f32[11, 32]",
        "nothing",
    ):
        assert text in str(error)
    with pytest.raises(StateError, match="wrong"):  # wrong shapes are never let through
        net.load_state_dict(state, strict=False)
    del state["embed.weight"], state["heads.a.bias"]
    keys = net.load_state_dict(state, strict=False)
    assert set(keys.missing_keys) == {"scale", "blocks.1.up.bias", "embed.weight", "heads.a.bias"}
    assert set(keys.unexpected_keys) == {"extra.weight", "blocks.2.norm.weight"}
    np.testing.assert_array_equal(net.scale.numpy(), before)


def test_a_value_computed_before_loading_is_refused_after(net):
    lazy = net.scale * 2
    net.load_state_dict({"scale": np.float32([9])}, strict=False)
    assert net.scale.item() == 9
    with pytest.raises(RuntimeError, match="load_state_dict has written over"):
        lazy.item()


@pytest.mark.parametrize(("inside", "outside"), [(32, 7), (5, 3), (33, 64)])
def test_linear(device, rng, inside, outside):
    layer = Linear(inside, outside, device=device, rng=rng)
    x = np.float32(rng.standard_normal((2, 3, inside)))
    w, b = layer.weight.numpy().astype(np.float64), layer.bias.numpy().astype(np.float64)
    assert np.abs(w).max() <= 1 / np.sqrt(inside) and np.abs(w).max() > 0
    np.testing.assert_allclose(layer(Tensor(x, device)).numpy(), x @ w.T + b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match=f"built for a last axis of {inside}"):
        layer(Tensor(np.zeros((2, inside + 1), np.float32), device))


def test_linear_quantises_itself(device, rng):
    layer = Linear(64, 5, device=device, rng=rng)
    x = np.float32(rng.standard_normal((4, 64)))
    want = layer(Tensor(x, device)).numpy()
    assert layer.to_quantized("q8_0") is layer and layer.weight.dtype == "q8_0"
    w = layer.weight.numpy().astype(np.float64)
    got = layer(Tensor(x, device)).numpy()
    np.testing.assert_allclose(got, x @ w.T + layer.bias.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.parametrize("dim", [32, 5])
def test_embedding(device, rng, dim):
    layer = Embedding(9, dim, device=device, rng=rng)
    ids = np.array([[0, 8, 3], [3, 3, 1]], np.int32)
    np.testing.assert_array_equal(layer(Tensor(ids, device)).numpy(), layer.weight.numpy()[ids])


def test_norms(device, rng):
    x = np.float32(rng.standard_normal((2, 3, 35)))
    x64 = x.astype(np.float64)
    gain, shift = np.float32(rng.standard_normal((2, 35)))
    rms = RMSNorm(35, 1e-5, device=device)
    rms.load_state_dict({"weight": gain})
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(rms(Tensor(x, device)).numpy(), want, rtol=1e-5, atol=1e-6)
    layer = LayerNorm(35, device=device)
    assert list(layer.state_dict()) == ["weight", "bias"]
    layer.load_state_dict({"weight": gain, "bias": shift})
    centred = x64 - x64.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain + shift
    np.testing.assert_allclose(layer(Tensor(x, device)).numpy(), want, rtol=1e-5, atol=2e-6)
    with pytest.raises(ShapeError, match="built for trailing axes"):
        layer(Tensor(x[..., 1:], device))


def test_sequential(device, rng):
    net = Sequential(Linear(32, 8, device=device, rng=rng), F.relu, Sequential(Linear(8, 2, device=device, rng=rng)))
    assert list(net.state_dict()) == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    state = {name: p.numpy().astype(np.float64) for name, p in net.named_parameters()}
    x = np.float32(rng.standard_normal((3, 32)))
    hidden = np.maximum(x @ state["0.weight"].T + state["0.bias"], 0)
    want = hidden @ state["2.0.weight"].T + state["2.0.bias"]
    np.testing.assert_allclose(net(Tensor(x, device)).numpy(), want, rtol=1e-5, atol=1e-5)
    assert len(net) == 3 and net[1] is F.relu


def paths(device, tensor):
    record = device.recorder()
    compile_program(device, [tensor.node]).record(record)
    return [scope.path for scope in record.plan().scopes]


def test_kernels_are_named_by_attribute_path(device, rng):
    """As the parameters are, through lists and dicts of modules."""
    net = Net(device, rng)
    found = paths(device, net(Tensor(np.array([1, 2], np.int32), device)))
    assert {path.rpartition(".")[0] for name, _ in net.named_parameters() if (path := name) != "scale"} <= set(found)
    assert found[0] == "embed" and {"blocks.0.norm", "blocks.1.down", "heads.a"} <= set(found)
    assert paths(device, Sequential(net.blocks[0].norm, net.blocks[0])(Tensor(np.ones((2, 32), np.float32), device)))[
        :2
    ] == ["0", "1.norm"]
    alone = net.blocks[0].norm(Tensor(np.ones((2, 32), np.float32), device))  # nobody's child here
    assert paths(device, alone) == [""]


def test_a_forward_that_fails_leaves_no_name_behind(device, rng):
    net = Net(device, rng)
    with pytest.raises(ShapeError):
        net.blocks[0](Tensor(np.ones((2, 31), np.float32), device))
    assert paths(device, net.blocks[0].norm(Tensor(np.ones((2, 32), np.float32), device))) == [""]
