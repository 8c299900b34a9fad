// What every attention kernel shares: element types, head size, Params, and the score of a query and a key.
//   score = capped(scale * q.k),   capped(s) = s, or softcap * tanh(s / softcap) where softcap > 0
// A score at or below MASKED does not take part in the softmax.
alias Elem = f32;        // type of q and out
alias KV = f32;          // type of k and v
const D: u32 = 64u;      // features a head, 1 to 256
const D4: u32 = (D + 3u) / 4u;
const MASKED: f32 = -3.4e38;
struct Params {
  heads: u32, group: u32,            // query heads; query heads per key/value head: head h reads kv head h / group
  quads: u32,                        // D4, unknown to the compiler: a loop to it is not unrolled
  q_len: u32, k_len: u32,            // rows of q and out; rows of k and v
  causal: u32, offset: i32,          // 1: query row i is at key position i + offset and sees keys up to it
  window: u32,                       // with causal: only the last `window` of those keys; 0: all
  scale: f32, softcap: f32,
  q_batch: u32, q_head: u32, q_row: u32,       // strides, in elements; features are contiguous
  k_batch: u32, k_head: u32, k_row: u32,
  v_batch: u32, v_head: u32, v_row: u32,
  out_batch: u32, out_head: u32, out_row: u32,
  mask_batch: u32, mask_head: u32, mask_row: u32, mask_key: u32,   // 0 where the mask is broadcast
}
@group(0) @binding(7) var<uniform> p: Params;

fn capped(score: f32) -> f32 {
  if (p.softcap <= 0.0) { return score; }
  var t = score / p.softcap;
  t = select(t, 15.0, t > 15.0);                        // exp must not overflow; tanh(15) is 1 in f32
  t = select(t, -15.0, t < -15.0);                      // clamp would make a number of NaN
  return p.softcap * (1.0 - 2.0 / (exp(2.0 * t) + 1.0));
}
