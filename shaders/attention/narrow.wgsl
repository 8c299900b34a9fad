// Attention for software drivers, where one workgroup is one vector of lanes and loads cost far more than arithmetic.
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// A workgroup takes ROWS (query row, head) pairs that share keys; neighbouring pairs are the heads of one query row. Keys come
// 32 at a time: each lane scores four of them for all pairs, then sums the weighted values of its groups of four features for
// all pairs. So a loaded k or q serves 4 or ROWS products of a lane. The running maximum rescales what was summed before
// (Milakov & Gimelshein 2018, arXiv:1805.02867). Pairs that see no key give 0.
// Grid: (ceil(q_len * group / ROWS), heads / group, batch), or x cut into equal parts, which z counts first. All sums are f32. Loops over features run to p.quads, which the
// driver does not know at compile time: unrolled they take it half a minute.
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
// include attention/lse_none.wgsl as lse
const ROWS: u32 = 4u;                                  // 1 to 4
var<workgroup> tops: array<vec4<f32>, 8>;              // of each lane: a component for each pair
var<workgroup> weights: array<vec4<f32>, ROWS * 8u>;   // exp(score - m): [pair][lane], keys 4 lane to 4 lane + 3
var<workgroup> sums: array<vec4<f32>, ROWS * D4>;      // outputs before division: [pair][quad], each used by one lane only

fn score_of(s: f32, batch: u32, head: u32, row: u32, key: u32, range: vec2<u32>) -> f32 {
  if (key < range.x || key >= range.y) { return MASKED; }
  return masked(capped(s * p.scale), batch, head, row, key);
}

@compute @workgroup_size(8)
fn attention_narrow(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                    @builtin(local_invocation_index) lane: u32) {
  let pairs = p.q_len * p.group;                       // pair = query row * group + head in group
  let folds = ((pairs + ROWS - 1u) / ROWS + grid.x - 1u) / grid.x;
  let first = (wg.z % folds * grid.x + wg.x) * ROWS;
  if (first >= pairs) { return; }                      // uniform: the whole workgroup leaves
  let batch = wg.z / folds;
  let k_base = batch * p.k_batch + wg.y * p.k_head;
  let v_base = batch * p.v_batch + wg.y * p.v_head;
  var row: array<u32, ROWS>;
  var head: array<u32, ROWS>;
  var q_base: array<u32, ROWS>;
  var sees: array<vec2<u32>, ROWS>;
  for (var r = 0u; r < ROWS; r++) {
    let pair = min(first + r, pairs - 1u);             // past the last: that one once more, to the same place
    row[r] = pair / p.group;
    head[r] = wg.y * p.group + pair % p.group;
    q_base[r] = batch * p.q_batch + head[r] * p.q_head + row[r] * p.q_row;
    sees[r] = key_range(row[r]);
  }
  var begin = 0u;                                      // keys that any pair sees
  var end = 0u;
  let rows_end = min((min(first + ROWS, pairs) - 1u) / p.group + 1u, valid_rows());
  if (first / p.group < rows_end) {
    begin = key_range(first / p.group).x;
    end = key_range(rows_end - 1u).y;
  }
  for (var d = lane; d < p.quads; d += 8u) {
    for (var r = 0u; r < ROWS; r++) { sums[r * D4 + d] = vec4<f32>(0.0); }
  }

  var top = vec4<f32>(MASKED);                         // m, a component for each pair
  var total = vec4<f32>(0.0);                          // l, of this lane's keys only
  for (var key0 = begin; key0 < end; key0 += 32u) {
    let key = key0 + 4u * lane;
    let k0 = k_base + min(key, end - 1u) * p.k_row;    // past the end: the last key once more, then left out
    let k1 = k_base + min(key + 1u, end - 1u) * p.k_row;
    let k2 = k_base + min(key + 2u, end - 1u) * p.k_row;
    let k3 = k_base + min(key + 3u, end - 1u) * p.k_row;
    var s: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) { s[r] = vec4<f32>(0.0); }
    for (var d = 0u; d < p.quads; d++) {
      let a0 = load_k(k0, d);
      let a1 = load_k(k1, d);
      let a2 = load_k(k2, d);
      let a3 = load_k(k3, d);
      for (var r = 0u; r < ROWS; r++) {
        let b = load_q(q_base[r], d);
        s[r] += vec4<f32>(dot(a0, b), dot(a1, b), dot(a2, b), dot(a3, b));
      }
    }
    var highest = top;
    for (var r = 0u; r < ROWS; r++) {
      s[r] = vec4<f32>(score_of(s[r].x, batch, head[r], row[r], key, sees[r]),
                       score_of(s[r].y, batch, head[r], row[r], key + 1u, sees[r]),
                       score_of(s[r].z, batch, head[r], row[r], key + 2u, sees[r]),
                       score_of(s[r].w, batch, head[r], row[r], key + 3u, sees[r]));
      highest[r] = max(highest[r], max(max(s[r].x, s[r].y), max(s[r].z, s[r].w)));
    }
    tops[lane] = highest;
    workgroupBarrier();                                // also: every lane is done with the last weights
    for (var n = 0u; n < 8u; n++) { highest = max(highest, tops[n]); }
    let fade = exp(top - highest);
    top = highest;
    total *= fade;
    for (var r = 0u; r < ROWS; r++) {
      let w = select(exp(s[r] - top[r]), vec4<f32>(0.0), s[r] <= vec4<f32>(MASKED));
      weights[r * 8u + lane] = w;
      total[r] += (w.x + w.y) + (w.z + w.w);
    }
    workgroupBarrier();                                // also: every lane is done with tops
    for (var d = lane; d < p.quads; d += 8u) {
      var sum: array<vec4<f32>, ROWS>;
      for (var r = 0u; r < ROWS; r++) { sum[r] = sums[r * D4 + d] * fade[r]; }
      for (var n = key0; n < min(key0 + 32u, end); n += 4u) {
        let v0 = load_v(v_base + n * p.v_row, d);
        let v1 = load_v(v_base + min(n + 1u, end - 1u) * p.v_row, d);
        let v2 = load_v(v_base + min(n + 2u, end - 1u) * p.v_row, d);
        let v3 = load_v(v_base + min(n + 3u, end - 1u) * p.v_row, d);
        for (var r = 0u; r < ROWS; r++) {
          let w = weights[r * 8u + (n - key0) / 4u];
          sum[r] += w.x * v0 + w.y * v1 + w.z * v2 + w.w * v3;
        }
      }
      for (var r = 0u; r < ROWS; r++) { sums[r * D4 + d] = sum[r]; }
    }
  }

  tops[lane] = total;
  workgroupBarrier();
  var all = vec4<f32>(0.0);
  for (var n = 0u; n < 8u; n++) { all += tops[n]; }
  let inverse = select(vec4<f32>(0.0), 1.0 / all, all != vec4<f32>(0.0));   // NaN stays NaN
  for (var r = 0u; r < ROWS; r++) {
    if (lane == 0u) { store_lse((batch * p.heads + head[r]) * p.q_len + row[r], top[r], all[r]); }
    let out_base = batch * p.out_batch + head[r] * p.out_head + row[r] * p.out_row;
    for (var d = lane; d < p.quads; d += 8u) { store_out(out_base, d, sums[r * D4 + d] * inverse[r]); }
  }
}
