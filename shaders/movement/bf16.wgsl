// bf16, the upper half of an f32, to f32 and back.
//   widen   out = x, x: [size] bf16, two in a word, the first below;   out: [size] f32
//   narrow  out = the nearest bf16, ties to even; NaN stays NaN (its lower bits may have held all that made it one)
// Grid: one invocation for two numbers. The last word of an odd number of bf16 has a zero above.
override WG: u32 = 256u;
struct Params { size: u32 }
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
@group(0) @binding(2) var<uniform> p: Params;

fn rounded(bits: u32) -> u32 {
  let quiet = (bits >> 16u) | 0x40u;
  return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, quiet, (bits & 0x7fffffffu) > 0x7f800000u);
}

@compute @workgroup_size(WG)
fn widen(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
         @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;      // grids past 65535 are folded into y
  if (2u * i >= p.size) { return; }
  let two = x[i];
  out[2u * i] = two << 16u;
  if (2u * i + 1u < p.size) { out[2u * i + 1u] = two & 0xffff0000u; }
}

@compute @workgroup_size(WG)
fn narrow(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (2u * i >= p.size) { return; }
  var high = 0u;
  if (2u * i + 1u < p.size) { high = rounded(x[2u * i + 1u]); }
  out[i] = rounded(x[2u * i]) | (high << 16u);
}
