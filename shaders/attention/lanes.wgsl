// Attention of one query row over many keys on a GPU with subgroups: one workgroup per row and head, no barrier a key.
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Eight neighbouring invocations share a key: each multiplies every eighth group of four features, shuffles add up the score,
// and each sums its own features of the weighted values. Every such eight goes through its own keys, AHEAD of them at a time,
// with a running maximum of its own (Milakov & Gimelshein 2018, arXiv:1805.02867); the eights are put together once, at the
// end: first within a subgroup by shuffles, then over the subgroups in workgroup memory, in a fixed order.
// Rows that see no key give 0. Grid: (heads, q_len, batch): it does not depend on the number of keys. All sums are f32.
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
override WG: u32 = 256u;                      // invocations; a power of two, at least 64
const SUBGROUP: u32 = 32u;                    // what the device was seen to use; a smaller one here takes more rounds
const QUADS: u32 = (D4 + 7u) / 8u;            // groups of four features an invocation owns
const AHEAD: u32 = 4u;                        // keys of an eight under way at once
// include lib/reduce.wgsl
var<workgroup> width: u32;
var<workgroup> sums: array<vec4<f32>, WG / SUBGROUP * D4>;

// Features past D4 are read from the last group, and q is 0 there.
fn quad(lane: u32, n: u32) -> u32 { return n * 8u + lane % 8u; }

@compute @workgroup_size(WG)
fn attention_lanes(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let head = wg.x;
  let row = wg.y;
  let batch = wg.z;
  let k_base = batch * p.k_batch + (head / p.group) * p.k_head;
  let v_base = batch * p.v_batch + (head / p.group) * p.v_head;
  let range = key_range(row);
  let eights = WG / 8u;
  var query: array<vec4<f32>, QUADS>;
  var sum: array<vec4<f32>, QUADS>;
  for (var n = 0u; n < QUADS; n++) {
    let d = quad(lane, n);
    query[n] = vec4<f32>(0.0);
    if (d < D4) { query[n] = load_q(batch * p.q_batch + head * p.q_head + row * p.q_row, d); }
    sum[n] = vec4<f32>(0.0);
  }
  var top = MASKED;
  var total = 0.0;
  for (var key0 = range.x; key0 < range.y; key0 += eights * AHEAD) {     // the same rounds for every invocation: shuffles
    var value: array<array<vec4<f32>, QUADS>, AHEAD>;
    var score: array<f32, AHEAD>;
    for (var a = 0u; a < AHEAD; a++) {
      let key = min(key0 + a * eights + lane / 8u, range.y - 1u);
      score[a] = 0.0;
      for (var n = 0u; n < QUADS; n++) {
        let d = min(quad(lane, n), D4 - 1u);
        score[a] += dot(query[n], load_k(k_base + key * p.k_row, d));
        value[a][n] = load_v(v_base + key * p.v_row, d);
      }
    }
    var higher = top;
    for (var a = 0u; a < AHEAD; a++) {
      let key = key0 + a * eights + lane / 8u;
      var s = score[a];
      s += subgroupShuffleXor(s, 1u);
      s += subgroupShuffleXor(s, 2u);
      s += subgroupShuffleXor(s, 4u);
      score[a] = MASKED;
      if (key < range.y) { score[a] = masked(capped(s * p.scale), batch, head, row, key); }
      higher = max(higher, score[a]);
    }
    let fade = exp(top - higher);
    top = higher;
    total *= fade;
    for (var n = 0u; n < QUADS; n++) { sum[n] *= fade; }
    for (var a = 0u; a < AHEAD; a++) {
      let w = select(exp(score[a] - top), 0.0, score[a] <= MASKED);
      total += w;
      for (var n = 0u; n < QUADS; n++) { sum[n] += w * value[a][n]; }
    }
  }

  let highest = wg_max(lane, top);
  let fade = exp(top - highest);
  let all = wg_sum(lane, select(0.0, total * fade, lane % 8u == 0u));
  let size = subgroupAdd(1u);
  if (lane == 0u) { width = min(size, SUBGROUP); }
  let part = workgroupUniformLoad(&width);       // invocations that will hold the same sums, eight by eight
  for (var n = 0u; n < QUADS; n++) {
    sum[n] *= fade;
    for (var other = 8u; other < part; other *= 2u) { sum[n] += subgroupShuffleXor(sum[n], other); }
  }
  let rounds = SUBGROUP / part;
  for (var r = 0u; r < rounds; r++) {
    workgroupBarrier();
    if (lane % part < 8u && (lane / part) % rounds == r) {
      for (var n = 0u; n < QUADS; n++) {
        let d = quad(lane, n);
        let at = lane / SUBGROUP * D4 + d;
        if (d < D4) {
          if (r == 0u) { sums[at] = sum[n]; } else { sums[at] += sum[n]; }
        }
      }
    }
  }
  workgroupBarrier();
  if (lane < D4) {
    var result = vec4<f32>(0.0);
    for (var n = 0u; n < WG / SUBGROUP; n++) { result += sums[n * D4 + lane]; }
    let inverse = select(0.0, 1.0 / all, all != 0.0);                 // NaN stays NaN
    store_out(batch * p.out_batch + head * p.out_head + row * p.out_row, lane, result * inverse);
  }
}
