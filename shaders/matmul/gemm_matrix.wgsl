// Dense matrix product on matrix units: out[z, i, j] = sum_k A[z, i, k] B[z, k, j];   matmul_bias: + bias[j]
// f16 operands and result, f32 sums. A workgroup makes TILE_M x TILE_N, each of its subgroups (of 32) SUB_M x SUB_N of that.
// For every TILE_K values of k it copies both operands to workgroup memory, in the order they are stored in; what lies outside
// counts as 0. The next tile is on its way to registers meanwhile. A lane copies two halves at a time: neighbours then write
// neighbouring words, where 16 bytes a lane meet four to a bank (H200, 4096 cubed, sizes built in: 267 to 240 TFLOP/s).
// Eight halves between rows keep the loads of matrices off each other's banks. Sums cannot be indexed, so results pass through a strip of
// workgroup memory. Any m, n, k (k = 0 gives zeros).
// Matrices and copies have names, so that no driver has to unroll a loop to keep them in registers.
// Grid: batches * ceil(m / TILE_M) * ceil(n / TILE_N) workgroups, GROUP tiles of a column together, so that caches see them.
const TILE_M: u32 = 128u;
const TILE_N: u32 = 128u;
const TILE_K: u32 = 32u;       // 16 or 32
const SUB_M: u32 = 64u;        // 16, 32 or 64
const SUB_N: u32 = 64u;
const GROUP: u32 = 4u;
const A_COLUMNS: bool = false; // A is stored (k, m): its columns lie one after another
const B_COLUMNS: bool = false; // B is stored (n, k)
// include matmul/halves_pairs.wgsl as halves
const WG: u32 = 32u * (TILE_M / SUB_M) * (TILE_N / SUB_N);   // a multiple of 128
const ROWS: u32 = SUB_M / 16u; // matrices of a subgroup
const COLS: u32 = SUB_N / 16u;
const A_TURN: u32 = u32(A_COLUMNS);
const B_TURN: u32 = u32(B_COLUMNS);
const A_RUN: u32 = TILE_K + A_TURN * (TILE_M - TILE_K);   // halves of a tile that lie one after another in storage
const B_RUN: u32 = TILE_N + B_TURN * TILE_K - B_TURN * TILE_N;
const A_STRIDE: u32 = A_RUN + 8u;
const B_STRIDE: u32 = B_RUN + 8u;
const A_EACH: u32 = TILE_M * TILE_K / 8u / WG;            // times that a lane copies four pairs: 1, 2 or 4
const B_EACH: u32 = TILE_N * TILE_K / 8u / WG;
const STRIP: u32 = 20u;        // floats from row to row of a result on its way out
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Sum = subgroup_matrix_result<f32, 16, 16>;
var<workgroup> a_tile: array<f16, TILE_M * TILE_K / A_RUN * A_STRIDE>;
var<workgroup> b_tile: array<f16, TILE_N * TILE_K / B_RUN * B_STRIDE>;
var<workgroup> strip: array<f32, WG / 32u * 16u * STRIP>;

// Where rows and columns of the operands end. Lines along them that are read in pairs are of even length (EVEN, of the part).
fn row_end() -> u32 { return p.m + A_TURN * EVEN * (p.m % 2u); }
fn col_end() -> u32 { return p.n + (1u - B_TURN) * EVEN * (p.n % 2u); }

struct Tile { z: u32, row: u32, col: u32 }
fn tile_of(wg: vec3<u32>, grid: vec3<u32>) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let rows = (p.m + TILE_M - 1u) / TILE_M;
  let cols = (p.n + TILE_N - 1u) / TILE_N;
  let place = i % (rows * cols);
  let first = place / (GROUP * cols) * GROUP;
  let height = min(GROUP, rows - first);
  let within = place - first * cols;
  // The last tiles end with the result where it is large enough: then they hold values that another tile has too.
  let row = min((first + within % height) * TILE_M, max(row_end(), TILE_M) - TILE_M);
  let col = min(within / height * TILE_N, max(col_end(), TILE_N) - TILE_N);
  return Tile(i / (rows * cols), row, col);
}

// Which line of a tile, and which two halves of it, the q-th pair of a copy is. Lines of 16 pairs are taken four apart, which
// puts the two of a subgroup into different banks.
fn spot(q: u32, run: u32) -> vec2<u32> {
  let pairs = run / 2u;
  if (pairs == 16u) { return vec2<u32>(q / 128u * 8u + q / 32u % 4u + q / 16u % 2u * 4u, q % 16u * 2u); }
  return vec2<u32>(q / pairs, q % pairs * 2u);
}

// Four pairs of A from the i-th on. first: where the lane's first one lies; step: from one to the next, equal in all lanes.
// The second form is for tiles that lie over an edge; at: row and k of the tile.
fn a_four(i: u32, first: u32, step: u32) -> mat4x2<f16> {
  return mat4x2<f16>(
    a_two(first, i * step, true), a_two(first, (i + 1u) * step, true),
    a_two(first, (i + 2u) * step, true), a_two(first, (i + 3u) * step, true));
}
fn a_edge(q: u32, at: vec2<u32>, base: u32) -> vec2<f16> {
  let x = spot(q, A_RUN) + select(at, at.yx, A_COLUMNS);   // line, half
  let limit = select(vec2<u32>(p.m, p.k), vec2<u32>(p.k, p.m), A_COLUMNS);
  if (x.x >= limit.x || x.y >= limit.y) { return vec2<f16>(); }
  return a_two(base + x.x * select(p.a_row, p.a_col, A_COLUMNS) + x.y, 0u, x.y + 1u < limit.y);
}
fn a_edges(i: u32, at: vec2<u32>, base: u32, lane: u32) -> mat4x2<f16> {
  return mat4x2<f16>(
    a_edge(i * WG + lane, at, base), a_edge((i + 1u) * WG + lane, at, base),
    a_edge((i + 2u) * WG + lane, at, base), a_edge((i + 3u) * WG + lane, at, base));
}
// The same of B. at: k and column of the tile.
fn b_four(i: u32, first: u32, step: u32) -> mat4x2<f16> {
  return mat4x2<f16>(
    b_two(first, i * step, true), b_two(first, (i + 1u) * step, true),
    b_two(first, (i + 2u) * step, true), b_two(first, (i + 3u) * step, true));
}
fn b_edge(q: u32, at: vec2<u32>, base: u32) -> vec2<f16> {
  let x = spot(q, B_RUN) + select(at, at.yx, B_COLUMNS);
  let limit = select(vec2<u32>(p.k, p.n), vec2<u32>(p.n, p.k), B_COLUMNS);
  if (x.x >= limit.x || x.y >= limit.y) { return vec2<f16>(); }
  return b_two(base + x.x * select(p.b_row, p.b_col, B_COLUMNS) + x.y, 0u, x.y + 1u < limit.y);
}
fn b_edges(i: u32, at: vec2<u32>, base: u32, lane: u32) -> mat4x2<f16> {
  return mat4x2<f16>(
    b_edge(i * WG + lane, at, base), b_edge((i + 1u) * WG + lane, at, base),
    b_edge((i + 2u) * WG + lane, at, base), b_edge((i + 3u) * WG + lane, at, base));
}

// A lane's part of both tiles, on its way from storage to workgroup memory.
struct Next {
  a0: mat4x2<f16>, a1: mat4x2<f16>, a2: mat4x2<f16>, a3: mat4x2<f16>,
  b0: mat4x2<f16>, b1: mat4x2<f16>, b2: mat4x2<f16>, b3: mat4x2<f16>,
}
fn fetch(tile: Tile, k0: u32, a_first: u32, b_first: u32, lane: u32) -> Next {
  var next: Next;
  let a_at = vec2<u32>(tile.row, k0);
  let b_at = vec2<u32>(k0, tile.col);
  if (tile.row + TILE_M <= row_end() && tile.col + TILE_N <= col_end() && k0 + TILE_K <= p.k) {
    let a_line = select(p.a_row, p.a_col, A_COLUMNS);
    let b_line = select(p.b_row, p.b_col, B_COLUMNS);
    let a_spot = spot(lane, A_RUN);
    let b_spot = spot(lane, B_RUN);
    let a_lane = a_first + tile.row * p.a_row + k0 * p.a_col + (a_spot.x * a_line + a_spot.y);
    let b_lane = b_first + tile.col * p.b_col + k0 * p.b_row + (b_spot.x * b_line + b_spot.y);
    let a_step = 2u * WG / A_RUN * a_line;   // a whole number of lines is copied at a time
    let b_step = 2u * WG / B_RUN * b_line;
    next.a0 = a_four(0u, a_lane, a_step);
    if (A_EACH > 1u) { next.a1 = a_four(4u, a_lane, a_step); }
    if (A_EACH > 2u) { next.a2 = a_four(8u, a_lane, a_step); }
    if (A_EACH > 2u) { next.a3 = a_four(12u, a_lane, a_step); }
    next.b0 = b_four(0u, b_lane, b_step);
    if (B_EACH > 1u) { next.b1 = b_four(4u, b_lane, b_step); }
    if (B_EACH > 2u) { next.b2 = b_four(8u, b_lane, b_step); }
    if (B_EACH > 2u) { next.b3 = b_four(12u, b_lane, b_step); }
  } else {
    next.a0 = a_edges(0u, a_at, a_first, lane);
    if (A_EACH > 1u) { next.a1 = a_edges(4u, a_at, a_first, lane); }
    if (A_EACH > 2u) { next.a2 = a_edges(8u, a_at, a_first, lane); }
    if (A_EACH > 2u) { next.a3 = a_edges(12u, a_at, a_first, lane); }
    next.b0 = b_edges(0u, b_at, b_first, lane);
    if (B_EACH > 1u) { next.b1 = b_edges(4u, b_at, b_first, lane); }
    if (B_EACH > 2u) { next.b2 = b_edges(8u, b_at, b_first, lane); }
    if (B_EACH > 2u) { next.b3 = b_edges(12u, b_at, b_first, lane); }
  }
  return next;
}
fn keep_a(i: u32, lane: u32, two: vec2<f16>) {
  let x = spot(lane, A_RUN);
  let at = x.x * A_STRIDE + x.y + i * (2u * WG / A_RUN * A_STRIDE);
  a_tile[at] = two.x;
  a_tile[at + 1u] = two.y;
}
fn keep_b(i: u32, lane: u32, two: vec2<f16>) {
  let x = spot(lane, B_RUN);
  let at = x.x * B_STRIDE + x.y + i * (2u * WG / B_RUN * B_STRIDE);
  b_tile[at] = two.x;
  b_tile[at + 1u] = two.y;
}
fn keep_a_four(i: u32, four: mat4x2<f16>, lane: u32) {
  keep_a(i, lane, four[0]);
  keep_a(i + 1u, lane, four[1]);
  keep_a(i + 2u, lane, four[2]);
  keep_a(i + 3u, lane, four[3]);
}
fn keep_b_four(i: u32, four: mat4x2<f16>, lane: u32) {
  keep_b(i, lane, four[0]);
  keep_b(i + 1u, lane, four[1]);
  keep_b(i + 2u, lane, four[2]);
  keep_b(i + 3u, lane, four[3]);
}
fn keep(next: Next, lane: u32) {
  keep_a_four(0u, next.a0, lane);
  if (A_EACH > 1u) { keep_a_four(4u, next.a1, lane); }
  if (A_EACH > 2u) { keep_a_four(8u, next.a2, lane); }
  if (A_EACH > 2u) { keep_a_four(12u, next.a3, lane); }
  keep_b_four(0u, next.b0, lane);
  if (B_EACH > 1u) { keep_b_four(4u, next.b1, lane); }
  if (B_EACH > 2u) { keep_b_four(8u, next.b2, lane); }
  if (B_EACH > 2u) { keep_b_four(12u, next.b3, lane); }
}

fn left_at(i: u32, k: u32) -> Left {
  return subgroupMatrixLoad<Left>(&a_tile, select(i * A_STRIDE + k, k * A_STRIDE + i, A_COLUMNS), A_COLUMNS, A_STRIDE);
}
fn right_at(k: u32, j: u32) -> Right {
  return subgroupMatrixLoad<Right>(&b_tile, select(k * B_STRIDE + j, j * B_STRIDE + k, B_COLUMNS), B_COLUMNS, B_STRIDE);
}
fn corner_of(lane: u32) -> vec2<u32> {   // of the subgroup's part of the tile
  let part = lane / 32u;
  return vec2<u32>(part / (TILE_N / SUB_N) * SUB_M, part % (TILE_N / SUB_N) * SUB_N);
}

// Sums of one column of matrices, from the top.
struct Column { s0: Sum, s1: Sum, s2: Sum, s3: Sum }
fn add_column(column: Column, l0: Left, l1: Left, l2: Left, l3: Left, right: Right) -> Column {
  var c = column;
  c.s0 = subgroupMatrixMultiplyAccumulate(l0, right, c.s0);
  if (ROWS > 1u) { c.s1 = subgroupMatrixMultiplyAccumulate(l1, right, c.s1); }
  if (ROWS > 2u) { c.s2 = subgroupMatrixMultiplyAccumulate(l2, right, c.s2); }
  if (ROWS > 2u) { c.s3 = subgroupMatrixMultiplyAccumulate(l3, right, c.s3); }
  return c;
}
struct Sums { c0: Column, c1: Column, c2: Column, c3: Column }
fn add_slice(sums: Sums, corner: vec2<u32>, k: u32) -> Sums {
  var s = sums;
  let l0 = left_at(corner.x, k);
  var l1: Left;
  var l2: Left;
  var l3: Left;
  if (ROWS > 1u) { l1 = left_at(corner.x + 16u, k); }
  if (ROWS > 2u) { l2 = left_at(corner.x + 32u, k); }
  if (ROWS > 2u) { l3 = left_at(corner.x + 48u, k); }
  s.c0 = add_column(s.c0, l0, l1, l2, l3, right_at(k, corner.y));
  if (COLS > 1u) { s.c1 = add_column(s.c1, l0, l1, l2, l3, right_at(k, corner.y + 16u)); }
  if (COLS > 2u) { s.c2 = add_column(s.c2, l0, l1, l2, l3, right_at(k, corner.y + 32u)); }
  if (COLS > 2u) { s.c3 = add_column(s.c3, l0, l1, l2, l3, right_at(k, corner.y + 48u)); }
  return s;
}
fn products(tile: Tile, lane: u32) -> Sums {
  let corner = corner_of(lane);
  let a_first = a_base(tile.z);
  let b_first = b_base(tile.z);
  var sums: Sums;
  var next = fetch(tile, 0u, a_first, b_first, lane);
  for (var k0 = 0u; k0 < p.k; k0 += TILE_K) {
    workgroupBarrier();
    keep(next, lane);
    workgroupBarrier();
    if (k0 + TILE_K < p.k) { next = fetch(tile, k0 + TILE_K, a_first, b_first, lane); }
    sums = add_slice(sums, corner, 0u);
    if (TILE_K > 16u) { sums = add_slice(sums, corner, 16u); }
  }
  return sums;
}

// The s-th pair that a lane has of a matrix in its subgroup's strip: row, column.
fn pair_of(s: u32, lane: u32) -> vec2<u32> {
  let q = s * 32u + lane % 32u;
  return vec2<u32>(q / 8u, q % 8u * 2u);
}
fn from_strip(x: vec2<u32>, lane: u32) -> vec2<f32> {
  let at = (lane / 32u * 16u + x.x) * STRIP + x.y;
  return vec2<f32>(strip[at], strip[at + 1u]);
}
fn put(tile: Tile, at: vec2<u32>, values: vec2<f32>) {   // at: row and column of the first
  let row = tile.z * p.m + at.x;
  let both = at.y + 1u < p.n;
  var result = vec2<f32>(epilogue(values.x, row, at.y), 0.0);
  if (both) { result.y = epilogue(values.y, row, at.y + 1u); }   // which may write too: not past the row
  put_two(p.out_offset + row * p.n + at.y, result, both);
}


// Through the strip to the result: the matrix at row, column `at` of the result.
fn to_strip(sum: Sum, lane: u32) {
  workgroupBarrier();
  subgroupMatrixStore(&strip, lane / 32u * 16u * STRIP, sum, false, STRIP);
  workgroupBarrier();
}
fn emit(tile: Tile, sum: Sum, at: vec2<u32>, lane: u32) {
  to_strip(sum, lane);
  for (var s = 0u; s < 4u; s++) {
    let x = pair_of(s, lane);
    if (at.x + x.x < p.m && at.y + x.y < p.n) { put(tile, at + x, from_strip(x, lane)); }
  }
}
fn emit_bias(tile: Tile, sum: Sum, at: vec2<u32>, lane: u32) {
  to_strip(sum, lane);
  for (var s = 0u; s < 4u; s++) {
    let x = pair_of(s, lane);
    let j = at.y + x.y;
    if (at.x + x.x < p.m && j < p.n) {
      put(tile, at + x, from_strip(x, lane) + vec2<f32>(f32(bias[j]), f32(bias[min(j + 1u, p.n - 1u)])));
    }
  }
}
fn emit_column(tile: Tile, column: Column, at: vec2<u32>, lane: u32) {
  emit(tile, column.s0, at, lane);
  if (ROWS > 1u) { emit(tile, column.s1, at + vec2<u32>(16u, 0u), lane); }
  if (ROWS > 2u) { emit(tile, column.s2, at + vec2<u32>(32u, 0u), lane); }
  if (ROWS > 2u) { emit(tile, column.s3, at + vec2<u32>(48u, 0u), lane); }
}
fn emit_bias_column(tile: Tile, column: Column, at: vec2<u32>, lane: u32) {
  emit_bias(tile, column.s0, at, lane);
  if (ROWS > 1u) { emit_bias(tile, column.s1, at + vec2<u32>(16u, 0u), lane); }
  if (ROWS > 2u) { emit_bias(tile, column.s2, at + vec2<u32>(32u, 0u), lane); }
  if (ROWS > 2u) { emit_bias(tile, column.s3, at + vec2<u32>(48u, 0u), lane); }
}

@compute @workgroup_size(WG)
fn matmul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  if (tile.z >= p.batches) { return; }   // uniform: the whole workgroup leaves
  let sums = products(tile, lane);
  let at = vec2<u32>(tile.row, tile.col) + corner_of(lane);
  emit_column(tile, sums.c0, at, lane);
  if (COLS > 1u) { emit_column(tile, sums.c1, at + vec2<u32>(0u, 16u), lane); }
  if (COLS > 2u) { emit_column(tile, sums.c2, at + vec2<u32>(0u, 32u), lane); }
  if (COLS > 2u) { emit_column(tile, sums.c3, at + vec2<u32>(0u, 48u), lane); }
}

@compute @workgroup_size(WG)
fn matmul_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  if (tile.z >= p.batches) { return; }
  let sums = products(tile, lane);
  let at = vec2<u32>(tile.row, tile.col) + corner_of(lane);
  emit_bias_column(tile, sums.c0, at, lane);
  if (COLS > 1u) { emit_bias_column(tile, sums.c1, at + vec2<u32>(0u, 16u), lane); }
  if (COLS > 2u) { emit_bias_column(tile, sums.c2, at + vec2<u32>(0u, 32u), lane); }
  if (COLS > 2u) { emit_bias_column(tile, sums.c3, at + vec2<u32>(0u, 48u), lane); }
}
