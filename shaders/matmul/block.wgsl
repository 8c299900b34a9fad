// Shared by the kernels that make blocks of a dense matrix product (gemm_block.wgsl, gemm_sum.wgsl). Where an operand lies
// along k in storage, its step leads from one row or column of the product to the next; otherwise from one k to the next.
// A batch z counts through size_1 inner and then outer indices, whose strides are 0 where an operand repeats.
alias Elem = f32;          // type of a, b, bias
alias Out = f32;           // type of out: Elem, or f32 for parts of sums
struct Params {
  m: u32, n: u32, k: u32, batches: u32, size_1: u32, split: u32, k_part: u32,
  a_offset: u32, a_step: u32, a_batch_0: u32, a_batch_1: u32,
  b_offset: u32, b_step: u32, b_batch_0: u32, b_batch_1: u32,
  out_offset: u32,
}
@group(0) @binding(4) var<uniform> p: Params;

fn epilogue(value: f32, row: u32, col: u32) -> f32 { return value; }   // slot: row counts through all batches

fn a_base(z: u32) -> u32 { return p.a_offset + (z / p.size_1) * p.a_batch_0 + (z % p.size_1) * p.a_batch_1; }
fn b_base(z: u32) -> u32 { return p.b_offset + (z / p.size_1) * p.b_batch_0 + (z % p.size_1) * p.b_batch_1; }
