// Rows of q, k, v and out read one feature at a time: any D, any stride. Features at and past D read as zero.
// `base`: the row's first element. `d`: group of four features, below D4.
@group(0) @binding(0) var<storage, read> q: array<Elem>;
@group(0) @binding(1) var<storage, read> k: array<KV>;
@group(0) @binding(2) var<storage, read> v: array<KV>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;
fn load_q(base: u32, d: u32) -> vec4<f32> {
  let e = 4u * d;
  var four = vec4<f32>(f32(q[base + e]), 0.0, 0.0, 0.0);
  if (e + 1u < D) { four.y = f32(q[base + e + 1u]); }
  if (e + 2u < D) { four.z = f32(q[base + e + 2u]); }
  if (e + 3u < D) { four.w = f32(q[base + e + 3u]); }
  return four;
}
fn load_k(base: u32, d: u32) -> vec4<f32> {
  let e = 4u * d;
  var four = vec4<f32>(f32(k[base + e]), 0.0, 0.0, 0.0);
  if (e + 1u < D) { four.y = f32(k[base + e + 1u]); }
  if (e + 2u < D) { four.z = f32(k[base + e + 2u]); }
  if (e + 3u < D) { four.w = f32(k[base + e + 3u]); }
  return four;
}
fn load_v(base: u32, d: u32) -> vec4<f32> {
  let e = 4u * d;
  var four = vec4<f32>(f32(v[base + e]), 0.0, 0.0, 0.0);
  if (e + 1u < D) { four.y = f32(v[base + e + 1u]); }
  if (e + 2u < D) { four.z = f32(v[base + e + 2u]); }
  if (e + 3u < D) { four.w = f32(v[base + e + 3u]); }
  return four;
}
fn store_out(base: u32, d: u32, value: vec4<f32>) {
  let e = 4u * d;
  out[base + e] = Elem(value.x);
  if (e + 1u < D) { out[base + e + 1u] = Elem(value.y); }
  if (e + 2u < D) { out[base + e + 2u] = Elem(value.z); }
  if (e + 3u < D) { out[base + e + 3u] = Elem(value.w); }
}
// Two neighbouring groups of features of a key or value: 2 o and 2 o + 1 (where D4 is odd, the last one once more).
fn load_k2(base: u32, o: u32) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(load_k(base, 2u * o), load_k(base, min(2u * o + 1u, D4 - 1u)));
}
fn load_v2(base: u32, o: u32) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(load_v(base, 2u * o), load_v(base, min(2u * o + 1u, D4 - 1u)));
}
