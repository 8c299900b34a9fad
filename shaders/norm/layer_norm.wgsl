// LayerNorm over the last axis (Ba et al. 2016, arXiv:1607.06450).
//   out[r,c] = (x[r,c] - mean[r]) / sqrt(var[r] + eps) * weight[c] + bias[c],   var without Bessel's correction
//   layer_norm: neither weight nor bias;  layer_norm_weight: weight only;  layer_norm_affine: both
// Two passes around a pivot: with d = x - x[r,0] the mean is x[r,0] + mean(d), and var = mean((d - mean(d))^2). A mean that
// is large next to the spread then costs no bits, since the mean itself is never rounded.
// Grid: one workgroup per row r. x, out: [rows, cols]; weight, bias: [cols]. Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x and out
alias Gain = f32;          // type of weight and bias
override WG: u32 = 256u;   // invocations per row; a power of two
struct Params { rows: u32, cols: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read> weight: array<Gain>;
@group(0) @binding(2) var<storage, read> bias: array<Gain>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;
@group(0) @binding(4) var<uniform> p: Params;
// include lib/reduce.wgsl

struct Stats { pivot: f32, shift: f32, scale: f32 }   // normalised value: ((x - pivot) - shift) * scale
fn row_stats(row: u32, lane: u32) -> Stats {
  let first = row * p.cols;
  let pivot = f32(x[first]);
  var sum = 0.0;
  for (var c = lane; c < p.cols; c += WG) { sum += f32(x[first + c]) - pivot; }
  let shift = wg_sum(lane, sum) / f32(p.cols);
  var squares = 0.0;
  for (var c = lane; c < p.cols; c += WG) { let d = (f32(x[first + c]) - pivot) - shift; squares += d * d; }
  return Stats(pivot, shift, inverseSqrt(wg_sum(lane, squares) / f32(p.cols) + p.eps));
}

@compute @workgroup_size(WG)
fn layer_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;      // grids past 65535 are folded into y
  if (row >= p.rows) { return; }       // uniform: the whole workgroup leaves
  let s = row_stats(row, lane);
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    out[i] = Elem(((f32(x[i]) - s.pivot) - s.shift) * s.scale);
  }
}

@compute @workgroup_size(WG)
fn layer_norm_weight(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;
  if (row >= p.rows) { return; }
  let s = row_stats(row, lane);
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    out[i] = Elem(((f32(x[i]) - s.pivot) - s.shift) * s.scale * f32(weight[c]));
  }
}

@compute @workgroup_size(WG)
fn layer_norm_affine(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;
  if (row >= p.rows) { return; }
  let s = row_stats(row, lane);
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    out[i] = Elem(((f32(x[i]) - s.pivot) - s.shift) * s.scale * f32(weight[c]) + f32(bias[c]));
  }
}
