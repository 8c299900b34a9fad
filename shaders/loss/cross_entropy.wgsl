// Cross-entropy of rows of logits with class indices, from one read of the logits (running maximum: Milakov & Gimelshein 2018,
// arXiv:1805.02867). Formulas: loss/cross_entropy_rows.wgsl. Class weights: the entry cross_entropy_weighted.
// A run of LANES invocations makes a row and keeps its first HELD * LANES packs in registers; the others pass by.
// Grid: ceil(rows / (WG / LANES)) workgroups. x: [rows, packs] of one or four logits (the part `pack`); weight: [packs].
// All sums are f32.
alias Elem = f32;          // type of x
override WG: u32 = 256u;   // invocations a workgroup
const LANES: u32 = 256u;   // invocations a row; powers of two both
const HELD: u32 = 4u;      // packs an invocation holds
const MASKED: f32 = -3.4e38;
@group(0) @binding(0) var<storage, read> x: array<Pack>;
@group(0) @binding(6) var<storage, read> weight: array<Real>;
// include loss/cross_entropy_rows.wgsl
// include lib/pack4.wgsl as pack
// include lib/runs.wgsl

fn row_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 {
  return (wg.y * grid.x + wg.x) * (WG / LANES) + lane / LANES;   // grids past 65535 are folded into y
}
fn power(v: Real, top: f32) -> Real { return select(exp(v - top), Real(), v <= Real(MASKED)); }   // NaN stays

struct Sums { lse: f32, pivot: f32 }
fn sums_of(first: u32, lane: u32, size: u32) -> Sums {
  var held: array<Real, HELD>;
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    held[i] = Real(MASKED);
    if (c < p.packs) { held[i] = wide(x[first + c]); }
  }
  var own_top = MASKED;
  for (var i = 0u; i < HELD; i++) { own_top = max(own_top, highest(held[i])); }
  var sum = 0.0;
  for (var c = lane % LANES + HELD * LANES; c < p.packs; c += LANES) {
    let v = wide(x[first + c]);
    let higher = max(own_top, highest(v));
    sum = sum * exp(own_top - higher) + total(power(v, higher));
    own_top = higher;
  }
  let top = run_max(lane, size, own_top);
  sum *= exp(own_top - top);
  for (var i = 0u; i < HELD; i++) { sum += total(power(held[i], top)); }
  sum = run_sum(lane, size, sum);
  let near = head(x[first]);
  return Sums(select(top + log(sum), top, sum == 0.0), select(near, 0.0, near <= MASKED));
}

@compute @workgroup_size(WG)
fn cross_entropy(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;       // nobody leaves early: the reductions need everyone
  let size = run_size(lane);
  let sums = sums_of(first, lane, size);
  var spread = 0.0;
  if (p.smoothing > 0.0) {                           // uniform
    for (var c = lane % LANES; c < p.packs; c += LANES) { spread += total(wide(x[first + c]) - sums.pivot); }
    spread = run_sum(lane, size, spread);
  }
  if (row >= p.rows || lane % LANES != 0u) { return; }
  let y = column_of(row);
  put_row(row, sums.lse, sums.pivot, spread, f32(p.cols), component(wide(x[first + y / PACK]), y % PACK), 1.0);
}

@compute @workgroup_size(WG)
fn cross_entropy_weighted(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                          @builtin(local_invocation_index) lane: u32) {
  let row = row_of(wg, grid, lane);
  let first = min(row, p.rows - 1u) * p.packs;
  let size = run_size(lane);
  let sums = sums_of(first, lane, size);
  var spread = 0.0;
  var all = 0.0;
  if (p.smoothing > 0.0) {
    for (var c = lane % LANES; c < p.packs; c += LANES) {
      let w = weight[c];
      spread += total(w * (wide(x[first + c]) - sums.pivot));
      all += total(w);
    }
    spread = run_sum(lane, size, spread);
    all = run_sum(lane, size, all);
  }
  if (row >= p.rows || lane % LANES != 0u) { return; }
  let y = column_of(row);
  let own = component(weight[y / PACK], y % PACK);
  put_row(row, sums.lse, sums.pivot, spread, all, component(wide(x[first + y / PACK]), y % PACK), own);
}
