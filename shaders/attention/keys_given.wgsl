// Which keys a query row sees, from Params alone.
fn valid_rows() -> u32 { return p.q_len; }

// Keys [x, y) of `row`; y <= p.k_len, and neither x nor y falls as row grows. x >= y: none.
fn key_range(row: u32) -> vec2<u32> {
  if (p.causal == 0u) { return vec2<u32>(0u, p.k_len); }
  let end = i32(row) + p.offset + 1;
  var begin = 0;
  if (p.window > 0u) { begin = max(end - i32(p.window), 0); }
  return vec2<u32>(u32(begin), u32(clamp(end, 0, i32(p.k_len))));
}
