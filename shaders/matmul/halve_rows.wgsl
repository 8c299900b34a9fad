// Rows of activations as halves, and the small steps behind a product on matrix units that it does not do itself.
//   halve_rows         out[t, c] = f16(x[t, c] * 2^e),  scales[t] = 2^-e,  e such that the row's largest |x| comes to 2^14..2^15
//   add_bias           result[t, c] += bias[c];   add_residual: += residual[t, c];   add_bias_residual: both
// The scale is a power of two: it costs no digits, and no activation overflows. A value keeps 11 bits.
// Grid: halve_rows one workgroup a row, the others one invocation an element; columns [first_col, first_col + cols) of result.
// x: [rows, cols], cols a multiple of 32; result, residual: [rows, out_cols]; bias: [out_cols].
override WG: u32 = 256u;
struct Params { rows: u32, cols: u32, out_cols: u32, first_col: u32 }
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read_write> scales: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read> residual: array<f32>;
@group(0) @binding(5) var<storage, read_write> result: array<f32>;
@group(0) @binding(6) var<uniform> p: Params;
// include lib/reduce.wgsl

@compute @workgroup_size(WG)
fn halve_rows(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;        // grids past 65535 are folded into y
  if (row >= p.rows) { return; }         // uniform: the whole workgroup leaves
  let packs = p.cols / 4u;
  var most = 0.0;
  for (var c = lane; c < packs; c += WG) {
    let v = abs(x[row * packs + c]);
    most = max(most, max(max(v.x, v.y), max(v.z, v.w)));
  }
  let exponent = i32((bitcast<u32>(wg_max(lane, most)) >> 23u) & 0xffu);
  let e = select(clamp(141 - exponent, -100, 100), 0, exponent == 0);
  let scale = bitcast<f32>(u32(127 + e) << 23u);
  for (var c = lane; c < packs; c += WG) { out[row * packs + c] = vec4<f16>(x[row * packs + c] * scale); }
  if (lane == 0u) { scales[row] = bitcast<f32>(u32(127 - e) << 23u); }
}

fn place(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> vec2<u32> {   // row, column; a row too many past the end
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  return vec2<u32>(i / p.cols, p.first_col + i % p.cols);
}

@compute @workgroup_size(WG)
fn add_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
  let at = place(wg, grid, lane);
  if (at.x >= p.rows) { return; }
  result[at.x * p.out_cols + at.y] += bias[at.y];
}

@compute @workgroup_size(WG)
fn add_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let at = place(wg, grid, lane);
  if (at.x >= p.rows) { return; }
  let i = at.x * p.out_cols + at.y;
  result[i] += residual[i];
}

@compute @workgroup_size(WG)
fn add_bias_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  let at = place(wg, grid, lane);
  if (at.x >= p.rows) { return; }
  let i = at.x * p.out_cols + at.y;
  result[i] += bias[at.y] + residual[i];
}
