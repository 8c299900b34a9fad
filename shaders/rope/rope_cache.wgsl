// Rotary embedding and cache write from a matrix of queries, keys and values.
//   rope_cache        q, k rotated, v as it is; q to out, k and v to the cache at step.position + t (see qkv.wgsl)
//   rope_cache_bias   bias[n] added first
//   rope_cache_norm   each head h of q and k first replaced by h / sqrt(mean(h^2) + eps) * gain    (Qwen 3, Gemma 3)
// qkv: [tokens, (heads + 2 kv_heads) * head_dim] f32, q then k then v in a row; bias: as a row; q_gain, k_gain: [head_dim].
// Grid: one workgroup per token and head, heads fastest. A few invocations do on software drivers.
override WG: u32 = 32u;    // invocations a head; a power of two
struct Params {
  tokens: u32, heads: u32, kv_heads: u32, head_dim: u32, rotated: u32, context: u32, table_rows: u32, eps: f32,
}
@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> bias: array<f32>;
@group(0) @binding(2) var<storage, read> q_gain: array<f32>;
@group(0) @binding(3) var<storage, read> k_gain: array<f32>;
@group(0) @binding(4) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> step: Step;
@group(0) @binding(6) var<storage, read_write> out: array<f32>;
@group(0) @binding(7) var<storage, read_write> k_cache: array<KV>;
@group(0) @binding(8) var<storage, read_write> v_cache: array<KV>;
@group(0) @binding(9) var<uniform> p: Params;
// include rope/qkv.wgsl
// include lib/reduce.wgsl

fn width() -> u32 { return (p.heads + 2u * p.kv_heads) * p.head_dim; }

@compute @workgroup_size(WG)
fn rope_cache(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let token = i / (p.heads + 2u * p.kv_heads);
  let head = i % (p.heads + 2u * p.kv_heads);
  if (token >= p.tokens) { return; }     // uniform: the whole workgroup leaves
  for (var j = lane; j < p.head_dim / 2u; j += WG) {
    let pair = head * (p.head_dim / 2u) + j;
    let at = token * width() + qkv_pair(pair);
    store_qkv(token, pair, vec2<f32>(qkv[at.x], qkv[at.y]));
  }
}

@compute @workgroup_size(WG)
fn rope_cache_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
  let i = wg.y * grid.x + wg.x;
  let token = i / (p.heads + 2u * p.kv_heads);
  let head = i % (p.heads + 2u * p.kv_heads);
  if (token >= p.tokens) { return; }
  for (var j = lane; j < p.head_dim / 2u; j += WG) {
    let pair = head * (p.head_dim / 2u) + j;
    let feature = qkv_pair(pair);
    let at = token * width() + feature;
    store_qkv(token, pair, vec2<f32>(qkv[at.x] + bias[feature.x], qkv[at.y] + bias[feature.y]));
  }
}

@compute @workgroup_size(WG)
fn rope_cache_norm(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
  let i = wg.y * grid.x + wg.x;
  let token = i / (p.heads + 2u * p.kv_heads);
  let head = i % (p.heads + 2u * p.kv_heads);
  if (token >= p.tokens) { return; }
  let first = token * width() + head * p.head_dim;
  var squares = 0.0;
  for (var j = lane; j < p.head_dim; j += WG) { squares += qkv[first + j] * qkv[first + j]; }
  let s = inverseSqrt(wg_sum(lane, squares) / f32(p.head_dim) + p.eps);
  for (var j = lane; j < p.head_dim / 2u; j += WG) {
    let pair = head * (p.head_dim / 2u) + j;
    let feature = qkv_pair(pair) - head * p.head_dim;
    var value = vec2<f32>(qkv[first + feature.x], qkv[first + feature.y]);
    if (head < p.heads) { value *= s * vec2<f32>(q_gain[feature.x], q_gain[feature.y]); }
    else if (head < p.heads + p.kv_heads) { value *= s * vec2<f32>(k_gain[feature.x], k_gain[feature.y]); }
    store_qkv(token, pair, value);
  }
}
