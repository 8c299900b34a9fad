// What both cross-entropy kernels share: the loss of a row out of its sums.
//   out[r] = (1 - s) w[y] (lse - x[r,y]) + s / C sum_c w[c] (lse - x[r,c]),   y = goal[r], s = smoothing, w = 1 without weights
//   kept[r] = w[y],   lse[r] = log sum_c exp(x[r,c])
// A row with goal[r] = ignored has out and kept 0, one with a goal that is no class has `outside` (NaN) in both.
struct Params { rows: u32, packs: u32, cols: u32, ignored: i32, smoothing: f32, outside: f32 }
@group(0) @binding(1) var<storage, read> goal: array<i32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<storage, read_write> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> kept: array<f32>;
@group(0) @binding(5) var<uniform> p: Params;

// pivot: a number near the row's logits; spread: sum of w (x - pivot); all: sum of w; at, own: logit and weight of the goal.
fn put_row(row: u32, total: f32, pivot: f32, spread: f32, all: f32, at: f32, own: f32) {
  let y = goal[row];
  var loss = 0.0;
  var weight = 0.0;
  if (y != p.ignored) {
    if (y < 0 || y >= i32(p.cols)) {
      loss = p.outside;
      weight = p.outside;
    } else {
      weight = own;
      loss = own * (total - at);
      if (p.smoothing > 0.0) {
        loss = loss * (1.0 - p.smoothing) + p.smoothing / f32(p.cols) * (all * (total - pivot) - spread);
      }
    }
  }
  out[row] = loss;
  lse[row] = total;
  kept[row] = weight;
}
// The goal as a column that can be read.
fn column_of(row: u32) -> u32 { return u32(clamp(goal[row], 0, i32(p.cols) - 1)); }
