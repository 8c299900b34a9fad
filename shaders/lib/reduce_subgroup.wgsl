// Reductions over one workgroup: first over each subgroup, then over the subgroups' results in their order.
// Any subgroup size; needs invocations numbered in order within subgroups (probed at start). Otherwise as reduce.wgsl.
var<workgroup> reduce_partial: array<f32, WG>;

// Sum of v over the workgroup, given to every invocation.
fn wg_sum(lane: u32, v: f32) -> f32 {
  let size = subgroupAdd(1u);            // every invocation is active here
  let part = subgroupAdd(v);
  if (lane % size == 0u) { reduce_partial[lane / size] = part; }
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < WG / size; i++) { total += reduce_partial[i]; }
  workgroupBarrier();
  if (lane == 0u) { reduce_partial[0] = total; }
  return workgroupUniformLoad(&reduce_partial[0]);   // with a barrier before and after
}

// Largest v of the workgroup, given to every invocation.
fn wg_max(lane: u32, v: f32) -> f32 {
  let size = subgroupAdd(1u);
  let part = subgroupMax(v);
  if (lane % size == 0u) { reduce_partial[lane / size] = part; }
  workgroupBarrier();
  var top = reduce_partial[0];
  for (var i = 1u; i < WG / size; i++) { top = max(top, reduce_partial[i]); }
  workgroupBarrier();
  if (lane == 0u) { reduce_partial[0] = top; }
  return workgroupUniformLoad(&reduce_partial[0]);
}
