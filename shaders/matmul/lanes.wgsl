// Sums over runs of LANES neighbouring invocations, by a tree in workgroup memory: the same order on every run.
// The including file declares WG, LANES (a power of two that divides WG) and SUMS. Call in uniform control flow.
var<workgroup> lanes_partial: array<f32, WG>;

// Each of the SUMS values, summed over the run of LANES invocations; every one of them gets the sums.
fn lanes_sums(lane: u32, values: array<f32, SUMS>) -> array<f32, SUMS> {
  var sums = values;
  for (var i = 0u; i < SUMS; i++) {
    lanes_partial[lane] = sums[i];
    for (var n = LANES / 2u; n > 0u; n /= 2u) {
      workgroupBarrier();
      if (lane % LANES < n) { lanes_partial[lane] += lanes_partial[lane + n]; }
    }
    workgroupBarrier();
    sums[i] = lanes_partial[lane - lane % LANES];
    workgroupBarrier();      // the next value may overwrite lanes_partial
  }
  return sums;
}
