// Products with a weight matrix for GPUs and few rows of x: LANES invocations share ROWS rows of W and TOKENS rows of x.
//   out[t, n] = sum_k x[t, k] W[n, k], and what entries.wgsl makes of it
// A workgroup first copies (and norms) CHUNK blocks of x to workgroup memory, in the form that the part `dots` wants, then each
// invocation takes every LANES-th block of 32 weights, UNROLL of them on their way at a time, then the LANES partial sums are
// added. x is asked for before the weights, because answers come in the order of the requests.
// Grid: any number of workgroups; of T = ceil(tokens / TOKENS) neighbours each makes another tile of tokens, for the same runs of
// ROWS rows (ROWS / 2 pairs), and goes on in rounds until all are made. x stays where all of K is one chunk.
// Sums are f32 in an order fixed by the constants; the grid does not change it.
const WG: u32 = 256u;      // invocations a workgroup, a power of two
const LANES: u32 = 16u;    // a power of two, at most WG
const WITHIN: u32 = 0u;    // 1: LANES is at most the size of a subgroup
const ROWS: u32 = 2u;      // even where an entry works on pairs
const TOKENS: u32 = 1u;
const UNROLL: u32 = 1u;
const CHUNK: u32 = 64u;    // blocks; CHUNK * TOKENS * STRIDE * 16 bytes of workgroup memory
// include matmul/weight.wgsl
// include matmul/entries.wgsl
// include matmul/lanes.wgsl
// include matmul/dots_f32.wgsl as dots
// include lib/reduce.wgsl
const SHARE: u32 = (CHUNK * 8u + WG - 1u) / WG;   // vec4 of x that an invocation copies, for each token
var<private> inverse: array<f32, TOKENS>;         // 1 / root mean square of x, once it is known

fn stores(lane: u32, i: u32) -> bool { return lane % LANES == i % LANES; }
fn tiles() -> u32 { return (p.tokens + TOKENS - 1u) / TOKENS; }
// Workgroups that make one tile of tokens, and the rounds in which they make all rows.
fn teams(grid: vec3<u32>) -> u32 { return max(grid.x * grid.y / tiles(), 1u); }
fn rounds(grid: vec3<u32>) -> u32 {
  let items = ((p.w_rows + ROWS - 1u) / ROWS + WG / LANES - 1u) / (WG / LANES);
  return (items + teams(grid) - 1u) / teams(grid);
}
fn place(wg: vec3<u32>, grid: vec3<u32>, lane: u32, round: u32) -> Place {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let team = i / tiles();
  // A workgroup too many has no rows.
  let item = select((team + round * teams(grid)) * (WG / LANES) + lane / LANES, p.w_rows, team >= teams(grid));
  return Place(item, (i % tiles()) * TOKENS);
}

// Block b of every row, and the ones LANES, 2 LANES ... further on, at most block `last`.
fn load_blocks(row: array<u32, ROWS>, b: u32, last: u32) -> array<array<Block, ROWS>, UNROLL> {
  var rows = row;
  var held: array<array<Block, ROWS>, UNROLL>;
  for (var u = 0u; u < UNROLL; u++) {
    for (var r = 0u; r < ROWS; r++) { held[u][r] = load_block(rows[r], min(b + u * LANES, last)); }
  }
  return held;
}

// The partial sums of one invocation over the staged blocks, which are `count` from block `first` on. `held`: the first ones.
fn add_products(rows: array<u32, ROWS>, first: u32, count: u32, lane: u32, held: ptr<function, array<array<Block, ROWS>, UNROLL>>,
                sums: ptr<function, array<f32, SUMS>>) {
  for (var b = lane % LANES; b < count; b += LANES * UNROLL) {
    var now = *held;
    if (b + LANES * UNROLL < count) { *held = load_blocks(rows, first + b + LANES * UNROLL, first + count - 1u); }
    for (var u = 0u; u < UNROLL; u++) {
      if (b + u * LANES < count) {
        var block = now[u];
        add_block(&block, (b + u * LANES) * STRIDE, sums);
      }
    }
  }
}

fn products(rows: array<u32, ROWS>, token: u32, lane: u32, round: u32) -> array<f32, SUMS> {
  var sums = array<f32, SUMS>();
  let n = blocks();
  for (var first = 0u; first < n; first += CHUNK) {
    let count = min(CHUNK, n - first);
    let fresh = round == 0u || n > CHUNK;
    var values: array<vec4<f32>, SHARE * TOKENS>;
    if (fresh) {
      for (var t = 0u; t < TOKENS; t++) {
        for (var i = 0u; i < SHARE; i++) {
          let at = min(i * WG + lane, count * 8u - 1u);
          values[t * SHARE + i] = x[(min(token + t, p.tokens - 1u) * n + first) * 8u + at];
        }
      }
    }
    var held = load_blocks(rows, first + min(lane % LANES, count - 1u), first + count - 1u);
    if (fresh) {
      workgroupBarrier();
      for (var t = 0u; t < TOKENS; t++) {
        for (var i = 0u; i < SHARE; i++) {
          let at = i * WG + lane;
          stage((t * CHUNK + at / 8u) * STRIDE, at % 8u, values[t * SHARE + i], at < count * 8u);
        }
      }
      workgroupBarrier();
    }
    add_products(rows, first, count, lane, &held, &sums);
  }
  return lanes_sums(lane, sums);
}

fn norm_products(rows: array<u32, ROWS>, token: u32, lane: u32, round: u32) -> array<f32, SUMS> {
  var sums = array<f32, SUMS>();
  var squares = array<f32, TOKENS>();
  let n = blocks();
  for (var first = 0u; first < n; first += CHUNK) {
    let count = min(CHUNK, n - first);
    let fresh = round == 0u || n > CHUNK;
    var values: array<vec4<f32>, SHARE * TOKENS>;
    if (fresh) {
      for (var i = 0u; i < SHARE; i++) {
        let at = min(i * WG + lane, count * 8u - 1u);
        let g = gain[first * 8u + at];
        for (var t = 0u; t < TOKENS; t++) {
          let value = x[(min(token + t, p.tokens - 1u) * n + first) * 8u + at];
          if (i * WG + lane < count * 8u) { squares[t] = dot4(value, value, squares[t]); }
          values[t * SHARE + i] = value * g;
        }
      }
    }
    var held = load_blocks(rows, first + min(lane % LANES, count - 1u), first + count - 1u);
    if (fresh) {
      workgroupBarrier();
      for (var t = 0u; t < TOKENS; t++) {
        for (var i = 0u; i < SHARE; i++) {
          let at = i * WG + lane;
          stage((t * CHUNK + at / 8u) * STRIDE, at % 8u, values[t * SHARE + i], at < count * 8u);
        }
      }
      workgroupBarrier();
    }
    add_products(rows, first, count, lane, &held, &sums);
  }
  sums = lanes_sums(lane, sums);
  if (round == 0u) {
    for (var t = 0u; t < TOKENS; t++) { inverse[t] = inv_rms(wg_sum(lane, squares[t])); }
  }
  for (var t = 0u; t < TOKENS; t++) {
    for (var r = 0u; r < ROWS; r++) { sums[r * TOKENS + t] *= inverse[t]; }
  }
  return sums;
}
