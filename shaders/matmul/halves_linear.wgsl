// Operands of gemm_matrix.wgsl for products with stored weights: rows of halves in, f32 out, each row times its own scale.
//   out[i, first_col + j] = scales[i] * sum_k A[i, k] B[j, k]
// a: [m, k], b: [n, k], k even; out: [m, out_cols] f32; scales: [m] f32.
alias Elem = f16;
struct Params {
  m: u32, n: u32, k: u32, batches: u32, out_offset: u32, out_cols: u32, first_col: u32,
  a_row: u32, a_col: u32, b_row: u32, b_col: u32,
}
@group(0) @binding(0) var<storage, read> a: array<vec2<f16>>;
@group(0) @binding(1) var<storage, read> b: array<vec2<f16>>;
@group(0) @binding(2) var<storage, read> bias: array<Elem>;   // matmul_bias only, which is not used here
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<uniform> p: Params;
@group(0) @binding(5) var<storage, read> scales: array<f32>;

const EVEN: u32 = 1u;   // lines are of even length
fn epilogue(value: f32, row: u32, col: u32) -> f32 { return value * scales[row]; }
fn a_base(z: u32) -> u32 { return 0u; }
fn b_base(z: u32) -> u32 { return 0u; }
fn a_two(at: u32, more: u32, both: bool) -> vec2<f16> { return a[at / 2u + more / 2u]; }
fn b_two(at: u32, more: u32, both: bool) -> vec2<f16> { return b[at / 2u + more / 2u]; }
fn put_two(at: u32, values: vec2<f32>, both: bool) {
  let i = at / p.n * p.out_cols + p.first_col + at % p.n;
  out[i] = values.x;
  if (both) { out[i + 1u] = values.y; }
}
