// RMSNorm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4, plus eps).
//   s[r] = 1 / sqrt(mean_c(x[r,c]^2) + eps)
//   rms_norm       out[r,c] = x[r,c] * s[r]
//   rms_norm_gain  out[r,c] = x[r,c] * s[r] * gain[c]
//   add_rms_norm   out[r,c] = residual[r,c] + x[r,c] * s[r] * gain[c]     (Gemma's norm behind a sub-layer)
// A run of LANES invocations makes a row and keeps its first HELD * LANES packs in registers, so that they are read once;
// the others are read again. Grid: ceil(rows / (WG / LANES)) workgroups.
// x, residual, out: [rows, packs], gain: [packs] of one or four elements (the part `pack`). Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x, residual, out
alias Gain = vec4<f32>;    // type of a pack of gain
override WG: u32 = 256u;   // invocations a workgroup
const LANES: u32 = 256u;   // invocations a row; powers of two both
const HELD: u32 = 4u;      // packs an invocation holds
struct Params { rows: u32, packs: u32, cols: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Pack>;
@group(0) @binding(1) var<storage, read> gain: array<Gain>;
@group(0) @binding(2) var<storage, read> residual: array<Pack>;
@group(0) @binding(3) var<storage, read_write> out: array<Pack>;
@group(0) @binding(4) var<uniform> p: Params;
// include lib/pack4.wgsl as pack
// include lib/runs.wgsl

fn row_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 {
  return (wg.y * grid.x + wg.x) * (WG / LANES) + lane / LANES;   // grids past 65535 are folded into y
}

struct Row { held: array<Real, HELD>, scale: f32 }   // scale: s of the header
fn row_at(first: u32, lane: u32) -> Row {
  var row: Row;
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { row.held[i] = wide(x[first + c]); }
  }
  let size = run_size(lane);
  var sum = 0.0;
  for (var i = 0u; i < HELD; i++) { sum += total(row.held[i] * row.held[i]); }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) { let v = wide(x[first + c]); sum += total(v * v); }
  row.scale = inverseSqrt(run_sum(lane, size, sum) / f32(p.cols) + p.eps);
  return row;
}

@compute @workgroup_size(WG)
fn rms_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;       // nobody leaves early: the reductions need everyone
  var it = row_at(first, lane);
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(it.held[i] * it.scale); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(wide(x[first + c]) * it.scale);
  }
}

@compute @workgroup_size(WG)
fn rms_norm_gain(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;
  var it = row_at(first, lane);
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(it.held[i] * it.scale * Real(gain[c])); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(wide(x[first + c]) * it.scale * Real(gain[c]));
  }
}

@compute @workgroup_size(WG)
fn add_rms_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;
  var it = row_at(first, lane);
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(wide(residual[first + c]) + it.held[i] * it.scale * Real(gain[c])); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(wide(residual[first + c]) + wide(x[first + c]) * it.scale * Real(gain[c]));
  }
}
