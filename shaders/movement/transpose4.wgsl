// Transposing copy four elements at a time, as movement/transpose.wgsl, where every length, stride and offset is a multiple
// of four: offsets and strides count vec4s here, rows and cols elements.
// Grid: one workgroup a tile of 64 x 64, tiles of a batch in row order. An invocation turns 4 x 4 elements in registers; the
// tile passes through workgroup memory in vec4s, its columns permuted so that neighbours lie in different banks.
alias Elem = f32;
alias Four = vec4<Elem>;
struct Params {
  batches: u32, size_1: u32, rows: u32, cols: u32,
  x_offset: u32, x_batch_0: u32, x_batch_1: u32, x_col: u32,
  out_offset: u32, out_batch_0: u32, out_batch_1: u32, out_row: u32,
}
@group(0) @binding(0) var<storage, read> x: array<Four>;
@group(0) @binding(1) var<storage, read_write> out: array<Four>;
@group(0) @binding(2) var<uniform> p: Params;
var<workgroup> tile: array<Four, 1024>;   // [64 rows, 16 vec4 of columns]

fn slot(r: u32, c4: u32) -> u32 { return r * 16u + (c4 ^ ((r >> 2u) & 15u)); }

@compute @workgroup_size(16, 16)
fn transpose4(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_id) lane: vec3<u32>) {
  let across = (p.cols + 63u) / 64u;
  let tiles = across * ((p.rows + 63u) / 64u);
  let id = wg.y * grid.x + wg.x;
  let b = id / tiles;
  if (b >= p.batches) { return; }          // uniform: the whole workgroup leaves
  let r0 = (id % tiles) / across * 64u;
  let c0 = (id % tiles) % across * 64u;
  let r = r0 + 4u * lane.x;
  let c = c0 + 4u * lane.y;
  if (r < p.rows && c < p.cols) {
    let at = p.x_offset + b / p.size_1 * p.x_batch_0 + b % p.size_1 * p.x_batch_1 + (r >> 2u) + c * p.x_col;
    let v0 = x[at];
    let v1 = x[at + p.x_col];
    let v2 = x[at + 2u * p.x_col];
    let v3 = x[at + 3u * p.x_col];
    tile[slot(4u * lane.x, lane.y)] = Four(v0.x, v1.x, v2.x, v3.x);
    tile[slot(4u * lane.x + 1u, lane.y)] = Four(v0.y, v1.y, v2.y, v3.y);
    tile[slot(4u * lane.x + 2u, lane.y)] = Four(v0.z, v1.z, v2.z, v3.z);
    tile[slot(4u * lane.x + 3u, lane.y)] = Four(v0.w, v1.w, v2.w, v3.w);
  }
  workgroupBarrier();
  let c_out = c0 + 4u * lane.x;
  let out_base = p.out_offset + b / p.size_1 * p.out_batch_0 + b % p.size_1 * p.out_batch_1 + (c_out >> 2u);
  for (var k = lane.y; k < 64u; k += 16u) {
    if (r0 + k < p.rows && c_out < p.cols) { out[out_base + (r0 + k) * p.out_row] = tile[slot(k, lane.x)]; }
  }
}
