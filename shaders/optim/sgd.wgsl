// One step of gradient descent, with momentum or without (Sutskever et al. 2013, ICML, in the form that PyTorch has).
//   g = factor * grad + decay * p
//   sgd            p = p - lr g
//   sgd_momentum   v = momentum v + kept g;   p = p - lr (NESTEROV ? g + momentum v : v)       kept: 1 at first, then 1 - dampening
// Nothing changes where factor is not finite: a step with overflown gradients is left out.
// Grid: one invocation for four numbers, from 4 * first on. weight, grad, v: rows of f32. hyper: see Hyper.
override WG: u32 = 256u;
override NESTEROV: bool = false;
struct Params { size: u32, first: u32 }
struct Hyper { lr: f32, momentum: f32, kept: f32, decay: f32, sign: f32 }
@group(0) @binding(0) var<storage, read> grad: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> factor: array<f32>;
@group(0) @binding(2) var<storage, read> hyper: Hyper;
@group(0) @binding(3) var<storage, read_write> weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> v: array<vec4<f32>>;      // sgd_momentum only
@group(0) @binding(5) var<uniform> p: Params;

fn place(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 { return (wg.y * grid.x + wg.x) * WG + lane; }
fn skipped(j: u32) -> bool { return j >= p.size || (bitcast<u32>(factor[0]) & 0x7f800000u) == 0x7f800000u; }
fn gradient(i: u32) -> vec4<f32> { return grad[i] * (factor[0] * hyper.sign) + hyper.decay * weight[i]; }

@compute @workgroup_size(WG)
fn sgd(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
       @builtin(local_invocation_index) lane: u32) {
  let j = place(wg, grid, lane);
  if (skipped(j)) { return; }
  let i = p.first + j;
  weight[i] -= hyper.lr * gradient(i);
}

@compute @workgroup_size(WG)
fn sgd_momentum(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                @builtin(local_invocation_index) lane: u32) {
  let j = place(wg, grid, lane);
  if (skipped(j)) { return; }
  let i = p.first + j;
  let g = gradient(i);
  let moved = hyper.momentum * v[i] + hyper.kept * g;
  v[i] = moved;
  weight[i] -= hyper.lr * select(moved, g + hyper.momentum * moved, NESTEROV);
}
