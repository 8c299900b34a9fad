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
const CHUNK: u32 = 64u;    // a multiple of LANES; CHUNK * TOKENS * 144 bytes of workgroup memory
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

fn load_blocks(row: array<u32, ROWS>, b: u32) -> array<Block, ROWS> {
  var rows = row;
  var block: array<Block, ROWS>;
  for (var r = 0u; r < ROWS; r++) { block[r] = load_block(rows[r], b); }
  return block;
}

// Adds the products of vec4 j of a block, whose values start at `at` in workgroup memory. j is a constant wherever it is
// called, so that a block stays in registers.
fn add_four(block: ptr<function, array<Block, ROWS>>, at: u32, j: u32, sums: ptr<function, array<f32, SUMS>>) {
  for (var r = 0u; r < ROWS; r++) {
    let weight = block4((*block)[r], j);
    for (var t = 0u; t < TOKENS; t++) {
      (*sums)[r * TOKENS + t] = dot4(weight, staged[at + t * CHUNK * 9u + j], (*sums)[r * TOKENS + t]);
    }
  }
}

// The partial sums of one invocation: blocks lane % LANES, then every LANES-th, of which `count` from block `first` on are
// staged. `block` holds the next ones, which are on their way while the sums of the last are made.
fn add_products(rows: array<u32, ROWS>, first: u32, count: u32, lane: u32, block: ptr<function, array<Block, ROWS>>,
                sums: ptr<function, array<f32, SUMS>>) {
  let last = blocks() - 1u;
  for (var b = lane % LANES; b < count; b += LANES) {
    var now = *block;
    *block = load_blocks(rows, min(first + b + LANES, last));
    let at = b * 9u;
    add_four(&now, at, 0u, sums);
    add_four(&now, at, 1u, sums);
    add_four(&now, at, 2u, sums);
    add_four(&now, at, 3u, sums);
    add_four(&now, at, 4u, sums);
    add_four(&now, at, 5u, sums);
    add_four(&now, at, 6u, sums);
    add_four(&now, at, 7u, sums);
  }
}

fn products(rows: array<u32, ROWS>, token: u32, lane: u32) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  let n = blocks();
  var block = load_blocks(rows, min(lane % LANES, n - 1u));
  for (var first = 0u; first < n; first += CHUNK) {
    let count = min(CHUNK, n - first);
    workgroupBarrier();
    for (var i = lane; i < count * 8u; i += WG) {
      for (var t = 0u; t < TOKENS; t++) {
        staged[(t * CHUNK + i / 8u) * 9u + i % 8u] = x[(min(token + t, p.tokens - 1u) * n + first) * 8u + i];
      }
    }
    workgroupBarrier();
    add_products(rows, first, count, lane, &block, &sums);
  }
  return lanes_sums(lane, sums);
}

fn norm_products(rows: array<u32, ROWS>, token: u32, lane: u32) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  var squares: array<f32, TOKENS>;
  let n = blocks();
  var block = load_blocks(rows, min(lane % LANES, n - 1u));
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
    add_products(rows, first, count, lane, &block, &sums);
  }
  sums = lanes_sums(lane, sums);
  for (var t = 0u; t < TOKENS; t++) {
    let s = inv_rms(wg_sum(lane, squares[t]));
    for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] *= s; }
  }
  return sums;
}
