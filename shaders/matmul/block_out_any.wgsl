// The result written value by value: any n.
@group(0) @binding(2) var<storage, read> bias: array<Elem>;              // [n], matmul_bias only
@group(0) @binding(3) var<storage, read_write> out: array<Out>;          // [batches, m, n] from out_offset on
fn bias_four(j: u32) -> vec4<f32> {
  var v = vec4<f32>();
  for (var c = 0u; c < 4u; c++) { if (j + c < p.n) { v[c] = f32(bias[j + c]); } }
  return v;
}
fn put_four(z: u32, i: u32, j: u32, v: vec4<f32>) {
  if (i >= p.m) { return; }
  let row = z * p.m + i;
  let at = p.out_offset + row * p.n + j;
  if (j < p.n) { out[at] = Out(epilogue(v.x, row, j)); }
  if (j + 1u < p.n) { out[at + 1u] = Out(epilogue(v.y, row, j + 1u)); }
  if (j + 2u < p.n) { out[at + 2u] = Out(epilogue(v.z, row, j + 2u)); }
  if (j + 3u < p.n) { out[at + 3u] = Out(epilogue(v.w, row, j + 3u)); }
}
