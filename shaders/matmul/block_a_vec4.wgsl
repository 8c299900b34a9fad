// Operand a read four values at a time: lines of it are multiples of 4 long.
@group(0) @binding(0) var<storage, read> a: array<vec4<Elem>>;
// Four values of a line from `at` on, a multiple of 4; past the value `last`, the line's last four.
fn a_run(first: u32, line: u32, at: u32, last: u32) -> vec4<f32> {
  return vec4<f32>(a[first / 4u + line * (p.a_step / 4u) + min(at, last) / 4u]);
}
