// Transposing copy: the axis that is contiguous in x is not the one that is contiguous in out.
//   out[out_offset + b0 * out_batch_0 + b1 * out_batch_1 + r * out_row + c] =
//     x[x_offset + b0 * x_batch_0 + b1 * x_batch_1 + r + c * x_col]
//   for b0 * size_1 + b1 < batches, b1 < size_1, r < rows, c < cols; all in elements.
// Grid: one workgroup a tile of 32 x 32, tiles of a batch in row order. A tile passes through workgroup memory, so that
// reads run along r and writes along c. Values are moved as they are, whatever Elem is.
alias Elem = f32;
struct Params {
  batches: u32, size_1: u32, rows: u32, cols: u32,
  x_offset: u32, x_batch_0: u32, x_batch_1: u32, x_col: u32,
  out_offset: u32, out_batch_0: u32, out_batch_1: u32, out_row: u32,
}
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read_write> out: array<Elem>;
@group(0) @binding(2) var<uniform> p: Params;
var<workgroup> tile: array<Elem, 1056>;   // 32 rows of 33: a column then falls into 32 different banks

@compute @workgroup_size(32, 8)
fn transpose(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_id) lane: vec3<u32>) {
  let across = (p.cols + 31u) / 32u;
  let tiles = across * ((p.rows + 31u) / 32u);
  let id = wg.y * grid.x + wg.x;
  let b = id / tiles;
  if (b >= p.batches) { return; }          // uniform: the whole workgroup leaves
  let r0 = (id % tiles) / across * 32u;
  let c0 = (id % tiles) % across * 32u;
  let x_base = p.x_offset + b / p.size_1 * p.x_batch_0 + b % p.size_1 * p.x_batch_1;
  let out_base = p.out_offset + b / p.size_1 * p.out_batch_0 + b % p.size_1 * p.out_batch_1;
  for (var k = lane.y; k < 32u; k += 8u) {
    let r = r0 + lane.x;
    let c = c0 + k;
    if (r < p.rows && c < p.cols) { tile[k * 33u + lane.x] = x[x_base + r + c * p.x_col]; }
  }
  workgroupBarrier();
  for (var k = lane.y; k < 32u; k += 8u) {
    let r = r0 + k;
    let c = c0 + lane.x;
    if (r < p.rows && c < p.cols) { out[out_base + r * p.out_row + c] = tile[lane.x * 33u + k]; }
  }
}
