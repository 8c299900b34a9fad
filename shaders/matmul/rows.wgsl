// Small row-wise steps around the products with a weight matrix, for the shapes that no fused entry takes.
//   pad    out[t, c] = x[t, c] for c < cols, 0 up to out_cols       (the products read rows of whole blocks of 32)
//   gate   out[t, c] = act(x[t, c]) * x[t, out_cols + c],  cols = 2 out_cols
// Grid: one invocation per element of out: [rows, out_cols] f32; x: [rows, cols] f32.
const GELU: u32 = 0u;      // the gate's activation: 0 SiLU, 1 GELU by tanh
override WG: u32 = 64u;
struct Params { rows: u32, cols: u32, out_cols: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
// include matmul/gated.wgsl

@compute @workgroup_size(WG)
fn pad(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
       @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i >= p.rows * p.out_cols) { return; }
  let c = i % p.out_cols;
  if (c < p.cols) { out[i] = x[i / p.out_cols * p.cols + c]; } else { out[i] = 0.0; }
}

@compute @workgroup_size(WG)
fn gate(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i >= p.rows * p.out_cols) { return; }
  let at = i / p.out_cols * p.cols + i % p.out_cols;
  out[i] = gated(x[at], x[at + p.out_cols]);
}
