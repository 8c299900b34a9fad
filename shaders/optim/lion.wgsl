// One step of Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2).
//   g = factor * grad;   p = p (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g);   m = beta2 m + (1 - beta2) g
// Nothing changes where factor is not finite. Grid: one invocation for four numbers, from 4 * first on. Rows of f32.
override WG: u32 = 256u;
struct Params { size: u32, first: u32 }
struct Hyper { lr: f32, beta1: f32, beta2: f32, decay: f32 }
@group(0) @binding(0) var<storage, read> grad: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> factor: array<f32>;
@group(0) @binding(2) var<storage, read> hyper: Hyper;
@group(0) @binding(3) var<storage, read_write> weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> m: array<vec4<f32>>;
@group(0) @binding(5) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn lion(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let j = (wg.y * grid.x + wg.x) * WG + lane;      // grids past 65535 are folded into y
  if (j >= p.size || (bitcast<u32>(factor[0]) & 0x7f800000u) == 0x7f800000u) { return; }
  let i = p.first + j;
  let h = hyper;
  let g = grad[i] * factor[0];
  weight[i] = weight[i] * (1.0 - h.lr * h.decay) - h.lr * sign(h.beta1 * m[i] + (1.0 - h.beta1) * g);
  m[i] = h.beta2 * m[i] + (1.0 - h.beta2) * g;
}
