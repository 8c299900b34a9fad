// One step of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) or Adam (Kingma & Ba 2015, arXiv:1412.6980).
//   g = factor * grad                      (Adam: + decay * p)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr decay) - lr / c1 * m / (sqrt(v / c2) + eps)          c1 = 1 - beta1^t, c2 = 1 - beta2^t; Adam: no decay here
// Nothing changes where factor is not finite: a step with overflown gradients is left out.
// Grid: one invocation for four numbers, from 4 * first on. p, grad, m, v: rows of f32. hyper: see Hyper. All parameters of a group lie in
// one buffer, so a model is one dispatch.
override WG: u32 = 256u;
override COUPLED: bool = false;   // Adam: decay is part of the gradient
struct Params { size: u32, first: u32 }
struct Hyper { lr: f32, beta1: f32, beta2: f32, eps: f32, decay: f32, c1: f32, c2: f32, sign: f32 }
@group(0) @binding(0) var<storage, read> grad: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> factor: array<f32>;
@group(0) @binding(2) var<storage, read> hyper: Hyper;
@group(0) @binding(3) var<storage, read_write> weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> m: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> v: array<vec4<f32>>;
@group(0) @binding(6) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn adam(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let j = (wg.y * grid.x + wg.x) * WG + lane;      // grids past 65535 are folded into y
  let i = p.first + j;
  if (j >= p.size || (bitcast<u32>(factor[0]) & 0x7f800000u) == 0x7f800000u) { return; }
  let h = hyper;
  let w = weight[i];
  var g = grad[i] * (factor[0] * h.sign);
  if (COUPLED) { g += h.decay * w; }
  let m_new = h.beta1 * m[i] + (1.0 - h.beta1) * g;
  let v_new = h.beta2 * v[i] + (1.0 - h.beta2) * g * g;
  m[i] = m_new;
  v[i] = v_new;
  let kept = select(w * (1.0 - h.lr * h.decay), w, COUPLED);
  weight[i] = kept - (h.lr / h.c1) * m_new / (sqrt(v_new / h.c2) + h.eps);
}
