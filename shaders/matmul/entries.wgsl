// Entry points of the products with a weight matrix, the same for row.wgsl, row_broadcast.wgsl and gemv.wgsl, which give
// `rounds`, `place`, `products`, `norm_products` (RMSNorm of x first, Zhang & Sennrich 2019, arXiv:1910.07467) and `stores`.
//   y[t, n] = sum_k x[t, k] W[n, k]
//   linear              out[t, n] = y[t, n];   _bias: + bias[n];   _residual: + residual[t, n]
//   norm_linear         x[t, k] replaced by x[t, k] gain[k] / sqrt(mean_k(x[t, k]^2) + eps)
//   gated_linear        W: gate rows, then as many up rows.   out[t, n] = act(gate[t, n]) * up[t, n];   norm_: x normed
//   norm_qkv_rope       W: q, k, v rows.   q rotated to out, k rotated and v to the cache at step.position + t, x normed
//   norm_qkv_bias_rope  + bias[n] before the rotation
const PAIRS: u32 = ROWS / 2u;
const SUMS: u32 = ROWS * TOKENS;
struct Place { item: u32, token: u32 }   // number of a run of ROWS rows (or PAIRS pairs); the first of TOKENS tokens

// ROWS rows one after another; past the end the last row once more.
fn rows_of(item: u32) -> array<u32, ROWS> {
  var rows: array<u32, ROWS>;
  for (var r = 0u; r < ROWS; r++) { rows[r] = min(item * ROWS + r, p.w_rows - 1u); }
  return rows;
}

// PAIRS pairs one after another: gate and up rows, or the rows of a rotated pair. Past the end the last pair once more.
fn gated_rows(item: u32) -> array<u32, ROWS> {
  var rows: array<u32, ROWS>;
  for (var i = 0u; i < PAIRS; i++) {
    rows[i] = min(item * PAIRS + i, p.w_rows / 2u - 1u);
    rows[PAIRS + i] = rows[i] + p.w_rows / 2u;
  }
  return rows;
}
fn rotated_rows(item: u32) -> array<u32, ROWS> {
  var rows: array<u32, ROWS>;
  for (var i = 0u; i < PAIRS; i++) {
    let pair = qkv_pair(min(item * PAIRS + i, p.w_rows / 2u - 1u));
    rows[i] = pair.x;
    rows[PAIRS + i] = pair.y;
  }
  return rows;
}
// Whether this invocation writes the result of row r (pair i) of its run for token t of its tile.
fn writes(at: Place, lane: u32, r: u32, t: u32) -> bool {
  return at.item * ROWS + r < p.w_rows && at.token + t < p.tokens && stores(lane, r * TOKENS + t);
}
fn writes_pair(at: Place, lane: u32, i: u32, t: u32) -> bool {
  return at.item * PAIRS + i < p.w_rows / 2u && at.token + t < p.tokens && stores(lane, i * TOKENS + t);
}
fn column(at: Place, r: u32) -> u32 { return p.row0 + at.item * ROWS + r; }

@compute @workgroup_size(WG)
fn linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = products(rows_of(at.item), at.token, lane, round);
    for (var r = 0u; r < ROWS; r++) { for (var t = 0u; t < TOKENS; t++) { if (writes(at, lane, r, t)) {
      out[(at.token + t) * p.out_cols + column(at, r)] = sums[r * TOKENS + t];
    } } }
  }
}

@compute @workgroup_size(WG)
fn linear_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = products(rows_of(at.item), at.token, lane, round);
    for (var r = 0u; r < ROWS; r++) { for (var t = 0u; t < TOKENS; t++) { if (writes(at, lane, r, t)) {
      out[(at.token + t) * p.out_cols + column(at, r)] = sums[r * TOKENS + t] + bias[column(at, r)];
    } } }
  }
}

@compute @workgroup_size(WG)
fn linear_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = products(rows_of(at.item), at.token, lane, round);
    for (var r = 0u; r < ROWS; r++) { for (var t = 0u; t < TOKENS; t++) { if (writes(at, lane, r, t)) {
      let i = (at.token + t) * p.out_cols + column(at, r);
      out[i] = sums[r * TOKENS + t] + residual[i];
    } } }
  }
}

@compute @workgroup_size(WG)
fn linear_bias_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                        @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = products(rows_of(at.item), at.token, lane, round);
    for (var r = 0u; r < ROWS; r++) { for (var t = 0u; t < TOKENS; t++) { if (writes(at, lane, r, t)) {
      let i = (at.token + t) * p.out_cols + column(at, r);
      out[i] = sums[r * TOKENS + t] + bias[column(at, r)] + residual[i];
    } } }
  }
}

@compute @workgroup_size(WG)
fn norm_linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = norm_products(rows_of(at.item), at.token, lane, round);
    for (var r = 0u; r < ROWS; r++) { for (var t = 0u; t < TOKENS; t++) { if (writes(at, lane, r, t)) {
      out[(at.token + t) * p.out_cols + column(at, r)] = sums[r * TOKENS + t];
    } } }
  }
}

@compute @workgroup_size(WG)
fn gated_linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = products(gated_rows(at.item), at.token, lane, round);
    for (var i = 0u; i < PAIRS; i++) { for (var t = 0u; t < TOKENS; t++) { if (writes_pair(at, lane, i, t)) {
      out[(at.token + t) * p.out_cols + at.item * PAIRS + i] = gated(sums[i * TOKENS + t], sums[(PAIRS + i) * TOKENS + t]);
    } } }
  }
}

@compute @workgroup_size(WG)
fn norm_gated_linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                     @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = norm_products(gated_rows(at.item), at.token, lane, round);
    for (var i = 0u; i < PAIRS; i++) { for (var t = 0u; t < TOKENS; t++) { if (writes_pair(at, lane, i, t)) {
      out[(at.token + t) * p.out_cols + at.item * PAIRS + i] = gated(sums[i * TOKENS + t], sums[(PAIRS + i) * TOKENS + t]);
    } } }
  }
}

@compute @workgroup_size(WG)
fn norm_qkv_rope(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = norm_products(rotated_rows(at.item), at.token, lane, round);
    for (var i = 0u; i < PAIRS; i++) { for (var t = 0u; t < TOKENS; t++) { if (writes_pair(at, lane, i, t)) {
      store_qkv(at.token + t, at.item * PAIRS + i, vec2<f32>(sums[i * TOKENS + t], sums[(PAIRS + i) * TOKENS + t]));
    } } }
  }
}

@compute @workgroup_size(WG)
fn norm_qkv_bias_rope(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                      @builtin(local_invocation_index) lane: u32) {
  for (var round = 0u; round < rounds(grid); round++) {
    let at = place(wg, grid, lane, round);
    let sums = norm_products(rotated_rows(at.item), at.token, lane, round);
    for (var i = 0u; i < PAIRS; i++) { for (var t = 0u; t < TOKENS; t++) { if (writes_pair(at, lane, i, t)) {
      let pair = at.item * PAIRS + i;
      let rows = qkv_pair(pair);
      let added = vec2<f32>(bias[rows.x], bias[rows.y]);
      store_qkv(at.token + t, pair, vec2<f32>(sums[i * TOKENS + t], sums[(PAIRS + i) * TOKENS + t]) + added);
    } } }
  }
}
