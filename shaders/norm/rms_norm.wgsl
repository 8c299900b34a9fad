// RMSNorm over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4, plus eps).
//   s[r] = 1 / sqrt(mean_c(x[r,c]^2) + eps)
//   rms_norm       out[r,c] = x[r,c] * s[r]
//   rms_norm_gain  out[r,c] = x[r,c] * s[r] * gain[c]
//   add_rms_norm   out[r,c] = residual[r,c] + x[r,c] * s[r] * gain[c]     (Gemma's norm behind a sub-layer)
// Grid: one workgroup per row r. x, residual, out: [rows, cols]; gain: [cols]. Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x, residual, out
alias Gain = f32;          // type of gain
override WG: u32 = 256u;   // invocations per row; a power of two
struct Params { rows: u32, cols: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read> gain: array<Gain>;
@group(0) @binding(2) var<storage, read> residual: array<Elem>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;
@group(0) @binding(4) var<uniform> p: Params;
// include lib/reduce.wgsl

fn inv_rms(row: u32, lane: u32) -> f32 {
  var sum = 0.0;
  for (var c = lane; c < p.cols; c += WG) { let v = f32(x[row * p.cols + c]); sum += v * v; }
  return inverseSqrt(wg_sum(lane, sum) / f32(p.cols) + p.eps);
}

@compute @workgroup_size(WG)
fn rms_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;      // grids past 65535 are folded into y
  if (row >= p.rows) { return; }       // uniform: the whole workgroup leaves
  let s = inv_rms(row, lane);
  for (var c = lane; c < p.cols; c += WG) { let i = row * p.cols + c; out[i] = Elem(f32(x[i]) * s); }
}

@compute @workgroup_size(WG)
fn rms_norm_gain(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;
  if (row >= p.rows) { return; }
  let s = inv_rms(row, lane);
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    out[i] = Elem(f32(x[i]) * s * f32(gain[c]));
  }
}

@compute @workgroup_size(WG)
fn add_rms_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;
  if (row >= p.rows) { return; }
  let s = inv_rms(row, lane);
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    out[i] = Elem(f32(residual[i]) + f32(x[i]) * s * f32(gain[c]));
  }
}
