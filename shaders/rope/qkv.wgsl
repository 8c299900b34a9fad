// Where queries, keys and values of a token go: rotary embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2) of q and
// k, then q to out and k and v to the cache.   (a, b) -> (a cos - b sin, a sin + b cos), angle = rope[position, pair]
// Features at and past `rotated` pass through. The including file declares
//   Params with heads, kv_heads, head_dim, rotated (both even), context and table_rows;   step: Step
//   rope: [table_rows, rotated/2] of (cos, sin);   out: [tokens, heads * head_dim];   k_cache, v_cache: [context, kv_heads * head_dim]
alias KV = f32;                // type of the cache
const INTERLEAVED: u32 = 0u;   // rotated pairs: 0 features (i, i + rotated/2) as GPT-NeoX, 1 features (2i, 2i + 1) as GPT-J
struct Step { position: u32, tokens: u32, seed: u32, draw: u32 }   // place of row 0 in the cache; rows that are no padding

// Features that make pair i, of heads * head_dim of q, then kv_heads * head_dim of k, then as many of v.
fn qkv_pair(i: u32) -> vec2<u32> {
  let half = p.head_dim / 2u;
  let j = i % half;
  let first = (i / half) * p.head_dim;
  if (INTERLEAVED == 0u && j < p.rotated / 2u && i / half < p.heads + p.kv_heads) {
    return first + vec2<u32>(j, j + p.rotated / 2u);
  }
  return first + 2u * j + vec2<u32>(0u, 1u);
}

// Rotates pair i of token t and puts it where it belongs: q to out, k and v to the cache. Padding is not cached.
fn store_qkv(t: u32, i: u32, values: vec2<f32>) {
  let half = p.head_dim / 2u;
  let head = i / half;
  let j = i % half;
  let feature = qkv_pair(i);
  let position = step.position + t;
  var y = values;
  if (j < p.rotated / 2u && head < p.heads + p.kv_heads) {
    let angle = rope[min(position, p.table_rows - 1u) * (p.rotated / 2u) + j];
    y = vec2<f32>(values.x * angle.x - values.y * angle.y, values.x * angle.y + values.y * angle.x);
  }
  if (head < p.heads) {
    let at = t * p.heads * p.head_dim + feature;
    out[at.x] = y.x;
    out[at.y] = y.y;
  } else if (t < step.tokens && position < p.context) {
    let width = p.kv_heads * p.head_dim;
    let at = position * width + feature - p.heads * p.head_dim;
    if (head < p.heads + p.kv_heads) { k_cache[at.x] = KV(y.x); k_cache[at.y] = KV(y.y); }
    else { v_cache[at.x - width] = KV(y.x); v_cache[at.y - width] = KV(y.y); }
  }
}
