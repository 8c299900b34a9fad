// What gemm.wgsl, gemm_serial.wgsl and gemm_matrix.wgsl share: out[z, i, j] = sum_k A[z, i, k] B[z, k, j] (+ bias[j]).
// An element of A lies at a_offset + its batch's place + i * a_row + k * a_col, so a transposed operand is a matter of strides;
// B likewise. A batch z counts through size_1 inner and then outer indices, whose strides are 0 where an operand repeats.
alias Elem = f32;          // type of a, b, bias, out; sums are f32
struct Params {
  m: u32, n: u32, k: u32, batches: u32, size_1: u32,
  a_offset: u32, a_row: u32, a_col: u32, a_batch_0: u32, a_batch_1: u32,
  b_offset: u32, b_row: u32, b_col: u32, b_batch_0: u32, b_batch_1: u32,
  out_offset: u32,
}
@group(0) @binding(2) var<storage, read> bias: array<Elem>;        // [n], matmul_bias only
@group(0) @binding(4) var<uniform> p: Params;

fn epilogue(value: f32, row: u32, col: u32) -> f32 { return value; }   // slot: row counts through all batches

fn a_base(z: u32) -> u32 { return p.a_offset + (z / p.size_1) * p.a_batch_0 + (z % p.size_1) * p.a_batch_1; }
fn b_base(z: u32) -> u32 { return p.b_offset + (z / p.size_1) * p.b_batch_0 + (z % p.size_1) * p.b_batch_1; }
