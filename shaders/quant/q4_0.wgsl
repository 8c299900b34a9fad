// q4_0: 32 nibbles q and an f16 scale d.   weight = d * (q - 8)
// Planes for n blocks: nibbles (n vec4), d (n halves).
// include quant/planes.wgsl
struct Block { q: vec4<u32>, d: f32 }
fn load_block(row: u32, block: u32) -> Block {
  let per_row = p.cols >> 5u;
  let i = row * per_row + block;
  return Block(w[i], f16_of(plane_half(p.w_rows * per_row, i)));
}
fn block4(b: Block, j: u32) -> vec4<f32> {
  return (bytes4((b.q[j >> 1u] >> ((j & 1u) << 2u)) & 0x0f0f0f0fu) - 8.0) * b.d;
}

// As integers: weight = scales * byte + offsets, a scale and an offset for each 16 weights.
const HALVES: bool = false;   // whether those of the two halves differ
fn packed4(b: Block, j: u32) -> u32 { return (b.q[j >> 1u] >> ((j & 1u) << 2u)) & 0x0f0f0f0fu; }
fn scales(b: Block) -> vec2<f32> { return vec2<f32>(b.d); }
fn offsets(b: Block) -> vec2<f32> { return vec2<f32>(-8.0 * b.d); }
