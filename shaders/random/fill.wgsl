// Pseudo-random contents for benchmarks and made-up models: every word depends on its index and the seed only.
//   hash(v) = the PCG output function on one LCG step (Jarzynski & Olano 2020, "Hash Functions for GPU Rendering")
//   bits(i) = hash(i + hash(seed)),   unit(b) = (b >> 8) / 2^24 in [0, 1)
// Grid: one invocation a word, workgroups folded into y. Words [first, first + count) of out are written; i counts from 0
// at `first`. fill_f16 and fill_bf16 pack two values: bits(2i) in the low half, bits(2i + 1) in the high half.
struct Params { first: u32, count: u32, seed: u32, mask: u32, low: f32, range: f32, low_odd: f32, range_odd: f32 }
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<uniform> p: Params;
const WG = 256u;

fn hash(v: u32) -> u32 {
  let state = v * 747796405u + 2891336453u;
  let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
  return (word >> 22u) ^ word;
}
fn bits(i: u32) -> u32 { return hash(i + hash(p.seed)); }
fn unit(i: u32) -> f32 { return f32(bits(i) >> 8u) * 0x1p-24; }
fn pair(i: u32) -> vec2<f32> {
  return vec2(p.low + p.range * unit(2u * i), p.low_odd + p.range_odd * unit(2u * i + 1u));
}
// The nearest bf16, ties to even, as its 16 bits; v is finite.
fn bf16_bits(v: f32) -> u32 {
  let b = bitcast<u32>(v);
  return (b + 0x7fffu + ((b >> 16u) & 1u)) >> 16u;
}
fn index_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 { return (wg.y * grid.x + wg.x) * WG + lane; }

@compute @workgroup_size(WG)        // out = bits & mask
fn fill_bits(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let i = index_of(wg, grid, lane);
  if (i < p.count) { out[p.first + i] = bits(i) & p.mask; }
}
@compute @workgroup_size(WG)        // an f32 in [low, low + range)
fn fill_f32(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
  let i = index_of(wg, grid, lane);
  if (i < p.count) { out[p.first + i] = bitcast<u32>(p.low + p.range * unit(i)); }
}
@compute @workgroup_size(WG)        // two f16 in [low, low + range] and [low_odd, low_odd + range_odd]
fn fill_f16(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
            @builtin(local_invocation_index) lane: u32) {
  let i = index_of(wg, grid, lane);
  if (i < p.count) { out[p.first + i] = pack2x16float(pair(i)); }
}
@compute @workgroup_size(WG)        // two bf16, likewise
fn fill_bf16(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
             @builtin(local_invocation_index) lane: u32) {
  let i = index_of(wg, grid, lane);
  if (i < p.count) { let v = pair(i); out[p.first + i] = bf16_bits(v.x) | (bf16_bits(v.y) << 16u); }
}
