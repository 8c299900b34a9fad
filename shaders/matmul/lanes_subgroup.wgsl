// Sums over runs of LANES neighbouring invocations, by exchanges within subgroups: the same order on every run.
// The including file declares WG, LANES (a power of two that divides WG), WITHIN and SUMS. Call in uniform control flow. Needs
// invocations numbered in order within subgroups (probed at start); a run wider than a subgroup, where WITHIN is not 1, goes on
// in workgroup memory.
var<workgroup> lanes_partial: array<f32, WG>;
var<workgroup> lanes_size: u32;

// Each of the SUMS values, summed over the run of LANES invocations; every one of them gets the sums.
fn lanes_sums(lane: u32, values: array<f32, SUMS>) -> array<f32, SUMS> {
  var sums = values;
  if (WITHIN == 1u) {
    for (var i = 0u; i < SUMS; i++) {
      for (var n = 1u; n < LANES; n *= 2u) { sums[i] += subgroupShuffleXor(sums[i], n); }
    }
    return sums;
  }
  let size = subgroupAdd(1u);            // every invocation is active here
  for (var i = 0u; i < SUMS; i++) {
    for (var n = 1u; n < LANES && n < size; n *= 2u) { sums[i] += subgroupShuffleXor(sums[i], n); }
  }
  if (lane == 0u) { lanes_size = size; }
  if (workgroupUniformLoad(&lanes_size) < LANES) {
    for (var i = 0u; i < SUMS; i++) {
      lanes_partial[lane] = sums[i];
      workgroupBarrier();
      sums[i] = 0.0;
      for (var n = lane - lane % LANES; n <= lane - lane % LANES + LANES - 1u; n += size) { sums[i] += lanes_partial[n]; }
      workgroupBarrier();                // the next value may overwrite lanes_partial
    }
  }
  return sums;
}
