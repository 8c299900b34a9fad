// Operands of gemm_matrix.wgsl half by half: rows may have any length.
// include matmul/dense_params.wgsl
@group(0) @binding(0) var<storage, read> a: array<f16>;
@group(0) @binding(1) var<storage, read> b: array<f16>;
@group(0) @binding(3) var<storage, read_write> out: array<f16>;   // [batches, m, n] from out_offset on

const EVEN: u32 = 0u;   // lines are of any length
// Element at + more and, where both are part of their row, the next one; else 0 in its place.
fn a_two(at: u32, more: u32, both: bool) -> vec2<f16> {
  var two = vec2<f16>(a[at + more], 0.0h);
  if (both) { two.y = a[at + more + 1u]; }
  return two;
}
fn b_two(at: u32, more: u32, both: bool) -> vec2<f16> {
  var two = vec2<f16>(b[at + more], 0.0h);
  if (both) { two.y = b[at + more + 1u]; }
  return two;
}
fn put_two(at: u32, values: vec2<f32>, both: bool) {
  out[at] = f16(values.x);
  if (both) { out[at + 1u] = f16(values.y); }
}
