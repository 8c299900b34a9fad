"""Matrix units: the rewriting into naga's spelling (needs no adapter), the request for the feature, and the probes."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

from gpu import Device, GpuError, ShaderError, matrix, probe, wgsl
from gpu import device as device_module
from gpu.backend import WgpuBackend, open_backend

KERNEL = """
const COLUMNS: bool = true;
alias Left = subgroup_matrix_left<f16, 16, 16>;  // a comment, with (brackets
@group(0) @binding(0) var<storage, read> a: array<f16>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
var<workgroup> tile: array<f16, 512>;
@compute @workgroup_size(32) fn main(@builtin(workgroup_id) wg: vec3<u32>) {
  let l = subgroupMatrixLoad<Left>(&a, wg.x * 256u, false, 16u);
  let r = subgroupMatrixLoad< subgroup_matrix_right<f16,16,16> >(
    &tile, at(wg.x, 2u), COLUMNS,
    24u,
  );
  var sum: subgroup_matrix_result<f32, 16, 16>;
  sum = subgroupMatrixMultiplyAccumulate(
    l, subgroupMatrixLoad<subgroup_matrix_right<f16, 16, 16>>(&tile, 0u, false, 8u), sum);
  subgroupMatrixStore(&out, wg.x * 256u, sum, false, 16u);
}
"""


def source(text: str) -> wgsl.Source:
    lines = text.splitlines()
    return wgsl.assemble("m.wgsl", lines, [("m.wgsl", i) for i in range(1, len(lines) + 1)])


def test_every_construct_is_rewritten():
    got = "".join(matrix.to_naga(source(KERNEL)).split())
    for wanted in (
        "alias Left = coop_mat16x16<f16, A>;",
        "let l = coopLoadT<Left>(&a[wg.x * 256u], 16u);",
        "let r = coopLoad<coop_mat16x16<f16, B>>(&tile[at(wg.x, 2u)], 24u);",
        "var sum: coop_mat16x16<f32, C>;",
        "sum = coopMultiplyAdd(l, coopLoadT<coop_mat16x16<f16, B>>(&tile[0u], 8u), sum);",
        "coopStoreT(sum, &out[wg.x * 256u], 16u);",
    ):
        assert "".join(wanted.split()) in got
    assert re.search("subgroup_?[mM]atrix", got) is None


def test_lines_keep_their_numbers():
    before, after = KERNEL.splitlines(), matrix.to_naga(source(KERNEL)).splitlines()
    assert len(before) == len(after)
    for text in ("var sum:", "@compute", "const COLUMNS"):
        at = next(i for i, line in enumerate(before) if text in line)
        assert text in after[at]


def test_code_without_matrices_is_left_alone():
    plain = source("fn f(x: f32) -> f32 { return subgroupAdd(x); }  // subgroupMatrixLoad")
    assert matrix.to_naga(plain) == plain.code


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("var m: subgroup_matrix_left<i8, 32, 16>;", "m.wgsl:2: .*naga has matrices of 8x8 and 16x16 only"),
        ("let y = subgroupMatrixScalarMultiply(m, 2.0);", "m.wgsl:2: subgroupMatrixScalarMultiply: naga has no such"),
        ("let y = subgroupMatrixLoad<M>(&a, 0u, turned, 8u);", "m.wgsl:2: .*order 'turned'; expected true, false, or"),
        ("let y = subgroupMatrixLoad<M>(&a, 0u, true);", "m.wgsl:2: subgroupMatrixLoad takes 4 arguments, here are 3"),
    ],
)
def test_what_naga_lacks_is_named_with_its_line(line, said):
    with pytest.raises(ShaderError, match=said):
        matrix.to_naga(source(f"fn f() {{\n  {line}\n}}"))


def test_extensions_name_matrices():
    assert source(KERNEL).extensions() == {"f16", "subgroups", "matrices"}
    assert source("fn f() { let x = subgroupAdd(1u); }").extensions() == {"subgroups"}


def test_a_device_without_matrices_refuses_the_shader():
    with Device.open(features="none") as device:
        assert (device.caps.matrix_f16, device.caps.matrix_i8) == (False, False)
        device.caps = replace(device.caps, f16=True, subgroups=True)
        with pytest.raises(ShaderError, match=r"uses subgroup matrices, which .* does not have through"):
            device.kernel_source(KERNEL, "main", label="m")


def test_a_refused_feature_costs_one_request_and_no_error(monkeypatch):
    """As wgpu-native does: the feature is listed, and the request for it fails."""
    asked: list[list[str]] = []
    monkeypatch.setattr(device_module, "_refused", set())
    monkeypatch.setattr(WgpuBackend, "matrix_features", ("cooperative-matrix",))
    backend = open_backend("wgpu")
    adapter = next(iter(backend.adapters()))
    listed = frozenset({*adapter.features, "cooperative-matrix"})
    monkeypatch.setattr(type(adapter), "features", property(lambda self: listed))
    request = WgpuBackend.request_device

    def refusing(self, adapter, *, features, limits, trusted):
        asked.append(list(features))
        if "cooperative-matrix" in features:
            raise RuntimeError("experimental features are not enabled")
        return request(self, adapter, features=features, limits=limits, trusted=trusted)

    monkeypatch.setattr(WgpuBackend, "request_device", refusing)
    for _ in range(2):
        with warnings.catch_warnings(), Device.open(backend="wgpu") as device:
            warnings.simplefilter("error")
            assert not device.caps.matrix_f16 and not device.caps.matrix_i8
            assert np.array_equal(device.read(device.upload(np.arange(4.0)), np.float64, 4), np.arange(4.0))
    assert ["cooperative-matrix" in features for features in asked] == [True, False, False]


def test_a_real_request_for_an_unknown_feature_leaves_nothing_broken(monkeypatch):
    """The driver itself refuses here, not a stand-in."""
    name = Device.open().backend.name
    kind = type(open_backend(name))
    listed = kind.adapters

    def lying(self):
        adapters = listed(self)
        for adapter in adapters:
            adapter._features = frozenset({*adapter.features, *self.matrix_features})
        return adapters

    monkeypatch.setattr(device_module, "_refused", set())
    monkeypatch.setattr(kind, "adapters", lying)
    with Device.open() as device:
        if device.caps.matrix_f16 or device_module._refused == set():
            pytest.skip("this adapter has matrix units")
        assert np.array_equal(device.read(device.upload(np.arange(4.0)), np.float64, 4), np.arange(4.0))


@pytest.mark.parametrize("kind", ["f16", "i8"])
@pytest.mark.parametrize("answer", ["none", "zeros", "one off", "right"])
def test_matrix_units_that_lie_are_switched_off(device, monkeypatch, kind, answer):
    """The probe's own comparison, with answers put in the kernel's place."""
    field = f"matrix_{kind}"
    offered = replace(device.caps, f16=True, subgroups=True, subgroup_size=32, matrix_f16=False, matrix_i8=False)
    monkeypatch.setattr(device, "caps", replace(offered, **{field: True}))
    k = 16 if kind == "f16" else 32
    i, j = np.arange(16)[:, None], np.arange(k)[None, :]
    right = ((7 * i + 13 * j) % 81 - 40) @ ((11 * i + 5 * j) % 79 - 39).T
    assert np.abs(right).max() > 2048 and (right % 2 == 1).any()  # sums in f16 could not hold these

    def run(device, text, label, inputs, dtype, count):
        if label == "shader-f16":
            return np.array([2.5, -4.5, 200.5, 0.75], np.float16)
        if label == "subgroups":
            lanes = np.arange(64)
            groups = lanes // 32
            sums = [sum(n * n for n in range(64) if n // 32 == g) for g in groups]
            tops = [max(n * 37 % 64 for n in range(64) if n // 32 == g) for g in groups]
            return np.concatenate([np.full(64, 32), groups * 32, sums, tops]).astype(np.uint32)
        got = {"none": None, "zeros": np.zeros((4, 16, 16)), "right": np.stack([right] * 4)}.get(answer)
        if answer == "one off":
            got = np.stack([right] * 4)
            got[3, 15, 15] += 1
        return None if got is None else got.astype(dtype).reshape(count)

    monkeypatch.setattr(probe, "_run", run)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        caps = probe.probe_features(device)
    assert getattr(caps, field) == (answer == "right")
    assert [str(w.message) for w in said] == (
        []
        if answer == "right"
        else [f"{device.caps.name}: {kind} matrix units are offered but do not work; switched off"]
    )


def test_probe_kernels_are_refused_by_name_where_there_are_no_matrices(device):
    if device.caps.matrix_f16:
        pytest.skip("the device has matrix units")
    with pytest.raises(GpuError, match=r"subgroup matrices|f16|subgroups"):
        device.kernel_source(probe._matrix_text("f16", "f16", "f32", 16, 256), "probe", label="probe")
