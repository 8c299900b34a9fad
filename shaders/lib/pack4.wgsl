// Four neighbouring elements of a row at a time: for rows of a multiple of four elements. Otherwise pack1.wgsl.
// The including file declares Elem.
alias Pack = vec4<Elem>;
alias Real = vec4<f32>;
fn wide(v: Pack) -> Real { return Real(v); }
fn narrow(v: Real) -> Pack { return Pack(v); }
fn head(v: Pack) -> f32 { return f32(v.x); }
fn total(v: Real) -> f32 { return (v.x + v.y) + (v.z + v.w); }
fn highest(v: Real) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
const PACK: u32 = 4u;
fn component(v: Real, i: u32) -> f32 { return v[i]; }
