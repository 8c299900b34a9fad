// Products with a weight matrix for GPUs and few rows of x: LANES invocations share ROWS rows of W and TOKENS rows of x.
//   out[t, n] = sum_k x[t, k] W[n, k], and what entries.wgsl makes of it
// A workgroup first copies (and norms) CHUNK blocks of x to workgroup memory, then each invocation takes every LANES-th block
// of 32 weights, then the LANES partial sums are added. Blocks lie 9 vec4 apart there, so that neighbouring invocations meet
// different banks. Grid: ceil(work / (WG / LANES)) * ceil(tokens / TOKENS) workgroups, token tiles fastest; work: runs of ROWS
// rows (ROWS / 2 pairs). Sums are f32 in an order fixed by LANES and CHUNK.
override WG: u32 = 128u;   // invocations a workgroup, a power of two
const LANES: u32 = 16u;    // a power of two, at most WG
const ROWS: u32 = 2u;      // even where an entry works on pairs
const TOKENS: u32 = 1u;
const CHUNK: u32 = 64u;    // CHUNK * TOKENS * 144 bytes of workgroup memory
// include matmul/weight.wgsl
// include matmul/entries.wgsl
// include matmul/lanes.wgsl
// include lib/reduce.wgsl
var<workgroup> staged: array<vec4<f32>, CHUNK * TOKENS * 9u>;

fn stores(lane: u32, i: u32) -> bool { return lane % LANES == i % LANES; }
fn place(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> Place {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let tiles = (p.tokens + TOKENS - 1u) / TOKENS;
  return Place((i / tiles) * (WG / LANES) + lane / LANES, (i % tiles) * TOKENS);
}

// Adds the products of the staged blocks, which start at block `first` of each row.
fn add_products(row: array<u32, ROWS>, first: u32, count: u32, lane: u32, before: array<f32, SUMS>) -> array<f32, SUMS> {
  var rows = row;
  var sums = before;
  for (var b = lane % LANES; b < count; b += LANES) {
    var block: array<Block, ROWS>;
    for (var r = 0u; r < ROWS; r++) { block[r] = load_block(rows[r], first + b); }
    for (var j = 0u; j < 8u; j++) {
      for (var t = 0u; t < TOKENS; t++) {
        let value = staged[(t * CHUNK + b) * 9u + j];
        for (var r = 0u; r < ROWS; r++) {
          sums[r * TOKENS + t] = dot4(block4(block[r], j), value, sums[r * TOKENS + t]);
        }
      }
    }
  }
  return sums;
}

fn products(rows: array<u32, ROWS>, token: u32, lane: u32) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  let n = blocks();
  for (var first = 0u; first < n; first += CHUNK) {
    let count = min(CHUNK, n - first);
    workgroupBarrier();
    for (var i = lane; i < count * 8u; i += WG) {
      for (var t = 0u; t < TOKENS; t++) {
        staged[(t * CHUNK + i / 8u) * 9u + i % 8u] = x[(min(token + t, p.tokens - 1u) * n + first) * 8u + i];
      }
    }
    workgroupBarrier();
    sums = add_products(rows, first, count, lane, sums);
  }
  return lanes_sums(lane, sums);
}

fn norm_products(rows: array<u32, ROWS>, token: u32, lane: u32) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  var squares: array<f32, TOKENS>;
  let n = blocks();
  for (var first = 0u; first < n; first += CHUNK) {
    let count = min(CHUNK, n - first);
    workgroupBarrier();
    for (var i = lane; i < count * 8u; i += WG) {
      let g = gain[first * 8u + i];
      for (var t = 0u; t < TOKENS; t++) {
        let value = x[(min(token + t, p.tokens - 1u) * n + first) * 8u + i];
        squares[t] = dot4(value, value, squares[t]);
        staged[(t * CHUNK + i / 8u) * 9u + i % 8u] = value * g;
      }
    }
    workgroupBarrier();
    sums = add_products(rows, first, count, lane, sums);
  }
  sums = lanes_sums(lane, sums);
  for (var t = 0u; t < TOKENS; t++) {
    let s = inv_rms(wg_sum(lane, squares[t]));
    for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] *= s; }
  }
  return sums;
}
