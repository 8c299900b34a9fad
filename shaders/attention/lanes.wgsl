// Attention of few query rows over many keys on a GPU with subgroups (single-token decode), with no barrier a key.
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Eight neighbouring invocations share a key: each multiplies its own groups of eight features, shuffles add up the score, and
// each sums its own features of the weighted values; HEADS query heads that read the same keys share the loads. Every such
// eight goes through its own keys, AHEAD of them at a time, with a running maximum of its own (Milakov & Gimelshein 2018,
// arXiv:1805.02867); the eights are put together once, at the end, in a fixed order: within a subgroup by shuffles, then over
// the subgroups in workgroup memory. Rows that see no key give 0. All sums are f32.
//   attention_lanes: grid (heads / HEADS, q_len, batch). A workgroup goes through all keys.
//   attention_split: grid (SPLITS, heads / HEADS, q_len * batch). Blocks of ROUND keys go to the splits in turn (flash-decoding,
//     Dao et al. 2023); split s leaves its sums, not yet divided, in `parts`: D4 vec4s, then (m, l, 0, 0).
//   attention_merge: grid (heads, q_len, batch). Puts the splits of a row together, in their order.
// No grid depends on the number of keys. The first keys are loaded before the step buffer says how many there are.
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
const WG: u32 = 256u;                         // invocations; a power of two, at least 64
const SUBGROUP: u32 = 32u;                    // what the device was seen to use; a smaller one here takes more rounds
const HEADS: u32 = 1u;                        // query heads a workgroup, a divisor of the group
const AHEAD: u32 = 4u;                        // keys of an eight under way at once
const SPLITS: u32 = 1u;                       // workgroups that share a row
const WINDOWED: bool = true;                  // false: p.window is 0
const OCTETS: u32 = (D4 + 15u) / 16u;         // groups of eight features an invocation owns
const EIGHTS: u32 = WG / 8u;
const ROUND: u32 = EIGHTS * AHEAD;            // keys a workgroup has under way
const SLOTS: u32 = WG / SUBGROUP;
const ROW: u32 = D4 + 1u;                     // vec4s of a split's part
@group(0) @binding(6) var<storage, read_write> parts: array<vec4<f32>>;   // [batch][query row][head][split]
var<workgroup> width: u32;
var<workgroup> tops: array<f32, EIGHTS * HEADS>;          // m of each eight
var<workgroup> slots: array<vec2<f32>, SLOTS * HEADS>;    // m and l of each subgroup
var<workgroup> sums: array<vec4<f32>, SLOTS * HEADS * D4>;

fn part_of(batch: u32, row: u32, head: u32, split: u32) -> u32 {
  return (((batch * p.q_len + row) * p.heads + head) * SPLITS + split) * ROW;
}

// Blocks split, split + SPLITS ... of the row's keys, for HEADS heads from head0: fills slots and sums.
fn gather(batch: u32, row: u32, head0: u32, split: u32, lane: u32) {
  let k_base = batch * p.k_batch + (head0 / p.group) * p.k_head;
  let v_base = batch * p.v_batch + (head0 / p.group) * p.v_head;
  let range = key_range(row);
  var query: array<array<vec4<f32>, 2u * OCTETS>, HEADS>;
  var sum: array<array<vec4<f32>, 2u * OCTETS>, HEADS>;
  var top: array<f32, HEADS>;
  var total: array<f32, HEADS>;
  for (var g = 0u; g < HEADS; g++) {
    let q_base = batch * p.q_batch + (head0 + g) * p.q_head + row * p.q_row;
    for (var n = 0u; n < 2u * OCTETS; n++) {
      let d = (n / 2u * 8u + lane % 8u) * 2u + n % 2u;       // features past D4: q is 0 there, and k is read elsewhere
      query[g][n] = vec4<f32>(0.0);
      if (d < D4) { query[g][n] = load_q(q_base, d) * select(p.scale, 1.0, p.softcap > 0.0); }
      sum[g][n] = vec4<f32>(0.0);
    }
    top[g] = MASKED;
    total[g] = 0.0;
  }
  var key0 = split * ROUND;
  if (WINDOWED) { key0 += range.x; }
  if (p.k_len > 0u) {
    loop {                                    // the same rounds for every invocation: shuffles
      var keys: array<array<vec4<f32>, 2u * OCTETS>, AHEAD>;
      var values: array<array<vec4<f32>, 2u * OCTETS>, AHEAD>;
      for (var a = 0u; a < AHEAD; a++) {
        let key = min(key0 + a * EIGHTS + lane / 8u, p.k_len - 1u);
        for (var n = 0u; n < OCTETS; n++) {
          let o = min(n * 8u + lane % 8u, (D4 - 1u) / 2u);
          let two = load_k2(k_base + key * p.k_row, o);
          keys[a][2u * n] = two[0];
          keys[a][2u * n + 1u] = two[1];
        }
      }
      for (var a = 0u; a < AHEAD; a++) {
        let key = min(key0 + a * EIGHTS + lane / 8u, p.k_len - 1u);
        for (var n = 0u; n < OCTETS; n++) {
          let o = min(n * 8u + lane % 8u, (D4 - 1u) / 2u);
          let two = load_v2(v_base + key * p.v_row, o);
          values[a][2u * n] = two[0];
          values[a][2u * n + 1u] = two[1];
        }
      }
      // Loops over heads are the innermost: compilers unroll those, and only then are these arrays registers.
      var score: array<array<f32, HEADS>, AHEAD>;
      for (var a = 0u; a < AHEAD; a++) {
        for (var g = 0u; g < HEADS; g++) { score[a][g] = 0.0; }
        for (var n = 0u; n < 2u * OCTETS; n++) {
          for (var g = 0u; g < HEADS; g++) { score[a][g] += dot(query[g][n], keys[a][n]); }
        }
      }
      var higher: array<f32, HEADS>;
      for (var g = 0u; g < HEADS; g++) { higher[g] = top[g]; }
      for (var a = 0u; a < AHEAD; a++) {
        let key = key0 + a * EIGHTS + lane / 8u;
        for (var g = 0u; g < HEADS; g++) {
          var s = score[a][g];
          s += subgroupShuffleXor(s, 1u);
          s += subgroupShuffleXor(s, 2u);
          s += subgroupShuffleXor(s, 4u);
          if (p.softcap > 0.0) { s = capped(s * p.scale); }
          if (key < range.y) { s = masked(s, batch, head0 + g, row, key); } else { s = MASKED; }
          score[a][g] = s;
          higher[g] = max(higher[g], s);
        }
      }
      for (var g = 0u; g < HEADS; g++) {
        let fade = exp(top[g] - higher[g]);
        top[g] = higher[g];
        total[g] *= fade;
        for (var n = 0u; n < 2u * OCTETS; n++) { sum[g][n] *= fade; }
      }
      for (var a = 0u; a < AHEAD; a++) {
        if (key0 + a * EIGHTS + lane / 8u < range.y) {         // what lies behind may be NaN
          for (var g = 0u; g < HEADS; g++) {
            score[a][g] = select(exp(score[a][g] - top[g]), 0.0, score[a][g] <= MASKED);
            total[g] += score[a][g];
          }
          for (var n = 0u; n < 2u * OCTETS; n++) {
            for (var g = 0u; g < HEADS; g++) { sum[g][n] += score[a][g] * values[a][n]; }
          }
        }
      }
      key0 += SPLITS * ROUND;
      if (key0 >= range.y) { break; }
    }
  }

  // Each subgroup's sums, with its own m.
  if (lane % 8u == 0u) {
    for (var g = 0u; g < HEADS; g++) { tops[lane / 8u * HEADS + g] = top[g]; }
  }
  let size = subgroupAdd(1u);
  if (lane == 0u) { width = min(size, SUBGROUP); }
  let part = workgroupUniformLoad(&width);       // invocations that will hold the same sums, eight by eight
  let slot = lane / SUBGROUP;
  for (var g = 0u; g < HEADS; g++) {
    var highest = MASKED;
    for (var n = 0u; n < SUBGROUP / 8u; n++) { highest = max(highest, tops[(slot * (SUBGROUP / 8u) + n) * HEADS + g]); }
    let fade = exp(top[g] - highest);
    top[g] = highest;
    total[g] *= fade;
    for (var n = 0u; n < 2u * OCTETS; n++) { sum[g][n] *= fade; }
  }
  for (var other = 8u; other < part; other *= 2u) {
    for (var g = 0u; g < HEADS; g++) {
      total[g] += subgroupShuffleXor(total[g], other);
      for (var n = 0u; n < 2u * OCTETS; n++) { sum[g][n] += subgroupShuffleXor(sum[g][n], other); }
    }
  }
  let rounds = SUBGROUP / part;
  for (var r = 0u; r < rounds; r++) {
    if (r > 0u) { workgroupBarrier(); }
    if (lane % part < 8u && (lane / part) % rounds == r) {
      for (var g = 0u; g < HEADS; g++) {
        let at = slot * HEADS + g;
        if (lane % 8u == 0u) {
          if (r == 0u) { slots[at] = vec2<f32>(top[g], total[g]); } else { slots[at].y += total[g]; }
        }
        for (var n = 0u; n < 2u * OCTETS; n++) {
          let d = (n / 2u * 8u + lane % 8u) * 2u + n % 2u;
          if (d < D4) {
            if (r == 0u) { sums[at * D4 + d] = sum[g][n]; } else { sums[at * D4 + d] += sum[g][n]; }
          }
        }
      }
    }
  }
  workgroupBarrier();
}

// m and l of head g over the subgroups, and the sum of its features 4d to 4d + 3.
fn gathered(g: u32, d: u32, sum: ptr<function, vec4<f32>>) -> vec2<f32> {
  var highest = MASKED;
  for (var n = 0u; n < SLOTS; n++) { highest = max(highest, slots[n * HEADS + g].x); }
  var all = 0.0;
  var result = vec4<f32>(0.0);
  for (var n = 0u; n < SLOTS; n++) {
    let slot = slots[n * HEADS + g];
    let fade = exp(slot.x - highest);
    all += slot.y * fade;
    result += sums[(n * HEADS + g) * D4 + d] * fade;
  }
  *sum = result;
  return vec2<f32>(highest, all);
}

@compute @workgroup_size(WG)
fn attention_lanes(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  gather(wg.z, wg.y, wg.x * HEADS, 0u, lane);
  for (var n = lane; n < HEADS * D4; n += WG) {
    var sum: vec4<f32>;
    let all = gathered(n / D4, n % D4, &sum).y;
    let inverse = select(0.0, 1.0 / all, all != 0.0);                 // NaN stays NaN
    let head = wg.x * HEADS + n / D4;
    store_out(wg.z * p.out_batch + head * p.out_head + wg.y * p.out_row, n % D4, sum * inverse);
  }
}

@compute @workgroup_size(WG)
fn attention_split(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = wg.z % p.q_len;
  let batch = wg.z / p.q_len;
  let range = key_range(row);
  if (range.x + wg.x * ROUND >= range.y) { return; }                  // uniform; attention_merge does not look here
  gather(batch, row, wg.y * HEADS, wg.x, lane);
  for (var n = lane; n < HEADS * D4; n += WG) {
    var sum: vec4<f32>;
    let all = gathered(n / D4, n % D4, &sum);
    let at = part_of(batch, row, wg.y * HEADS + n / D4, wg.x);
    parts[at + n % D4] = sum;
    if (n % D4 == 0u) { parts[at + D4] = vec4<f32>(all, 0.0, 0.0); }
  }
}

const MERGE: u32 = 256u;                      // invocations of attention_merge, at least 64
const SHARES: u32 = MERGE / D4;               // of the splits
var<workgroup> shares: array<vec4<f32>, SHARES * D4>;
var<workgroup> share_tops: array<vec2<f32>, SHARES>;

@compute @workgroup_size(MERGE)
fn attention_merge(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let range = key_range(wg.y);
  var used = 0u;                              // splits with keys
  if (range.y > range.x) { used = min(SPLITS, (range.y - range.x - 1u) / ROUND + 1u); }
  let share = lane / D4;
  let d = lane % D4;
  if (share < SHARES) {
    var top = MASKED;
    var total = 0.0;
    var sum = vec4<f32>(0.0);
    for (var split = share; split < used; split += SHARES) {
      let at = part_of(wg.z, wg.y, wg.x, split);
      let other = parts[at + D4];
      let four = parts[at + d];
      let higher = max(top, other.x);
      let fade = exp(top - higher);
      let weight = exp(other.x - higher);
      top = higher;
      total = total * fade + other.y * weight;
      sum = sum * fade + four * weight;
    }
    shares[lane] = sum;
    if (d == 0u) { share_tops[share] = vec2<f32>(top, total); }
  }
  workgroupBarrier();
  if (lane < D4) {
    var highest = MASKED;
    for (var n = 0u; n < SHARES; n++) { highest = max(highest, share_tops[n].x); }
    var all = 0.0;
    var result = vec4<f32>(0.0);
    for (var n = 0u; n < SHARES; n++) {
      let fade = exp(share_tops[n].x - highest);
      all += share_tops[n].y * fade;
      result += shares[n * D4 + lane] * fade;
    }
    let inverse = select(0.0, 1.0 / all, all != 0.0);                 // NaN stays NaN
    store_out(wg.z * p.out_batch + wg.x * p.out_head + wg.y * p.out_row, lane, result * inverse);
  }
}
