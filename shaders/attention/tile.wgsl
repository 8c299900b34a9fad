// Flash attention forward, tiled, for many query rows on a GPU (Dao 2023, arXiv:2307.08691, algorithm 1, without dropout).
//   out[b,h,i] = sum_j softmax_j(masked(capped(scale * q[b,h,i].k[b,h/group,j]))) v[b,h/group,j]
// Keys come in tiles; the running maximum m and sum l of each row rescale what was summed before. Rows that see no key give 0.
// Grid: (ceil(q_len / ROWS), heads * SLICES, batch): wide heads are cut into slices of the output, each with its own copy of
// the scores, since an invocation's sums have to fit its registers. q, out: rows of Elem; k, v: rows of KV; strides in Params. All sums are f32.
// An invocation owns rows r, r+16, r+32, r+48 of the tile: their scores of keys 4c..4c+3, and of their outputs the features
// 4c..4c+3 of each chunk of 32. m and l are kept alike by the 8 invocations of a row. 13.5 KiB of workgroup memory, read and
// written in whole vec4s (a store to one component may touch its neighbours).
// include attention/params.wgsl
// include attention/rows_vec4.wgsl as rows
// include attention/keys_given.wgsl as keys
// include attention/mask_none.wgsl as mask
const ROWS: u32 = 64u;                  // query rows a tile
const KEYS: u32 = 32u;                  // keys a tile
const CHUNKS: u32 = 4u;                 // chunks of 32 features a slice
const SLICES: u32 = (D4 + 8u * CHUNKS - 1u) / (8u * CHUNKS);
const STRIDE: u32 = 9u;                 // vec4s a staged row: 8, and one so that rows start in different banks
const LANES: u32 = 128u;
var<workgroup> left: array<vec4<f32>, 576>;    // ROWS x STRIDE: a chunk of q, then the scores, then the probabilities
var<workgroup> right: array<vec4<f32>, 288>;   // KEYS x STRIDE: a chunk of k, then of v

@compute @workgroup_size(128)
fn attention_tile(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let head = wg.y / SLICES;
  let slice = wg.y % SLICES * CHUNKS * 8u;             // its first group of four features
  let batch = wg.z;
  let first = wg.x * ROWS;
  let q_base = batch * p.q_batch + head * p.q_head;
  let k_base = batch * p.k_batch + (head / p.group) * p.k_head;
  let v_base = batch * p.v_batch + (head / p.group) * p.v_head;
  let r = lane / 8u;
  let c = lane % 8u;

  var rows_end = min(first + ROWS, valid_rows());      // past the last row of this tile that sees keys
  var begin = 0u;
  var end = 0u;
  if (first < rows_end) {
    begin = key_range(first).x;
    end = key_range(rows_end - 1u).y;
  }
  var sees: array<vec2<u32>, 4>;                       // keys of each own row
  for (var i = 0u; i < 4u; i++) {
    let row = first + r + 16u * i;
    sees[i] = vec2<u32>(0u, 0u);
    if (row < rows_end) { sees[i] = key_range(row); }
  }

  var top = vec4<f32>(MASKED);                         // m of each own row
  var total = vec4<f32>(0.0);                          // l of each own row
  var sum: array<array<vec4<f32>, 4>, CHUNKS>;         // outputs before division by l: [chunk][own row]
  for (var chunk = 0u; chunk < CHUNKS; chunk++) {
    for (var i = 0u; i < 4u; i++) { sum[chunk][i] = vec4<f32>(0.0); }
  }

  for (var key0 = begin; key0 < end; key0 += KEYS) {
    // Scores: s[own row][own key].
    var s: array<vec4<f32>, 4>;
    for (var i = 0u; i < 4u; i++) { s[i] = vec4<f32>(0.0); }
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
        right[((n / 8u) % 4u * 8u + n / 32u) * STRIDE + n % 8u] = four;   // key 4c+j at row 8j+c: no bank conflicts
      }
      workgroupBarrier();
      for (var d = 0u; d < min(8u, p.quads - d0); d++) {
        let k0 = right[c * STRIDE + d];
        let k1 = right[(c + 8u) * STRIDE + d];
        let k2 = right[(c + 16u) * STRIDE + d];
        let k3 = right[(c + 24u) * STRIDE + d];
        for (var i = 0u; i < 4u; i++) {
          let a = left[(r + 16u * i) * STRIDE + d];
          s[i] += vec4<f32>(dot(a, k0), dot(a, k1), dot(a, k2), dot(a, k3));
        }
      }
      workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
      let row = first + r + 16u * i;
      for (var j = 0u; j < 4u; j++) {
        let key = key0 + 4u * c + j;
        var score = MASKED;
        if (key >= sees[i].x && key < sees[i].y) {
          score = masked(capped(s[i][j] * p.scale), batch, head, row, key);
        }
        s[i][j] = score;
      }
      left[(r + 16u * i) * STRIDE + c] = s[i];
    }
    workgroupBarrier();
    var fade: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
      var highest = vec4<f32>(MASKED);
      for (var n = 0u; n < min(8u, (end - key0 + 3u) / 4u); n++) { highest = max(highest, left[(r + 16u * i) * STRIDE + n]); }
      let higher = max(top[i], max(max(highest.x, highest.y), max(highest.z, highest.w)));
      fade[i] = exp(top[i] - higher);
      top[i] = higher;
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
      left[(r + 16u * i) * STRIDE + c] = select(exp(s[i] - top[i]), vec4<f32>(0.0), s[i] <= vec4<f32>(MASKED));
    }
    // Outputs. The first barrier below also makes the probabilities visible.
    total *= fade;
    for (var chunk = 0u; chunk < CHUNKS; chunk++) {
      let d0 = slice + chunk * 8u;
      for (var n = lane; n < KEYS * 8u; n += LANES) {
        let key = key0 + n / 8u;
        let d = d0 + n % 8u;
        var four = vec4<f32>(0.0);
        if (key < end && d < D4) { four = load_v(v_base + key * p.v_row, d); }
        right[(n / 8u) * STRIDE + n % 8u] = four;
      }
      workgroupBarrier();
      for (var i = 0u; i < 4u; i++) { sum[chunk][i] *= fade[i]; }
      for (var n = 0u; n < min(8u, (end - key0 + 3u) / 4u); n++) {
        let v0 = right[(4u * n) * STRIDE + c];
        let v1 = right[(4u * n + 1u) * STRIDE + c];
        let v2 = right[(4u * n + 2u) * STRIDE + c];
        let v3 = right[(4u * n + 3u) * STRIDE + c];
        for (var i = 0u; i < 4u; i++) {
          let w = left[(r + 16u * i) * STRIDE + n];
          sum[chunk][i] += w.x * v0 + w.y * v1 + w.z * v2 + w.w * v3;
          if (chunk == 0u) { total[i] += (w.x + w.y) + (w.z + w.w); }
        }
      }
      workgroupBarrier();
    }
  }

  for (var i = 0u; i < 4u; i++) {
    let row = first + r + 16u * i;
    if (row < p.q_len) {
      let inverse = select(0.0, 1.0 / total[i], total[i] != 0.0);     // NaN stays NaN
      for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        let d = slice + chunk * 8u + c;
        if (d < D4) { store_out(batch * p.out_batch + head * p.out_head + row * p.out_row, d, sum[chunk][i] * inverse); }
      }
    }
  }
}
