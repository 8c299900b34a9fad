// Inner products of blocks of weights with x in f32, for gemv.wgsl and every storage format: part `dots`.
// A block of x is 8 vec4; blocks lie 9 apart, so that neighbouring invocations meet different banks.
const STRIDE: u32 = 9u;
var<workgroup> staged: array<vec4<f32>, CHUNK * TOKENS * STRIDE>;

// Keeps vec4 j of the block of x that lies at `at`; an invocation with `inside` false has none.
fn stage(at: u32, j: u32, value: vec4<f32>, inside: bool) {
  if (inside) { staged[at + j] = value; }
}

// Adds the products of vec4 j. j is a constant wherever it is called, so that a block stays in registers.
fn add_four(block: ptr<function, array<Block, ROWS>>, at: u32, j: u32, sums: ptr<function, array<f32, SUMS>>) {
  for (var r = 0u; r < ROWS; r++) {
    let weight = block4((*block)[r], j);
    for (var t = 0u; t < TOKENS; t++) {
      (*sums)[r * TOKENS + t] = dot4(weight, staged[at + t * CHUNK * STRIDE + j], (*sums)[r * TOKENS + t]);
    }
  }
}

// Adds the products of a block of each row with the block of x that lies at `at` for the first token.
fn add_block(block: ptr<function, array<Block, ROWS>>, at: u32, sums: ptr<function, array<f32, SUMS>>) {
  add_four(block, at, 0u, sums);
  add_four(block, at, 1u, sums);
  add_four(block, at, 2u, sums);
  add_four(block, at, 3u, sums);
  add_four(block, at, 4u, sums);
  add_four(block, at, 5u, sums);
  add_four(block, at, 6u, sums);
  add_four(block, at, 7u, sums);
}
