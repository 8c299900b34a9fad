// q3_k: 32 three-bit q, a signed 6-bit scale s for each 16 of them; f16 d for every 8 blocks.   weight = d * s * (q - 4)
// Planes for n blocks: low pairs (2n words), high bits (n words), s (n halves, a byte each), d (n / 8 halves).
// include quant/planes.wgsl
struct Block { q: vec2<u32>, high: u32, d: vec2<f32> }
fn load_block(row: u32, block: u32) -> Block {
  let per_row = p.cols >> 5u;
  let n = p.w_rows * per_row;
  let i = row * per_row + block;
  let scales = (n >> 1u) + (n >> 2u);
  let s = signed_bytes4(plane_half(scales, i)).xy;
  let d = f16_of(plane_half(scales + (n >> 3u), i >> 3u));
  return Block(vec2<u32>(plane_word(0u, 2u * i), plane_word(0u, 2u * i + 1u)), plane_word(n >> 1u, i), d * s);
}
fn block4(b: Block, j: u32) -> vec4<f32> {
  let low = (b.q[j >> 2u] >> ((j & 3u) << 1u)) & 0x03030303u;
  return (bytes4(low | (((b.high >> j) & 0x01010101u) << 2u)) - 4.0) * b.d[j >> 2u];
}

// As integers: weight = scales * byte + offsets, a scale and an offset for each 16 weights.
const HALVES: bool = true;   // whether those of the two halves differ
fn packed4(b: Block, j: u32) -> u32 {
  return ((b.q[j >> 2u] >> ((j & 3u) << 1u)) & 0x03030303u) | (((b.high >> j) & 0x01010101u) << 2u);
}
fn scales(b: Block) -> vec2<f32> { return b.d; }
fn offsets(b: Block) -> vec2<f32> { return -4.0 * b.d; }
