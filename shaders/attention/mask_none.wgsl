// No mask besides key_range.
fn masked(score: f32, batch: u32, head: u32, row: u32, key: u32) -> f32 { return score; }
const HAS_MASK: bool = false;
