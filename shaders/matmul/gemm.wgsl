// Dense matrix product for GPUs: out[z, i, j] = sum_k A[z, i, k] B[z, k, j];   matmul_bias: + bias[j]
// A workgroup of 256 makes a tile of 16 PM rows times 16 PN columns. For every 4 DEPTH values of k it copies both operands to
// workgroup memory as vec4 along k, permuted so that neighbours in a column lie in different banks; an invocation (tx, ty)
// then adds up rows ty + 16 i times columns tx + 16 j. Any m, n, k (k = 0 gives zeros); what lies outside counts as 0.
// Grid: batches * ceil(m / (16 PM)) * ceil(n / (16 PN)) workgroups, columns fastest. Sums are f32, k ascending.
const PM: u32 = 4u;        // 1 to 8
const PN: u32 = 4u;
const DEPTH: u32 = 8u;     // 4 or 8; 256 DEPTH (PM + PN) bytes of workgroup memory
const A_ROWS: u32 = 0u;    // 1: neighbouring invocations copy neighbouring rows of A (a transposed A), 0: neighbouring k
const B_COLS: u32 = 1u;    // 1: neighbouring invocations copy neighbouring columns of B, 0: neighbouring k (a transposed B)
// include matmul/dense.wgsl
const SUMS: u32 = PM * PN;
var<workgroup> a_tile: array<vec4<f32>, 16u * PM * DEPTH>;
var<workgroup> b_tile: array<vec4<f32>, 16u * PN * DEPTH>;

struct Tile { z: u32, row: u32, col: u32 }
fn tile_of(wg: vec3<u32>, grid: vec3<u32>) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let rows = (p.m + 16u * PM - 1u) / (16u * PM);
  let cols = (p.n + 16u * PN - 1u) / (16u * PN);
  return Tile(i / (rows * cols), (i / cols) % rows * 16u * PM, i % cols * 16u * PN);
}
fn slot(row: u32, c: u32) -> u32 { return row * DEPTH + (c ^ ((row * DEPTH / 8u) & (DEPTH - 1u))); }
fn dot4(x: vec4<f32>, y: vec4<f32>, sum: f32) -> f32 {
  return fma(x.w, y.w, fma(x.z, y.z, fma(x.y, y.y, fma(x.x, y.x, sum))));
}
// The i-th (row, vec4 of k) pair that an invocation copies of a tile with so many rows.
fn share(i: u32, lane: u32, rows: u32, rows_next: u32) -> vec2<u32> {
  let at = i * 256u + lane;
  if (rows_next == 1u) { return vec2<u32>(at % rows, at / rows); }
  return vec2<u32>(at / DEPTH, at % DEPTH);
}

fn products(tile: Tile, lane: u32) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  let a_first = a_base(tile.z);
  let b_first = b_base(tile.z);
  for (var k0 = 0u; k0 < p.k; k0 += 4u * DEPTH) {
    workgroupBarrier();
    for (var i = 0u; i * 256u + lane < 16u * PM * DEPTH; i++) {
      let at = share(i, lane, 16u * PM, A_ROWS);
      let k = k0 + 4u * at.y;
      var v = vec4<f32>();
      if (tile.row + at.x < p.m) {
        let first = a_first + (tile.row + at.x) * p.a_row + k * p.a_col;
        if (k < p.k) { v.x = f32(a[first]); }
        if (k + 1u < p.k) { v.y = f32(a[first + p.a_col]); }
        if (k + 2u < p.k) { v.z = f32(a[first + 2u * p.a_col]); }
        if (k + 3u < p.k) { v.w = f32(a[first + 3u * p.a_col]); }
      }
      a_tile[slot(at.x, at.y)] = v;
    }
    for (var i = 0u; i * 256u + lane < 16u * PN * DEPTH; i++) {
      let at = share(i, lane, 16u * PN, B_COLS);
      let k = k0 + 4u * at.y;
      var v = vec4<f32>();
      if (tile.col + at.x < p.n) {
        let first = b_first + (tile.col + at.x) * p.b_col + k * p.b_row;
        if (k < p.k) { v.x = f32(b[first]); }
        if (k + 1u < p.k) { v.y = f32(b[first + p.b_row]); }
        if (k + 2u < p.k) { v.z = f32(b[first + 2u * p.b_row]); }
        if (k + 3u < p.k) { v.w = f32(b[first + 3u * p.b_row]); }
      }
      b_tile[slot(at.x, at.y)] = v;
    }
    workgroupBarrier();
    for (var c = 0u; c < DEPTH; c++) {
      var right: array<vec4<f32>, PN>;
      for (var j = 0u; j < PN; j++) { right[j] = b_tile[slot(lane % 16u + 16u * j, c)]; }
      for (var i = 0u; i < PM; i++) {
        let left = a_tile[slot(lane / 16u + 16u * i, c)];
        for (var j = 0u; j < PN; j++) { sums[i * PN + j] = dot4(left, right[j], sums[i * PN + j]); }
      }
    }
  }
  return sums;
}

@compute @workgroup_size(256)
fn matmul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  if (tile.z >= p.batches) { return; }   // uniform: the whole workgroup leaves
  let sums = products(tile, lane);
  for (var i = 0u; i < PM; i++) { for (var j = 0u; j < PN; j++) {
    let row = tile.row + lane / 16u + 16u * i;
    let col = tile.col + lane % 16u + 16u * j;
    if (row < p.m && col < p.n) { put(tile.z, row, col, sums[i * PN + j]); }
  } }
}

@compute @workgroup_size(256)
fn matmul_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  if (tile.z >= p.batches) { return; }
  let sums = products(tile, lane);
  for (var i = 0u; i < PM; i++) { for (var j = 0u; j < PN; j++) {
    let row = tile.row + lane / 16u + 16u * i;
    let col = tile.col + lane % 16u + 16u * j;
    if (row < p.m && col < p.n) { put(tile.z, row, col, sums[i * PN + j] + f32(bias[col])); }
  } }
}
