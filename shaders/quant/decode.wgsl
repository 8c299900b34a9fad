// Decodes one row window of a weight matrix to f32, for checks and for reading weights back.
//   out[r, k] = weight (first + r, k),   w: a window in any storage format, out: [rows, cols] f32
// Grid: one invocation per block of 32 weights, workgroups folded into y.
// include quant/q8_0.wgsl as format
struct Params { w_rows: u32, cols: u32, first: u32, rows: u32 }
@group(0) @binding(0) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(64)
fn decode(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let per_row = (p.cols + 31u) >> 5u;
  let i = (wg.y * grid.x + wg.x) * 64u + lane;
  if (i >= p.rows * per_row) { return; }
  let row = i / per_row;
  let block = i % per_row;
  let b = load_block(p.first + row, block);
  for (var j = 0u; j < 8u; j++) {
    let v = block4(b, j);
    for (var c = 0u; c < 4u; c++) {
      let k = block * 32u + j * 4u + c;
      if (k < p.cols) { out[row * p.cols + k] = v[c]; }
    }
  }
}
