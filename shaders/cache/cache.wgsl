// Small steps around the KV cache whose place is known on the device only: struct Step says where a chunk of tokens stands.
//   positions   out[t] = min(step.position + t, last)                          Grid: ceil(rows / 64), folded
//   last_row    out[c] = x[step.tokens - 1, c]: the row that the head needs    Grid: ceil(cols / 64), folded
//   store_qkv   qkv (rows, q_cols + 2 kv_cols): q to out, k and v to the cache at step.position + t, for t < step.tokens
//               Grid: ceil(rows * cols / 64), folded; cols = q_cols + 2 kv_cols
// Nothing is written at or past `context`.
alias KV = f32;            // element of the cache, f32 or f16
struct Params { rows: u32, cols: u32, q_cols: u32, kv_cols: u32, context: u32, last: u32 }
struct Step { position: u32, tokens: u32, seed: u32, draw: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> step: Step;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> k_cache: array<KV>;
@group(0) @binding(5) var<storage, read_write> v_cache: array<KV>;
@group(0) @binding(6) var<uniform> p: Params;

fn index_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 { return (wg.y * grid.x + wg.x) * 64u + lane; }

@compute @workgroup_size(64)
fn positions(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let t = index_of(wg, grid, lane);
  if (t < p.rows) { ids[t] = min(step.position + t, p.last); }
}
@compute @workgroup_size(64)
fn last_row(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
  let c = index_of(wg, grid, lane);
  if (c < p.cols) { out[c] = x[(clamp(step.tokens, 1u, p.rows) - 1u) * p.cols + c]; }
}
@compute @workgroup_size(64)
fn store_qkv(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let i = index_of(wg, grid, lane);
  if (i >= p.rows * p.cols) { return; }
  let t = i / p.cols;
  let c = i % p.cols;
  if (c < p.q_cols) { out[t * p.q_cols + c] = x[i]; return; }
  let at = step.position + t;
  if (t >= step.tokens || at >= p.context) { return; }
  let kv = c - p.q_cols;
  if (kv < p.kv_cols) {
    k_cache[at * p.kv_cols + kv] = KV(x[i]);
  } else {
    v_cache[at * p.kv_cols + kv - p.kv_cols] = KV(x[i]);
  }
}
