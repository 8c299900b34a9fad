// A row window of a weight matrix as halves, for products on matrix units.
//   out[r, k] = f16(weight (r, k)),   w: a window in any storage format, out: [w_rows, 32 * blocks]; zeros past cols
// Grid: one invocation per block of 32 weights, workgroups folded into y.
// include quant/q8_0.wgsl as format
override WG: u32 = 64u;
struct Params { w_rows: u32, cols: u32 }
@group(0) @binding(0) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f16>>;
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn widen(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
         @builtin(local_invocation_index) lane: u32) {
  let per_row = (p.cols + 31u) >> 5u;
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i >= p.w_rows * per_row) { return; }
  let block = i % per_row;
  let b = load_block(i / per_row, block);
  for (var j = 0u; j < 8u; j++) {
    let k = vec4<u32>(block * 32u + j * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
    out[i * 8u + j] = vec4<f16>(select(vec4<f32>(0.0), block4(b, j), k < vec4<u32>(p.cols)));
  }
}
