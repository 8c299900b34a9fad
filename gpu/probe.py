"""What a device says it can do, tried: tiny kernels whose results are compared. A feature that lies is switched off."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.errors import GpuError
from gpu.native import PublicCalls

if TYPE_CHECKING:
    from gpu.device import Capabilities, Device
    from gpu.memory import Buffer

_CALLS = """
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(4)
fn probe(@builtin(local_invocation_index) i: u32) { out[i] = x[i] * 3u + 1u; }
"""
_F16 = """
@group(0) @binding(0) var<storage, read> x: array<f16>;
@group(0) @binding(1) var<storage, read_write> out: array<f16>;
@compute @workgroup_size(4)
fn probe(@builtin(local_invocation_index) i: u32) { out[i] = x[i] * f16(2.0) + f16(0.5); }
"""
_SUBGROUPS = """
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(64)
fn probe(@builtin(local_invocation_index) lane: u32) {
  let size = subgroupAdd(1u);
  out[lane] = size;
  out[64u + lane] = subgroupBroadcastFirst(lane);
  out[128u + lane] = subgroupAdd(lane * lane);
  out[192u + lane] = subgroupMax((lane * 37u) % 64u);
}
"""


def _matrix_text(elem: str, word: str, sums: str, k: int, count: int) -> str:
    """Each subgroup multiplies A by B, whose columns lie one after another in workgroup memory. word: what arrays hold.

    128 invocations are a whole number of subgroups everywhere.
    """
    return f"""
@group(0) @binding(0) var<storage, read> a: array<{word}>;
@group(0) @binding(1) var<storage, read> b: array<{word}>;
@group(0) @binding(2) var<storage, read_write> out: array<{sums}>;
var<workgroup> tile: array<{word}, {count}>;
@compute @workgroup_size(128)
fn probe(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_size) size: u32) {{
  for (var i = lane; i < {count}u; i += 128u) {{ tile[i] = b[i]; }}
  workgroupBarrier();
  let left = subgroupMatrixLoad<subgroup_matrix_left<{elem}, {k}, 16>>(&a, 0u, false, {k}u);
  let right = subgroupMatrixLoad<subgroup_matrix_right<{elem}, 16, {k}>>(&tile, 0u, true, {k}u);
  var sum: subgroup_matrix_result<{sums}, 16, 16>;
  sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
  subgroupMatrixStore(&out, (lane / size) * 256u, sum, false, 16u);
}}
"""


def probe_calls(device: Device) -> None:
    """Replay a tiny Plan with a write and a read; on a wrong result or an error, take the public API, with a warning.

    Raises GpuError if the public API does not work either.
    """
    problem = "the library lacks a function"
    if not isinstance(device.backend.calls, PublicCalls):
        try:
            if _replay_works(device):
                return
            problem = "a replay gave a wrong result"
        except Exception as error:
            problem = f"a replay failed ({error})"
        device.use_calls(PublicCalls())
    warnings.warn(
        f"{device.caps.name}: direct calls of {device.caps.backend_version} do not work: {problem}; "
        "using its public API, which is slower",
        stacklevel=3,
    )
    if not _replay_works(device):
        raise GpuError(f"{device.caps.name}: a first tiny kernel gave a wrong result; this driver cannot be used")


def _replay_works(device: Device) -> bool:
    x, out = device.alloc(16), device.alloc(16)
    recorder = device.recorder()
    recorder(device.kernel_source(_CALLS, "probe", label="probe calls"), grid=1, x=x, out=out)
    plan = recorder.plan()
    for start in (5, 1 << 20):
        values = np.arange(start, start + 4, dtype=np.uint32)
        pending = plan.replay(write=(x, values.tobytes()), read=(out, 16))
        if pending is None or not np.array_equal(np.frombuffer(pending.result(), np.uint32), values * 3 + 1):
            return False
    return True


def probe_features(device: Device) -> Capabilities:
    """The device's capabilities with the optional features that gave right results."""
    caps = device.caps
    if caps.f16:
        x = np.array([1, -2.5, 100, 0.125], np.float16)
        good = _run(device, _F16, "shader-f16", {"x": device.upload(x)}, np.float16, 4)
        if good is None or not np.array_equal(good, x * np.float16(2) + np.float16(0.5)):
            warnings.warn(f"{caps.name}: shader-f16 is offered but computes wrong values; switched off", stacklevel=3)
            caps = replace(caps, f16=False)
    if caps.subgroups:
        size = _linear_subgroup_size(_run(device, _SUBGROUPS, "subgroups", {}, np.uint32, 256))
        if size == 0:
            warnings.warn(
                f"{caps.name}: subgroups are offered but do not work as specified; switched off", stacklevel=3
            )
        caps = replace(caps, subgroups=size > 0, subgroup_size=size)
    for kind, field in (("f16", "matrix_f16"), ("i8", "matrix_i8")):
        usable = caps.subgroups and (caps.f16 or kind != "f16")
        if getattr(caps, field) and not (usable and _matrices_work(device, kind, caps.subgroup_size)):
            warnings.warn(f"{caps.name}: {kind} matrix units are offered but do not work; switched off", stacklevel=3)
            caps = replace(caps, **{field: False})
    return caps


def _matrices_work(device: Device, kind: str, subgroup_size: int) -> bool:
    """16x16 sums of products of small integers, by every subgroup: exact, and too large for sums in f16."""
    k = 16 if kind == "f16" else 32
    i, j = np.arange(16)[:, None], np.arange(k)[None, :]
    a, b = (7 * i + 13 * j) % 81 - 40, (11 * i + 5 * j) % 79 - 39  # b: its columns as rows
    if kind == "f16":
        text, stored, result = _matrix_text("f16", "f16", "f32", k, 16 * k), np.float16, np.float32
    else:  # four to a word
        text, stored, result = _matrix_text("i8", "i32", "i32", k, 4 * k), np.int8, np.int32
    inputs = {"a": device.upload(a.astype(stored)), "b": device.upload(b.astype(stored))}
    subgroups = 128 // subgroup_size
    got = _run(device, text, f"{kind} matrices", inputs, result, 256 * subgroups)
    return got is not None and np.array_equal(got.reshape(subgroups, 16, 16), [a @ b.T] * subgroups)


def _run(device: Device, text: str, label: str, inputs: dict[str, Buffer], dtype: Any, count: int) -> np.ndarray | None:
    try:
        kernel = device.kernel_source(text, "probe", label=f"probe {label}")
        out = device.alloc(count * np.dtype(dtype).itemsize)
        recorder = device.recorder()
        recorder(kernel, grid=1, out=out, **inputs)
        recorder.submit()
        return device.read(out, dtype, count)
    except GpuError:
        return None


def _linear_subgroup_size(got: np.ndarray | None) -> int:
    """The subgroup size, if all are equal, invocations are numbered in order, and sums and maxima are right; else 0."""
    if got is None:
        return 0
    sizes, first, sums, tops = got.reshape(4, 64).astype(np.int64)
    size = int(sizes[0])
    if size not in (4, 8, 16, 32, 64) or (sizes != size).any():
        return 0
    lanes = np.arange(64)
    groups = lanes // size
    want_sum = np.array([(lanes[groups == g] ** 2).sum() for g in groups])
    want_max = np.array([((lanes[groups == g] * 37) % 64).max() for g in groups])
    right = (first == groups * size).all() and (sums == want_sum).all() and (tops == want_max).all()
    return size if right else 0
