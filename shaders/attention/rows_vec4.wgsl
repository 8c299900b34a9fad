// Rows of q, k, v and out read four features at a time: D and every stride are multiples of 4.
// `base`: the row's first element. `d`: group of four features, below D4.
@group(0) @binding(0) var<storage, read> q: array<vec4<Elem>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<KV>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<KV>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<Elem>>;
fn load_q(base: u32, d: u32) -> vec4<f32> { return vec4<f32>(q[base / 4u + d]); }
fn load_k(base: u32, d: u32) -> vec4<f32> { return vec4<f32>(k[base / 4u + d]); }
fn load_v(base: u32, d: u32) -> vec4<f32> { return vec4<f32>(v[base / 4u + d]); }
fn store_out(base: u32, d: u32, value: vec4<f32>) { out[base / 4u + d] = vec4<Elem>(value); }
// Two neighbouring groups of features of a key or value: 2 o and 2 o + 1 (where D4 is odd, the last one once more).
fn load_k2(base: u32, o: u32) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(load_k(base, 2u * o), load_k(base, min(2u * o + 1u, D4 - 1u)));
}
fn load_v2(base: u32, o: u32) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(load_v(base, 2u * o), load_v(base, min(2u * o + 1u, D4 - 1u)));
}
