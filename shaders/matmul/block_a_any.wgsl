// Operand a read value by value: lines of any length.
@group(0) @binding(0) var<storage, read> a: array<Elem>;
// Four values of a line from `at` on; past the value `last` it is repeated.
fn a_run(first: u32, line: u32, at: u32, last: u32) -> vec4<f32> {
  let i = first + line * p.a_step;
  return vec4<f32>(f32(a[i + min(at, last)]), f32(a[i + min(at + 1u, last)]), f32(a[i + min(at + 2u, last)]),
                   f32(a[i + min(at + 3u, last)]));
}
