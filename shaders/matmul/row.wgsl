// Products with a weight matrix for software drivers: one invocation is ROWS rows of W times TOKENS rows of x.
//   out[t, n] = sum_k x[t, k] W[n, k], and what entries.wgsl makes of it
// Same entries and bindings as gemv.wgsl. No workgroup memory: x is read by all invocations at one address at a time, and no
// invocation leaves early, so the driver sees uniform loads (which it broadcasts); rows past the end are computed, not stored.
// Grid: ceil(work / WG) * ceil(tokens / TOKENS) workgroups, token tiles fastest; work: invocations for all rows of a token.
// Sums are f32, k ascending.
override WG: u32 = 8u;     // invocations a workgroup
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

fn products(row: array<u32, ROWS>, token: u32, lane: u32, round: u32) -> array<f32, SUMS> {
  var rows = row;
  var sums: array<f32, SUMS>;
  let n = blocks();
  let quarters = min(8u, p.cols);        // 8: a bound the driver does not know keeps its code short, and faster
  for (var b = 0u; b < n; b++) {
    var block: array<Block, ROWS>;
    for (var r = 0u; r < ROWS; r++) { block[r] = load_block(rows[r], b); }
    for (var j = 0u; j < quarters; j++) {
      var weight: array<vec4<f32>, ROWS>;
      for (var r = 0u; r < ROWS; r++) { weight[r] = block4(block[r], j); }
      for (var t = 0u; t < TOKENS; t++) {
        let value = x[(min(token + t, p.tokens - 1u) * n + b) * 8u + j];
        for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] = dot4(weight[r], value, sums[r * TOKENS + t]); }
      }
    }
  }
  return sums;
}

fn norm_products(row: array<u32, ROWS>, token: u32, lane: u32, round: u32) -> array<f32, SUMS> {
  var rows = row;
  var sums: array<f32, SUMS>;
  var squares: array<f32, TOKENS>;
  let n = blocks();
  let quarters = min(8u, p.cols);        // 8: a bound the driver does not know keeps its code short, and faster
  for (var b = 0u; b < n; b++) {
    var block: array<Block, ROWS>;
    for (var r = 0u; r < ROWS; r++) { block[r] = load_block(rows[r], b); }
    for (var j = 0u; j < quarters; j++) {
      var weight: array<vec4<f32>, ROWS>;
      for (var r = 0u; r < ROWS; r++) { weight[r] = block4(block[r], j); }
      let g = gain[b * 8u + j];
      for (var t = 0u; t < TOKENS; t++) {
        let value = x[(min(token + t, p.tokens - 1u) * n + b) * 8u + j];
        squares[t] = dot4(value, value, squares[t]);
        for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] = dot4(weight[r], value * g, sums[r * TOKENS + t]); }
      }
    }
  }
  for (var t = 0u; t < TOKENS; t++) {
    let s = inv_rms(squares[t]);
    for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] *= s; }
  }
  return sums;
}
