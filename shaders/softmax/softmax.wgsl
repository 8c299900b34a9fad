// Softmax and log-softmax over the last axis (running maximum: Milakov & Gimelshein 2018, arXiv:1805.02867).
//   softmax      out[r,c] = exp(x[r,c] - m[r]) / l[r],   m[r] = max_c x[r,c],   l[r] = sum_c exp(x[r,c] - m[r])
//   log_softmax  out[r,c] = (x[r,c] - m[r]) - log(l[r])
// An element at or below MASKED (minus infinity) is masked: softmax gives 0, log_softmax gives the element back. A row that
// is masked throughout therefore has softmax 0 everywhere, not NaN. NaN in a row makes the row NaN.
// A run of LANES invocations makes a row and keeps its first HELD * LANES packs in registers, so that they are read once;
// the others are read again. Grid: ceil(rows / (WG / LANES)) workgroups.
// x, out: [rows, packs] of one or four elements (the part `pack`). Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x and out
override WG: u32 = 256u;   // invocations a workgroup
const LANES: u32 = 256u;   // invocations a row; powers of two both
const HELD: u32 = 4u;      // packs an invocation holds
const MASKED: f32 = -3.4e38;
struct Params { rows: u32, packs: u32 }
@group(0) @binding(0) var<storage, read> x: array<Pack>;
@group(0) @binding(1) var<storage, read_write> out: array<Pack>;
@group(0) @binding(2) var<uniform> p: Params;
// include lib/pack4.wgsl as pack
// include lib/runs.wgsl

fn row_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 {
  return (wg.y * grid.x + wg.x) * (WG / LANES) + lane / LANES;   // grids past 65535 are folded into y
}
fn weight(v: Real, top: f32) -> Real { return select(exp(v - top), Real(), v <= Real(MASKED)); }   // NaN stays
fn log_weight(v: Real, top: f32, log_sum: f32) -> Real { return select((v - top) - log_sum, v, v <= Real(MASKED)); }

// What an invocation holds of the row that starts at pack `first`.
fn held_of(first: u32, lane: u32) -> array<Real, HELD> {
  var held: array<Real, HELD>;
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    held[i] = Real(MASKED);
    if (c < p.packs) { held[i] = wide(x[first + c]); }
  }
  return held;
}
struct Rest { top: f32, sum: f32 }   // largest element so far; sum of the weights of the packs not held, relative to it
fn rest_of(first: u32, lane: u32, held: array<Real, HELD>) -> Rest {
  var values = held;
  var top = MASKED;
  for (var i = 0u; i < HELD; i++) { top = max(top, highest(values[i])); }
  var sum = 0.0;
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    let v = wide(x[first + c]);
    let higher = max(top, highest(v));
    sum = sum * exp(top - higher) + total(weight(v, higher));
    top = higher;
  }
  return Rest(top, sum);
}

@compute @workgroup_size(WG)
fn softmax(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;       // nobody leaves early: the reductions need everyone
  var held = held_of(first, lane);
  let size = run_size(lane);
  let rest = rest_of(first, lane, held);
  let top = run_max(lane, size, rest.top);
  var sum = rest.sum * exp(rest.top - top);
  for (var i = 0u; i < HELD; i++) {
    held[i] = weight(held[i], top);
    sum += total(held[i]);
  }
  sum = run_sum(lane, size, sum);
  let scale = select(1.0 / sum, 0.0, sum == 0.0);    // 0 where the row is masked throughout
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(held[i] * scale); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(weight(wide(x[first + c]), top) * scale);
  }
}

@compute @workgroup_size(WG)
fn log_softmax(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;
  var held = held_of(first, lane);
  let size = run_size(lane);
  let rest = rest_of(first, lane, held);
  let top = run_max(lane, size, rest.top);
  var sum = rest.sum * exp(rest.top - top);
  for (var i = 0u; i < HELD; i++) { sum += total(weight(held[i], top)); }
  sum = run_sum(lane, size, sum);
  let log_sum = log(select(sum, 1.0, sum == 0.0));   // 0 where the row is masked throughout
  if (row >= p.rows) { return; }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (c < p.packs) { out[first + c] = narrow(log_weight(held[i], top, log_sum)); }
  }
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    out[first + c] = narrow(log_weight(wide(x[first + c]), top, log_sum));
  }
}
