// f32: plain numbers, rows padded with zeros to a multiple of 32. One plane: 8 vec4 a block.
// A block is only its address: block4 reads the numbers when they are asked for.
struct Block { at: u32 }
fn load_block(row: u32, block: u32) -> Block { return Block((row * ((p.cols + 31u) >> 5u) + block) << 3u); }
fn block4(b: Block, j: u32) -> vec4<f32> { return bitcast<vec4<f32>>(w[b.at + j]); }
