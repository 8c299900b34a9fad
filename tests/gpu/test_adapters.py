"""Choice of the adapter, environment switches, and probes of features that lie."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from gpu import AdapterInfo, Device, GpuError, NoAdapter, ShaderError, list_adapters, probe
from gpu.backend import open_backend
from gpu.device import DEFAULT_LIMITS, choose

VARIABLES = ("ANYGPU_DEVICE", "ANYGPU_BACKEND", "ANYGPU_CHECKED", "ANYGPU_LIMITS", "ANYGPU_FEATURES")


def adapter(index: int, name: str, type_: str, api: str = "Vulkan") -> AdapterInfo:
    kind = "cpu" if type_ == "CPU" else "gpu"
    return AdapterInfo(index=index, name=name, vendor="", driver=f"driver of {name}", type=type_, api=api, kind=kind)


ADAPTERS = [
    adapter(0, "llvmpipe", "CPU"),
    adapter(1, "Intel Xe", "IntegratedGPU"),
    adapter(2, "Radeon", "DiscreteGPU", "OpenGL"),
    adapter(3, "Radeon", "DiscreteGPU"),
    adapter(4, "GeForce", "DiscreteGPU"),
    adapter(5, "Mystery", "Unknown"),
]


@pytest.mark.parametrize(
    ("here", "wanted", "index", "why"),
    [
        (ADAPTERS, None, 3, "the fastest kind of adapter here"),
        (ADAPTERS, "", 3, "the fastest kind of adapter here"),
        (ADAPTERS[:2], None, 1, "the fastest kind of adapter here"),
        ([ADAPTERS[0], ADAPTERS[5]], None, 5, "the fastest kind of adapter here"),
        (ADAPTERS[:1], None, 0, "the only adapter here"),
        (ADAPTERS[2:3], None, 2, "the only adapter here"),  # better OpenGL than nothing
        (ADAPTERS, "2", 2, "asked for by number (2)"),  # by number even what would not be chosen
        (ADAPTERS, "0", 0, "asked for by number (0)"),
        (ADAPTERS, "gEfOr", 4, "asked for by name ('gEfOr')"),
        (ADAPTERS, "radeon", 3, "asked for by name ('radeon')"),
        (ADAPTERS, "driver of intel", 1, "asked for by name ('driver of intel')"),
    ],
)
def test_choose(here, wanted, index, why):
    chosen, reason = choose(here, wanted)
    assert (chosen.index, reason) == (index, why)


@pytest.mark.parametrize("wanted", ["6", "99", "Apple", "-1"])
def test_choose_lists_what_is_here_when_nothing_matches(wanted):
    with pytest.raises(NoAdapter, match=re.escape(f"no adapter matches '{wanted}'. Here are: 0: llvmpipe (CPU,")):
        choose(ADAPTERS, wanted)


def test_no_adapter_names_the_remedy(monkeypatch):
    with pytest.raises(NoAdapter, match=r"no Vulkan, Metal or D3D12 driver.*apt-get install mesa-vulkan-drivers"):
        choose([], None)
    monkeypatch.setattr("gpu.backend.Backend.adapters", lambda self: [])
    monkeypatch.setattr("gpu.backend.DawnBackend.adapters", lambda self: [])
    with pytest.raises(NoAdapter, match="no WebGPU adapter found"):
        Device.open()
    assert list_adapters() == []


def test_adapters_of_this_machine(device):
    here = list_adapters()
    assert [a.index for a in here] == list(range(len(here)))
    assert device.adapter in here
    assert all(a.kind == ("cpu" if a.type == "CPU" else "gpu") for a in here)


# Environment -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch):
    for variable in VARIABLES:
        if variable != "ANYGPU_BACKEND":
            monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variable", "value", "error", "message"),
    [
        ("ANYGPU_DEVICE", "no such card", NoAdapter, "no adapter matches 'no such card'. Here are: 0: "),
        ("ANYGPU_DEVICE", "4711", NoAdapter, "no adapter matches '4711'"),
        ("ANYGPU_BACKEND", "metal", GpuError, "ANYGPU_BACKEND=metal: expected one of wgpu, dawn; unset it for wgpu"),
        ("ANYGPU_CHECKED", "maybe", GpuError, "ANYGPU_CHECKED=maybe: expected 1 (on) or 0 (off)"),
        ("ANYGPU_LIMITS", "small", GpuError, "limits='small' (or ANYGPU_LIMITS); expected one of default, max"),
        ("ANYGPU_FEATURES", "f16", GpuError, "features='f16' (or ANYGPU_FEATURES); expected one of none, all"),
    ],
)
def test_a_bad_value_names_the_variable(clean, variable, value, error, message):
    clean.setenv(variable, value)
    with pytest.raises(error, match=re.escape(message)):
        Device.open()


def test_an_unknown_backend_and_a_missing_package_are_named(clean):
    with pytest.raises(GpuError, match="backend 'cuda' is unknown: expected one of wgpu, dawn"):
        Device.open(backend="cuda")

    def missing(name: str):
        raise ImportError(f"No module named '{name}'")

    clean.setattr("gpu.backend.importlib.import_module", missing)
    with pytest.raises(
        GpuError, match=r"backend 'dawn' needs a package that is not installed.*install 'anygpu\[dawn\]'"
    ):
        open_backend("dawn")
    with pytest.raises(GpuError, match=r"backend 'wgpu' needs a package that is not installed.*install 'wgpu'"):
        open_backend("wgpu")


def test_the_switches_reach_the_device(clean):
    clean.setenv("ANYGPU_CHECKED", "1")
    clean.setenv("ANYGPU_LIMITS", "default")
    clean.setenv("ANYGPU_FEATURES", "none")
    clean.setenv("ANYGPU_DEVICE", "0")
    with Device.open() as device:
        caps = device.caps
        assert device.why == "asked for by number (0)"
        assert caps.checked
        assert (caps.f16, caps.subgroups, caps.subgroup_size, caps.timestamps) == (False, False, 0, False)
        assert caps.max_storage_buffers == DEFAULT_LIMITS["max-storage-buffers-per-shader-stage"]
        assert caps.max_binding == DEFAULT_LIMITS["max-storage-buffer-binding-size"]
        assert caps.max_buffer == DEFAULT_LIMITS["max-buffer-size"]
        assert caps.max_workgroup_bytes == DEFAULT_LIMITS["max-compute-workgroup-storage-size"]
        assert caps.max_invocations == DEFAULT_LIMITS["max-compute-invocations-per-workgroup"]
        with pytest.raises(ShaderError, match=r"half: uses f16, which .* does not have; use f32"):
            device.kernel_source("alias E = f16;\n@compute @workgroup_size(1) fn main() {}", "main", label="half")
        with pytest.raises(ShaderError, match=r"sum: uses subgroups, which .* does not have; pass subgroups=False"):
            device.kernel_source("@compute @workgroup_size(1) fn main() { _ = subgroupAdd(1u); }", "main", label="sum")


def test_arguments_win_over_the_environment(clean):
    clean.setenv("ANYGPU_CHECKED", "1")
    clean.setenv("ANYGPU_DEVICE", "no such card")
    with Device.open("0", checked=False, limits="max", features="all") as device:
        assert not device.caps.checked
        assert device.caps.max_storage_buffers >= 8


def test_capabilities_describe_the_device(device):
    caps = device.caps
    assert caps.kind == device.adapter.kind and caps.name == device.adapter.name
    assert caps.backend == device.backend.name and caps.backend in caps.backend_version
    assert caps.subgroups == (caps.subgroup_size > 0)
    assert caps.max_binding % 4 == 0 and caps.max_buffer % 4 == 0
    assert caps.max_binding >= 128 << 20 and caps.max_workgroups == 65_535


def test_other_lines_on_stderr_are_passed_on(capfd):
    import os

    from gpu.backend import _DAWN_NOISE, _without_lines

    noise = b"Warning: maxDynamicUniformBuffersPerPipelineLayout artificially reduced from 1000000 to 16 to fit dynamic"
    with _without_lines(_DAWN_NOISE):
        os.write(2, b"a driver's message\n" + noise + b" offset allocation limit.\nno newline")
    os.write(2, b"|after\n")
    assert capfd.readouterr().err == "a driver's message\nno newline|after\n"


# Features that lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "label", "wrong"),
    [
        ("f16", "shader-f16", lambda got: got * np.float16(2)),
        ("f16", "shader-f16", lambda got: None),  # the kernel did not even build
        ("subgroups", "subgroups", lambda got: np.roll(got, 1)),
        ("subgroups", "subgroups", lambda got: np.zeros_like(got)),
        ("subgroups", "subgroups", lambda got: None),
    ],
)
def test_a_feature_that_lies_is_switched_off_with_one_warning(monkeypatch, device, feature, label, wrong):
    if not getattr(device.caps, feature):
        pytest.skip(f"this device has no {feature} to lie about")
    run = probe._run

    def lying(device, text, what, *rest):
        got = run(device, text, what, *rest)
        return wrong(got) if what == label else got

    monkeypatch.setattr(probe, "_run", lying)
    monkeypatch.delenv("ANYGPU_FEATURES", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = Device.open()
    with opened:
        assert not getattr(opened.caps, feature)
        assert opened.caps.subgroup_size == (0 if feature == "subgroups" else device.caps.subgroup_size)
    assert len(caught) == 1
    assert re.search(f"{label} (is|are) offered but .*; switched off", str(caught[0].message))


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64])
def test_any_linear_subgroup_size_is_accepted(size):
    lanes = np.arange(64)
    groups = lanes // size
    per_group = lambda values, fold: np.array([fold(values[groups == g]) for g in groups])  # noqa: E731
    good = np.concatenate(
        [np.full(64, size), groups * size, per_group(lanes**2, np.sum), per_group((lanes * 37) % 64, np.max)]
    ).astype(np.uint32)
    assert probe._linear_subgroup_size(good) == size
    for i in (0, 63, 64, 127, 128, 191, 192, 255):
        bad = good.copy()
        bad[i] += 1
        assert probe._linear_subgroup_size(bad) == 0
    assert probe._linear_subgroup_size(np.zeros(256, np.uint32)) == 0
