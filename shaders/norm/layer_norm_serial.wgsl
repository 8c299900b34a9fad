// LayerNorm as in norm/layer_norm.wgsl (same pivot, same two passes), one invocation per row: for software drivers.
// Grid: ceil(rows / WG) workgroups. x, out: [rows, cols]; weight, bias: [cols]. Sums are f32 in four interleaved parts.
alias Elem = f32;          // type of x and out
alias Gain = f32;          // type of weight and bias
override WG: u32 = 8u;     // rows per workgroup
struct Params { rows: u32, cols: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read> weight: array<Gain>;
@group(0) @binding(2) var<storage, read> bias: array<Gain>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;
@group(0) @binding(4) var<uniform> p: Params;

struct Stats { pivot: f32, shift: f32, scale: f32 }   // normalised value: ((x - pivot) - shift) * scale
fn row_stats(first: u32) -> Stats {
  let pivot = f32(x[first]);
  let whole = p.cols & ~3u;            // columns taken four at a time
  var sums = vec4<f32>();
  for (var c = 0u; c < whole; c += 4u) {
    let i = first + c;
    sums += vec4<f32>(f32(x[i]), f32(x[i + 1u]), f32(x[i + 2u]), f32(x[i + 3u])) - pivot;
  }
  var sum = (sums.x + sums.y) + (sums.z + sums.w);
  for (var c = whole; c < p.cols; c += 1u) { sum += f32(x[first + c]) - pivot; }
  let shift = sum / f32(p.cols);
  sums = vec4<f32>();
  for (var c = 0u; c < whole; c += 4u) {
    let i = first + c;
    let d = (vec4<f32>(f32(x[i]), f32(x[i + 1u]), f32(x[i + 2u]), f32(x[i + 3u])) - pivot) - shift;
    sums += d * d;
  }
  sum = (sums.x + sums.y) + (sums.z + sums.w);
  for (var c = whole; c < p.cols; c += 1u) { let d = (f32(x[first + c]) - pivot) - shift; sum += d * d; }
  return Stats(pivot, shift, inverseSqrt(sum / f32(p.cols) + p.eps));
}

@compute @workgroup_size(WG)
fn layer_norm_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = row_stats(first);
  for (var c = 0u; c < p.cols; c += 1u) {
    out[first + c] = Elem(((f32(x[first + c]) - s.pivot) - s.shift) * s.scale);
  }
}

@compute @workgroup_size(WG)
fn layer_norm_weight_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                            @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = row_stats(first);
  for (var c = 0u; c < p.cols; c += 1u) {
    out[first + c] = Elem(((f32(x[first + c]) - s.pivot) - s.shift) * s.scale * f32(weight[c]));
  }
}

@compute @workgroup_size(WG)
fn layer_norm_affine_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                            @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = row_stats(first);
  for (var c = 0u; c < p.cols; c += 1u) {
    out[first + c] = Elem(((f32(x[first + c]) - s.pivot) - s.shift) * s.scale * f32(weight[c]) + f32(bias[c]));
  }
}
