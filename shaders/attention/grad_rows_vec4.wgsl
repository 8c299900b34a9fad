// Rows of q, k, v, the result's gradient and, in one buffer, their gradients, four features at a time: D and every stride are multiples of 4.
// `base`: the row's first element. `d`: group of four features, below D4. `which`: 0 q, 1 k, 2 v, 3 dout.
@group(0) @binding(0) var<storage, read> q: array<vec4<Elem>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<KV>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<KV>>;
@group(0) @binding(3) var<storage, read> dout: array<vec4<Elem>>;
@group(0) @binding(6) var<storage, read_write> grads: array<vec4<Elem>>;
fn load(which: u32, base: u32, d: u32) -> vec4<f32> {
  let at = base / 4u + d;
  if (which == 0u) { return vec4<f32>(q[at]); }
  if (which == 1u) { return vec4<f32>(k[at]); }
  if (which == 2u) { return vec4<f32>(v[at]); }
  return vec4<f32>(dout[at]);
}
fn store(base: u32, d: u32, value: vec4<f32>) { grads[base / 4u + d] = vec4<Elem>(value); }
