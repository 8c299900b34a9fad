// bf16: the upper halves of f32 numbers, rows padded with zeros to a multiple of 32. One plane: 4 vec4 a block.
// A block is only its address: block4 reads the numbers when they are asked for.
struct Block { at: u32 }
fn load_block(row: u32, block: u32) -> Block { return Block((row * ((p.cols + 31u) >> 5u) + block) << 2u); }
fn block4(b: Block, j: u32) -> vec4<f32> {
  let v = w[b.at + (j >> 1u)];
  let q = select(v.xy, v.zw, (j & 1u) == 1u);
  return bitcast<vec4<f32>>(vec4<u32>(q.x << 16u, q.x & 0xffff0000u, q.y << 16u, q.y & 0xffff0000u));
}
