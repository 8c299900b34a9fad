// Reductions over one workgroup by a tree in workgroup memory: the same order, so the same bits, on every run.
// The including file declares WG (invocations, a power of two) before the include. Call in uniform control flow.
var<workgroup> reduce_partial: array<f32, WG>;

// Sum of v over the workgroup, given to every invocation.
fn wg_sum(lane: u32, v: f32) -> f32 {
  reduce_partial[lane] = v;
  for (var n = WG / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane < n) { reduce_partial[lane] += reduce_partial[lane + n]; }
  }
  return workgroupUniformLoad(&reduce_partial[0]);   // with a barrier before and after
}

// Largest v of the workgroup, given to every invocation.
fn wg_max(lane: u32, v: f32) -> f32 {
  reduce_partial[lane] = v;
  for (var n = WG / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane < n) { reduce_partial[lane] = max(reduce_partial[lane], reduce_partial[lane + n]); }
  }
  return workgroupUniformLoad(&reduce_partial[0]);
}
