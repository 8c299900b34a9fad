// Embedding lookup as embedding/embedding.wgsl, for rows of a multiple of four numbers.
//   out[t, k] = scale * table[ids[t], k],   ids: [tokens] u32, out: [tokens, packs] of four f32
// Grid: one invocation per EACH packs, WG apart, workgroups folded into y.
// include quant/q8_0.wgsl as format
override WG: u32 = 256u;
const EACH: u32 = 4u;
struct Params { tokens: u32, vocab: u32, row0: u32, w_rows: u32, cols: u32, scale: f32 }
@group(0) @binding(0) var<storage, read> ids: array<u32>;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn embedding4(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let per_token = p.cols >> 2u;
  let start = (wg.y * grid.x + wg.x) * WG * EACH + lane;
  var row: array<u32, EACH>;
  for (var e = 0u; e < EACH; e++) {
    let token = min((start + e * WG) / per_token, p.tokens - 1u);
    row[e] = min(ids[token], p.vocab - 1u) - p.row0;   // a row before the window wraps around to a large number
  }
  for (var e = 0u; e < EACH; e++) {
    let i = start + e * WG;
    if (i < p.tokens * per_token && row[e] < p.w_rows) {
      let k4 = i % per_token;
      out[i] = block4(load_block(row[e], k4 >> 3u), k4 & 7u) * p.scale;
    }
  }
}
