// Embedding lookup: rows of a table in any storage format, decoded and scaled.
//   out[t, k] = scale * table[ids[t], k],   ids: [tokens] u32, out: [tokens, cols] f32
// The table has `vocab` rows; w holds those from row0 on. One dispatch a window: each writes only the tokens whose row
// lies in its window, so together they write all. An id outside the table reads the last row.
// Grid: one invocation per 4 outputs of one token, workgroups folded into y.
// include quant/q8_0.wgsl as format
struct Params { tokens: u32, vocab: u32, row0: u32, w_rows: u32, cols: u32, scale: f32 }
@group(0) @binding(0) var<storage, read> ids: array<u32>;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(64)
fn embedding(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let per_token = (p.cols + 3u) >> 2u;
  let i = (wg.y * grid.x + wg.x) * 64u + lane;
  if (i >= p.tokens * per_token) { return; }
  let token = i / per_token;
  let k4 = i % per_token;
  let row = min(ids[token], p.vocab - 1u) - p.row0;    // a row before the window wraps around to a large number
  if (row >= p.w_rows) { return; }
  let v = block4(load_block(row, k4 >> 3u), k4 & 7u) * p.scale;
  let at = token * p.cols + k4 * 4u;
  let left = min(p.cols - k4 * 4u, 4u);
  for (var c = 0u; c < left; c++) { out[at + c] = v[c]; }
}
