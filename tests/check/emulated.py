"""Matrix units in plain WGSL, so that kernels written for them run on any device.

As on matrix units, 32 invocations share a matrix: each keeps eight values, half a row. Slow, and no proof of a driver's
matrix units; everything around them (copies, edges, order of storage, epilogues) is what the kernel's own text says.
Sums are f32 in order of k. Calls must come in uniform control flow, as the kernels have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gpu import Device
from gpu.kernel import KernelCache

_TYPE = re.compile(r"subgroup_matrix_(left|right|result)<\w+, 16, 16>")
_LOAD = re.compile(r"subgroupMatrixLoad<\w+>\(&(\w+), ")
_STORE = re.compile(r"subgroupMatrixStore\(&(\w+), ")
_ENTRY = re.compile(r"(local_invocation_index\) lane: u32\) \{)")
_MATRIX = """
struct Emulated { v: array<f32, 8> }
var<private> emulated_lane: u32;
var<workgroup> emulated_both: array<f32, WG * 16u>;   // left and right of each 32 invocations
fn emulated_sum(left: Emulated, right: Emulated, sum: Emulated) -> Emulated {
  let base = emulated_lane / 32u * 512u;
  let row = emulated_lane % 32u / 2u;
  let col = emulated_lane % 2u * 8u;
  var result = sum;
  var l = left;
  var r = right;
  workgroupBarrier();
  for (var e = 0u; e < 8u; e++) {
    emulated_both[base + 16u * row + col + e] = l.v[e];
    emulated_both[base + 256u + 16u * row + col + e] = r.v[e];
  }
  workgroupBarrier();
  for (var k = 0u; k < 16u; k++) {
    let x = emulated_both[base + 16u * row + k];
    for (var e = 0u; e < 8u; e++) { result.v[e] = fma(x, emulated_both[base + 256u + 16u * k + col + e], result.v[e]); }
  }
  return result;
}
"""
_OF_ARRAY = """
fn load_NAME(at: u32, columns: bool, stride: u32) -> Emulated {
  let row = emulated_lane % 32u / 2u;
  let col = emulated_lane % 2u * 8u;
  var m: Emulated;
  for (var e = 0u; e < 8u; e++) {
    m.v[e] = f32(NAME[at + select(row * stride + col + e, (col + e) * stride + row, columns)]);
  }
  return m;
}
fn store_NAME(at: u32, m: Emulated, columns: bool, stride: u32) {
  let row = emulated_lane % 32u / 2u;
  let col = emulated_lane % 2u * 8u;
  var whole = m;
  for (var e = 0u; e < 8u; e++) {
    NAME[at + select(row * stride + col + e, (col + e) * stride + row, columns)] = TYPE(whole.v[e]);
  }
}
"""


def plain(code: str) -> str:
    """The code with matrix types and calls replaced by functions over plain arrays, behind its last line."""
    names = dict.fromkeys(_LOAD.findall(code) + _STORE.findall(code))
    helpers = _MATRIX
    for name in names:
        elem = re.search(rf"var<\w+> {name}: array<(\w+)", code)
        assert elem is not None, f"{name} is not a workgroup array"
        helpers += _OF_ARRAY.replace("NAME", name).replace("TYPE", elem[1])
    code = _LOAD.sub(r"load_\1(", code)
    code = _STORE.sub(r"store_\1(", code)
    code = code.replace("subgroupMatrixMultiplyAccumulate(", "emulated_sum(")
    code = _ENTRY.sub(r"\1 emulated_lane = lane;", code)
    return _TYPE.sub("Emulated", code) + helpers


@contextmanager
def matrices(device: Device) -> Iterator[Device]:
    """The device, with matrix units that its kernels do not have."""
    make = KernelCache._make

    def emulating(self, source, entry, label):
        if "matrices" in source.extensions():
            lines = source.lines + ((source.path, 1),) * (plain(source.code).count("\n") - source.code.count("\n"))
            source = replace(source, code=plain(source.code), lines=lines)
        return make(self, source, entry, label)

    caps = device.caps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelCache, "_make", emulating)
        device.caps = replace(caps, matrix_f16=True)
        device.kernels.clear()
        try:
            yield device
        finally:
            device.caps = caps
            device.kernels.clear()
