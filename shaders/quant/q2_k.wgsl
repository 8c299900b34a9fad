// q2_k: 32 two-bit q, a 4-bit scale s and minimum t for each 16 of them; f16 d and e for every 8 blocks.
//   weight = d * s * q - e * t
// Planes for n blocks: pairs (2n words), s and t (n halves, a nibble each), d and e (n / 8 words).
// include quant/planes.wgsl
struct Block { q: vec2<u32>, d: vec2<f32>, m: vec2<f32> }
fn load_block(row: u32, block: u32) -> Block {
  let per_row = p.cols >> 5u;
  let n = p.w_rows * per_row;
  let i = row * per_row + block;
  let s = vec2<u32>(plane_half(n >> 1u, i)) >> vec2<u32>(0u, 8u);
  let d = unpack2x16float(plane_word((n >> 1u) + (n >> 3u), i >> 3u));
  let scale = vec2<f32>(s & vec2<u32>(15u));
  let minimum = vec2<f32>((s >> vec2<u32>(4u)) & vec2<u32>(15u));
  return Block(vec2<u32>(plane_word(0u, 2u * i), plane_word(0u, 2u * i + 1u)), d.x * scale, d.y * minimum);
}
fn block4(b: Block, j: u32) -> vec4<f32> {
  return bytes4((b.q[j >> 2u] >> ((j & 3u) << 1u)) & 0x03030303u) * b.d[j >> 2u] - b.m[j >> 2u];
}

// As integers: weight = scales * byte + offsets, a scale and an offset for each 16 weights.
const HALVES: bool = true;   // whether those of the two halves differ
fn packed4(b: Block, j: u32) -> u32 { return (b.q[j >> 2u] >> ((j & 3u) << 1u)) & 0x03030303u; }
fn scales(b: Block) -> vec2<f32> { return b.d; }
fn offsets(b: Block) -> vec2<f32> { return -b.m; }
