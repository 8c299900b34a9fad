// Dense matrix product for GPUs, blocks in registers: out[z, i, j] = sum_k A[z, i, k] B[z, k, j];   matmul_bias: + bias[j]
// A workgroup makes BM rows times BN columns. A group of 32 neighbours makes LY TM rows times LX TN columns of them, one
// invocation TM rows times TN columns: runs of four, 4 LY rows and 4 LX columns apart. Both operands pass through workgroup
// memory k by k, as vec4 along i and along j, so that a group reads few different vec4 (the rest is broadcast) and what it
// does with them is an outer product. The next BK values of k are on their way to registers while the present ones are used.
// An invocation moves blocks of 4x4 values; where an operand lies along k in storage, it transposes them in registers.
// Any m, n, k (k = 0 gives zeros); what lies outside counts as 0. Sums are f32, k ascending.
// p.split > 1 cuts the k axis: part s of batch z, p.k_part values of k, is written at z split + s for gemm_sum.wgsl to add up.
// Grid: batches * split * ceil(m / BM) * ceil(n / BN) workgroups; of GROUP tiles above each other one column goes first.
const TM: u32 = 8u;        // 4, 8 or 16
const TN: u32 = 8u;
const LY: u32 = 4u;        // LY LX = 32
const LX: u32 = 8u;
const WY: u32 = 4u;        // groups of 32 in a workgroup: WY WX
const WX: u32 = 2u;
const BK: u32 = 16u;       // 8, 16 or 32
const STAGES: u32 = 1u;    // 2: the next values of k have workgroup memory of their own, which saves a barrier
const GROUP: u32 = 8u;
const A_ROWS: u32 = 0u;    // 1: A lies along i in storage (a transposed A), 0: along k
const B_COLS: u32 = 1u;    // 1: B lies along j in storage, 0: along k (a transposed B)
// include matmul/block.wgsl
// include matmul/block_a_vec4.wgsl as a
// include matmul/block_b_vec4.wgsl as b
// include matmul/block_out_vec4.wgsl as out
const WG: u32 = 32u * WY * WX;
const BM: u32 = WY * LY * TM;
const BN: u32 = WX * LX * TN;
const M4: u32 = BM / 4u;                          // vec4 in a row of a tile: those of A, then those of B
const N4: u32 = BN / 4u;
const ROW: u32 = M4 + N4;
const A_UNITS: u32 = M4 * (BK / 4u);              // blocks of 4x4 values of A that are moved for BK values of k
const UNITS: u32 = ROW * (BK / 4u);
const EACH: u32 = (UNITS + WG - 1u) / WG;         // blocks an invocation moves
const I4: u32 = TM / 4u;
const J4: u32 = TN / 4u;
alias Moved = array<vec4<f32>, 4u * EACH>;
alias Sums = array<vec4<f32>, TM * J4>;           // TM rows of J4 runs
const STAGE: u32 = BK * ROW;
var<workgroup> tiles: array<vec4<f32>, STAGES * STAGE>;

struct Tile { z: u32, part: u32, row: u32, col: u32 }
fn tile_of(wg: vec3<u32>, grid: vec3<u32>) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let rows = (p.m + BM - 1u) / BM;
  let cols = (p.n + BN - 1u) / BN;
  let within = i % (rows * cols);
  let group = within / (GROUP * cols);
  let high = min(rows - group * GROUP, GROUP);
  let at = within % (GROUP * cols);
  let z = i / (rows * cols);
  return Tile(z / p.split, z % p.split, (group * GROUP + at % high) * BM, at / high * BN);
}
// An invocation's place in its group of 32. Every two neighbours read the same of B, every second ones the same of A: some
// devices then read for half the group at once.
fn lane_y(lane: u32) -> u32 { return (lane % 32u) / (2u * LX) * 2u + lane % 2u; }
fn lane_x(lane: u32) -> u32 { return (lane / 2u) % LX; }

// (vec4 across, block along k) of block number `unit` of one operand, `wide` vec4 across: neighbours are near in storage. Where
// they are transposed, eight neighbours have eight places of a row between them, which lie in different banks.
fn place(unit: u32, wide: u32, across: u32) -> vec2<u32> {
  if (across == 1u) { return vec2<u32>(unit % wide, unit / wide); }
  let odd = select(0u, unit % 2u, wide % 8u == 0u);
  return vec2<u32>((unit / 2u) % 4u + 4u * ((unit / BK) ^ odd), unit % 2u + 2u * ((unit / 8u) % (BK / 8u)));
}

// Brings the invocation's blocks of the values of k from k0 on, of four lines each. Past an edge the last values repeat.
fn fetch(moved: ptr<function, Moved>, tile: Tile, lane: u32, k0: u32, k_last: u32) {
  for (var e = 0u; e < EACH; e++) {
    let unit = e * WG + lane;
    if (unit < A_UNITS) {
      let at = place(unit, M4, A_ROWS);
      let i = tile.row + 4u * at.x;
      let k = k0 + 4u * at.y;
      let first = a_base(tile.z);
      if (A_ROWS == 1u) {
        (*moved)[4u * e] = a_run(first, min(k, k_last), i, p.m - 1u);
        (*moved)[4u * e + 1u] = a_run(first, min(k + 1u, k_last), i, p.m - 1u);
        (*moved)[4u * e + 2u] = a_run(first, min(k + 2u, k_last), i, p.m - 1u);
        (*moved)[4u * e + 3u] = a_run(first, min(k + 3u, k_last), i, p.m - 1u);
      } else {
        (*moved)[4u * e] = a_run(first, min(i, p.m - 1u), k, k_last);
        (*moved)[4u * e + 1u] = a_run(first, min(i + 1u, p.m - 1u), k, k_last);
        (*moved)[4u * e + 2u] = a_run(first, min(i + 2u, p.m - 1u), k, k_last);
        (*moved)[4u * e + 3u] = a_run(first, min(i + 3u, p.m - 1u), k, k_last);
      }
    } else if (unit < UNITS) {
      let at = place(unit - A_UNITS, N4, B_COLS);
      let j = tile.col + 4u * at.x;
      let k = k0 + 4u * at.y;
      let first = b_base(tile.z);
      if (B_COLS == 1u) {
        (*moved)[4u * e] = b_run(first, min(k, k_last), j, p.n - 1u);
        (*moved)[4u * e + 1u] = b_run(first, min(k + 1u, k_last), j, p.n - 1u);
        (*moved)[4u * e + 2u] = b_run(first, min(k + 2u, k_last), j, p.n - 1u);
        (*moved)[4u * e + 3u] = b_run(first, min(k + 3u, k_last), j, p.n - 1u);
      } else {
        (*moved)[4u * e] = b_run(first, min(j, p.n - 1u), k, k_last);
        (*moved)[4u * e + 1u] = b_run(first, min(j + 1u, p.n - 1u), k, k_last);
        (*moved)[4u * e + 2u] = b_run(first, min(j + 2u, p.n - 1u), k, k_last);
        (*moved)[4u * e + 3u] = b_run(first, min(j + 3u, p.n - 1u), k, k_last);
      }
    }
  }
}
// Puts the blocks into the tile; `depth` of their values of k are there, the others count as 0.
fn stage(moved: ptr<function, Moved>, lane: u32, first: u32, depth: u32) {
  for (var e = 0u; e < EACH; e++) {
    let unit = e * WG + lane;
    var v = mat4x4<f32>((*moved)[4u * e], (*moved)[4u * e + 1u], (*moved)[4u * e + 2u], (*moved)[4u * e + 3u]);
    var at = vec2<u32>();
    if (unit < A_UNITS) {
      at = place(unit, M4, A_ROWS);
      if (A_ROWS == 0u) { v = transpose(v); }
    } else {
      at = place(unit - A_UNITS, N4, B_COLS) + vec2<u32>(M4, 0u);
      if (B_COLS == 0u) { v = transpose(v); }
    }
    let k = 4u * at.y;
    if (depth < BK) {
      v[0] = select(vec4<f32>(), v[0], k < depth);
      v[1] = select(vec4<f32>(), v[1], k + 1u < depth);
      v[2] = select(vec4<f32>(), v[2], k + 2u < depth);
      v[3] = select(vec4<f32>(), v[3], k + 3u < depth);
    }
    if (unit < UNITS) {
      let slot = first + k * ROW + at.x;
      tiles[slot] = v[0];
      tiles[slot + ROW] = v[1];
      tiles[slot + 2u * ROW] = v[2];
      tiles[slot + 3u * ROW] = v[3];
    }
  }
}
// One k, whose row of the tile begins at `row`; y, x: the invocation's first vec4 of A and of B.
fn outer(sums: ptr<function, Sums>, row: u32, y: u32, x: u32) {
  var left: array<vec4<f32>, I4>;
  var right: array<vec4<f32>, J4>;
  for (var j = 0u; j < J4; j++) { right[j] = tiles[row + x + LX * j]; }
  for (var i = 0u; i < I4; i++) { left[i] = tiles[row + y + LY * i]; }
  for (var i = 0u; i < I4; i++) { for (var j = 0u; j < J4; j++) {
    let at = 4u * i * J4 + j;
    (*sums)[at] = fma(vec4<f32>(left[i].x), right[j], (*sums)[at]);
    (*sums)[at + J4] = fma(vec4<f32>(left[i].y), right[j], (*sums)[at + J4]);
    (*sums)[at + 2u * J4] = fma(vec4<f32>(left[i].z), right[j], (*sums)[at + 2u * J4]);
    (*sums)[at + 3u * J4] = fma(vec4<f32>(left[i].w), right[j], (*sums)[at + 3u * J4]);
  } }
}
fn multiply(sums: ptr<function, Sums>, first: u32, y: u32, x: u32) {
  for (var k = 0u; k < BK; k += 8u) {     // written out: not every driver unrolls so much
    outer(sums, first + k * ROW, y, x);
    outer(sums, first + (k + 1u) * ROW, y, x);
    outer(sums, first + (k + 2u) * ROW, y, x);
    outer(sums, first + (k + 3u) * ROW, y, x);
    outer(sums, first + (k + 4u) * ROW, y, x);
    outer(sums, first + (k + 5u) * ROW, y, x);
    outer(sums, first + (k + 6u) * ROW, y, x);
    outer(sums, first + (k + 7u) * ROW, y, x);
  }
}
fn products(tile: Tile, lane: u32) -> Sums {
  var sums: Sums;
  var moved: Moved;
  let k_first = tile.part * p.k_part;
  let k_end = min(k_first + p.k_part, p.k);
  if (k_first >= k_end) { return sums; }   // uniform
  let depth = (k_end - k_first - 1u) % BK + 1u;     // of the first step; all others are whole
  let y = (lane / 32u / WX) * (LY * I4) + lane_y(lane);
  let x = M4 + ((lane / 32u) % WX) * (LX * J4) + lane_x(lane);
  fetch(&moved, tile, lane, k_first, k_end - 1u);
  stage(&moved, lane, 0u, depth);
  var now = 0u;
  var k0 = k_first + depth;
  loop {
    workgroupBarrier();
    if (k0 < k_end) { fetch(&moved, tile, lane, k0, 0xffffffffu); }
    multiply(&sums, now, y, x);
    if (k0 >= k_end) { break; }
    if (STAGES == 2u) { now = STAGE - now; } else { workgroupBarrier(); }
    stage(&moved, lane, now, BK);
    k0 += BK;
  }
  return sums;
}
// Row r and run j of the invocation's own, from the tile's first.
fn row_of(lane: u32, r: u32) -> u32 { return (lane / 32u / WX) * LY * TM + r / 4u * 4u * LY + lane_y(lane) * 4u + r % 4u; }
fn col_of(lane: u32, j: u32) -> u32 { return ((lane / 32u) % WX) * LX * TN + j * 4u * LX + lane_x(lane) * 4u; }

@compute @workgroup_size(WG)
fn matmul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  if (tile.z >= p.batches) { return; }   // uniform: the whole workgroup leaves
  let sums = products(tile, lane);
  for (var r = 0u; r < TM; r++) { for (var j = 0u; j < J4; j++) {
    put_four(tile.z * p.split + tile.part, tile.row + row_of(lane, r), tile.col + col_of(lane, j), sums[r * J4 + j]);
  } }
}

@compute @workgroup_size(WG)
fn matmul_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  if (tile.z >= p.batches) { return; }
  let sums = products(tile, lane);
  for (var r = 0u; r < TM; r++) { for (var j = 0u; j < J4; j++) {
    let col = tile.col + col_of(lane, j);
    put_four(tile.z, tile.row + row_of(lane, r), col, sums[r * J4 + j] + bias_four(col));
  } }
}
