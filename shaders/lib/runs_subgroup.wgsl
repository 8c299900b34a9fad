// Reductions over runs of LANES neighbouring invocations: within subgroups by shuffles, then over the run's subgroups in
// their order. Any subgroup size; needs invocations numbered in order within subgroups (probed at start). Otherwise as
// runs.wgsl.
var<workgroup> run_partial: array<f32, WG>;
var<workgroup> run_subgroup: u32;

// The subgroup size, uniform over the workgroup. Call it once, early: nothing needs to wait for its barrier then.
fn run_size(lane: u32) -> u32 {
  let size = subgroupAdd(1u);            // every invocation is active here
  if (lane == 0u) { run_subgroup = size; }
  return workgroupUniformLoad(&run_subgroup);
}

// Sum of v over the run, given to every invocation of it.
fn run_sum(lane: u32, size: u32, v: f32) -> f32 {
  var all = v;
  if (LANES <= size) {
    for (var n = 1u; n < LANES; n *= 2u) { all += subgroupShuffleXor(all, n); }
    return all;
  }
  let part = subgroupAdd(v);
  if (lane % size == 0u) { run_partial[lane / size] = part; }
  workgroupBarrier();
  let first = (lane / LANES) * (LANES / size);
  all = run_partial[first];
  for (var i = 1u; i < LANES / size; i++) { all += run_partial[first + i]; }
  workgroupBarrier();                    // the next call may overwrite run_partial
  return all;
}

// Largest v of the run, given to every invocation of it.
fn run_max(lane: u32, size: u32, v: f32) -> f32 {
  var all = v;
  if (LANES <= size) {
    for (var n = 1u; n < LANES; n *= 2u) { all = max(all, subgroupShuffleXor(all, n)); }
    return all;
  }
  let part = subgroupMax(v);
  if (lane % size == 0u) { run_partial[lane / size] = part; }
  workgroupBarrier();
  let first = (lane / LANES) * (LANES / size);
  all = run_partial[first];
  for (var i = 1u; i < LANES / size; i++) { all = max(all, run_partial[first + i]); }
  workgroupBarrier();
  return all;
}
