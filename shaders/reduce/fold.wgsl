// Fold of a matrix along its columns: out = finish(join of the values of a row over the columns of part s).
// A long fold runs as several dispatches: the first leaves `parts` partial results a row, the next folds those.
//   part s covers columns [s * chunk, min((s + 1) * chunk, cols))
//   fold_rows     a run of LANES invocations an output, out[row * parts + s]. For rows that lie along memory.
//                 PACK values of a row come at once: cols, chunk count packs of columns, out and rows do not
//   fold_columns  a workgroup makes LANES packs of PACK rows from one part, out[s * rows + row]. For columns that lie along
//                 memory: rows counts packs
//   fold_serial   an invocation an output, out[row * parts + s], PACK 1. For software drivers
// Grid: fold_rows ceil(rows * parts / (WG / LANES)), fold_columns ceil(rows / LANES) * parts, fold_serial
// ceil(rows * parts / WG) workgroups. The order is fixed: the same bits on every run. Acc is f32 for all floats.
// As it stands this sums rows of source; the fuser fills the slots (values brings the producers fused into the fold).
alias Acc = f32;
alias Out = f32;
override WG: u32 = 64u;
const LANES: u32 = 64u;    // a power of two, as WG; at most WG
const PACK: u32 = 1u;      // 1 or 4
struct Params { rows: u32, parts: u32, cols: u32, chunk: u32, scale: f32, neutral: u32 }
@group(0) @binding(0) var<storage, read> source: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<Out>;
@group(0) @binding(2) var<uniform> p: Params;
// include lib/fold_run.wgsl

fn values(row: u32, col: u32) -> array<Acc, PACK> { return array<Acc, PACK>(source[row * p.cols + col]); }   // slot
fn neutral() -> Acc { return bitcast<Acc>(p.neutral); }                 // slot
fn join(a: Acc, b: Acc) -> Acc { return a + b; }                        // slot
fn finish(a: Acc) -> Out { return Out(a * p.scale); }                   // slot

// The PACK values of a pack joined.
fn joined(v: array<Acc, PACK>) -> Acc {
  var values = v;
  var a = values[0];
  for (var i = 1u; i < PACK; i++) { a = join(a, values[i]); }
  return a;
}

@compute @workgroup_size(WG)
fn fold_rows(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let o = (wg.y * grid.x + wg.x) * (WG / LANES) + lane / LANES;   // grids past 65535 are folded into y
  let row = min(o / p.parts, p.rows - 1u);                        // nobody leaves early: join_run needs everyone
  let start = (o % p.parts) * p.chunk;
  let end = min(start + p.chunk, p.cols);
  var parts = array<Acc, 4>(neutral(), neutral(), neutral(), neutral());
  var c = start + lane % LANES;
  for (; c + 3u * LANES < end; c += 4u * LANES) {                 // four loads on their way at once
    let v0 = values(row, c);
    let v1 = values(row, c + LANES);
    let v2 = values(row, c + 2u * LANES);
    let v3 = values(row, c + 3u * LANES);
    parts[0] = join(parts[0], joined(v0));
    parts[1] = join(parts[1], joined(v1));
    parts[2] = join(parts[2], joined(v2));
    parts[3] = join(parts[3], joined(v3));
  }
  if (c < end) {                                                  // and so the last ones, some of them in vain
    let v0 = values(row, c);
    let v1 = values(row, min(c + LANES, end - 1u));
    let v2 = values(row, min(c + 2u * LANES, end - 1u));
    parts[0] = join(parts[0], joined(v0));
    if (c + LANES < end) { parts[1] = join(parts[1], joined(v1)); }
    if (c + 2u * LANES < end) { parts[2] = join(parts[2], joined(v2)); }
  }
  let a = join_run(lane, join(join(parts[0], parts[1]), join(parts[2], parts[3])));
  if (lane % LANES == 0u && o < p.rows * p.parts) { out[o] = finish(a); }
}

var<workgroup> column_partial: array<array<Acc, PACK>, WG>;

@compute @workgroup_size(WG)
fn fold_columns(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let i = wg.y * grid.x + wg.x;
  let across = (p.rows + LANES - 1u) / LANES;
  let part = i / across;
  if (part >= p.parts) { return; }                                // uniform: the whole workgroup leaves
  let pack = (i % across) * LANES + lane % LANES;
  let row = min(pack, p.rows - 1u);
  let end = min((part + 1u) * p.chunk, p.cols);
  let step = WG / LANES;
  var sums: array<Acc, PACK>;
  for (var j = 0u; j < PACK; j++) { sums[j] = neutral(); }
  for (var c = part * p.chunk + lane / LANES; c < end; c += 8u * step) {
    var v: array<array<Acc, PACK>, 8>;                            // eight loads on their way at once
    if (c + 7u * step < end) {
      for (var u = 0u; u < 8u; u++) { v[u] = values(row, c + u * step); }
      for (var j = 0u; j < PACK; j++) {
        let low = join(join(v[0][j], v[1][j]), join(v[2][j], v[3][j]));
        sums[j] = join(sums[j], join(low, join(join(v[4][j], v[5][j]), join(v[6][j], v[7][j]))));
      }
      continue;
    }
    for (var u = 0u; u < 8u; u++) { v[u] = values(row, min(c + u * step, end - 1u)); }   // the last ones, some in vain
    for (var u = 0u; u < 8u; u++) {
      if (c + u * step < end) { for (var j = 0u; j < PACK; j++) { sums[j] = join(sums[j], v[u][j]); } }
    }
  }
  column_partial[lane] = sums;
  for (var n = WG / 2u; n >= LANES; n /= 2u) {
    workgroupBarrier();
    if (lane < n) {
      for (var j = 0u; j < PACK; j++) {
        column_partial[lane][j] = join(column_partial[lane][j], column_partial[lane + n][j]);
      }
    }
  }
  if (lane < LANES && pack < p.rows) {                            // these wrote what they read now
    for (var j = 0u; j < PACK; j++) { out[(part * p.rows + pack) * PACK + j] = finish(column_partial[lane][j]); }
  }
}

@compute @workgroup_size(WG)
fn fold_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let o = (wg.y * grid.x + wg.x) * WG + lane;
  if (o >= p.rows * p.parts) { return; }
  // Neighbouring invocations take neighbouring rows: a fold over columns then reads whole lines.
  let row = o % p.rows;
  let part = o / p.rows;
  let start = part * p.chunk;
  let end = min(start + p.chunk, p.cols);
  var a = neutral();
  for (var c = start; c < end; c++) { a = join(a, values(row, c)[0]); }
  out[row * p.parts + part] = finish(a);
}
