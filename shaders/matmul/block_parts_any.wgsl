// Parts of sums read value by value: any n.
@group(0) @binding(0) var<storage, read> parts: array<f32>;         // [batches split, m, n]
fn part_four(z: u32, i: u32, j: u32) -> vec4<f32> {
  var v = vec4<f32>();
  let first = (z * p.m + i) * p.n + j;
  for (var c = 0u; c < 4u; c++) { if (j + c < p.n) { v[c] = parts[first + c]; } }
  return v;
}
