// Rows of q, k, v, the result's gradient and, in one buffer, their gradients, one feature at a time: any D, any stride. Features at and past D
// read as zero. `base`: the row's first element. `d`: group of four features, below D4. `which`: 0 q, 1 k, 2 v, 3 dout.
@group(0) @binding(0) var<storage, read> q: array<Elem>;
@group(0) @binding(1) var<storage, read> k: array<KV>;
@group(0) @binding(2) var<storage, read> v: array<KV>;
@group(0) @binding(3) var<storage, read> dout: array<Elem>;
@group(0) @binding(6) var<storage, read_write> grads: array<Elem>;
fn one(which: u32, at: u32) -> f32 {
  if (which == 0u) { return f32(q[at]); }
  if (which == 1u) { return f32(k[at]); }
  if (which == 2u) { return f32(v[at]); }
  return f32(dout[at]);
}
fn load(which: u32, base: u32, d: u32) -> vec4<f32> {
  let e = 4u * d;
  var four = vec4<f32>(one(which, base + e), 0.0, 0.0, 0.0);
  if (e + 1u < D) { four.y = one(which, base + e + 1u); }
  if (e + 2u < D) { four.z = one(which, base + e + 2u); }
  if (e + 3u < D) { four.w = one(which, base + e + 3u); }
  return four;
}
fn store(base: u32, d: u32, value: vec4<f32>) {
  let e = 4u * d;
  for (var i = 0u; i < min(4u, D - e); i++) { grads[base + e + i] = Elem(value[i]); }
}
