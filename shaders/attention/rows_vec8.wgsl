// Rows of k and v in f16, read eight features at a time, q and out four: D and the strides of k and v are multiples of 8.
// For kernels that read k and v by load_k2 and load_v2 only. `base`: the row's first element.
@group(0) @binding(0) var<storage, read> q: array<vec4<Elem>>;
@group(0) @binding(1) var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> v: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<Elem>>;
fn load_q(base: u32, d: u32) -> vec4<f32> { return vec4<f32>(q[base / 4u + d]); }
fn store_out(base: u32, d: u32, value: vec4<f32>) { out[base / 4u + d] = vec4<Elem>(value); }
fn eight(x: vec4<u32>) -> array<vec4<f32>, 2> {
  return array<vec4<f32>, 2>(vec4<f32>(unpack2x16float(x.x), unpack2x16float(x.y)),
                             vec4<f32>(unpack2x16float(x.z), unpack2x16float(x.w)));
}
fn load_k2(base: u32, o: u32) -> array<vec4<f32>, 2> { return eight(k[base / 8u + o]); }
fn load_v2(base: u32, o: u32) -> array<vec4<f32>, 2> { return eight(v[base / 8u + o]); }
