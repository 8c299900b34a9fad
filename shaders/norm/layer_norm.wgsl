// LayerNorm over the last axis (Ba et al. 2016, arXiv:1607.06450).
//   out[r,c] = (x[r,c] - mean[r]) / sqrt(var[r] + eps) * weight[c] + bias[c],   var without Bessel's correction
//   layer_norm: neither weight nor bias;  layer_norm_weight: weight only;  layer_norm_affine: both
// Two passes around a pivot: with d = x - x[r,0] the mean is x[r,0] + mean(d), and var = mean((d - mean(d))^2). A mean that
// is large next to the spread then costs no bits, since the mean itself is never rounded.
// A run of LANES invocations makes a row and keeps its first HELD * LANES packs in registers, so that they are read once;
// the others are read again. Grid: ceil(rows / (WG / LANES)) workgroups.
// x, out: [rows, packs]; weight, bias: [packs] of one or four elements (the part `pack`). Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x and out
alias Gain = vec4<f32>;    // type of a pack of weight or bias
override WG: u32 = 256u;   // invocations a workgroup
const LANES: u32 = 256u;   // invocations a row; powers of two both
const HELD: u32 = 4u;      // packs an invocation holds
struct Params { rows: u32, packs: u32, cols: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Pack>;
@group(0) @binding(1) var<storage, read> weight: array<Gain>;
@group(0) @binding(2) var<storage, read> bias: array<Gain>;
@group(0) @binding(3) var<storage, read_write> out: array<Pack>;
@group(0) @binding(4) var<uniform> p: Params;
// include lib/pack4.wgsl as pack
// include lib/runs.wgsl

fn row_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 {
  return (wg.y * grid.x + wg.x) * (WG / LANES) + lane / LANES;   // grids past 65535 are folded into y
}

struct Row { held: array<Real, HELD>, pivot: f32, shift: f32, scale: f32 }   // held: x - pivot - shift
fn row_at(first: u32, lane: u32) -> Row {
  var row: Row;
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { row.held[i] = wide(x[first + c]); }
  }
  row.pivot = head(x[first]);
  let size = run_size(lane);
  var sum = 0.0;
  for (var i = 0u; i < HELD; i++) {
    row.held[i] -= row.pivot;
    if (lane % LANES + i * LANES < p.packs) { sum += total(row.held[i]); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) { sum += total(wide(x[first + c]) - row.pivot); }
  row.shift = run_sum(lane, size, sum) / f32(p.cols);
  sum = 0.0;
  for (var i = 0u; i < HELD; i++) {
    row.held[i] -= row.shift;
    if (lane % LANES + i * LANES < p.packs) { sum += total(row.held[i] * row.held[i]); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    let d = (wide(x[first + c]) - row.pivot) - row.shift;
    sum += total(d * d);
  }
  row.scale = inverseSqrt(run_sum(lane, size, sum) / f32(p.cols) + p.eps);
  return row;
}
// The normalised pack c of a row, read again.
fn normed(first: u32, c: u32, row: Row) -> Real { return ((wide(x[first + c]) - row.pivot) - row.shift) * row.scale; }

@compute @workgroup_size(WG)
fn layer_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;       // nobody leaves early: the reductions need everyone
  var it = row_at(first, lane);
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(it.held[i] * it.scale); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) { out[first + c] = narrow(normed(first, c, it)); }
}

@compute @workgroup_size(WG)
fn layer_norm_weight(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;
  var it = row_at(first, lane);
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(it.held[i] * it.scale * Real(weight[c])); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(normed(first, c, it) * Real(weight[c]));
  }
}

@compute @workgroup_size(WG)
fn layer_norm_affine(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;
  var it = row_at(first, lane);
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(it.held[i] * it.scale * Real(weight[c]) + Real(bias[c])); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(normed(first, c, it) * Real(weight[c]) + Real(bias[c]));
  }
}
