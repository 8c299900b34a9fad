// Which keys a query row sees in a cache of p.k_len rows, from the step buffer: row t stands at cache index position + t and
// sees the keys up to it. Rows at and past `tokens` are padding and see none. p.causal and p.offset are not used.
struct Step { position: u32, tokens: u32, seed: u32, draw: u32 }
@group(0) @binding(4) var<storage, read> step: Step;
fn valid_rows() -> u32 { return min(p.q_len, step.tokens); }

// Keys [x, y) of `row`; y <= p.k_len, and neither x nor y falls as row grows below valid_rows(). x >= y: none.
fn key_range(row: u32) -> vec2<u32> {
  if (row >= valid_rows()) { return vec2<u32>(0u, 0u); }
  let end = min(step.position, p.k_len) + row + 1u;
  var begin = 0u;
  if (p.window > 0u && end > p.window) { begin = end - p.window; }
  return vec2<u32>(begin, min(end, p.k_len));
}
