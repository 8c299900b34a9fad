// Gradients of LayerNorm and RMSNorm from one read of x and dy; the rows' statistics are made again.
//   n = (x - mean) s (CENTRED) or x s,   g = gain dy:   dx = s (g - mean(g) - n mean(g n)), without mean(g) unless CENTRED
//   dgain = sum over rows of dy n,   dbias = sum over rows of dy
//   norm_grad: neither gain nor bias;  norm_grad_gain: gain only;  norm_grad_affine: both
// A run of LANES invocations goes through `each` rows and keeps a row's HELD * LANES packs, which are all of it, in registers, and
// its part of dgain and dbias; reduce/parts.wgsl adds up the runs' parts. The pivot is as in norm/layer_norm.wgsl.
// Grid: ceil(rows / (each WG / LANES)) workgroups, folded into y.
// x, dy, out (dx): [rows, packs] of one or four elements (the part `pack`); gain: [packs]; parts: [runs, 1 or 2, packs] f32.
// Sums are f32 whatever Elem is, in an order that the sizes alone decide.
alias Elem = f32;          // type of x, dy and out
alias Gain = vec4<f32>;    // type of a pack of gain
override WG: u32 = 64u;    // invocations a workgroup
const LANES: u32 = 64u;    // invocations a row; powers of two both
const HELD: u32 = 4u;      // packs an invocation holds
const CENTRED: bool = true;
struct Params { rows: u32, packs: u32, cols: u32, each: u32, runs: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Pack>;
@group(0) @binding(1) var<storage, read> dy: array<Pack>;
@group(0) @binding(2) var<storage, read> gain: array<Gain>;
@group(0) @binding(3) var<storage, read_write> out: array<Pack>;
@group(0) @binding(4) var<storage, read_write> parts: array<Real>;
@group(0) @binding(5) var<uniform> p: Params;
// include lib/pack4.wgsl as pack
// include lib/runs.wgsl
alias Held = array<Real, HELD>;

fn run_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 {
  return (wg.y * grid.x + wg.x) * (WG / LANES) + lane / LANES;   // grids past 65535 are folded into y
}

struct Row { n: Held, scale: f32 }     // normalised values, zero past the last pack; s
// Call it and slopes_of in uniform control flow. first: the row's first pack.
fn row_at(first: u32, lane: u32, size: u32) -> Row {
  var row: Row;
  let pivot = select(0.0, head(x[first]), CENTRED);
  var sum = 0.0;
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    row.n[i] = Real();
    if (c < p.packs) { row.n[i] = wide(x[first + c]) - pivot; }
    sum += total(row.n[i]);
  }
  if (CENTRED) {
    let shift = run_sum(lane, size, sum) / f32(p.cols);
    for (var i = 0u; i < HELD; i++) {
      if (lane % LANES + i * LANES < p.packs) { row.n[i] -= shift; }
    }
  }
  sum = 0.0;
  for (var i = 0u; i < HELD; i++) { sum += total(row.n[i] * row.n[i]); }
  row.scale = inverseSqrt(run_sum(lane, size, sum) / f32(p.cols) + p.eps);
  for (var i = 0u; i < HELD; i++) { row.n[i] *= row.scale; }
  return row;
}
// A row of dy, zero past the last pack and where the row is not one.
fn slope_at(first: u32, lane: u32, there: bool) -> Held {
  var held: Held;
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    held[i] = Real();
    if (there && c < p.packs) { held[i] = wide(dy[first + c]); }
  }
  return held;
}
fn put_dx(first: u32, lane: u32, size: u32, row: Row, g: Held, there: bool) {
  var sum = 0.0;
  var dot = 0.0;
  for (var i = 0u; i < HELD; i++) {
    sum += total(g[i]);
    dot += total(g[i] * row.n[i]);
  }
  let by_n = run_sum(lane, size, dot) / f32(p.cols);
  var mean = 0.0;
  if (CENTRED) { mean = run_sum(lane, size, sum) / f32(p.cols); }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (there && c < p.packs) { out[first + c] = narrow((g[i] - mean - row.n[i] * by_n) * row.scale); }
  }
}

@compute @workgroup_size(WG)
fn norm_grad(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let run = run_of(wg, grid, lane);
  let size = run_size(lane);
  for (var e = 0u; e < p.each; e++) {                  // nobody leaves early: the reductions need everyone
    let at = run * p.each + e;
    let first = min(at, p.rows - 1u) * p.packs;
    let row = row_at(first, lane, size);
    put_dx(first, lane, size, row, slope_at(first, lane, at < p.rows), at < p.rows);
  }
}

@compute @workgroup_size(WG)
fn norm_grad_gain(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                  @builtin(local_invocation_index) lane: u32) {
  let run = run_of(wg, grid, lane);
  let size = run_size(lane);
  var dgain = array<Real, HELD>();
  for (var e = 0u; e < p.each; e++) {
    let at = run * p.each + e;
    let first = min(at, p.rows - 1u) * p.packs;
    let row = row_at(first, lane, size);
    var g = slope_at(first, lane, at < p.rows);
    for (var i = 0u; i < HELD; i++) {
      dgain[i] += g[i] * row.n[i];
      g[i] *= Real(gain[min(lane % LANES + i * LANES, p.packs - 1u)]);
    }
    put_dx(first, lane, size, row, g, at < p.rows);
  }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (run < p.runs && c < p.packs) { parts[run * p.packs + c] = dgain[i]; }
  }
}

@compute @workgroup_size(WG)
fn norm_grad_affine(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                    @builtin(local_invocation_index) lane: u32) {
  let run = run_of(wg, grid, lane);
  let size = run_size(lane);
  var dgain = array<Real, HELD>();
  var dbias = array<Real, HELD>();
  for (var e = 0u; e < p.each; e++) {
    let at = run * p.each + e;
    let first = min(at, p.rows - 1u) * p.packs;
    let row = row_at(first, lane, size);
    var g = slope_at(first, lane, at < p.rows);
    for (var i = 0u; i < HELD; i++) {
      dgain[i] += g[i] * row.n[i];
      dbias[i] += g[i];
      g[i] *= Real(gain[min(lane % LANES + i * LANES, p.packs - 1u)]);
    }
    put_dx(first, lane, size, row, g, at < p.rows);
  }
  for (var i = 0u; i < HELD; i++) {
    let c = lane % LANES + i * LANES;
    if (run < p.runs && c < p.packs) {
      parts[2u * run * p.packs + c] = dgain[i];
      parts[(2u * run + 1u) * p.packs + c] = dbias[i];
    }
  }
}
