// Operand b read four values at a time: lines of it are multiples of 4 long.
@group(0) @binding(1) var<storage, read> b: array<vec4<Elem>>;
// Four values of a line from `at` on, a multiple of 4; past the value `last`, the line's last four.
fn b_run(first: u32, line: u32, at: u32, last: u32) -> vec4<f32> {
  return vec4<f32>(b[first / 4u + line * (p.b_step / 4u) + min(at, last) / 4u]);
}
