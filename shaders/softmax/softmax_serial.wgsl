// Softmax and log-softmax as in softmax/softmax.wgsl, one invocation per row: for software drivers. The maximum is found
// first, so that each element costs one exp in the sum and no rescaling.
// Grid: ceil(rows / WG) workgroups. x, out: [rows, cols]. Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x and out
override WG: u32 = 8u;     // rows per workgroup
const MASKED: f32 = -3.4e38;
struct Params { rows: u32, cols: u32 }
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read_write> out: array<Elem>;
@group(0) @binding(2) var<uniform> p: Params;

struct Stats { top: f32, total: f32 }
fn row_stats(first: u32) -> Stats {
  var top = MASKED;
  for (var c = 0u; c < p.cols; c += 1u) { top = max(top, f32(x[first + c])); }
  var total = 0.0;
  for (var c = 0u; c < p.cols; c += 1u) {
    let v = f32(x[first + c]);
    if (!(v <= MASKED)) { total += exp(v - top); }   // NaN enters here and stays
  }
  return Stats(top, total);
}

@compute @workgroup_size(WG)
fn softmax_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                  @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = row_stats(first);
  for (var c = 0u; c < p.cols; c += 1u) {
    let v = f32(x[first + c]);
    var y = 0.0;
    if (!(v <= MASKED)) { y = exp(v - s.top) / s.total; }
    out[first + c] = Elem(y);
  }
}

@compute @workgroup_size(WG)
fn log_softmax_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                      @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * WG + lane;
  if (row >= p.rows) { return; }
  let first = row * p.cols;
  let s = row_stats(first);
  let log_total = log(select(s.total, 1.0, s.total == 0.0));   // 0 where the row is masked throughout
  for (var c = 0u; c < p.cols; c += 1u) {
    let v = f32(x[first + c]);
    var y = v;
    if (!(v <= MASKED)) { y = (v - s.top) - log_total; }
    out[first + c] = Elem(y);
  }
}
