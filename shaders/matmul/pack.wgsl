// Panels for gemm_packed.wgsl: a dense matrix of lines (rows of A, columns of B) laid out as its tiles read it, with zeros
// past k and copies of the last line past it.
//   pack_rows     out[z, tile, k/4, line] holds four k of one line:  A, LINES lines a tile
//   pack_columns  out[z, tile, k, line/4] holds four lines at one k:  B
// out: [batches, ceil(lines / LINES), LINES * ceil(k / 4)] vec4s. A batch z counts through size_1 inner and then outer
// indices. Elements become f32. For software drivers: nothing is divided in a loop.
// Grid: batches * tiles * ceil(k / 256) workgroups, pieces of k fastest. Each takes LINES lines over 256 k.
alias Elem = f32;
const LINES: u32 = 16u;    // a multiple of 8; for pack_columns of 32
struct Params {
  lines: u32, k: u32, batches: u32, size_1: u32, offset: u32, step_line: u32, step_k: u32, batch_0: u32, batch_1: u32,
}
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(2) var<uniform> p: Params;

struct Piece { tile: u32, first: u32, start: u32, end: u32 }   // tile of all; its first line; from k, to k
fn piece_of(wg: vec3<u32>, grid: vec3<u32>) -> Piece {
  let i = wg.y * grid.x + wg.x;          // grids past 65535 are folded into y
  let pieces = (p.k + 255u) / 256u;
  let tiles = (p.lines + LINES - 1u) / LINES;
  let start = i % pieces * 256u;
  return Piece(i / pieces, i / pieces % tiles * LINES, start, min(start + 256u, p.k));
}
fn base_of(tile: u32) -> u32 {
  let z = tile / ((p.lines + LINES - 1u) / LINES);
  return p.offset + z / p.size_1 * p.batch_0 + z % p.size_1 * p.batch_1;
}
fn inside(tile: u32) -> bool { return tile < p.batches * ((p.lines + LINES - 1u) / LINES); }

@compute @workgroup_size(8)
fn pack_rows(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let piece = piece_of(wg, grid);
  if (!inside(piece.tile)) { return; }
  let fours = (p.k + 3u) / 4u;
  for (var line = lane; line < LINES; line += 8u) {
    var source = base_of(piece.tile) + min(piece.first + line, p.lines - 1u) * p.step_line + piece.start * p.step_k;
    var to = (piece.tile * fours + piece.start / 4u) * LINES + line;
    var k = piece.start;
    for (; k + 4u <= piece.end; k += 4u) {
      out[to] = vec4<f32>(
        f32(x[source]), f32(x[source + p.step_k]), f32(x[source + 2u * p.step_k]), f32(x[source + 3u * p.step_k]));
      source += 4u * p.step_k;
      to += LINES;
    }
    if (k < piece.end) {
      var last = vec4<f32>();
      for (var c = 0u; c < piece.end - k; c++) { last[c] = f32(x[source + c * p.step_k]); }
      out[to] = last;
    }
  }
}

@compute @workgroup_size(8)
fn pack_columns(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let piece = piece_of(wg, grid);
  if (!inside(piece.tile)) { return; }
  let depth = (p.k + 3u) / 4u * 4u;
  for (var four = lane; four < LINES / 4u; four += 8u) {
    let first = base_of(piece.tile) + piece.start * p.step_k;
    let line = piece.first + 4u * four;
    let lines = min(vec4<u32>(line, line + 1u, line + 2u, line + 3u), vec4<u32>(p.lines - 1u));
    var at = vec4<u32>(first) + lines * p.step_line;
    var to = (piece.tile * depth + piece.start) * (LINES / 4u) + four;
    for (var k = piece.start; k < piece.end; k++) {
      out[to] = vec4<f32>(f32(x[at.x]), f32(x[at.y]), f32(x[at.z]), f32(x[at.w]));
      at += vec4<u32>(p.step_k);
      to += LINES / 4u;
    }
    if (piece.end == p.k) {
      for (var k = p.k; k < depth; k++) { out[to] = vec4<f32>(); to += LINES / 4u; }
    }
  }
}
