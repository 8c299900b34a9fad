// Flash attention forward, tiled, for many query rows on a GPU (Dao 2023, arXiv:2307.08691, algorithm 1, without dropout).
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Keys come in tiles; the running maximum m and sum l of each row rescale what was summed before. Rows that see no key give 0.
// Grid: (ceil(q_len / ROWS), heads, batch); the last rows, which see most keys of a causal mask, go first.
// q, out: rows of Elem; k, v: rows of KV; strides in Params. All sums are f32, in an order that depends on the sizes alone.
// An invocation (r, c) of TY x 8 owns rows r + TY i: their scores of keys c + 8 j, so that a vec4 holds keys c, c+8, c+16 and
// c+24 of 32, and of their outputs the features 4c..4c+3 of each chunk of 32. Workgroup memory is read and written in whole
// vec4s (a store to one component may touch its neighbours): 15.5 KiB for PM 4, PN 4, TY 16, WIDE 1.
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
// include attention/lse_none.wgsl as lse
const PM: u32 = 4u;                     // query rows an invocation, a multiple of 4
const PN: u32 = 4u;                     // keys an invocation, a multiple of 4
const TY: u32 = 16u;                    // rows of invocations
const WIDE: u32 = 1u;                   // chunks of 32 features of v staged at once, at most CHUNKS
const ROWS: u32 = PM * TY;              // query rows a tile
const KEYS: u32 = 8u * PN;              // keys a tile
const LANES: u32 = 8u * TY;
const CHUNKS: u32 = (D4 + 7u) / 8u;     // chunks of 32 features
const STRIDE: u32 = 9u;                 // vec4s a staged row of q and k: 8, and one so that rows start in different banks
const SPREAD: u32 = 2u * PN + 1u;       // vec4s a row of probabilities, likewise
const PN4: u32 = PN / 4u;
var<workgroup> left: array<vec4<f32>, ROWS * max(STRIDE, SPREAD)>;              // a chunk of q, then the probabilities
var<workgroup> right: array<vec4<f32>, KEYS * max(STRIDE, 8u * WIDE)>;          // a chunk of k, then WIDE chunks of v
var<workgroup> tops: array<vec4<f32>, LANES * PM / 4u>;                             // of each invocation's rows

fn score_of(s: f32, batch: u32, head: u32, row: u32, key: u32, sees: vec2<u32>) -> f32 {
  if (key < sees.x || key >= sees.y) { return MASKED; }
  return masked(s, batch, head, row, key);
}

@compute @workgroup_size(LANES)
fn attention_tile(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                  @builtin(local_invocation_index) lane: u32) {
  let head = wg.y;
  let batch = wg.z;
  let first = (grid.x - 1u - wg.x) * ROWS;
  let q_base = batch * p.q_batch + head * p.q_head;
  let k_base = batch * p.k_batch + (head / p.group) * p.k_head;
  let v_base = batch * p.v_batch + (head / p.group) * p.v_head;
  let r = lane / 8u;
  let c = lane % 8u;

  let rows_end = min(first + ROWS, valid_rows());      // past the last row of this tile that sees keys
  var begin = 0u;                                      // keys that any row sees
  var end = 0u;
  var all_begin = 0u;                                  // keys that every row sees
  var all_end = 0u;
  if (first < rows_end) {
    let lowest = key_range(first);
    let highest = key_range(rows_end - 1u);
    begin = lowest.x;
    end = highest.y;
    all_begin = highest.x;
    all_end = lowest.y;
  }

  var top: array<f32, PM>;                             // m of each own row
  var total: array<f32, PM>;                           // l of each own row, of this invocation's keys only
  for (var i = 0u; i < PM; i++) { top[i] = MASKED; total[i] = 0.0; }
  var sum: array<array<vec4<f32>, PM>, CHUNKS>;        // outputs before division by l
  for (var chunk = 0u; chunk < CHUNKS; chunk++) {
    for (var i = 0u; i < PM; i++) { sum[chunk][i] = vec4<f32>(0.0); }
  }

  for (var key0 = begin; key0 < end; key0 += KEYS) {
    // Scores: component m of s[own row][h] is of key 32 h + 8 m + c.
    var s: array<array<vec4<f32>, PN4>, PM>;
    for (var i = 0u; i < PM; i++) {
      for (var h = 0u; h < PN4; h++) { s[i][h] = vec4<f32>(0.0); }
    }
    for (var d0 = 0u; d0 < p.quads; d0 += 8u) {
      for (var n = lane; n < ROWS * 8u; n += LANES) {
        let row = first + n / 8u;
        let d = d0 + n % 8u;
        var four = vec4<f32>(0.0);
        if (row < rows_end && d < D4) { four = load_q(q_base + row * p.q_row, d); }
        left[(n / 8u) * STRIDE + n % 8u] = four;
      }
      for (var n = lane; n < KEYS * 8u; n += LANES) {
        let key = key0 + n / 8u;
        let d = d0 + n % 8u;
        var four = vec4<f32>(0.0);
        if (key < end && d < D4) { four = load_k(k_base + key * p.k_row, d); }
        right[(n / 8u) * STRIDE + n % 8u] = four;
      }
      workgroupBarrier();
      for (var d = 0u; d < min(8u, p.quads - d0); d++) {
        var b: array<vec4<f32>, PN>;
        for (var j = 0u; j < PN; j++) { b[j] = right[(c + 8u * j) * STRIDE + d]; }
        for (var i = 0u; i < PM; i++) {
          let a = left[(r + TY * i) * STRIDE + d];
          for (var h = 0u; h < PN4; h++) {
            let b0 = b[4u * h];
            let b1 = b[4u * h + 1u];
            let b2 = b[4u * h + 2u];
            let b3 = b[4u * h + 3u];
            var t = fma(vec4<f32>(a.x), vec4<f32>(b0.x, b1.x, b2.x, b3.x), s[i][h]);
            t = fma(vec4<f32>(a.y), vec4<f32>(b0.y, b1.y, b2.y, b3.y), t);
            t = fma(vec4<f32>(a.z), vec4<f32>(b0.z, b1.z, b2.z, b3.z), t);
            s[i][h] = fma(vec4<f32>(a.w), vec4<f32>(b0.w, b1.w, b2.w, b3.w), t);
          }
        }
      }
      workgroupBarrier();
    }

    for (var i = 0u; i < PM; i++) {
      for (var h = 0u; h < PN4; h++) { s[i][h] *= p.scale; }
    }
    if (p.softcap > 0.0) {
      for (var i = 0u; i < PM; i++) {
        for (var h = 0u; h < PN4; h++) {
          s[i][h] = vec4<f32>(capped(s[i][h].x), capped(s[i][h].y), capped(s[i][h].z), capped(s[i][h].w));
        }
      }
    }
    let whole = !HAS_MASK && key0 >= all_begin && key0 + KEYS <= all_end;
    if (!whole) {
      for (var i = 0u; i < PM; i++) {
        let row = first + r + TY * i;
        var sees = vec2<u32>(0u, 0u);
        if (row < rows_end) { sees = key_range(row); }
        for (var h = 0u; h < PN4; h++) {
          let key = key0 + 32u * h + c;
          let four = s[i][h];
          s[i][h] = vec4<f32>(score_of(four.x, batch, head, row, key, sees),
                              score_of(four.y, batch, head, row, key + 8u, sees),
                              score_of(four.z, batch, head, row, key + 16u, sees),
                              score_of(four.w, batch, head, row, key + 24u, sees));
        }
      }
    }

    // The largest of each row, over the eight invocations that share it.
    var fade: array<f32, PM>;                          // first: the largest of this invocation's keys
    for (var i = 0u; i < PM; i++) {
      var four = s[i][0];
      for (var h = 1u; h < PN4; h++) { four = max(four, s[i][h]); }
      fade[i] = max(max(four.x, four.y), max(four.z, four.w));
    }
    for (var i = 0u; i < PM; i += 4u) {
      tops[(lane * PM + i) / 4u] = vec4<f32>(fade[i], fade[i + 1u], fade[i + 2u], fade[i + 3u]);
    }
    workgroupBarrier();
    for (var i = 0u; i < PM; i += 4u) {
      var highest = vec4<f32>(top[i], top[i + 1u], top[i + 2u], top[i + 3u]);
      let before = highest;
      for (var n = 0u; n < 8u; n++) { highest = max(highest, tops[((r * 8u + n) * PM + i) / 4u]); }
      let four = exp(before - highest);
      fade[i] = four.x;
      fade[i + 1u] = four.y;
      fade[i + 2u] = four.z;
      fade[i + 3u] = four.w;
      top[i] = highest.x;
      top[i + 1u] = highest.y;
      top[i + 2u] = highest.z;
      top[i + 3u] = highest.w;
    }
    for (var i = 0u; i < PM; i++) {
      var four = vec4<f32>(0.0);
      for (var h = 0u; h < PN4; h++) {
        s[i][h] = select(exp(s[i][h] - top[i]), vec4<f32>(0.0), s[i][h] <= vec4<f32>(MASKED));
        four += s[i][h];
      }
      total[i] = total[i] * fade[i] + ((four.x + four.y) + (four.z + four.w));
    }
    for (var chunk = 0u; chunk < CHUNKS; chunk++) {
      for (var i = 0u; i < PM; i++) { sum[chunk][i] *= fade[i]; }
    }

    // Outputs, WIDE chunks of features at a time: where that is all of them, no index of `sum` depends on a loop that stays.
    for (var i = 0u; i < PM; i++) {
      for (var h = 0u; h < PN4; h++) { left[(r + TY * i) * SPREAD + 8u * h + c] = s[i][h]; }
    }
    for (var c0 = 0u; c0 < CHUNKS; c0 += WIDE) {
      for (var n = lane; n < KEYS * 8u * WIDE; n += LANES) {
        let key = key0 + n / (8u * WIDE);
        let d = c0 * 8u + n % (8u * WIDE);
        var four = vec4<f32>(0.0);
        if (key < end && d < D4) { four = load_v(v_base + key * p.v_row, d); }
        right[n] = four;
      }
      workgroupBarrier();
      for (var n = 0u; n < 2u * PN; n++) {
        let key = n / 8u * 32u + n % 8u;
        var v: array<array<vec4<f32>, 4>, WIDE>;
        for (var w = 0u; w < WIDE; w++) {
          for (var m = 0u; m < 4u; m++) { v[w][m] = right[(key + 8u * m) * 8u * WIDE + 8u * w + c]; }
        }
        for (var i = 0u; i < PM; i++) {
          let weight = left[(r + TY * i) * SPREAD + n];
          for (var w = 0u; w < WIDE; w++) {
            if (c0 + w < CHUNKS) {
              var t = fma(vec4<f32>(weight.x), v[w][0], sum[c0 + w][i]);
              t = fma(vec4<f32>(weight.y), v[w][1], t);
              t = fma(vec4<f32>(weight.z), v[w][2], t);
              sum[c0 + w][i] = fma(vec4<f32>(weight.w), v[w][3], t);
            }
          }
        }
      }
      workgroupBarrier();
    }
  }

  for (var i = 0u; i < PM; i += 4u) {
    tops[(lane * PM + i) / 4u] = vec4<f32>(total[i], total[i + 1u], total[i + 2u], total[i + 3u]);
  }
  workgroupBarrier();
  for (var i = 0u; i < PM; i += 4u) {
    var all = vec4<f32>(0.0);
    for (var n = 0u; n < 8u; n++) { all += tops[((r * 8u + n) * PM + i) / 4u]; }
    total[i] = all.x;
    total[i + 1u] = all.y;
    total[i + 2u] = all.z;
    total[i + 3u] = all.w;
  }
  for (var i = 0u; i < PM; i++) {
    let row = first + r + TY * i;
    if (row < p.q_len) {
      let inverse = select(0.0, 1.0 / total[i], total[i] != 0.0);     // NaN stays NaN
      if (c == 0u) { store_lse((batch * p.heads + head) * p.q_len + row, top[i], total[i]); }
      for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        let d = chunk * 8u + c;
        let value = select(vec4<f32>(0.0), sum[chunk][i] * inverse, row < rows_end);   // `whole` tiles count padding rows too
        if (d < D4) { store_out(batch * p.out_batch + head * p.out_head + row * p.out_row, d, value); }
      }
    }
  }
}
