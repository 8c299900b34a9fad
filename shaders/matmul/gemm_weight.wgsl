// Products with a weight matrix for GPUs and many rows of x: a workgroup makes a tile of 64 rows of W times 8 PER rows of x.
//   linear         out[t, n] = y[t, n],   y[t, n] = sum_k x[t, k] W[n, k];   _bias: + bias[n];   _residual: + residual[t, n]
//   gated_linear   W: gate rows, then as many up rows.   out[t, n] = act(gate[t, n]) * up[t, n]
// For each block of 32 columns the first 64 invocations decode W and the other 64 copy x to workgroup memory; then each of the
// 128 adds up 4 rows (tx + 16 j) times PER tokens (ty + 8 i). A tile row is 8 vec4, permuted so that neighbours in a column
// lie in different banks. 16 KiB at most. Grid: ceil(rows of W / 64) * ceil(tokens / (8 PER)) workgroups, token tiles fastest.
// Sums are f32, k ascending.
const PER: u32 = 8u;       // tokens an invocation: 1, 2, 4 or 8
// include matmul/weight.wgsl
const SUMS: u32 = 4u * PER;
var<workgroup> weights: array<vec4<f32>, 512>;        // [64 rows, 8]
var<workgroup> values: array<vec4<f32>, 64u * PER>;   // [8 PER tokens, 8]

struct Tile { row: u32, token: u32 }     // number of the tile of rows; first token
fn tile_of(wg: vec3<u32>, grid: vec3<u32>) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let tiles = (p.tokens + 8u * PER - 1u) / (8u * PER);
  return Tile(i / tiles, (i % tiles) * 8u * PER);
}
fn slot(row: u32, column: u32) -> u32 { return row * 8u + (column ^ (row & 7u)); }
fn token_of(tile: Tile, lane: u32, i: u32) -> u32 { return tile.token + lane / 16u + 8u * i; }

// sums[4 i + j] of row tx + 16 j and token ty + 8 i. `row`: the row of W this invocation decodes, if it is one of the first 64.
// Block b + 1 is on its way while the sums of block b are made.
fn products(tile: Tile, row: u32, lane: u32) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  var block: Block;
  var fetched: array<vec4<f32>, PER>;
  let n = blocks();
  let decodes = lane < 64u;
  let token = (lane % 64u) / 8u;
  for (var b = 0u; b <= n; b++) {
    if (b > 0u) {
      workgroupBarrier();
      if (decodes) {
        weights[slot(lane, 0u)] = block4(block, 0u);
        weights[slot(lane, 1u)] = block4(block, 1u);
        weights[slot(lane, 2u)] = block4(block, 2u);
        weights[slot(lane, 3u)] = block4(block, 3u);
        weights[slot(lane, 4u)] = block4(block, 4u);
        weights[slot(lane, 5u)] = block4(block, 5u);
        weights[slot(lane, 6u)] = block4(block, 6u);
        weights[slot(lane, 7u)] = block4(block, 7u);
      } else {
        for (var i = 0u; i < PER; i++) { values[slot(i * 8u + token, lane % 8u)] = fetched[i]; }
      }
      workgroupBarrier();
    }
    if (b < n) {
      if (decodes) {
        block = load_block(row, b);
      } else {
        for (var i = 0u; i < PER; i++) {
          fetched[i] = x[(min(tile.token + i * 8u + token, p.tokens - 1u) * n + b) * 8u + lane % 8u];
        }
      }
    }
    if (b > 0u) {
      for (var c = 0u; c < 8u; c++) {
        var weight: array<vec4<f32>, 4>;
        for (var j = 0u; j < 4u; j++) { weight[j] = weights[slot(lane % 16u + 16u * j, c)]; }
        for (var i = 0u; i < PER; i++) {
          let value = values[slot(lane / 16u + 8u * i, c)];
          for (var j = 0u; j < 4u; j++) { sums[4u * i + j] = dot4(weight[j], value, sums[4u * i + j]); }
        }
      }
    }
  }
  return sums;
}
fn plain(tile: Tile, lane: u32) -> array<f32, SUMS> {
  return products(tile, min(tile.row * 64u + lane, p.w_rows - 1u), lane);
}
fn row_of(tile: Tile, lane: u32, j: u32) -> u32 { return tile.row * 64u + lane % 16u + 16u * j; }

@compute @workgroup_size(128)
fn linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = plain(tile, lane);
  for (var i = 0u; i < PER; i++) { for (var j = 0u; j < 4u; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (row < p.w_rows && token < p.tokens) { out[token * p.out_cols + p.row0 + row] = sums[4u * i + j]; }
  } }
}

@compute @workgroup_size(128)
fn linear_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = plain(tile, lane);
  for (var i = 0u; i < PER; i++) { for (var j = 0u; j < 4u; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (row < p.w_rows && token < p.tokens) {
      out[token * p.out_cols + p.row0 + row] = sums[4u * i + j] + bias[p.row0 + row];
    }
  } }
}

@compute @workgroup_size(128)
fn linear_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = plain(tile, lane);
  for (var i = 0u; i < PER; i++) { for (var j = 0u; j < 4u; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (row < p.w_rows && token < p.tokens) {
      let at = token * p.out_cols + p.row0 + row;
      out[at] = sums[4u * i + j] + residual[at];
    }
  } }
}

@compute @workgroup_size(128)
fn linear_bias_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                        @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = plain(tile, lane);
  for (var i = 0u; i < PER; i++) { for (var j = 0u; j < 4u; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (row < p.w_rows && token < p.tokens) {
      let at = token * p.out_cols + p.row0 + row;
      out[at] = sums[4u * i + j] + bias[p.row0 + row] + residual[at];
    }
  } }
}

// The tile's first 32 rows are gate rows, the others the up rows that belong to them: an invocation holds both of a pair.
@compute @workgroup_size(128)
fn gated_linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let half = p.w_rows / 2u;
  let mine = min(tile.row * 32u + lane % 32u, half - 1u) + select(0u, half, lane % 64u > 31u);
  let sums = products(tile, mine, lane);
  for (var i = 0u; i < PER; i++) { for (var j = 0u; j < 2u; j++) {
    let row = tile.row * 32u + lane % 16u + 16u * j;
    let token = token_of(tile, lane, i);
    if (row < half && token < p.tokens) {
      out[token * p.out_cols + row] = gated(sums[4u * i + j], sums[4u * i + j + 2u]);
    }
  } }
}
