// q6_k: 32 six-bit q, a signed scale s for each 16 of them; f16 d for every 8 blocks.   weight = d * s * (q - 32)
// Planes for n blocks: nibbles (n vec4), high pairs (2n words), s (n halves, a byte each), d (n / 8 halves).
// include quant/planes.wgsl
struct Block { q: vec4<u32>, high: vec2<u32>, d: vec2<f32> }
fn load_block(row: u32, block: u32) -> Block {
  let per_row = p.cols >> 5u;
  let n = p.w_rows * per_row;
  let i = row * per_row + block;
  let scales = n + (n >> 1u);
  let s = signed_bytes4(plane_half(scales, i)).xy;
  let d = f16_of(plane_half(scales + (n >> 3u), i >> 3u));
  return Block(w[i], vec2<u32>(plane_word(n, 2u * i), plane_word(n, 2u * i + 1u)), d * s);
}
fn block4(b: Block, j: u32) -> vec4<f32> {
  let low = (b.q[j >> 1u] >> ((j & 1u) << 2u)) & 0x0f0f0f0fu;
  let high = (b.high[j >> 2u] >> ((j & 3u) << 1u)) & 0x03030303u;
  return (bytes4(low | (high << 4u)) - 32.0) * b.d[j >> 2u];
}

// As integers: weight = scales * byte + offsets, a scale and an offset for each 16 weights.
const HALVES: bool = true;   // whether those of the two halves differ
fn packed4(b: Block, j: u32) -> u32 {
  let low = (b.q[j >> 1u] >> ((j & 1u) << 2u)) & 0x0f0f0f0fu;
  return low | (((b.high[j >> 2u] >> ((j & 3u) << 1u)) & 0x03030303u) << 4u);
}
fn scales(b: Block) -> vec2<f32> { return b.d; }
fn offsets(b: Block) -> vec2<f32> { return -32.0 * b.d; }
