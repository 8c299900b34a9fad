// Softmax and log-softmax over the last axis, with the running maximum of Milakov & Gimelshein 2018, arXiv:1805.02867.
//   softmax      out[r,c] = exp(x[r,c] - m[r]) / l[r],   m[r] = max_c x[r,c],   l[r] = sum_c exp(x[r,c] - m[r])
//   log_softmax  out[r,c] = (x[r,c] - m[r]) - log(l[r])
// An element at or below MASKED (minus infinity) is masked: softmax gives 0, log_softmax gives the element back. A row that
// is masked throughout therefore has softmax 0 everywhere, not NaN. NaN in a row makes the row NaN.
// Grid: one workgroup per row r. x, out: [rows, cols]. Sums are f32 whatever Elem is.
alias Elem = f32;          // type of x and out
override WG: u32 = 256u;   // invocations per row; a power of two
const MASKED: f32 = -3.4e38;
struct Params { rows: u32, cols: u32 }
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read_write> out: array<Elem>;
@group(0) @binding(2) var<uniform> p: Params;
// include lib/reduce.wgsl

struct Stats { top: f32, total: f32 }   // m and l of the header
fn row_stats(row: u32, lane: u32) -> Stats {
  var top = MASKED;
  var total = 0.0;
  for (var c = lane; c < p.cols; c += WG) {
    let v = f32(x[row * p.cols + c]);
    if (!(v <= MASKED)) {               // NaN enters here and stays
      let higher = max(top, v);
      total = total * exp(top - higher) + exp(v - higher);
      top = higher;
    }
  }
  let highest = wg_max(lane, top);
  return Stats(highest, wg_sum(lane, total * exp(top - highest)));
}

@compute @workgroup_size(WG)
fn softmax(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
           @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;      // grids past 65535 are folded into y
  if (row >= p.rows) { return; }       // uniform: the whole workgroup leaves
  let s = row_stats(row, lane);
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    let v = f32(x[i]);
    var y = 0.0;
    if (!(v <= MASKED)) { y = exp(v - s.top) / s.total; }
    out[i] = Elem(y);
  }
}

@compute @workgroup_size(WG)
fn log_softmax(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let row = wg.y * grid.x + wg.x;
  if (row >= p.rows) { return; }
  let s = row_stats(row, lane);
  let log_total = log(select(s.total, 1.0, s.total == 0.0));   // 0 where the row is masked throughout
  for (var c = lane; c < p.cols; c += WG) {
    let i = row * p.cols + c;
    let v = f32(x[i]);
    var y = v;
    if (!(v <= MASKED)) { y = (v - s.top) - log_total; }
    out[i] = Elem(y);
  }
}
