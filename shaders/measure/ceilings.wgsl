// What a device can do at most: kernels whose time is bytes, arithmetic or a launch, and nothing else (gpu/ceilings.py).
// copy: out = x, SPAN vectors an invocation. Grid: one workgroup for WG * SPAN vectors.
// multiply_add: eight independent chains v = v * scale + shift of p.rounds * 4 steps, from i + 4 j + (0, 1, 2, 3) for
//   chain j of invocation i: all different, so that a compiler has to compute each. out[i] is their sum. An invocation
//   does 128 multiply-adds a round. Grid: ceil(n / WG).
// tick: out[0] += 1. Each dispatch depends on the one before. Grid: 1.
override WG: u32 = 256u;
override SPAN: u32 = 4u;
override FUSED: u32 = 1u;  // 1: fma(); 0: a product and a sum, which the driver may join
struct Params { n: u32, rounds: u32, scale: f32, shift: f32 }
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(2) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn copy(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let start = (wg.y * grid.x + wg.x) * WG * SPAN + lane;
  for (var s = 0u; s < SPAN; s++) {
    let i = start + s * WG;
    if (i < p.n) { out[i] = x[i]; }
  }
}

fn add_scaled(v: vec4<f32>, a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
  if (FUSED == 1u) { return fma(v, a, b); }
  return v * a + b;
}

@compute @workgroup_size(WG)
fn multiply_add(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i >= p.n) { return; }
  let a = vec4(p.scale);
  let b = vec4(p.shift);
  let first = f32(i);
  var v0 = vec4(first) + vec4(0.0, 1.0, 2.0, 3.0);
  var v1 = vec4(first) + vec4(4.0, 5.0, 6.0, 7.0);
  var v2 = vec4(first) + vec4(8.0, 9.0, 10.0, 11.0);
  var v3 = vec4(first) + vec4(12.0, 13.0, 14.0, 15.0);
  var v4 = vec4(first) + vec4(16.0, 17.0, 18.0, 19.0);
  var v5 = vec4(first) + vec4(20.0, 21.0, 22.0, 23.0);
  var v6 = vec4(first) + vec4(24.0, 25.0, 26.0, 27.0);
  var v7 = vec4(first) + vec4(28.0, 29.0, 30.0, 31.0);
  for (var r = 0u; r < p.rounds; r++) {
    v0 = add_scaled(v0, a, b); v1 = add_scaled(v1, a, b); v2 = add_scaled(v2, a, b); v3 = add_scaled(v3, a, b);
    v4 = add_scaled(v4, a, b); v5 = add_scaled(v5, a, b); v6 = add_scaled(v6, a, b); v7 = add_scaled(v7, a, b);
    v0 = add_scaled(v0, a, b); v1 = add_scaled(v1, a, b); v2 = add_scaled(v2, a, b); v3 = add_scaled(v3, a, b);
    v4 = add_scaled(v4, a, b); v5 = add_scaled(v5, a, b); v6 = add_scaled(v6, a, b); v7 = add_scaled(v7, a, b);
    v0 = add_scaled(v0, a, b); v1 = add_scaled(v1, a, b); v2 = add_scaled(v2, a, b); v3 = add_scaled(v3, a, b);
    v4 = add_scaled(v4, a, b); v5 = add_scaled(v5, a, b); v6 = add_scaled(v6, a, b); v7 = add_scaled(v7, a, b);
    v0 = add_scaled(v0, a, b); v1 = add_scaled(v1, a, b); v2 = add_scaled(v2, a, b); v3 = add_scaled(v3, a, b);
    v4 = add_scaled(v4, a, b); v5 = add_scaled(v5, a, b); v6 = add_scaled(v6, a, b); v7 = add_scaled(v7, a, b);
  }
  out[i] = ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7));
}

@compute @workgroup_size(1)
fn tick() { out[0] += vec4(1.0); }
