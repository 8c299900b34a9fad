// Operands of gemm_matrix.wgsl two halves at a time, for results with rows of odd length: those are written half by half.
// include matmul/dense_params.wgsl
@group(0) @binding(0) var<storage, read> a: array<vec2<f16>>;
@group(0) @binding(1) var<storage, read> b: array<vec2<f16>>;
@group(0) @binding(3) var<storage, read_write> out: array<f16>;   // [batches, m, n] from out_offset on

const EVEN: u32 = 1u;   // lines are of even length
fn a_two(at: u32, more: u32, both: bool) -> vec2<f16> { return a[at / 2u + more / 2u]; }
fn b_two(at: u32, more: u32, both: bool) -> vec2<f16> { return b[at / 2u + more / 2u]; }
fn put_two(at: u32, values: vec2<f32>, both: bool) {
  out[at] = f16(values.x);
  if (both) { out[at + 1u] = f16(values.y); }
}
