// RMSNorm as in norm/rms_norm.wgsl, one invocation per row: for software drivers, where workgroup memory and barriers cost
// more than they save.
//   s[r] = 1 / sqrt(mean_c(x[r,c]^2) + eps)
// Grid: ceil(rows / WG) workgroups. x, residual, out: [rows, cols]; gain: [cols]. Sums are f32 in four interleaved parts.
alias Elem = f32;          // type of x, residual, out
alias Gain = f32;          // type of gain
override WG: u32 = 8u;     // rows per workgroup
struct Params { rows: u32, cols: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read> gain: array<Gain>;
@group(0) @binding(2) var<storage, read> residual: array<Elem>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;
@group(0) @binding(4) var<uniform> p: Params;

fn inv_rms(first: u32) -> f32 {
  var parts = vec4<f32>();
  var c = 0u;
  for (; c + 4u <= p.cols; c += 4u) {
    let i = first + c;
    let v = vec4<f32>(f32(x[i]), f32(x[i + 1u]), f32(x[i + 2u]), f32(x[i + 3u]));
    parts += v * v;
  }
  var sum = (parts.x + parts.y) + (parts.z + parts.w);
  for (; c < p.cols; c += 1u) { let v = f32(x[first + c]); sum += v * v; }
  return inverseSqrt(sum / f32(p.cols) + p.eps);
}

@compute @workgroup_size(WG)
fn rms_norm_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = inv_rms(first);
  for (var c = 0u; c < p.cols; c += 1u) { out[first + c] = Elem(f32(x[first + c]) * s); }
}

@compute @workgroup_size(WG)
fn rms_norm_gain_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                        @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = inv_rms(first);
  for (var c = 0u; c < p.cols; c += 1u) { out[first + c] = Elem(f32(x[first + c]) * s * f32(gain[c])); }
}

@compute @workgroup_size(WG)
fn add_rms_norm_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                       @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = inv_rms(first);
  for (var c = 0u; c < p.cols; c += 1u) {
    out[first + c] = Elem(f32(residual[first + c]) + f32(x[first + c]) * s * f32(gain[c]));
  }
}
