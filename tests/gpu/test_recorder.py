"""Recording, what it refuses, and replaying; kernels and their cache."""

from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest

from gpu import Device, GpuError, LimitExceeded, ShaderError, wgsl
from gpu.recorder import MAX_PER_SUBMIT

ADD = """
struct Params { count: u32, by: i32, scale: f32 }
@group(0) @binding(0) var<storage, read> x: array<i32>;
@group(0) @binding(1) var<storage, read_write> out: array<i32>;
@group(0) @binding(2) var<uniform> p: Params;
@compute @workgroup_size(64)
fn add(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
       @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * 64u + lane;
  if (i < p.count) { out[i] = i32(f32(x[i]) * p.scale) + p.by; }
}
@compute @workgroup_size(1) fn step() { out[0] = out[0] * 3 + p.by; }
@compute @workgroup_size(1) fn none() {}
@compute @workgroup_size(1)
fn mark(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
  let i = (wg.z * grid.y + wg.y) * grid.x + wg.x;
  if (i < p.count) { out[i] += p.by; }
}
"""
PAIR = """
@group(0) @binding(0) var<storage, read_write> left: array<u32>;
@group(0) @binding(1) var<storage, read_write> right: array<u32>;
@compute @workgroup_size(1) fn pair() { left[0] = 1u; right[0] = 2u; }
"""


@pytest.fixture
def add(device):
    return device.kernel_source(ADD, "add", label="add")


def kernel(device: Device, entry: str):
    return device.kernel_source(ADD, entry, label=entry)


def run(device: Device, *dispatches) -> None:
    recorder = device.recorder()
    for chosen, grid, operands in dispatches:
        recorder(chosen, grid=grid, **operands)
    recorder.submit()


# Right results ---------------------------------------------------------------------------------------------------


def test_params_of_every_type_arrive(device, add):
    x = np.arange(-50, 50, dtype=np.int32)
    out = device.alloc(x.nbytes)
    run(device, (add, 2, {"x": device.upload(x), "out": out, "count": 100, "by": -7, "scale": -2.5}))
    np.testing.assert_array_equal(device.read(out, np.int32, 100), np.trunc(x * -2.5).astype(np.int32) - 7)


def test_dispatches_run_in_order_each_with_its_own_params(device):
    out = device.upload(np.ones(1, np.int32))
    run(device, *[(kernel(device, "step"), 1, {"out": out, "count": 0, "by": i, "scale": 1.0}) for i in range(10)])
    want = 1
    for i in range(10):
        want = want * 3 + i
    assert device.read(out, np.int32, 1)[0] == want


def test_a_kernel_without_bindings_or_params_runs(device):
    run(device, (kernel(device, "none"), 3, {}))
    device.wait()


@pytest.mark.parametrize("groups", [65_535, 65_536, 65_537, 131_071, 200_003], ids=str)
def test_a_grid_over_the_limit_is_folded(device, groups):
    out = device.upload(np.zeros(groups, np.int32))
    run(device, (kernel(device, "mark"), groups, {"out": out, "count": groups, "by": 1, "scale": 1.0}))
    np.testing.assert_array_equal(device.read(out, np.int32, groups), 1)  # each once, none missing


@pytest.mark.parametrize("grid", [1, (5,), (2, 3), (2, 3, 4), [3, 2], np.int64(7), np.array([2, 2])], ids=str)
def test_grids_of_every_form(device, grid):
    count = int(np.prod(grid))
    out = device.upload(np.zeros(count, np.int32))
    run(device, (kernel(device, "mark"), grid, {"out": out, "count": count, "by": 1, "scale": 1.0}))
    np.testing.assert_array_equal(device.read(out, np.int32, count), 1)


@pytest.mark.parametrize("grid", [0, (0,), (0, 3), (3, 0, 1), np.int64(0)], ids=str)
def test_a_grid_of_nothing_records_nothing(device, add, grid):
    recorder = device.recorder()
    recorder(add, grid=grid)
    assert len(recorder) == 0
    recorder.submit()


def test_an_empty_plan_replays_and_still_reads(device):
    buffer = device.upload(np.arange(4, dtype=np.uint32))
    plan = device.recorder().plan()
    assert len(plan) == 0
    plan.replay()
    new = np.array([9, 8], np.uint32)
    pending = plan.replay(write=(buffer, new.tobytes()), read=(buffer, 16))
    assert np.frombuffer(pending.result(), np.uint32).tolist() == [9, 8, 2, 3]


def test_more_dispatches_than_one_submit_holds(fresh):
    count = 2 * MAX_PER_SUBMIT + 3
    out = fresh.upload(np.zeros(1, np.int32))
    mark = kernel(fresh, "mark")
    recorder = fresh.recorder()
    for i in range(count):
        recorder(mark, grid=1, out=out, count=1, by=i, scale=1.0)
    plan = recorder.plan()
    assert (len(plan), len(recorder)) == (count, 0)
    submits, dispatches = fresh.counters.submits, fresh.counters.dispatches
    zero = (out, np.zeros(1, np.int32).tobytes())
    for _ in range(2):
        got = np.frombuffer(plan.replay(write=zero, read=(out, 4)).result(), np.int32)
        assert got[0] == count * (count - 1) // 2
    assert fresh.counters.submits - submits == 2 * 3
    assert fresh.counters.dispatches - dispatches == 2 * count


def test_checked_and_trusted_give_the_same(rng):
    x = rng.integers(-1000, 1000, 1000).astype(np.int32)
    results = []
    for checked in (False, True):
        with Device.open(checked=checked) as device:
            assert device.caps.checked is checked
            out = device.alloc(x.nbytes)
            chosen = kernel(device, "add")
            run(device, (chosen, 16, {"x": device.upload(x), "out": out, "count": 1000, "by": 3, "scale": 2.0}))
            results.append(device.read(out, np.int32, 1000))
    np.testing.assert_array_equal(results[0], 2 * x + 3)
    np.testing.assert_array_equal(results[1], results[0])


# Steady state ----------------------------------------------------------------------------------------------------


def test_a_replay_makes_nothing_new(fresh):
    state, out = fresh.upload(np.zeros(64, np.int32)), fresh.alloc(256)
    recorder = fresh.recorder()
    for _ in range(5):
        recorder(kernel(fresh, "add"), grid=1, x=state, out=out, count=64, by=1, scale=1.0)
    plan = recorder.plan()
    fresh.memory.reserve_staging(256, 2)

    def made():
        counters = fresh.counters
        return counters.pipelines, counters.allocations, counters.bind_groups, counters.bytes_live

    before = made()
    ahead = None
    for i in range(20):  # the next replay goes out before this one's result is looked at
        pending = plan.replay(write=(state, np.full(64, i, np.int32).tobytes()), read=(out, 256))
        if ahead is not None:
            np.testing.assert_array_equal(np.frombuffer(ahead.result(), np.int32), i)
        ahead = pending
    np.testing.assert_array_equal(np.frombuffer(ahead.result(), np.int32), 20)
    assert made() == before


def test_kernels_are_compiled_once_for_the_same_options(fresh):
    def made() -> int:
        return fresh.counters.pipelines

    start = made()
    first = fresh.kernel("norm/rms_norm.wgsl", "rms_norm")
    assert made() == start + 1
    assert fresh.kernel("norm/rms_norm.wgsl", "rms_norm", constants={}, types=None) is first
    assert made() == start + 1
    smaller = fresh.kernel("norm/rms_norm.wgsl", "rms_norm", constants={"WG": 64})
    assert smaller is not first
    assert fresh.kernel("norm/rms_norm.wgsl", "rms_norm", constants={"WG": 64}) is smaller
    plain = fresh.kernel("norm/rms_norm.wgsl", "rms_norm", subgroups=False)
    assert (plain is first) == (not fresh.caps.subgroups)
    text = kernel(fresh, "add")
    assert kernel(fresh, "add") is text and kernel(fresh, "step") is not text


def whole_files() -> list[str]:
    """The shader files that no other includes: those that compile as they stand."""
    paths = {
        str(path.relative_to(wgsl.SHADERS)): path.read_text(encoding="utf-8") for path in wgsl.SHADERS.rglob("*.wgsl")
    }
    included = {name for text in paths.values() for name in re.findall(r"// include (\S+)", text)}
    return sorted(paths.keys() - included)


@pytest.mark.parametrize("path", whole_files())
def test_every_entry_builds_at_the_smallest_limits(smallest, path):
    loaded = wgsl.load(path)
    for entry in loaded.entries:
        if sum(binding.access != "uniform" for binding in loaded.used_by(entry)) > 8:
            with pytest.raises(LimitExceeded, match=f"{entry}: binds 9 storage buffers, .* allows 8 a shader; split"):
                smallest.kernel(path, entry)
        elif needs := loaded.extensions() & {"f16", "subgroups"}:  # kernels for devices that have them
            with pytest.raises(ShaderError, match=f"{entry}: uses ({'|'.join(needs)}), which .* does not have"):
                smallest.kernel(path, entry)
        else:
            assert smallest.kernel(path, entry).entry == entry


@pytest.fixture(scope="module")
def smallest():
    with Device.open(limits="default", features="none", checked=True) as device:
        yield device


# What is refused -------------------------------------------------------------------------------------------------


def refused(error, message: str):
    return pytest.raises(error, match=re.escape(message))


def test_wrong_buffers_and_params_are_named(device, add):
    x, out = device.alloc(4), device.alloc(4)
    good = {"x": x, "out": out, "count": 1, "by": 0, "scale": 1.0}
    recorder = device.recorder()
    with refused(ShaderError, "add: buffers given ['out'], the shader binds ['out', 'x']; missing ['x']"):
        recorder(add, grid=1, **{k: v for k, v in good.items() if k != "x"})
    with refused(
        ShaderError, "params given ['by', 'count'], the shader has ['by', 'count', 'scale']; missing ['scale'"
    ):
        recorder(add, grid=1, **{k: v for k, v in good.items() if k != "scale"})
    with refused(ShaderError, "missing [], unknown ['extra']"):
        recorder(add, grid=1, **good, extra=1)
    with refused(ShaderError, "add: 'x' is a ndarray, expected a Buffer"):
        recorder(add, grid=1, **(good | {"x": np.zeros(1)}))
    for name, value in (("count", -1), ("count", 2**32), ("by", 2**31), ("count", 1.5), ("scale", 1e39), ("by", "1")):
        with refused(ShaderError, "add: a parameter does not fit its type"):
            recorder(add, grid=1, **(good | {name: value}))
    assert len(recorder) == 0
    recorder(add, grid=1, **good)
    recorder.submit()


def test_grids_over_the_limit_are_refused(device, add):
    limit = device.caps.max_workgroups
    recorder = device.recorder()
    with refused(
        LimitExceeded, f"add: grid ({limit + 1}, 1, 1), at most {limit} workgroups a dimension; split or fold it"
    ):
        recorder(add, grid=(limit + 1, 1))
    with refused(LimitExceeded, f"add: {limit * limit + 1:,} workgroups are more than {limit} x {limit}"):
        recorder(add, grid=limit * limit + 1)


def test_one_buffer_read_and_written_is_refused(device, add):
    whole = device.alloc(1024)
    operands = {"count": 1, "by": 0, "scale": 1.0}
    message = "add: 'out' is written and 'x' lies in the same driver buffer; one buffer cannot be read and written"
    for x, out in ((whole, whole), (whole, whole.view(256, 256)), (whole.view(0, 256), whole.view(512, 256))):
        with refused(GpuError, message):
            device.recorder()(add, grid=1, x=x, out=out, **operands)


def test_two_written_ranges_may_be_apart_but_not_overlap(device):
    pair = device.kernel_source(PAIR, "pair", label="pair")
    whole = device.upload(np.zeros(256, np.uint32))
    run(device, (pair, 1, {"left": whole.view(0, 256), "right": whole.view(256, 256)}))
    got = device.read(whole, np.uint32, 256)
    assert (got[0], got[64], got.sum()) == (1, 2, 3)
    for left, right in ((whole, whole), (whole.view(0, 512), whole.view(256, 256)), (whole.view(256, 4), whole)):
        with refused(GpuError, "pair: 'left' is written and 'right' lies in the same driver buffer"):
            device.recorder()(pair, grid=1, left=left, right=right)


def test_a_buffer_of_another_device_is_refused(device, add, fresh):
    mine, other = device.alloc(4), fresh.alloc(4)
    with refused(GpuError, "add: 'x' belongs to another device; upload it to this one"):
        device.recorder()(add, grid=1, x=other, out=mine, count=1, by=0, scale=1.0)


def test_a_kernel_of_another_device_is_refused(add, fresh):
    x, out = fresh.alloc(4), fresh.alloc(4)
    with refused(GpuError, "add: this kernel is another device's; make it with this device's kernel()"):
        fresh.recorder()(add, grid=1, x=x, out=out, count=1, by=0, scale=1.0)


def test_more_storage_buffers_than_allowed_are_refused(smallest):
    text = "".join(f"@group(0) @binding({i}) var<storage, read_write> b{i}: array<f32>;\n" for i in range(9))
    text += "@compute @workgroup_size(1) fn eight() { " + "".join(f"b{i}[0] = 1.0; " for i in range(8)) + "}\n"
    text += "@compute @workgroup_size(1) fn nine() { " + "".join(f"b{i}[0] = 1.0; " for i in range(9)) + "}\n"
    assert len(smallest.kernel_source(text, "eight", label="many").storage) == 8
    with pytest.raises(LimitExceeded, match=r"many: binds 9 storage buffers, .* allows 8 a shader; split"):
        smallest.kernel_source(text, "nine", label="many")


def test_a_binding_over_the_limit_is_refused(smallest):
    chosen = kernel(smallest, "add")
    limit = smallest.caps.max_binding
    x, out = smallest.alloc(limit + 256), smallest.alloc(4)
    operands = {"out": out, "count": 1, "by": 0, "scale": 1.0}
    recorder = smallest.recorder()
    with pytest.raises(LimitExceeded, match=rf"add: 'x': {limit + 256:,} bytes in one binding; .* at most {limit:,};"):
        recorder(chosen, grid=1, x=x, **operands)
    recorder(chosen, grid=1, x=x.view(256, limit), **operands)
    recorder.submit()


def test_more_than_two_groups_are_refused(device):
    text = "@group(2) @binding(0) var<storage, read_write> out: array<u32>;\n"
    text += "@compute @workgroup_size(1) fn f() { out[0] = 1u; }"
    with refused(ShaderError, "three: uses @group(2); kernels have groups 0 to 1"):
        device.kernel_source(text, "f", label="three")


def test_a_second_group_is_bound(device):
    text = """
    @group(0) @binding(0) var<storage, read_write> out: array<u32>;
    @group(1) @binding(3) var<storage, read> extra: array<u32>;
    @compute @workgroup_size(1) fn both() { out[0] = extra[0] + 1u; }
    @compute @workgroup_size(1) fn later() { let unused = extra[0]; }
    """
    out, extra = device.alloc(4), device.upload(np.array([41], np.uint32))
    both = device.kernel_source(text, "both", label="both")
    run(device, (both, 1, {"out": out, "extra": extra}))
    assert device.read(out, np.uint32, 1)[0] == 42
    run(device, (device.kernel_source(text, "later", label="later"), 1, {"extra": extra}))


def test_a_recording_holds_what_it_is_asked_to_keep(fresh):
    buffer = fresh.alloc(1024)
    gone = weakref.ref(buffer)
    recorder = fresh.recorder()
    recorder.keep(buffer)
    del buffer
    plan = recorder.plan()
    gc.collect()
    assert gone() is not None
    del plan
    gc.collect()
    assert gone() is None


def test_large_params_are_refused(device):
    fields = ", ".join(f"a{i}: u32" for i in range(65))
    text = f"struct Params {{ {fields} }}\n@group(0) @binding(0) var<uniform> p: Params;\n"
    text += "@group(0) @binding(1) var<storage, read_write> out: array<u32>;\n"
    text += "@compute @workgroup_size(1) fn f() { out[0] = p.a64; }"
    recorder = device.recorder()
    big = device.kernel_source(text, "f", label="big")
    recorder(big, grid=1, out=device.alloc(4), **{f"a{i}": i for i in range(65)})
    with refused(ShaderError, "big: Params of 260 bytes; at most 256"):
        recorder.plan()


def test_replay_refuses_ranges_outside(device, add):
    x, out = device.alloc(16), device.alloc(16)
    recorder = device.recorder()
    recorder(add, grid=1, x=x, out=out, count=4, by=0, scale=1.0)
    plan = recorder.plan()
    with refused(GpuError, "replay: write: 20 bytes at offset 0 of a buffer of 16"):
        plan.replay(write=(x, bytes(20)))
    with refused(GpuError, "replay: write of 3 bytes; whole words of 4 are written"):
        plan.replay(write=(x, bytes(3)))
    with refused(GpuError, "replay: read: 17 bytes at offset 0 of a buffer of 16"):
        plan.replay(read=(out, 17))


# Shader errors ---------------------------------------------------------------------------------------------------

WRONG = {
    "type": ("  let a: u32 = 1.5;", "let a: u32 = 1.5;"),
    "name": ("  out[0] = nothing(1u);", "out[0] = nothing(1u);"),
    "syntax": ("  out[0] = = 1u;", "out[0] = = 1u;"),
}


@pytest.mark.parametrize("checked", [False, True], ids=["trusted", "checked"])
@pytest.mark.parametrize("kind", WRONG)
def test_shader_errors_name_file_and_line(tmp_path, monkeypatch, kind, checked):
    line, shown = WRONG[kind]
    (tmp_path / "lib").mkdir()
    (tmp_path / "main.wgsl").write_text(
        "// A file.\n// include lib/part.wgsl\n@compute @workgroup_size(1) fn main() { part(); }\n", encoding="utf-8"
    )
    (tmp_path / "lib/part.wgsl").write_text(
        "@group(0) @binding(0) var<storage, read_write> out: array<u32>;\n\nfn part() {\n" + line + "\n}\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(wgsl.load, "__kwdefaults__", wgsl.load.__kwdefaults__ | {"root": tmp_path})
    with Device.open(checked=checked, features="none") as device:
        with pytest.raises(ShaderError) as caught:
            device.kernel("main.wgsl", "main")
        assert str(caught.value).startswith("lib/part.wgsl:4: ")
        assert str(caught.value).endswith(f"\n  in: {shown}")
        out = device.upload(np.zeros(1, np.int32))  # and the device goes on
        run(device, (kernel(device, "mark"), 1, {"out": out, "count": 1, "by": 5, "scale": 1.0}))
        assert device.read(out, np.int32, 1)[0] == 5


def test_an_error_without_a_line_names_the_kernel(device):
    text = "override WG: u32 = 1u;\n@compute @workgroup_size(WG) fn f() {}"
    with pytest.raises(ShaderError, match="wide"):
        device.kernel_source(text, "f", label="wide", constants={"WG": 1 << 20})


@pytest.mark.parametrize("grid", [-1, (2, -1), 1.5, "2", None, (), (1, 1, 1, 1), (1, 2.5)], ids=str)
def test_a_grid_that_is_none_is_refused(device, add, grid):
    x = device.upload(np.arange(4, dtype=np.int32))
    with pytest.raises(ShaderError, match=r"add: grid is .*; expected a number of workgroups"):
        device.recorder()(add, grid=grid, x=x, out=device.alloc(16), count=4, by=1, scale=1.0)


def test_deeply_nested_brackets_are_refused(device):
    """The parser of a driver would run out of stack, which ends the process."""
    for depth, good in ((90, True), (5000, False)):
        value = "(" * depth + "p.by" + ")" * depth
        text = ADD.replace("+= p.by", f"+= {value}") + "// ((( a comment does not count"
        if good:
            assert device.kernel_source(text, "mark", label="deep").names == {"out"}
        else:
            with pytest.raises(ShaderError, match=r"deep: brackets are nested 500\d deep, at most 100"):
                device.kernel_source(text, "mark", label="deep")


def test_constants_are_numbers(device):
    with pytest.raises(ShaderError, match="constant WG is '64'; expected a number"):
        device.kernel("norm/rms_norm.wgsl", "rms_norm", constants={"WG": "64"})


def test_scratch_is_shared_by_name_within_a_recording(device):
    record = device.recorder()
    first = record.scratch("panel", 4096)
    assert record.scratch("panel", 256) is first and record.scratch("other", 256) is not first
    larger = record.scratch("panel", 8192)
    assert larger is not first and larger.nbytes >= 8192 and not first.released
    record.plan()
    assert record.scratch("panel", 4096) is not larger
