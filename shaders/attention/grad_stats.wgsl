// What the gradients of attention need of each query row: stats[b,h,i] = (lse[b,h,i], sum_d dout[b,h,i,d] out[b,h,i,d]).
// LANES invocations a row, added up in a tree. Grid: ceil(rows / (64 / LANES)) workgroups, folded into y.
// dout, out: (batch, heads, q_len) rows of d features; strides in Params, in elements.
alias Elem = f32;          // type of dout and out
const LANES: u32 = 8u;     // invocations a row, a power of two
struct Params {
  rows: u32, d: u32, heads: u32, q_len: u32,           // rows: batch * heads * q_len
  dout_batch: u32, dout_head: u32, dout_row: u32,
  out_batch: u32, out_head: u32, out_row: u32,
}
@group(0) @binding(0) var<storage, read> dout: array<Elem>;
@group(0) @binding(1) var<storage, read> out: array<Elem>;
@group(0) @binding(2) var<storage, read> lse: array<f32>;
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;
@group(0) @binding(4) var<uniform> p: Params;
var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn attention_grad_stats(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                        @builtin(local_invocation_index) lane: u32) {
  let row = (wg.y * grid.x + wg.x) * (64u / LANES) + lane / LANES;
  let at = min(row, p.rows - 1u);                      // nobody leaves early: the tree needs everyone
  let batch = at / (p.heads * p.q_len);
  let head = at / p.q_len % p.heads;
  let d_base = batch * p.dout_batch + head * p.dout_head + at % p.q_len * p.dout_row;
  let o_base = batch * p.out_batch + head * p.out_head + at % p.q_len * p.out_row;
  var sum = 0.0;
  for (var e = lane % LANES; e < p.d; e += LANES) { sum += f32(dout[d_base + e]) * f32(out[o_base + e]); }
  sums[lane] = sum;
  for (var n = LANES / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane % LANES < n) { sums[lane] += sums[lane + n]; }
  }
  if (lane % LANES == 0u && row < p.rows) { stats[row] = vec2<f32>(lse[row], sums[lane]); }
}
