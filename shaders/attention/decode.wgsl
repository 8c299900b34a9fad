// Attention of few query rows over many keys on a GPU (single-token decode): one workgroup per row and head.
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Keys come in blocks of WG. Eight neighbouring invocations multiply a key together, so that they read one line of memory, and
// do so for eight keys, WG / 8 apart; then each invocation adds up and scores one key; then groups of D4 invocations sum the
// weighted values, each invocation four features of every WG / D4-th key. The running maximum rescales what was summed before
// (Milakov & Gimelshein 2018, arXiv:1805.02867). Rows that see no key give 0.
// Grid: (heads, q_len, batch): it does not depend on the number of keys. All sums are f32.
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
override WG: u32 = 128u;                          // invocations; a power of two, at least 64 (D4 at most)
// include lib/reduce.wgsl
var<workgroup> query: array<vec4<f32>, D4>;
var<workgroup> products: array<f32, WG * 9u>;     // [key][one of its eight invocations], rows in different banks
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
    var partial: array<f32, 8>;
    for (var n = 0u; n < 8u; n++) { partial[n] = 0.0; }
    for (var d = lane % 8u; d < p.quads; d += 8u) {
      for (var n = 0u; n < 8u; n++) {             // eight loads under way at once
        let key = min(key0 + n * (WG / 8u) + lane / 8u, range.y - 1u);
        partial[n] += dot(query[d], load_k(k_base + key * p.k_row, d));
      }
    }
    for (var n = 0u; n < 8u; n++) { products[(n * (WG / 8u) + lane / 8u) * 9u + lane % 8u] = partial[n]; }
    workgroupBarrier();
    let key = key0 + lane;
    var score = MASKED;
    if (key < range.y) {
      var s = 0.0;
      for (var n = 0u; n < 8u; n++) { s += products[lane * 9u + n]; }
      score = masked(capped(s * p.scale), batch, head, row, key);
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
      let last = min(WG, range.y - key0) - 1u;
      for (var j = part; j <= last; j += 4u * parts) {      // four loads under way at once
        let j1 = min(j + parts, last);
        let j2 = min(j + 2u * parts, last);
        let j3 = min(j + 3u * parts, last);
        let v0 = load_v(v_base + (key0 + j) * p.v_row, own);
        let v1 = load_v(v_base + (key0 + j1) * p.v_row, own);
        let v2 = load_v(v_base + (key0 + j2) * p.v_row, own);
        let v3 = load_v(v_base + (key0 + j3) * p.v_row, own);
        sum += weight[j] * v0 + select(0.0, weight[j1], j1 == j + parts) * v1;
        sum += select(0.0, weight[j2], j2 == j + 2u * parts) * v2 + select(0.0, weight[j3], j3 == j + 3u * parts) * v3;
      }
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
