// Zeros in the gaps between tensors that share one buffer.
//   out[start[i] + j] = 0,  j < length[i] <= 64
// Grid: one workgroup a gap. table: [2 * gaps], start and length of each, in words.
struct Params { gaps: u32 }
@group(0) @binding(0) var<storage, read> table: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(64)
fn clear_gaps(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let gap = wg.y * grid.x + wg.x;      // grids past 65535 are folded into y
  if (gap >= p.gaps) { return; }
  if (lane < table[2u * gap + 1u]) { out[table[2u * gap] + lane] = 0u; }
}
