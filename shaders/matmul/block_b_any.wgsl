// Operand b read value by value: lines of any length.
@group(0) @binding(1) var<storage, read> b: array<Elem>;
// Four values of a line from `at` on; past the value `last` it is repeated.
fn b_run(first: u32, line: u32, at: u32, last: u32) -> vec4<f32> {
  let i = first + line * p.b_step;
  return vec4<f32>(f32(b[i + min(at, last)]), f32(b[i + min(at + 1u, last)]), f32(b[i + min(at + 2u, last)]),
                   f32(b[i + min(at + 3u, last)]));
}
