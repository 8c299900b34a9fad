// Lines of halves of odd length, copied to lines that are one longer and end in a zero: then they can be read in pairs.
//   out[l, c] = x[l, c] for c < length, 0 behind;   x: [lines, length], out: [lines, length + 1], length odd
// Grid: one invocation for two halves of out.
override WG: u32 = 256u;
struct Params { lines: u32, length: u32 }
@group(0) @binding(0) var<storage, read> x: array<f16>;
@group(0) @binding(1) var<storage, read_write> out: array<vec2<f16>>;
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn even_lines(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;      // grids past 65535 are folded into y
  let pairs = p.length / 2u + 1u;
  if (i >= p.lines * pairs) { return; }
  let c = i % pairs * 2u;
  let at = i / pairs * p.length + c;
  var two = vec2<f16>(x[at], 0.0h);
  if (c + 1u < p.length) { two.y = x[at + 1u]; }
  out[i] = two;
}
