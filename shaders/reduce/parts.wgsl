// Adds up rows of partial sums: out[c] = sum over r of parts[r, c], in an order that the sizes alone decide. sum_two_parts: the
// first half of the columns goes to out, the second to other.
// COLS x DEEP invocations a workgroup: (c, d) adds the rows d, d + DEEP, ... of its column, then the DEEP sums are added in
// a tree. Grid: ceil(cols / COLS) workgroups, folded into y. parts: [rows, cols] f32; out: [cols].
alias Elem = f32;          // type of out and other
const COLS: u32 = 32u;
const DEEP: u32 = 8u;      // a power of two
struct Params { rows: u32, cols: u32 }
@group(0) @binding(0) var<storage, read> parts: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<Elem>;
@group(0) @binding(2) var<storage, read_write> other: array<Elem>;
@group(0) @binding(3) var<uniform> p: Params;
var<workgroup> sums: array<f32, COLS * DEEP>;

// The sum of a column, given to the first COLS invocations. Call in uniform control flow.
fn sum_of(col: u32, lane: u32) -> f32 {
  let at = min(col, p.cols - 1u);      // nobody leaves early: the tree needs everyone
  var sum = 0.0;
  for (var r = lane / COLS; r < p.rows; r += DEEP) { sum += parts[r * p.cols + at]; }
  sums[lane] = sum;
  for (var n = DEEP / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane / COLS < n) { sums[lane] += sums[lane + n * COLS]; }
  }
  return sums[lane];
}

@compute @workgroup_size(COLS * DEEP)
fn sum_parts(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let col = (wg.y * grid.x + wg.x) * COLS + lane % COLS;
  let sum = sum_of(col, lane);
  if (lane < COLS && col < p.cols) { out[col] = Elem(sum); }
}

@compute @workgroup_size(COLS * DEEP)
fn sum_two_parts(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  let col = (wg.y * grid.x + wg.x) * COLS + lane % COLS;
  let half = p.cols / 2u;
  let sum = sum_of(col, lane);
  if (lane < COLS && col < p.cols) {
    if (col < half) { out[col] = Elem(sum); } else { other[col - half] = Elem(sum); }
  }
}
