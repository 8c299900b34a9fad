// Elements of a row one at a time, for rows of any length; same names as pack4.wgsl. The including file declares Elem.
alias Pack = Elem;
alias Real = f32;
fn wide(v: Pack) -> Real { return Real(v); }
fn narrow(v: Real) -> Pack { return Pack(v); }
fn head(v: Pack) -> f32 { return f32(v); }
fn total(v: Real) -> f32 { return v; }
fn highest(v: Real) -> f32 { return v; }
const PACK: u32 = 1u;
fn component(v: Real, i: u32) -> f32 { return v; }
