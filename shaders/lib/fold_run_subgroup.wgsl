// join over runs of LANES neighbouring invocations: within subgroups by shuffles, then over the run's subgroups in their
// order. Any subgroup size; needs invocations numbered in order within subgroups (probed at start). Otherwise as
// fold_run.wgsl; join must not depend on the order of its two arguments.
var<workgroup> run_partial: array<Acc, WG>;

// The join of the run's values, given to its first invocation.
fn join_run(lane: u32, a: Acc) -> Acc {
  let size = subgroupAdd(1u);            // every invocation is active here
  var all = a;
  for (var n = 1u; n < LANES && n < size; n *= 2u) { all = join(all, subgroupShuffleXor(all, n)); }
  run_partial[lane] = all;
  workgroupBarrier();
  for (var i = lane + size; i < lane - lane % LANES + LANES; i += size) {   // nothing where a subgroup holds the run
    if (lane % LANES == 0u) { all = join(all, run_partial[i]); }
  }
  return all;
}
