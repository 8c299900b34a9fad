// Rotary position embedding as rope/rope.wgsl, four features at a time: head_dim and the pairs of a head that are four
// neighbours in memory come in fours (INTERLEAVED 0: rotated a multiple of 8; 1: of 4).
// An invocation takes HEADS heads of a token, so that it looks for the position and its angles once.
// Grid: one invocation per unit, group of heads, token and batch, units fastest. A unit is four features and their partners
// rotated/2 further on, four features that hold both of each pair, or four that pass through.
// x, out: [batch, tokens, heads, head_dim] in vec4s; table: [table_rows, rotated/2] of (cos, sin), two a vec4.
alias Elem = f32;              // type of x and out
alias Four = vec4<Elem>;
override WG: u32 = 256u;
const INTERLEAVED: u32 = 0u;
const HEADS: u32 = 4u;
struct Params {
  size: u32, tokens: u32, heads: u32, head_dim: u32,     // size: invocations with work to do; head_dim in vec4s
  rotated: u32, table_rows: u32, position_stride: u32,   // rotated in vec4s; elements from one batch to the next, or 0
}
@group(0) @binding(0) var<storage, read> x: array<Four>;
@group(0) @binding(1) var<storage, read> table: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> positions: array<i32>;
@group(0) @binding(3) var<storage, read_write> out: array<Four>;
@group(0) @binding(4) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn rope4(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
         @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;            // grids past 65535 are folded into y
  if (i >= p.size) { return; }
  let partner = select(p.rotated / 2u, 0u, INTERLEAVED != 0u);
  let units = p.head_dim - partner;
  let groups = (p.heads + HEADS - 1u) / HEADS;
  let unit = i % units;
  let first = (i / units) % groups * HEADS;
  let row = i / units / groups;                          // batch * tokens + token
  let last = min(first + HEADS, p.heads);
  let at = row * p.heads * p.head_dim;
  let pairs = select(partner, p.rotated, INTERLEAVED != 0u);   // units that are rotated
  if (unit >= pairs) {
    for (var h = first; h < last; h++) { let j = at + h * p.head_dim + partner + unit; out[j] = x[j]; }
    return;
  }
  let position = positions[(row / p.tokens) * p.position_stride + row % p.tokens];
  let angles = u32(clamp(position, 0, i32(p.table_rows) - 1)) * p.rotated;   // a row of it: rotated / 2 pairs
  if (INTERLEAVED != 0u) {
    let angle = table[angles + unit];
    for (var h = first; h < last; h++) {
      let j = at + h * p.head_dim + unit;
      let v = vec4<f32>(x[j]);
      out[j] = Four(v * angle.xxzz + vec4<f32>(-v.y, v.x, -v.w, v.z) * angle.yyww);
    }
    return;
  }
  let low = table[angles + 2u * unit];
  let high = table[angles + 2u * unit + 1u];
  let cosines = vec4<f32>(low.xz, high.xz);
  let sines = vec4<f32>(low.yw, high.yw);
  for (var h = first; h < last; h++) {
    let j = at + h * p.head_dim + unit;
    let a = vec4<f32>(x[j]);
    let b = vec4<f32>(x[j + partner]);
    out[j] = Four(a * cosines - b * sines);
    out[j + partner] = Four(a * sines + b * cosines);
  }
}
