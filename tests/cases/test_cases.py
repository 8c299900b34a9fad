"""Small inputs that other programs got wrong in public, with their right values (docs/cases.md lists all 25 kinds).

Only the values that no other test holds are here; numbers in the names are lines of docs/cases.md. Right values are by
hand or NumPy float64.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpu import Device, DeviceLost, GpuError, LimitExceeded, ShaderError
from nn import functional as F
from nn.generate.engine import Engine
from nn.models.load import ModelFile, load_model
from nn.tensor import Tensor
from tests.fixtures import tiny


@pytest.fixture
def t(device):
    return lambda data, dtype=None: Tensor(np.asarray(data, np.float32), device, dtype=dtype)


@pytest.fixture(scope="module")
def smallest():
    """A device with WebGPU's default limits and no optional feature."""
    with Device.open(limits="default", features="none", canary=True) as device:
        yield device
        device.memory.check_canaries()


def test_03_tanh_and_tanh_gelu_do_not_overflow(t):
    np.testing.assert_array_equal(t([100, -100]).tanh().numpy(), [1, -1])
    np.testing.assert_array_equal(F.gelu(t([-20, 40]), approximate="tanh").numpy(), [0, 40])


def test_07_a_product_over_no_columns_is_zero(t):
    got = (t(np.zeros((2, 0))) @ t(np.zeros((0, 3)))).numpy()
    assert got.shape == (2, 3)
    np.testing.assert_array_equal(got, np.zeros((2, 3)))


@pytest.mark.parametrize("queries", [20, 65])  # tests/ops/test_attention.py has one query: another kernel
@pytest.mark.parametrize("head_dim", [80, 96, 256, 63])
def test_09_padding_of_the_last_block_of_keys_does_not_count(t, head_dim, queries):
    q, k = t(np.zeros((1, queries, head_dim))), t(np.zeros((1, 77, head_dim)))
    v = t(np.broadcast_to(np.arange(77.0)[:, None], (1, 77, head_dim)))
    out = F.scaled_dot_product_attention(q, k, v).numpy()
    np.testing.assert_allclose(out, np.full((1, queries, head_dim), 38.0), rtol=2e-6)


@pytest.mark.parametrize("limits", ["max", "default"])
def test_10_more_operands_than_a_shader_binds(device, smallest, limits):
    on = smallest if limits == "default" else device
    parts = [Tensor(np.full((5, 7), i, np.float32), on) for i in range(1, 34)]
    total = parts[0]
    for part in parts[1:12]:
        total = total + part
    np.testing.assert_array_equal(total.numpy(), np.full((5, 7), 78))
    np.testing.assert_array_equal(F.cat(parts).numpy(), np.repeat(np.arange(1, 34), 5)[:, None] * np.ones(7))


def test_10_products_and_attention_are_the_same_at_the_smallest_limits(device, smallest, rng):
    a, b = rng.integers(-8, 9, (2, 70, 70)).astype(np.float32)
    q, k, v = rng.standard_normal((3, 2, 33, 96)).astype(np.float32)
    products, attended = [], []
    for on in (device, smallest):
        products.append((Tensor(a, on) @ Tensor(b, on)).numpy())
        attended.append(F.scaled_dot_product_attention(*(Tensor(x, on) for x in (q, k, v))).numpy())
    np.testing.assert_array_equal(products[0], a @ b)  # whole numbers: exact in any order
    np.testing.assert_array_equal(products[1], a @ b)
    np.testing.assert_allclose(attended[1], attended[0], rtol=1e-5, atol=1e-5)


def test_11_a_fill_past_four_gibibytes_is_whole_or_refused(device):
    count = 2**30 + 3
    try:
        filled = F.full((count,), 1.0, device=device).realize()
    except LimitExceeded as error:
        assert "split" in str(error)
        return
    ends = filled[-5:].numpy(), filled[:5].numpy(), filled[2**29 - 2 : 2**29 + 2].numpy()
    assert all((end == 1).all() for end in ends)


def test_13_a_product_does_not_depend_on_subgroups(device, smallest):
    i, k, j = np.arange(32)[:, None], np.arange(32), np.arange(32)
    a, b = ((i + k) % 3).astype(np.float32), ((np.arange(32)[:, None] * j) % 5).astype(np.float32)
    for on in (device, smallest):
        runs = [(Tensor(a, on) @ Tensor(b, on)).numpy() for _ in range(3)]
        assert (runs[0][0, 1], runs[0][31, 31], runs[0].sum(dtype=np.float64)) == (61, 62, 50013)
        assert all(run.tobytes() == runs[0].tobytes() for run in runs[1:])


def test_14_no_f16_is_a_named_error_and_f32_goes_on(smallest, tmp_path):
    assert not smallest.caps.f16
    with pytest.raises((ShaderError, TypeError), match="f16"):
        (Tensor(np.float16([1, 2, 3]), smallest) * 2).numpy()
    np.testing.assert_array_equal((Tensor(np.float32([1, 2, 3]), smallest) * 2).numpy(), [2, 4, 6])
    write(tmp_path, "llama")
    file = ModelFile(tmp_path)
    before = smallest.counters.bytes_live
    with pytest.raises(ValueError, match="kv_dtype"):
        load_model(file, smallest, kv_dtype="f16")
    assert smallest.counters.bytes_live == before  # refused before anything is loaded
    file.close()


def test_14_closing_raises_nothing_and_a_reload_gives_the_same_numbers(tmp_path):
    model = write(tmp_path, "llama")
    runs = []
    for _ in range(2):
        device = Device.open()
        runs.append(logits(device, tmp_path, model.ids[:9]))
        device.close()
        device.close()
        with pytest.raises(DeviceLost, match="open a new Device"):
            device.alloc(4)
    assert runs[0].tobytes() == runs[1].tobytes()


def test_14_too_much_memory_is_a_typed_error_and_the_device_goes_on(device):
    with pytest.raises(GpuError, match="split"):
        device.alloc(device.caps.max_buffer + 4)
    np.testing.assert_array_equal((Tensor(np.float32([1, 2]), device) * 3).numpy(), [3, 6])


def test_16_a_tied_head_is_the_embedding_whether_stored_or_not(device, tmp_path):
    """Logits = E h; a stale lm_head beside a tied embedding is not read."""
    runs = []
    for name, head in (("absent", None), ("present", "same"), ("stale", "ones")):
        folder = tmp_path / name
        folder.mkdir()
        model = write(folder, "gemma3", head=head)
        assert model.config.tied_head
        runs.append(logits(device, folder, model.ids[:9]))
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()
    np.testing.assert_allclose(runs[0], model.logits[:9], atol=2e-3 * model.logits.std())


def write(folder, name, head="as stored"):
    """A tiny model in a folder; head: None leaves a tied lm_head out, "same" repeats the embedding, "ones" is stale."""
    model = tiny.load(name)
    state = tiny.hf_state(model.config, model.weights(), model.hf_shapes)
    if head != "as stored":
        embed = state[next(key for key in state if key.endswith("embed_tokens.weight"))]
        state.pop("lm_head.weight", None)
        if head is not None:
            state["lm_head.weight"] = np.ascontiguousarray(embed if head == "same" else np.ones_like(embed))
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.json))
    return model


def logits(device, folder, ids):
    file = ModelFile(folder)
    try:
        return Engine(load_model(file, device, kv_dtype="f32")).logits(ids.tolist())
    finally:
        file.close()
