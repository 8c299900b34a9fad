// Shared by the products with a weight matrix (row.wgsl, row_broadcast.wgsl, gemv.wgsl, gemm_weight.wgsl): what they bind,
// and what becomes of a finished product y[t, n] = sum_k x[t, k] W[n, k].
// w: a window of W's rows in the storage format of the part; x: [tokens, K rounded up to 32] f32, zeros at the end of a row.
// include quant/q8_0.wgsl as format
// include matmul/gated.wgsl
// include rope/qkv.wgsl
const GELU: u32 = 0u;          // the gate's activation: 0 SiLU, 1 GELU by tanh
struct Params {
  tokens: u32, cols: u32, w_rows: u32, row0: u32,   // rows of x; K; rows of W here, and the first one's place in out
  out_cols: u32, eps: f32,                          // width of out; added to mean(x^2)
  heads: u32, kv_heads: u32, head_dim: u32, rotated: u32, context: u32, table_rows: u32,   // norm_qkv_rope only
}
@group(0) @binding(0) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> gain: array<vec4<f32>>;        // [K], norm entries
@group(0) @binding(3) var<storage, read> bias: array<f32>;              // [out_cols]
@group(0) @binding(4) var<storage, read> residual: array<f32>;          // [tokens, out_cols]
@group(0) @binding(5) var<storage, read> rope: array<vec2<f32>>;        // [table_rows, rotated/2] of (cos, sin)
@group(0) @binding(6) var<storage, read> step: Step;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;         // [tokens, out_cols]
@group(0) @binding(8) var<storage, read_write> k_cache: array<KV>;      // [context, kv_heads * head_dim]
@group(0) @binding(9) var<storage, read_write> v_cache: array<KV>;
@group(0) @binding(10) var<uniform> p: Params;

fn blocks() -> u32 { return (p.cols + 31u) >> 5u; }
fn dot4(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
  return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
fn inv_rms(squares: f32) -> f32 { return inverseSqrt(squares / f32(p.cols) + p.eps); }
