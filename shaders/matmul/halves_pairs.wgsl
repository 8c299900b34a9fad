// Operands of gemm_matrix.wgsl two halves at a time: rows of every operand and of the result are of even length.
// include matmul/dense_params.wgsl
@group(0) @binding(0) var<storage, read> a: array<vec2<f16>>;
@group(0) @binding(1) var<storage, read> b: array<vec2<f16>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec2<f16>>;   // [batches, m, n / 2] from out_offset / 2 on

const EVEN: u32 = 1u;   // lines are of even length
// Element at + more (both even) and the next one. more: the same in all lanes, so that its half is taken once for all.
// both: whether the next one is part of the row; it always is.
fn a_two(at: u32, more: u32, both: bool) -> vec2<f16> { return a[at / 2u + more / 2u]; }
fn b_two(at: u32, more: u32, both: bool) -> vec2<f16> { return b[at / 2u + more / 2u]; }
fn put_two(at: u32, values: vec2<f32>, both: bool) { out[at / 2u] = vec2<f16>(values); }
