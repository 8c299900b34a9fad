// Flash attention forward with matrix units (Dao 2023, arXiv:2307.08691), for f16 keys and values and many query rows.
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Products take f16 and sum in f32; probabilities are rounded to f16 before they meet v. A subgroup owns RM x 16 query rows; its
// outputs stay in accumulators. Accumulators cannot be indexed, so scores pass through workgroup memory: four invocations share
// a row. The sums refer to a maximum m that is only raised when a score exceeds it by more than SLACK: then outputs
// take the same way and are rescaled, else they stay where they are (the result is divided by a sum that refers to the same m,
// so this changes no more than the rounding). Rows that see no key give 0.
// Grid: (ceil(q_len / ROWS), heads, batch); the last rows, which see most keys of a causal mask, go first.
// q, out: rows of Elem, read four at a time; k, v: rows of f16, read eight at a time: D and their strides are multiples of 8.
// include attention/params.wgsl
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
const SUBGROUP: u32 = 32u;              // what the device was seen to use
const SUBGROUPS: u32 = 4u;              // a workgroup
const RM: u32 = 2u;                     // blocks of 16 query rows a subgroup
const KEYS: u32 = 32u;                  // keys a tile, a multiple of 16
const LANES: u32 = SUBGROUP * SUBGROUPS;
const OWN: u32 = 16u * RM;              // query rows a subgroup
const ROWS: u32 = OWN * SUBGROUPS;      // query rows a workgroup
const DT: u32 = (D + 15u) / 16u;        // blocks of 16 features, taken in PARTS of four
const PARTS: u32 = (DT + 3u) / 4u;
const D8: u32 = D / 8u;
const KT: u32 = KEYS / 16u;
const KS: u32 = 16u * DT + 8u;          // halves a staged row of k and v; the 8 spread rows over banks
const SS: u32 = KEYS + 4u;              // floats a row of scores
const PS: u32 = KEYS + 8u;              // halves a row of probabilities
const PASS: u32 = SUBGROUP / 4u;        // rows that a subgroup scores at once
const PASSES: u32 = OWN / PASS;
const SPAN: u32 = KEYS / 4u;            // keys of a row that an invocation scores
const STAGE: u32 = (KEYS * 2u * DT + LANES - 1u) / LANES;   // groups of 8 halves of a tile that an invocation stages
const PREFETCH: bool = true;            // keys and values of the next tile are loaded while this one is worked on
const SLACK: f32 = 7.0;                 // powers of two: far below the largest f16
const LOG2E: f32 = 1.4426950408889634;
@group(0) @binding(0) var<storage, read> q: array<vec4<Elem>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<Elem>>;
// Declared first: behind an array of f16 an atomic makes matrices load from that array one element too early (seen with NVIDIA's
// driver 580.159).
alias Lefts = array<subgroup_matrix_left<f16, 16, 16>, 4u * RM>;
alias Sums = array<subgroup_matrix_result<f32, 16, 16>, 4u * RM>;
alias Block = array<subgroup_matrix_result<f32, 16, 16>, RM>;
alias Weights = array<subgroup_matrix_left<f16, 16, 16>, RM>;
var<workgroup> raised: atomic<u32>;     // the last tile, counted from 1, in which some m was raised
const VALUES: u32 = KEYS * KS;          // where they begin in `halves`
const PROBS: u32 = 2u * KEYS * KS;
var<workgroup> halves: array<f16, PROBS + ROWS * PS>;    // k: [key][feature] (q goes through it first), v likewise, probabilities: [row][key]
var<workgroup> scores: array<f32, ROWS * SS>;        // [row][key]
var<workgroup> factor: array<f32, ROWS>;             // what a row's outputs are multiplied by

fn score_of(s: f32, batch: u32, head: u32, row: u32, key: u32, sees: vec2<u32>) -> f32 {
  if (key < sees.x || key >= sees.y) { return MASKED; }
  return masked(s, batch, head, row, key);
}
fn load_k(base: u32, key: u32, d: u32, end: u32) -> vec4<u32> {
  if (key >= end || d >= D8) { return vec4<u32>(0u); }
  return k[base + key * (p.k_row / 8u) + d];
}
fn load_v(base: u32, key: u32, d: u32, end: u32) -> vec4<u32> {
  if (key >= end || d >= D8) { return vec4<u32>(0u); }
  return v[base + key * (p.v_row / 8u) + d];
}
fn stage(at: u32, eight: vec4<u32>) {
  for (var i = 0u; i < 4u; i++) {
    let two = bitcast<vec2<f16>>(eight[i]);
    halves[at + 2u * i] = two.x;
    halves[at + 2u * i + 1u] = two.y;
  }
}

// Blocks of 16 features, four at a time: each array is indexed by short loops only, which compilers unroll, and stays in registers.
fn load_query(query: ptr<function, Lefts>, part: u32, own: u32, r0: u32) {
  for (var i = 0u; i < RM; i++) {
    if ((own + 16u * i) / KEYS == r0 / KEYS) {
      for (var d = 0u; d < 4u; d++) {
        if (4u * part + d < DT) {
          (*query)[i * 4u + d] = subgroupMatrixLoad<subgroup_matrix_left<f16, 16, 16>>(
            &halves, (own + 16u * i) % KEYS * KS + 16u * (4u * part + d), false, KS);
        }
      }
    }
  }
}
fn add_scores(s: ptr<function, Block>, query: ptr<function, Lefts>, part: u32, j: u32) {
  for (var d = 0u; d < 4u; d++) {
    if (4u * part + d < DT) {
      let b = subgroupMatrixLoad<subgroup_matrix_right<f16, 16, 16>>(&halves, 16u * j * KS + 16u * (4u * part + d), true, KS);
      for (var i = 0u; i < RM; i++) { (*s)[i] = subgroupMatrixMultiplyAccumulate((*query)[i * 4u + d], b, (*s)[i]); }
    }
  }
}
fn add_values(sum: ptr<function, Sums>, a: ptr<function, Weights>, part: u32, j: u32) {
  for (var d = 0u; d < 4u; d++) {
    if (4u * part + d < DT) {
      let b = subgroupMatrixLoad<subgroup_matrix_right<f16, 16, 16>>(
        &halves, VALUES + 16u * j * KS + 16u * (4u * part + d), false, KS);
      for (var i = 0u; i < RM; i++) { (*sum)[i * 4u + d] = subgroupMatrixMultiplyAccumulate((*a)[i], b, (*sum)[i * 4u + d]); }
    }
  }
}
// Those of its blocks that lie in strip `strip` of KEYS features, to `scores` and back.
fn put(sum: ptr<function, Sums>, part: u32, strip: u32, own: u32) {
  for (var d = 0u; d < 4u; d++) {
    if ((4u * part + d) / KT == strip) {
      for (var i = 0u; i < RM; i++) {
        subgroupMatrixStore(&scores, (own + 16u * i) * SS + 16u * ((4u * part + d) % KT), (*sum)[i * 4u + d], false, SS);
      }
    }
  }
}
fn take(sum: ptr<function, Sums>, part: u32, strip: u32, own: u32) {
  for (var d = 0u; d < 4u; d++) {
    if ((4u * part + d) / KT == strip) {
      for (var i = 0u; i < RM; i++) {
        (*sum)[i * 4u + d] = subgroupMatrixLoad<subgroup_matrix_result<f32, 16, 16>>(
          &scores, (own + 16u * i) * SS + 16u * ((4u * part + d) % KT), false, SS);
      }
    }
  }
}

@compute @workgroup_size(LANES)
fn attention_matrix(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                    @builtin(local_invocation_index) lane: u32) {
  let head = wg.y;
  let batch = wg.z;
  let first = (grid.x - 1u - wg.x) * ROWS;
  let q_base = (batch * p.q_batch + head * p.q_head) / 4u;
  let k_base = (batch * p.k_batch + (head / p.group) * p.k_head) / 8u;
  let v_base = (batch * p.v_batch + (head / p.group) * p.v_head) / 8u;
  let own = lane / SUBGROUP * OWN;                     // first row of the subgroup in the tile
  let r = lane % SUBGROUP / 4u;
  let c = lane % 4u;

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

  // The queries, KEYS rows at a time.
  var query0: Lefts;
  var query1: Lefts;
  var query2: Lefts;
  var query3: Lefts;
  for (var r0 = 0u; r0 < ROWS; r0 += KEYS) {
    for (var n = lane; n < KEYS * 4u * DT; n += LANES) {
      let row = first + r0 + n / (4u * DT);
      let d = n % (4u * DT);
      var four = vec4<f16>(0.0h);
      if (row < rows_end && d < D4) { four = vec4<f16>(q[q_base + row * (p.q_row / 4u) + d]); }
      let at = n / (4u * DT) * KS + 4u * d;
      halves[at] = four.x;
      halves[at + 1u] = four.y;
      halves[at + 2u] = four.z;
      halves[at + 3u] = four.w;
    }
    workgroupBarrier();
    load_query(&query0, 0u, own, r0);
    if (PARTS > 1u) { load_query(&query1, 1u, own, r0); }
    if (PARTS > 2u) { load_query(&query2, 2u, own, r0); }
    if (PARTS > 3u) { load_query(&query3, 3u, own, r0); }
    workgroupBarrier();
  }

  var top: array<f32, PASSES>;                         // m of rows PASS * n + r of the subgroup
  var total: array<f32, PASSES>;                       // l of them, of this invocation's keys only
  for (var n = 0u; n < PASSES; n++) { top[n] = MASKED; total[n] = 0.0; }
  var zero: subgroup_matrix_result<f32, 16, 16>;
  var sum0: Sums;
  var sum1: Sums;
  var sum2: Sums;
  var sum3: Sums;
  for (var i = 0u; i < 4u * RM; i++) {
    sum0[i] = zero;
    sum1[i] = zero;
    sum2[i] = zero;
    sum3[i] = zero;
  }

  var next_k: array<vec4<u32>, STAGE>;
  var next_v: array<vec4<u32>, STAGE>;
  if (PREFETCH) {
    for (var i = 0u; i < STAGE; i++) {
      let n = lane + i * LANES;
      next_k[i] = load_k(k_base, begin + n / (2u * DT), n % (2u * DT), end);
      next_v[i] = load_v(v_base, begin + n / (2u * DT), n % (2u * DT), end);
    }
  }
  let plain = !HAS_MASK && p.softcap <= 0.0;           // scores are taken in powers of two at once
  let factor0 = select(p.scale, p.scale * LOG2E, plain);
  var tile = 0u;
  for (var key0 = begin; key0 < end; key0 += KEYS) {
    tile++;
    if (!PREFETCH) {
      for (var i = 0u; i < STAGE; i++) {
        let n = lane + i * LANES;
        next_k[i] = load_k(k_base, key0 + n / (2u * DT), n % (2u * DT), end);
        next_v[i] = load_v(v_base, key0 + n / (2u * DT), n % (2u * DT), end);
      }
    }
    for (var i = 0u; i < STAGE; i++) {
      let n = lane + i * LANES;
      if (n < KEYS * 2u * DT) {
        let at = n / (2u * DT) * KS + n % (2u * DT) * 8u;
        stage(at, next_k[i]);
        stage(VALUES + at, next_v[i]);
      }
    }
    workgroupBarrier();
    if (PREFETCH) {
      for (var i = 0u; i < STAGE; i++) {
        let n = lane + i * LANES;
        next_k[i] = load_k(k_base, key0 + KEYS + n / (2u * DT), n % (2u * DT), end);
        next_v[i] = load_v(v_base, key0 + KEYS + n / (2u * DT), n % (2u * DT), end);
      }
    }

    for (var j = 0u; j < KT; j++) {
      var s: Block;
      for (var i = 0u; i < RM; i++) { s[i] = zero; }
      add_scores(&s, &query0, 0u, j);
      if (PARTS > 1u) { add_scores(&s, &query1, 1u, j); }
      if (PARTS > 2u) { add_scores(&s, &query2, 2u, j); }
      if (PARTS > 3u) { add_scores(&s, &query3, 3u, j); }
      for (var i = 0u; i < RM; i++) { subgroupMatrixStore(&scores, (own + 16u * i) * SS + 16u * j, s[i], false, SS); }
    }
    workgroupBarrier();

    let whole = !HAS_MASK && key0 >= all_begin && key0 + KEYS <= all_end;
    for (var n = 0u; n < PASSES; n++) {
      let row = own + PASS * n + r;
      var s: array<f32, SPAN>;
      for (var j = 0u; j < SPAN; j++) { s[j] = scores[row * SS + c + 4u * j] * factor0; }
      if (!plain) {
        for (var j = 0u; j < SPAN; j++) { s[j] = capped(s[j]); }
      }
      if (!whole) {
        var sees = vec2<u32>(0u, 0u);
        if (first + row < rows_end) { sees = key_range(first + row); }
        for (var j = 0u; j < SPAN; j++) { s[j] = score_of(s[j], batch, head, first + row, key0 + c + 4u * j, sees); }
      }
      if (!plain) {
        for (var j = 0u; j < SPAN; j++) { s[j] = max(s[j] * LOG2E, MASKED); }
      }
      var highest = s[0];
      for (var j = 1u; j < SPAN; j++) { highest = max(highest, s[j]); }
      highest = max(highest, subgroupShuffleXor(highest, 1u));
      highest = max(highest, subgroupShuffleXor(highest, 2u));
      var fade = 1.0;
      if (highest > top[n] + SLACK) {
        if (top[n] > MASKED) {                         // else this row's outputs are zero
          fade = exp2(top[n] - highest);
          atomicStore(&raised, tile);
        }
        top[n] = highest;
      }
      if (c == 0u) { factor[row] = fade; }
      let base = select(top[n], 0.0, top[n] <= MASKED);          // then exp2(MASKED - base) is 0
      var part = 0.0;
      for (var j = 0u; j < SPAN; j++) {
        let w = exp2(s[j] - base);
        part += w;
        halves[PROBS + row * PS + c + 4u * j] = f16(w);
      }
      total[n] = total[n] * fade + part;
    }
    if (workgroupUniformLoad(&raised) == tile) {       // with a barrier before and after
      for (var strip = 0u; strip * KT < DT; strip++) {           // KEYS features at a time
        put(&sum0, 0u, strip, own);
        if (PARTS > 1u) { put(&sum1, 1u, strip, own); }
        if (PARTS > 2u) { put(&sum2, 2u, strip, own); }
        if (PARTS > 3u) { put(&sum3, 3u, strip, own); }
        workgroupBarrier();
        for (var n = lane; n < ROWS * KEYS; n += LANES) { scores[n / KEYS * SS + n % KEYS] *= factor[n / KEYS]; }
        workgroupBarrier();
        take(&sum0, 0u, strip, own);
        if (PARTS > 1u) { take(&sum1, 1u, strip, own); }
        if (PARTS > 2u) { take(&sum2, 2u, strip, own); }
        if (PARTS > 3u) { take(&sum3, 3u, strip, own); }
        workgroupBarrier();
      }
    }

    for (var j = 0u; j < KT; j++) {
      var a: Weights;
      for (var i = 0u; i < RM; i++) {
        a[i] = subgroupMatrixLoad<subgroup_matrix_left<f16, 16, 16>>(&halves, PROBS + (own + 16u * i) * PS + 16u * j, false, PS);
      }
      add_values(&sum0, &a, 0u, j);
      if (PARTS > 1u) { add_values(&sum1, &a, 1u, j); }
      if (PARTS > 2u) { add_values(&sum2, &a, 2u, j); }
      if (PARTS > 3u) { add_values(&sum3, &a, 3u, j); }
    }
    workgroupBarrier();
  }

  for (var n = 0u; n < PASSES; n++) {
    var all = total[n];
    all += subgroupShuffleXor(all, 1u);
    all += subgroupShuffleXor(all, 2u);
    if (c == 0u) { factor[own + PASS * n + r] = select(0.0, 1.0 / all, all != 0.0); }     // NaN stays NaN
  }
  for (var strip = 0u; strip * KT < DT; strip++) {
    put(&sum0, 0u, strip, own);
    if (PARTS > 1u) { put(&sum1, 1u, strip, own); }
    if (PARTS > 2u) { put(&sum2, 2u, strip, own); }
    if (PARTS > 3u) { put(&sum3, 3u, strip, own); }
    workgroupBarrier();
    for (var n = lane; n < ROWS * 4u * KT; n += LANES) {
      let at = n / (4u * KT);
      let d = 4u * KT * strip + n % (4u * KT);
      let row = first + at;
      if (row < p.q_len && d < D4) {
        let s = at * SS + n % (4u * KT) * 4u;
        let four = vec4<f32>(scores[s], scores[s + 1u], scores[s + 2u], scores[s + 3u]) * factor[at];
        let value = select(vec4<f32>(0.0), four, row < rows_end);      // `whole` tiles count padding rows too
        out[(batch * p.out_batch + head * p.out_head + row * p.out_row) / 4u + d] = vec4<Elem>(value);
      }
    }
    workgroupBarrier();
  }
}
