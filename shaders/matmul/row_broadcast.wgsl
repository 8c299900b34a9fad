// Products with a weight matrix for software drivers: one invocation is ROWS rows of W times TOKENS rows of x.
//   out[t, n] = sum_k x[t, k] W[n, k], and what entries.wgsl makes of it
// As row.wgsl, for subgroups of eight or more: a load costs such a driver more than what is computed with it, so of the
// eight vectors of x that a block of W meets, each invocation loads one and the subgroup hands them round. No invocation
// leaves early; rows past the end are computed, not stored.
// Grid: ceil(work / WG) * ceil(tokens / TOKENS) workgroups, token tiles fastest; work: invocations for all rows of a token.
// Sums are f32, k ascending.
const WG: u32 = 8u;        // invocations a workgroup: one subgroup
const ROWS: u32 = 4u;      // rows an invocation; even
const TOKENS: u32 = 1u;    // rows of x an invocation
// include matmul/weight.wgsl
// include matmul/entries.wgsl

fn stores(lane: u32, i: u32) -> bool { return true; }
fn rounds(grid: vec3<u32>) -> u32 { return 1u; }
fn place(wg: vec3<u32>, grid: vec3<u32>, lane: u32, round: u32) -> Place {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let tiles = (p.tokens + TOKENS - 1u) / TOKENS;
  return Place((i / tiles) * WG + lane, (i % tiles) * TOKENS);
}

// Eighth j of a block of W for all rows, times the four x that `value` holds for each token.
fn add_eighth(
  sums: ptr<function, array<f32, SUMS>>, block: ptr<function, array<Block, ROWS>>, j: u32, value: array<vec4<f32>, TOKENS>,
) {
  var values = value;
  for (var r = 0u; r < ROWS; r++) {
    let weight = block4((*block)[r], j);
    for (var t = 0u; t < TOKENS; t++) { (*sums)[r * TOKENS + t] = dot4(weight, values[t], (*sums)[r * TOKENS + t]); }
  }
}
// A block of W times the x of which each invocation holds an eighth in `mine`. WGSL wants the number of the invocation that
// a broadcast reads as a constant.
fn add_block(
  sums: ptr<function, array<f32, SUMS>>, block: ptr<function, array<Block, ROWS>>, mine: array<vec4<f32>, TOKENS>,
) {
  var own = mine;
  var value: array<vec4<f32>, TOKENS>;
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 0u); }
  add_eighth(sums, block, 0u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 1u); }
  add_eighth(sums, block, 1u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 2u); }
  add_eighth(sums, block, 2u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 3u); }
  add_eighth(sums, block, 3u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 4u); }
  add_eighth(sums, block, 4u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 5u); }
  add_eighth(sums, block, 5u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 6u); }
  add_eighth(sums, block, 6u, value);
  for (var t = 0u; t < TOKENS; t++) { value[t] = subgroupBroadcast(own[t], 7u); }
  add_eighth(sums, block, 7u, value);
}

fn products(row: array<u32, ROWS>, token: u32, lane: u32, round: u32) -> array<f32, SUMS> {
  var rows = row;
  var sums: array<f32, SUMS>;
  let n = blocks();
  for (var b = 0u; b < n; b++) {
    var block: array<Block, ROWS>;
    for (var r = 0u; r < ROWS; r++) { block[r] = load_block(rows[r], b); }
    var mine: array<vec4<f32>, TOKENS>;
    for (var t = 0u; t < TOKENS; t++) {
      mine[t] = x[(min(token + t, p.tokens - 1u) * n + b) * 8u + lane];
    }
    add_block(&sums, &block, mine);
  }
  return sums;
}

fn norm_products(row: array<u32, ROWS>, token: u32, lane: u32, round: u32) -> array<f32, SUMS> {
  var rows = row;
  var sums: array<f32, SUMS>;
  var squares: array<f32, TOKENS>;
  let n = blocks();
  for (var b = 0u; b < n; b++) {
    var block: array<Block, ROWS>;
    for (var r = 0u; r < ROWS; r++) { block[r] = load_block(rows[r], b); }
    let g = gain[b * 8u + lane];
    var mine: array<vec4<f32>, TOKENS>;
    for (var t = 0u; t < TOKENS; t++) {
      mine[t] = x[(min(token + t, p.tokens - 1u) * n + b) * 8u + lane];
      squares[t] = dot4(mine[t], mine[t], squares[t]);
      mine[t] *= g;
    }
    add_block(&sums, &block, mine);
  }
  for (var t = 0u; t < TOKENS; t++) {
    let s = inv_rms(subgroupAdd(squares[t]));
    for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] *= s; }
  }
  return sums;
}
