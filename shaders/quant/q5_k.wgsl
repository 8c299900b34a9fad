// q5_k: 32 five-bit q, a 6-bit scale s and minimum t; f16 d and e for every 8 blocks.   weight = d * s * q - e * t
// Planes for n blocks: nibbles (n vec4), high bits (n words), s and t (n halves, a byte each), d and e (n / 8 words).
// include quant/planes.wgsl
struct Block { q: vec4<u32>, high: u32, d: f32, m: f32 }
fn load_block(row: u32, block: u32) -> Block {
  let per_row = p.cols >> 5u;
  let n = p.w_rows * per_row;
  let i = row * per_row + block;
  let scales = n + (n >> 2u);
  let s = plane_half(scales, i);
  let d = unpack2x16float(plane_word(scales + (n >> 3u), i >> 3u));
  return Block(w[i], plane_word(n, i), d.x * f32(s & 255u), d.y * f32((s >> 8u) & 255u));
}
fn block4(b: Block, j: u32) -> vec4<f32> {
  let low = (b.q[j >> 1u] >> ((j & 1u) << 2u)) & 0x0f0f0f0fu;
  return bytes4(low | (((b.high >> j) & 0x01010101u) << 4u)) * b.d - b.m;
}

// As integers: weight = scales * byte + offsets, a scale and an offset for each 16 weights.
const HALVES: bool = false;   // whether those of the two halves differ
fn packed4(b: Block, j: u32) -> u32 {
  return ((b.q[j >> 1u] >> ((j & 1u) << 2u)) & 0x0f0f0f0fu) | (((b.high >> j) & 0x01010101u) << 4u);
}
fn scales(b: Block) -> vec2<f32> { return vec2<f32>(b.d); }
fn offsets(b: Block) -> vec2<f32> { return vec2<f32>(-b.m); }
