// What the gradients of attention share: the weight of a query and a key, and the gradient of their score.
//   weight = exp(score - lse[row]),   slope = weight (dout[row].v[key] - delta[row]) d capped / d s,   delta = sum_d dout out
// stats: (batch, heads, q_len) of lse and delta.
@group(0) @binding(4) var<storage, read> stats: array<vec2<f32>>;

// s: q.k; dp: dout.v; check: whether this key may be one that the row does not see.
fn pair(s: f32, dp: f32, stat: vec2<f32>, batch: u32, head: u32, row: u32, key: u32, check: bool) -> vec2<f32> {
  let t = capped(s * p.scale);
  var score = t;
  if (check) {
    var sees = vec2<u32>(0u, 0u);
    if (row < p.q_len) { sees = key_range(row); }
    score = MASKED;
    if (key >= sees.x && key < sees.y) { score = masked(t, batch, head, row, key); }
  }
  let weight = select(exp(score - stat.x), 0.0, score <= MASKED);
  var slope = weight * (dp - stat.y);
  if (p.softcap > 0.0) {
    let u = t / p.softcap;
    slope *= 1.0 - u * u;
  }
  return vec2<f32>(weight, slope);
}
fn stat_of(batch: u32, head: u32, row: u32) -> vec2<f32> {
  return stats[(batch * p.heads + head) * p.q_len + min(row, p.q_len - 1u)];
}

// Query rows [x, y) that see any of the keys first to last.
fn row_range(first: u32, last: u32) -> vec2<u32> {
  if (p.causal == 0u) { return vec2<u32>(0u, p.q_len); }
  let begin = clamp(i32(first) - p.offset, 0, i32(p.q_len));
  var end = i32(p.q_len);
  if (p.window > 0u) { end = clamp(i32(last) + i32(p.window) - p.offset, 0, end); }
  return vec2<u32>(u32(begin), u32(end));
}
