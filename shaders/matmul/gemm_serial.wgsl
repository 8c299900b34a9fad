// Dense matrix product for software drivers: out[z, i, j] = sum_k A[z, i, k] B[z, k, j];   matmul_bias: + bias[j]
// No workgroup memory: an invocation makes PM rows times PN columns in registers. All invocations of a workgroup share their
// rows, so the driver loads A at one address for all of them; none leaves early, and what lies outside is computed at the
// edge's address but not stored. Grid: batches * ceil(m / PM) * ceil(n / (WG PN)) workgroups, columns fastest. Sums are f32,
// k ascending.
override WG: u32 = 8u;     // invocations a workgroup
const PM: u32 = 4u;        // rows an invocation
const PN: u32 = 4u;        // columns an invocation, WG apart
// include matmul/dense.wgsl
const SUMS: u32 = PM * PN;

struct Tile { z: u32, row: u32, col: u32 }   // col: the invocation's first
fn tile_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let rows = (p.m + PM - 1u) / PM;
  let cols = (p.n + WG * PN - 1u) / (WG * PN);
  return Tile(i / (rows * cols), (i / cols) % rows * PM, i % cols * WG * PN + lane);
}

fn products(tile: Tile) -> array<f32, SUMS> {
  var sums: array<f32, SUMS>;
  let z = min(tile.z, p.batches - 1u);
  var a_at: array<u32, PM>;
  var b_at: array<u32, PN>;
  for (var i = 0u; i < PM; i++) { a_at[i] = a_base(z) + min(tile.row + i, p.m - 1u) * p.a_row; }
  for (var j = 0u; j < PN; j++) { b_at[j] = b_base(z) + min(tile.col + WG * j, p.n - 1u) * p.b_col; }
  for (var k = 0u; k < p.k; k++) {
    var right: array<f32, PN>;
    for (var j = 0u; j < PN; j++) { right[j] = f32(b[b_at[j] + k * p.b_row]); }
    for (var i = 0u; i < PM; i++) {
      let left = f32(a[a_at[i] + k * p.a_col]);
      for (var j = 0u; j < PN; j++) { sums[i * PN + j] = fma(left, right[j], sums[i * PN + j]); }
    }
  }
  return sums;
}

@compute @workgroup_size(WG)
fn matmul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid, lane);
  let sums = products(tile);
  for (var i = 0u; i < PM; i++) { for (var j = 0u; j < PN; j++) {
    let row = tile.row + i;
    let col = tile.col + WG * j;
    if (tile.z < p.batches && row < p.m && col < p.n) { put(tile.z, row, col, sums[i * PN + j]); }
  } }
}

@compute @workgroup_size(WG)
fn matmul_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid, lane);
  let sums = products(tile);
  for (var i = 0u; i < PM; i++) { for (var j = 0u; j < PN; j++) {
    let row = tile.row + i;
    let col = tile.col + WG * j;
    if (tile.z < p.batches && row < p.m && col < p.n) { put(tile.z, row, col, sums[i * PN + j] + f32(bias[col])); }
  } }
}
