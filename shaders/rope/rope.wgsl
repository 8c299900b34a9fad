// Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2.2) from a table of angles.
//   (a, b) -> (a cos - b sin, a sin + b cos) for each pair of features; angle = table[position, pair]
//   INTERLEAVED 0: feature i pairs with i + rotated/2 (GPT-NeoX);  1: features 2i and 2i+1 pair (GPT-J)
// Features at and past `rotated` pass through. Positions past the table take its last row, negative ones its first.
// Grid: one invocation per element. x, out: [batch, tokens, heads, head_dim]; table: [table_rows, rotated/2] of (cos, sin);
// positions: [tokens], or [batch, tokens] with position_stride = tokens. The rotation is f32 whatever Elem is.
alias Elem = f32;              // type of x and out
override WG: u32 = 64u;        // elements per workgroup
const INTERLEAVED: u32 = 0u;
struct Params {
  size: u32, tokens: u32, heads: u32, head_dim: u32,
  rotated: u32, table_rows: u32, position_stride: u32,   // position_stride: elements from one batch to the next, or 0
}
@group(0) @binding(0) var<storage, read> x: array<Elem>;
@group(0) @binding(1) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> positions: array<i32>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;
@group(0) @binding(4) var<uniform> p: Params;

@compute @workgroup_size(WG)
fn rope(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i >= p.size) { return; }
  let feature = i % p.head_dim;
  if (feature >= p.rotated) { out[i] = x[i]; return; }
  let row = i / (p.head_dim * p.heads);                  // batch * tokens + token
  let position = positions[(row / p.tokens) * p.position_stride + row % p.tokens];
  let half = p.rotated / 2u;
  var pair = feature % half;
  var distance = half;
  var second = feature >= half;                          // this feature is the b of its pair
  if (INTERLEAVED != 0u) { pair = feature / 2u; distance = 1u; second = (feature & 1u) == 1u; }
  let angle = table[u32(clamp(position, 0, i32(p.table_rows) - 1)) * half + pair];
  let own = f32(x[i]);
  if (second) { out[i] = Elem(f32(x[i - distance]) * angle.y + own * angle.x); }
  else { out[i] = Elem(own * angle.x - f32(x[i + distance]) * angle.y); }
}
