// Flash attention backward, tiled, for GPUs (Dao 2023, arXiv:2307.08691, algorithm 2, as two kernels without atomics).
//   with P = exp(score - lse), dP = dout v^T, dS = P (dP - delta):   dq = scale dS k,   dk = scale dS^T q,   dv = P^T dout
// attention_grad_q_tile: a workgroup has ROWS query rows and goes through the keys, KEYS at a time. Grid: (ceil(q_len / ROWS),
// heads, batch). attention_grad_kv_tile: a workgroup has ROWS keys of a key/value head and goes through the query rows of its
// query heads, one head after the other. Grid: (ceil(k_len / ROWS), heads / group, batch).
// Both: an invocation (r, c) of TY x 8 owns rows r + TY i of its own side; a vec4 of its scores holds the other side's
// c, c+8, c+16 and c+24 of 32; of its sums it has the features 4c..4c+3 of each chunk of 32. As in tile.wgsl.
// Scores are made again, so memory is linear in length. All sums are f32, in an order that depends on the sizes alone.
// q, dout: rows of Elem; k, v: rows of KV; strides in Params (dout: those of out). grads, of Elem: JOINT, where q, k and v are
// alike: (batch, rows, 3, heads, D), as the gradient of their joint projection; else dq, dk and dv one after the other, each
// (batch, rows, heads, D).
// include attention/params.wgsl
// include attention/grad_rows_vec4.wgsl as rows
// include attention/keys_given.wgsl
// include attention/mask_none.wgsl as mask
// include attention/grad_pair.wgsl
const PM: u32 = 4u;                     // own rows an invocation
const PN: u32 = 4u;                     // rows of the other side an invocation, a multiple of 4
const TY: u32 = 16u;                    // rows of invocations
const JOINT: bool = false;              // dq, dk and dv side by side
const WIDE: u32 = 1u;                   // chunks of 32 features staged at once for the sums, at most CHUNKS
const ROWS: u32 = PM * TY;
const KEYS: u32 = 8u * PN;
const LANES: u32 = 8u * TY;
const CHUNKS: u32 = (D4 + 7u) / 8u;     // chunks of 32 features
const STRIDE: u32 = 9u;                 // vec4s a staged row: 8, and one so that rows start in different banks
const SPREAD: u32 = 2u * PN + 1u;       // vec4s a row of weights, likewise
const PN4: u32 = PN / 4u;
alias Scores = array<array<vec4<f32>, PN4>, PM>;
alias Total = array<array<vec4<f32>, PM>, CHUNKS>;
var<workgroup> left: array<vec4<f32>, ROWS * max(STRIDE, SPREAD)>;        // a chunk of the own side, then weights
var<workgroup> right: array<vec4<f32>, KEYS * max(STRIDE, 8u * WIDE)>;    // a chunk of the other side

// Where the gradient of a row starts. side: 0 q, 1 k, 2 v; head: of its own kind.
fn place(side: u32, batches: u32, batch: u32, row: u32, head: u32) -> u32 {
  if (JOINT) { return (((batch * p.q_len + row) * 3u + side) * p.heads + head) * D; }
  if (side == 0u) { return ((batch * p.q_len + row) * p.heads + head) * D; }
  let kv_heads = p.heads / p.group;
  let before = batches * (p.q_len * p.heads + (side - 1u) * p.k_len * kv_heads);
  return (before + (batch * p.k_len + row) * kv_heads + head) * D;
}

// A side of a product: which operand, its first element, elements a row, and rows [first, end) of which there are values.
struct Side { which: u32, base: u32, stride: u32, first: u32, end: u32 }

// own . other over all features. Call in uniform control flow.
fn scores_of(own: Side, other: Side, lane: u32) -> Scores {
  var s: Scores;
  for (var i = 0u; i < PM; i++) {
    for (var h = 0u; h < PN4; h++) { s[i][h] = vec4<f32>(0.0); }
  }
  let r = lane / 8u;
  let c = lane % 8u;
  for (var d0 = 0u; d0 < p.quads; d0 += 8u) {
    for (var n = lane; n < ROWS * 8u; n += LANES) {
      let row = own.first + n / 8u;
      let d = d0 + n % 8u;
      var four = vec4<f32>(0.0);
      if (row < own.end && d < D4) { four = load(own.which, own.base + row * own.stride, d); }
      left[(n / 8u) * STRIDE + n % 8u] = four;
    }
    for (var n = lane; n < KEYS * 8u; n += LANES) {
      let row = other.first + n / 8u;
      let d = d0 + n % 8u;
      var four = vec4<f32>(0.0);
      if (row < other.end && d < D4) { four = load(other.which, other.base + row * other.stride, d); }
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
  return s;
}

// sum += weights . other, with the weights of the own rows. Call in uniform control flow.
fn add_to(sum: ptr<function, Total>, weights: Scores, other: Side, lane: u32) {
  let r = lane / 8u;
  let c = lane % 8u;
  for (var i = 0u; i < PM; i++) {
    for (var h = 0u; h < PN4; h++) { left[(r + TY * i) * SPREAD + 8u * h + c] = weights[i][h]; }
  }
  for (var c0 = 0u; c0 < CHUNKS; c0 += WIDE) {
    for (var n = lane; n < KEYS * 8u * WIDE; n += LANES) {
      let row = other.first + n / (8u * WIDE);
      let d = c0 * 8u + n % (8u * WIDE);
      var four = vec4<f32>(0.0);
      if (row < other.end && d < D4) { four = load(other.which, other.base + row * other.stride, d); }
      right[n] = four;
    }
    workgroupBarrier();
    for (var n = 0u; n < 2u * PN; n++) {
      let at = n / 8u * 32u + n % 8u;
      var v4: array<array<vec4<f32>, 4>, WIDE>;
      for (var w = 0u; w < WIDE; w++) {
        for (var m = 0u; m < 4u; m++) { v4[w][m] = right[(at + 8u * m) * 8u * WIDE + 8u * w + c]; }
      }
      for (var i = 0u; i < PM; i++) {
        let weight = left[(r + TY * i) * SPREAD + n];
        for (var w = 0u; w < WIDE; w++) {
          if (c0 + w < CHUNKS) {
            var t = fma(vec4<f32>(weight.x), v4[w][0], (*sum)[c0 + w][i]);
            t = fma(vec4<f32>(weight.y), v4[w][1], t);
            t = fma(vec4<f32>(weight.z), v4[w][2], t);
            (*sum)[c0 + w][i] = fma(vec4<f32>(weight.w), v4[w][3], t);
          }
        }
      }
    }
    workgroupBarrier();
  }
}

@compute @workgroup_size(LANES)
fn attention_grad_q_tile(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                         @builtin(local_invocation_index) lane: u32) {
  let head = wg.y;
  let batch = wg.z;
  let first = (grid.x - 1u - wg.x) * ROWS;             // the last rows, which see most keys of a causal mask, go first
  let q_base = batch * p.q_batch + head * p.q_head;
  let own_q = Side(0u, q_base, p.q_row, first, p.q_len);
  let own_dout = Side(3u, batch * p.out_batch + head * p.out_head, p.out_row, first, p.q_len);
  let k_base = batch * p.k_batch + (head / p.group) * p.k_head;
  let v_base = batch * p.v_batch + (head / p.group) * p.v_head;
  let r = lane / 8u;
  let c = lane % 8u;
  let lowest = key_range(first);
  let highest = key_range(min(first + ROWS, p.q_len) - 1u);
  var stat: array<vec2<f32>, PM>;
  for (var i = 0u; i < PM; i++) { stat[i] = stat_of(batch, head, first + r + TY * i); }
  var sum: Total;
  for (var chunk = 0u; chunk < CHUNKS; chunk++) {
    for (var i = 0u; i < PM; i++) { sum[chunk][i] = vec4<f32>(0.0); }
  }
  for (var key0 = lowest.x; key0 < highest.y; key0 += KEYS) {
    let k_side = Side(1u, k_base, p.k_row, key0, highest.y);
    let v_side = Side(2u, v_base, p.v_row, key0, highest.y);
    var s = scores_of(own_q, k_side, lane);
    let dp = scores_of(own_dout, v_side, lane);
    let check = HAS_MASK || key0 < highest.x || key0 + KEYS > lowest.y;
    for (var i = 0u; i < PM; i++) {
      let row = first + r + TY * i;
      for (var h = 0u; h < PN4; h++) {
        let key = key0 + 32u * h + c;
        s[i][h] = vec4<f32>(pair(s[i][h].x, dp[i][h].x, stat[i], batch, head, row, key, check).y,
                            pair(s[i][h].y, dp[i][h].y, stat[i], batch, head, row, key + 8u, check).y,
                            pair(s[i][h].z, dp[i][h].z, stat[i], batch, head, row, key + 16u, check).y,
                            pair(s[i][h].w, dp[i][h].w, stat[i], batch, head, row, key + 24u, check).y);
      }
    }
    add_to(&sum, s, k_side, lane);
  }
  for (var i = 0u; i < PM; i++) {
    let row = first + r + TY * i;
    if (row < p.q_len) {
      let base = place(0u, grid.z, batch, row, head);
      for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        let d = chunk * 8u + c;
        if (d < D4) { store(base, d, sum[chunk][i] * p.scale); }
      }
    }
  }
}

@compute @workgroup_size(LANES)
fn attention_grad_kv_tile(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                          @builtin(local_invocation_index) lane: u32) {
  let batch = wg.z;
  let first = wg.x * ROWS;
  let k_base = batch * p.k_batch + wg.y * p.k_head;
  let v_base = batch * p.v_batch + wg.y * p.v_head;
  let own_k = Side(1u, k_base, p.k_row, first, p.k_len);
  let own_v = Side(2u, v_base, p.v_row, first, p.k_len);
  let r = lane / 8u;
  let c = lane % 8u;
  let rows = row_range(first, min(first + ROWS, p.k_len) - 1u);
  var sum_k: Total;
  var sum_v: Total;
  for (var chunk = 0u; chunk < CHUNKS; chunk++) {
    for (var i = 0u; i < PM; i++) {
      sum_k[chunk][i] = vec4<f32>(0.0);
      sum_v[chunk][i] = vec4<f32>(0.0);
    }
  }
  for (var g = 0u; g < p.group; g++) {
    let head = wg.y * p.group + g;
    let q_base = batch * p.q_batch + head * p.q_head;
    let out_base = batch * p.out_batch + head * p.out_head;
    for (var row0 = rows.x; row0 < rows.y; row0 += KEYS) {
      let q_side = Side(0u, q_base, p.q_row, row0, rows.y);
      let dout_side = Side(3u, out_base, p.out_row, row0, rows.y);
      var s = scores_of(own_k, q_side, lane);
      var dp = scores_of(own_v, dout_side, lane);
      var check = HAS_MASK || first + ROWS > p.k_len || row0 + KEYS > rows.y;
      if (!check) { check = key_range(row0).y < first + ROWS || key_range(row0 + KEYS - 1u).x > first; }
      for (var h = 0u; h < PN4; h++) {
        let row = row0 + 32u * h + c;
        let stat0 = stat_of(batch, head, row);
        let stat1 = stat_of(batch, head, row + 8u);
        let stat2 = stat_of(batch, head, row + 16u);
        let stat3 = stat_of(batch, head, row + 24u);
        for (var i = 0u; i < PM; i++) {
          let key = first + r + TY * i;
          let e0 = pair(s[i][h].x, dp[i][h].x, stat0, batch, head, row, key, check);
          let e1 = pair(s[i][h].y, dp[i][h].y, stat1, batch, head, row + 8u, key, check);
          let e2 = pair(s[i][h].z, dp[i][h].z, stat2, batch, head, row + 16u, key, check);
          let e3 = pair(s[i][h].w, dp[i][h].w, stat3, batch, head, row + 24u, key, check);
          s[i][h] = vec4<f32>(e0.x, e1.x, e2.x, e3.x);
          dp[i][h] = vec4<f32>(e0.y, e1.y, e2.y, e3.y);
        }
      }
      add_to(&sum_v, s, dout_side, lane);
      add_to(&sum_k, dp, q_side, lane);
    }
  }
  for (var i = 0u; i < PM; i++) {
    let key = first + r + TY * i;
    if (key < p.k_len) {
      let base_k = place(1u, grid.z, batch, key, wg.y);
      let base_v = place(2u, grid.z, batch, key, wg.y);
      for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        let d = chunk * 8u + c;
        if (d < D4) {
          store(base_k, d, sum_k[chunk][i] * p.scale);
          store(base_v, d, sum_v[chunk][i]);
        }
      }
    }
  }
}
