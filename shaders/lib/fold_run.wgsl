// join over runs of LANES neighbouring invocations, by a tree in workgroup memory: the same bits on every run.
// The including file declares Acc, join, WG and LANES, powers of two with LANES <= WG. Call in uniform control flow.
var<workgroup> run_partial: array<Acc, WG>;

// The join of the run's values, given to its first invocation.
fn join_run(lane: u32, a: Acc) -> Acc {
  run_partial[lane] = a;
  for (var n = LANES / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane % LANES < n) { run_partial[lane] = join(run_partial[lane], run_partial[lane + n]); }
  }
  return run_partial[lane];
}
