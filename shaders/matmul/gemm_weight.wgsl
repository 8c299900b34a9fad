// Products with a weight matrix for GPUs and many rows of x: a workgroup makes a tile of TX RM rows of W times TY RN rows of x.
//   linear         out[t, n] = y[t, n],   y[t, n] = sum_k x[t, k] W[n, k];   _bias: + bias[n];   _residual: + residual[t, n]
//   gated_linear   W: gate rows, then as many up rows.   out[t, n] = act(gate[t, n]) * up[t, n]
// For every STEP blocks of 32 columns W is decoded and x copied to workgroup memory; then TX TY invocations, PARTS times, each
// add up rows tx + TX j times tokens ty + TY i over every PARTS-th vec4 of columns, and at the end the PARTS sums are added: few
// tokens leave a tile too small to keep as many invocations busy as it takes to decode W. A tile row is 8 STEP vec4, permuted
// so that neighbours in a column lie in different banks; (TX RM + TY RN) STEP 128 bytes of workgroup memory.
// Grid: ceil(rows of W / (TX RM)) * ceil(tokens / (TY RN)) workgroups, token tiles fastest. Sums are f32, in a fixed order.
const TX: u32 = 16u;
const TY: u32 = 8u;
const RM: u32 = 4u;        // rows an invocation: 4 or 8
const RN: u32 = 8u;        // tokens an invocation
const PARTS: u32 = 1u;     // 1, or TY RN PARTS <= 32 STEP
const STEP: u32 = 1u;      // blocks; PARTS divides 8 STEP
// include matmul/weight.wgsl
const TEAM: u32 = TX * TY;
const WG: u32 = TEAM * PARTS;
const ROWS: u32 = TX * RM;
const TOKENS: u32 = TY * RN;
const SUMS: u32 = RM * RN;
const WIDE: u32 = 8u * STEP;                    // vec4 a tile row
const UNITS: u32 = ROWS * STEP;                 // blocks of W to decode a step
const SPLIT: u32 = select(1u, 2u, 2u * UNITS <= WG);          // invocations a block
const DECODED: u32 = (UNITS * SPLIT + WG - 1u) / WG;          // blocks, or halves, an invocation
const COPIED: u32 = (TOKENS * WIDE + WG - 1u) / WG;           // vec4 of x an invocation
var<workgroup> weights: array<vec4<f32>, ROWS * WIDE>;        // and in the end PARTS sums
var<workgroup> values: array<vec4<f32>, TOKENS * WIDE>;

struct Tile { row: u32, token: u32 }     // number of the tile of rows; first token
fn tile_of(wg: vec3<u32>, grid: vec3<u32>) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let tiles = (p.tokens + TOKENS - 1u) / TOKENS;
  return Tile(i / tiles, (i % tiles) * TOKENS);
}
// An invocation's column and row of its team: neighbours form squares of 8 by 4, which read the fewest different vec4.
const WX: u32 = min(TX, 8u);
const WY: u32 = min(TY, 32u / WX);
fn tx_of(lane: u32) -> u32 { return lane % WX + WX * (lane % TEAM / (WX * WY) % (TX / WX)); }
fn ty_of(lane: u32) -> u32 { return lane % TEAM / WX % WY + WY * (lane % TEAM / (WX * WY) / (TX / WX)); }
fn slot(row: u32, c: u32) -> u32 { return row * WIDE + (c ^ ((row + 2u * (c >> 3u)) & 7u)); }
fn token_of(tile: Tile, lane: u32, i: u32) -> u32 { return tile.token + ty_of(lane) + TY * i; }
fn row_of(tile: Tile, lane: u32, j: u32) -> u32 { return tile.row * ROWS + tx_of(lane) + TX * j; }
// Whether this invocation has the finished sums of its tokens i.
fn owns(lane: u32, i: u32) -> bool { return i % PARTS == lane / TEAM; }

// The row of W that row r of a tile is. paired: the tile's first half is gate rows, the other the up rows that belong to them.
fn source(tile: Tile, r: u32, paired: bool) -> u32 {
  if (!paired) { return min(tile.row * ROWS + r, p.w_rows - 1u); }
  let half = p.w_rows / 2u;
  return min(tile.row * (ROWS / 2u) + r % (ROWS / 2u), half - 1u) + select(0u, half, r >= ROWS / 2u);
}

// Decodes the first (0) or second half of a block to vec4 4 half of a tile row. The halves are constants where this is called.
fn put(block: Block, row: u32, column: u32, half: u32, inside: bool) {
  for (var j = 0u; j < 4u; j++) {
    weights[slot(row, column + 4u * half + j)] = select(vec4<f32>(), block4(block, 4u * half + j), inside);
  }
}

// sums[RM i + j] of row tx + TX j and token ty + TY i. What the next step needs is on its way while the sums of a step are made.
fn products(tile: Tile, paired: bool, lane: u32) -> array<f32, SUMS> {
  var sums = array<f32, SUMS>();
  var block: array<Block, DECODED>;
  var fetched: array<vec4<f32>, COPIED>;
  let n = blocks();
  let tx = tx_of(lane);
  let ty = ty_of(lane);
  for (var first = 0u; first < n + STEP; first += STEP) {
    if (first > 0u) {
      workgroupBarrier();
      for (var m = 0u; m < DECODED; m++) {
        let unit = (lane + WG * m) % UNITS;
        let inside = first - STEP + unit % STEP < n;
        let lower = lane + WG * m < UNITS;
        let upper = lane >= UNITS && lane / 2u < UNITS;         // with a block for two invocations
        if (lower) { put(block[m], unit / STEP, unit % STEP * 8u, 0u, inside); }
        if ((SPLIT == 1u && lower) || (SPLIT == 2u && upper)) { put(block[m], unit / STEP, unit % STEP * 8u, 1u, inside); }
      }
      for (var m = 0u; m < COPIED; m++) {
        let at = lane + WG * m;
        if (at < TOKENS * WIDE) { values[slot(at / WIDE, at % WIDE)] = fetched[m]; }
      }
      workgroupBarrier();
    }
    if (first < n) {
      for (var m = 0u; m < DECODED; m++) {
        let unit = (lane + WG * m) % UNITS;
        block[m] = load_block(source(tile, unit / STEP, paired), min(first + unit % STEP, n - 1u));
      }
      for (var m = 0u; m < COPIED; m++) {
        let at = min(lane + WG * m, TOKENS * WIDE - 1u);
        let column = first * 8u + at % WIDE;
        let value = x[min(tile.token + at / WIDE, p.tokens - 1u) * n * 8u + min(column, n * 8u - 1u)];
        fetched[m] = select(vec4<f32>(), value, column < n * 8u);
      }
    }
    if (first > 0u) {
      for (var c = lane / TEAM; c < WIDE; c += PARTS) {
        var weight: array<vec4<f32>, RM>;
        for (var j = 0u; j < RM; j++) { weight[j] = weights[slot(tx + TX * j, c)]; }
        for (var i = 0u; i < RN; i++) {
          let value = values[slot(ty + TY * i, c)];
          for (var j = 0u; j < RM; j++) { sums[RM * i + j] = dot4(weight[j], value, sums[RM * i + j]); }
        }
      }
    }
  }
  if (PARTS > 1u) { sums = added(sums, lane); }
  return sums;
}

// The sums of all parts, each for the tokens that the invocation owns.
fn added(parts: array<f32, SUMS>, lane: u32) -> array<f32, SUMS> {
  var sums = parts;
  workgroupBarrier();
  for (var q = 0u; q < SUMS / 4u; q++) {
    weights[(lane / TEAM * (SUMS / 4u) + q) * TEAM + lane % TEAM] =
      vec4<f32>(sums[4u * q], sums[4u * q + 1u], sums[4u * q + 2u], sums[4u * q + 3u]);
  }
  workgroupBarrier();
  for (var q = 0u; q < SUMS / 4u; q++) {
    if (owns(lane, 4u * q / RM)) {
      var total = weights[q * TEAM + lane % TEAM];
      for (var part = 1u; part < PARTS; part++) { total += weights[(part * (SUMS / 4u) + q) * TEAM + lane % TEAM]; }
      sums[4u * q] = total.x;
      sums[4u * q + 1u] = total.y;
      sums[4u * q + 2u] = total.z;
      sums[4u * q + 3u] = total.w;
    }
  }
  return sums;
}

@compute @workgroup_size(WG)
fn linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, false, lane);
  for (var i = 0u; i < RN; i++) { for (var j = 0u; j < RM; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (owns(lane, i) && row < p.w_rows && token < p.tokens) {
      out[token * p.out_cols + p.row0 + row] = sums[RM * i + j];
    }
  } }
}

@compute @workgroup_size(WG)
fn linear_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, false, lane);
  for (var i = 0u; i < RN; i++) { for (var j = 0u; j < RM; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (owns(lane, i) && row < p.w_rows && token < p.tokens) {
      out[token * p.out_cols + p.row0 + row] = sums[RM * i + j] + bias[p.row0 + row];
    }
  } }
}

@compute @workgroup_size(WG)
fn linear_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                   @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, false, lane);
  for (var i = 0u; i < RN; i++) { for (var j = 0u; j < RM; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (owns(lane, i) && row < p.w_rows && token < p.tokens) {
      let at = token * p.out_cols + p.row0 + row;
      out[at] = sums[RM * i + j] + residual[at];
    }
  } }
}

@compute @workgroup_size(WG)
fn linear_bias_residual(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                        @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, false, lane);
  for (var i = 0u; i < RN; i++) { for (var j = 0u; j < RM; j++) {
    let row = row_of(tile, lane, j);
    let token = token_of(tile, lane, i);
    if (owns(lane, i) && row < p.w_rows && token < p.tokens) {
      let at = token * p.out_cols + p.row0 + row;
      out[at] = sums[RM * i + j] + bias[p.row0 + row] + residual[at];
    }
  } }
}

// The tile's first half is gate rows: an invocation holds both of a pair, RM / 2 apart.
@compute @workgroup_size(WG)
fn gated_linear(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, true, lane);
  for (var i = 0u; i < RN; i++) { for (var j = 0u; j < RM / 2u; j++) {
    let row = tile.row * (ROWS / 2u) + tx_of(lane) + TX * j;
    let token = token_of(tile, lane, i);
    if (owns(lane, i) && row < p.w_rows / 2u && token < p.tokens) {
      out[token * p.out_cols + row] = gated(sums[RM * i + j], sums[RM * i + j + RM / 2u]);
    }
  } }
}
