// Reductions over runs of LANES neighbouring invocations by a tree in workgroup memory: the same bits on every run.
// The including file declares WG and LANES, powers of two with LANES <= WG. Call in uniform control flow.
var<workgroup> run_partial: array<f32, WG>;

// What the reductions take as `size`. Call it once, early: it has a barrier that nothing needs to wait for then.
fn run_size(lane: u32) -> u32 { return LANES; }

// Sum of v over the run, given to every invocation of it.
fn run_sum(lane: u32, size: u32, v: f32) -> f32 {
  run_partial[lane] = v;
  for (var n = LANES / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane % LANES < n) { run_partial[lane] += run_partial[lane + n]; }
  }
  workgroupBarrier();
  let all = run_partial[lane - lane % LANES];
  workgroupBarrier();        // the next call may overwrite run_partial
  return all;
}

// Largest v of the run, given to every invocation of it.
fn run_max(lane: u32, size: u32, v: f32) -> f32 {
  run_partial[lane] = v;
  for (var n = LANES / 2u; n > 0u; n /= 2u) {
    workgroupBarrier();
    if (lane % LANES < n) { run_partial[lane] = max(run_partial[lane], run_partial[lane + n]); }
  }
  workgroupBarrier();
  let all = run_partial[lane - lane % LANES];
  workgroupBarrier();
  return all;
}
