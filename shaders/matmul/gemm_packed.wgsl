// Dense matrix product for software drivers with subgroups of eight: out[z, i, j] = sum_k A[z, i, k] B[z, k, j];
// matmul_bias: + bias[j]. From panels that pack.wgsl made: A by 8 P rows, B by 8 Q columns.
// A load costs such a driver as much as ten multiplications or more, for one element an invocation or for four. So the eight
// invocations of a workgroup, one subgroup, load eight rows of A at once, each its own, and hand them round: they make 8 P
// rows times 8 Q columns in registers. Panels lie in the order they are read in, so that no stride wastes cache lines.
// Grid: batches * ceil(m / (8 P)) * ceil(n / (8 Q)) workgroups, rows fastest, so that a panel of B stays in the cache.
// Sums are f32, k ascending.
alias Elem = f32;          // type of bias and out
const P: u32 = 2u;         // eights of rows
const Q: u32 = 4u;         // columns an invocation: 4 or 8
const WIDTH: u32 = 2u * Q;             // vec4s of a row of a panel of B
const FOURS: u32 = Q / 4u;             // vec4s of it an invocation takes
const SUMS: u32 = 8u * P * FOURS;
struct Params { m: u32, n: u32, fours: u32, batches: u32, a_batches: u32, b_batches: u32, out_offset: u32 }
@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;      // [a_batches, tiles, fours, 8 P]
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;      // [b_batches, tiles, 4 fours, 2 Q]
@group(0) @binding(2) var<storage, read> bias: array<Elem>;        // [n], matmul_bias only
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;   // [batches, m, n] from out_offset on
@group(0) @binding(4) var<uniform> p: Params;

fn epilogue(value: f32, row: u32, col: u32) -> f32 { return value; }   // slot: row counts through all batches

struct Tile { z: u32, row: u32, col: u32 }   // batch; number of the tile of rows and of columns
fn tile_of(wg: vec3<u32>, grid: vec3<u32>) -> Tile {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let rows = (p.m + 8u * P - 1u) / (8u * P);
  let cols = (p.n + 8u * Q - 1u) / (8u * Q);
  return Tile(min(i / (rows * cols), p.batches), i % rows, i / rows % cols);
}

// Row `at` of the tile: + left * right.
fn add(sums: ptr<function, array<vec4<f32>, SUMS>>, at: u32, left: f32, right: array<vec4<f32>, FOURS>) {
  var values = right;
  for (var j = 0u; j < FOURS; j++) {
    (*sums)[at * FOURS + j] = fma(vec4<f32>(left), values[j], (*sums)[at * FOURS + j]);
  }
}
// Eight rows from `at` on, of which each invocation holds one in `left`.
fn add_eight(sums: ptr<function, array<vec4<f32>, SUMS>>, at: u32, left: f32, right: array<vec4<f32>, FOURS>) {
  add(sums, at + 0u, subgroupBroadcast(left, 0u), right);
  add(sums, at + 1u, subgroupBroadcast(left, 1u), right);
  add(sums, at + 2u, subgroupBroadcast(left, 2u), right);
  add(sums, at + 3u, subgroupBroadcast(left, 3u), right);
  add(sums, at + 4u, subgroupBroadcast(left, 4u), right);
  add(sums, at + 5u, subgroupBroadcast(left, 5u), right);
  add(sums, at + 6u, subgroupBroadcast(left, 6u), right);
  add(sums, at + 7u, subgroupBroadcast(left, 7u), right);
}
fn b_row(at: u32) -> array<vec4<f32>, FOURS> {
  var row: array<vec4<f32>, FOURS>;
  for (var j = 0u; j < FOURS; j++) { row[j] = b[at + 8u * j]; }
  return row;
}

fn products(tile: Tile, lane: u32) -> array<vec4<f32>, SUMS> {
  var sums: array<vec4<f32>, SUMS>;
  let z = min(tile.z, p.batches - 1u);
  let rows = (p.m + 8u * P - 1u) / (8u * P);
  let cols = (p.n + 8u * Q - 1u) / (8u * Q);
  var a_at = ((z % p.a_batches) * rows + tile.row) * p.fours * 8u * P + lane;
  var b_at = ((z % p.b_batches) * cols + tile.col) * p.fours * 4u * WIDTH + lane;
  for (var k = 0u; k < p.fours; k++) {
    var left: array<vec4<f32>, P>;
    for (var i = 0u; i < P; i++) { left[i] = a[a_at + 8u * i]; }
    let right0 = b_row(b_at + 0u * WIDTH);
    for (var i = 0u; i < P; i++) { add_eight(&sums, 8u * i, left[i].x, right0); }
    let right1 = b_row(b_at + 1u * WIDTH);
    for (var i = 0u; i < P; i++) { add_eight(&sums, 8u * i, left[i].y, right1); }
    let right2 = b_row(b_at + 2u * WIDTH);
    for (var i = 0u; i < P; i++) { add_eight(&sums, 8u * i, left[i].z, right2); }
    let right3 = b_row(b_at + 3u * WIDTH);
    for (var i = 0u; i < P; i++) { add_eight(&sums, 8u * i, left[i].w, right3); }
    a_at += 8u * P;
    b_at += 4u * WIDTH;
  }
  return sums;
}

fn put(z: u32, i: u32, j: u32, value: f32) {
  let row = z * p.m + i;
  out[p.out_offset + row * p.n + j] = Elem(epilogue(value, row, j));
}

@compute @workgroup_size(8)
fn matmul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, lane);
  for (var i = 0u; i < 8u * P; i++) { for (var j = 0u; j < Q; j++) {
    let row = tile.row * 8u * P + i;
    let col = tile.col * 8u * Q + 32u * (j / 4u) + 4u * lane + j % 4u;
    if (tile.z < p.batches && row < p.m && col < p.n) { put(tile.z, row, col, sums[i * FOURS + j / 4u][j % 4u]); }
  } }
}

@compute @workgroup_size(8)
fn matmul_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let tile = tile_of(wg, grid);
  let sums = products(tile, lane);
  for (var i = 0u; i < 8u * P; i++) { for (var j = 0u; j < Q; j++) {
    let row = tile.row * 8u * P + i;
    let col = tile.col * 8u * Q + 32u * (j / 4u) + 4u * lane + j % 4u;
    if (tile.z < p.batches && row < p.m && col < p.n) {
      put(tile.z, row, col, sums[i * FOURS + j / 4u][j % 4u] + f32(bias[col]));
    }
  } }
}
