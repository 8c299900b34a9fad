// q8_0: 32 signed bytes q and an f16 scale d.   weight = d * q
// Planes for n blocks: bytes (2n vec4), d (n halves).
// include quant/planes.wgsl
struct Block { q: array<vec4<u32>, 2>, d: f32 }
fn load_block(row: u32, block: u32) -> Block {
  let per_row = p.cols >> 5u;
  let i = row * per_row + block;
  return Block(array<vec4<u32>, 2>(w[2u * i], w[2u * i + 1u]), f16_of(plane_half(2u * p.w_rows * per_row, i)));
}
fn block4(b: Block, j: u32) -> vec4<f32> {
  let q = select(b.q[0], b.q[1], j > 3u);
  return signed_bytes4(q[j & 3u]) * b.d;
}

// As integers: weight = scales * byte + offsets, a scale and an offset for each 16 weights.
const HALVES: bool = false;   // whether those of the two halves differ
fn packed4(b: Block, j: u32) -> u32 { return select(b.q[0], b.q[1], j > 3u)[j & 3u]; }
fn scales(b: Block) -> vec2<f32> { return vec2<f32>(b.d); }
fn offsets(b: Block) -> vec2<f32> { return vec2<f32>(); }
