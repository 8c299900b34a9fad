// Attention of few query rows over many keys on a GPU (single-token decode): one workgroup per row and head.
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Keys come in blocks of WG: each invocation scores one, then PARTS groups of D4 invocations sum the weighted values, each
// invocation four features of every PARTS-th key. The running maximum rescales what was summed before (Milakov & Gimelshein
// 2018, arXiv:1805.02867). Rows that see no key give 0.
// Grid: (heads, q_len, batch): it does not depend on the number of keys. All sums are f32.
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
override WG: u32 = 256u;                 // invocations; a power of two, at least 64 (D4 at most)
// include lib/reduce.wgsl
var<workgroup> query: array<vec4<f32>, D4>;
var<workgroup> weight: array<f32, WG>;            // exp(score - m) of the block's keys
var<workgroup> sums: array<vec4<f32>, WG>;

@compute @workgroup_size(WG)
fn attention_decode(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let head = wg.x;
  let row = wg.y;
  let batch = wg.z;
  let k_base = batch * p.k_batch + (head / p.group) * p.k_head;
  let v_base = batch * p.v_batch + (head / p.group) * p.v_head;
  let range = key_range(row);
  if (lane < D4) { query[lane] = load_q(batch * p.q_batch + head * p.q_head + row * p.q_row, lane); }
  workgroupBarrier();

  let parts = WG / D4;
  let part = lane / D4;
  let own = lane % D4;                            // four features
  var top = MASKED;
  var total = 0.0;                                // of this invocation's keys only
  var sum = vec4<f32>(0.0);
  for (var key0 = range.x; key0 < range.y; key0 += WG) {
    let key = key0 + lane;
    var score = MASKED;
    if (key < range.y) {
      var s = 0.0;
      for (var d = 0u; d < p.quads; d++) { s += dot(query[d], load_k(k_base + key * p.k_row, d)); }
      score = max(masked(capped(s * p.scale), batch, head, row, key), MASKED);
    }
    let higher = max(top, wg_max(lane, score));
    let fade = exp(top - higher);
    top = higher;
    let w = select(exp(score - top), 0.0, score <= MASKED);
    weight[lane] = w;
    total = total * fade + w;
    workgroupBarrier();
    sum *= fade;
    if (part < parts) {
      let count = min(WG, range.y - key0);
      for (var j = part; j < count; j += parts) { sum += weight[j] * load_v(v_base + (key0 + j) * p.v_row, own); }
    }
    workgroupBarrier();                           // the next block overwrites weight
  }
  sums[lane] = sum;
  let all = wg_sum(lane, total);
  workgroupBarrier();
  if (lane < D4) {
    var result = vec4<f32>(0.0);
    for (var n = 0u; n < parts; n++) { result += sums[n * D4 + lane]; }
    let inverse = select(0.0, 1.0 / all, all != 0.0);                 // NaN stays NaN
    store_out(batch * p.out_batch + head * p.out_head + row * p.out_row, lane, result * inverse);
  }
}
