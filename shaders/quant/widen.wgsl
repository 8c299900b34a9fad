// A row window of a weight matrix as halves, for products on matrix units.
//   out[r, k] = f16(weight (r, k)),   w: a window in any storage format, out: [w_rows, 32 * blocks]; zeros past cols
// Grid: one invocation for four weights, so that neighbours write side by side; workgroups folded into y.
// include quant/q8_0.wgsl as format
override WG: u32 = 256u;
struct Params { w_rows: u32, cols: u32 }
@group(0) @binding(0) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f16>>;
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn widen(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
         @builtin(local_invocation_index) lane: u32) {
  let per_row = (p.cols + 31u) >> 5u;
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i >= p.w_rows * per_row * 8u) { return; }
  let block = i / 8u % per_row;
  let j = i % 8u;
  let k = vec4<u32>(block * 32u + j * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
  let four = block4(load_block(i / 8u / per_row, block), j);
  out[i] = vec4<f16>(select(vec4<f32>(0.0), four, k < vec4<u32>(p.cols)));
}
