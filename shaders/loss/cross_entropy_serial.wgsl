// Cross-entropy as in loss/cross_entropy.wgsl, one invocation per row: for software drivers.
// Grid: ceil(rows / WG) workgroups. x: [rows, cols]; weight: [cols]. All sums are f32.
alias Elem = f32;          // type of x
override WG: u32 = 8u;     // rows per workgroup
const MASKED: f32 = -3.4e38;
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(6) var<storage, read> weight: array<f32>;
// include loss/cross_entropy_rows.wgsl

fn power(v: f32, top: f32) -> f32 { return select(exp(v - top), 0.0, v <= MASKED); }   // NaN stays
fn lse_of(first: u32) -> f32 {
  var top = MASKED;
  for (var c = 0u; c < p.cols; c++) { top = max(top, f32(x[first + c])); }
  var sum = 0.0;
  for (var c = 0u; c < p.cols; c++) { sum += power(f32(x[first + c]), top); }
  return select(top + log(sum), top, sum == 0.0);
}
fn pivot_of(first: u32) -> f32 { return select(f32(x[first]), 0.0, f32(x[first]) <= MASKED); }

@compute @workgroup_size(WG)
fn cross_entropy_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                        @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let pivot = pivot_of(first);
  var spread = 0.0;
  if (p.smoothing > 0.0) { for (var c = 0u; c < p.cols; c++) { spread += f32(x[first + c]) - pivot; } }
  put_row(row, lse_of(first), pivot, spread, f32(p.cols), f32(x[first + column_of(row)]), 1.0);
}

@compute @workgroup_size(WG)
fn cross_entropy_weighted_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                                 @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let pivot = pivot_of(first);
  var spread = 0.0;
  var all = 0.0;
  if (p.smoothing > 0.0) {
    for (var c = 0u; c < p.cols; c++) {
      spread += weight[c] * (f32(x[first + c]) - pivot);
      all += weight[c];
    }
  }
  let y = column_of(row);
  put_row(row, lse_of(first), pivot, spread, all, f32(x[first + y]), weight[y]);
}
