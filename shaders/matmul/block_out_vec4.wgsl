// The result written four values at a time: n is a multiple of 4.
@group(0) @binding(2) var<storage, read> bias: array<vec4<Elem>>;        // [n], matmul_bias only
@group(0) @binding(3) var<storage, read_write> out: array<vec4<Out>>;    // [batches, m, n] from out_offset on
fn bias_four(j: u32) -> vec4<f32> {
  if (j >= p.n) { return vec4<f32>(); }
  return vec4<f32>(bias[j / 4u]);
}
fn put_four(z: u32, i: u32, j: u32, v: vec4<f32>) {
  if (i >= p.m || j >= p.n) { return; }
  let row = z * p.m + i;
  let done = vec4<f32>(epilogue(v.x, row, j), epilogue(v.y, row, j + 1u), epilogue(v.z, row, j + 2u), epilogue(v.w, row, j + 3u));
  out[(p.out_offset + row * p.n + j) / 4u] = vec4<Out>(done);
}
