// A mask of booleans (a u32 each): true takes part. Broadcast axes have stride 0.
@group(0) @binding(5) var<storage, read> allowed: array<u32>;
fn masked(score: f32, batch: u32, head: u32, row: u32, key: u32) -> f32 {
  let at = batch * p.mask_batch + head * p.mask_head + row * p.mask_row + key * p.mask_key;
  return select(MASKED, score, allowed[at] != 0u);
}
const HAS_MASK: bool = true;
