// Fold of a matrix along its columns: out[r * parts + s] = finish(join of value(r, c) over the columns of part s).
// A long fold runs as several dispatches: the first leaves `parts` partial results a row, the next folds those.
//   part s covers columns [s * chunk, min((s + 1) * chunk, cols)); outputs = rows * parts
// Grid: fold_group: one workgroup an output, for long contiguous rows. fold_serial: one invocation an output, for
// columns, short rows and CPU drivers. The order is fixed: the same bits on every run. Acc is f32 for all floats.
// As it stands this sums rows of source; the fuser fills the slots (value brings the producers fused into the fold).
alias Acc = f32;
alias Out = f32;
override WG: u32 = 64u;
// include lib/reduce.wgsl
struct Params { outputs: u32, parts: u32, cols: u32, chunk: u32, scale: f32, neutral: u32 }
@group(0) @binding(0) var<storage, read> source: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<Out>;
@group(0) @binding(2) var<uniform> p: Params;
var<workgroup> tree_partial: array<Acc, WG>;

fn value(row: u32, col: u32) -> Acc { return source[row * p.cols + col]; }   // slot
fn neutral() -> Acc { return bitcast<Acc>(p.neutral); }                 // slot
fn join(a: Acc, b: Acc) -> Acc { return a + b; }                        // slot
fn finish(a: Acc) -> Out { return Out(a * p.scale); }                   // slot
fn join_group(lane: u32, a: Acc) -> Acc { return wg_sum(lane, a); }     // slot

// join over the workgroup for any Acc; the result in every invocation.
fn tree(lane: u32, a: Acc) -> Acc {
  tree_partial[lane] = a;
  for (var n = WG / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane < n) { tree_partial[lane] = join(tree_partial[lane], tree_partial[lane + n]); }
  }
  workgroupBarrier();
  let all = tree_partial[0];
  workgroupBarrier();
  return all;
}

@compute @workgroup_size(WG)
fn fold_group(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let o = wg.y * grid.x + wg.x;
  if (o >= p.outputs) { return; }        // uniform: the whole workgroup leaves
  let row = o / p.parts;
  let start = (o % p.parts) * p.chunk;
  let end = min(start + p.chunk, p.cols);
  var a = neutral();
  for (var c = start + lane; c < end; c += WG) { a = join(a, value(row, c)); }
  a = join_group(lane, a);
  if (lane == 0u) { out[o] = finish(a); }
}

@compute @workgroup_size(WG)
fn fold_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let o = (wg.y * grid.x + wg.x) * WG + lane;
  if (o >= p.outputs) { return; }
  // Neighbouring invocations take neighbouring rows: a fold over columns then reads whole lines.
  let rows = p.outputs / p.parts;
  let row = o % rows;
  let part = o / rows;
  let start = part * p.chunk;
  let end = min(start + p.chunk, p.cols);
  var a = neutral();
  for (var c = start; c < end; c++) { a = join(a, value(row, c)); }
  out[row * p.parts + part] = finish(a);
}
