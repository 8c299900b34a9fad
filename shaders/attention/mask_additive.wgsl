// A mask added to the scores; minus infinity leaves a key out. Broadcast axes have stride 0.
alias Bias = f32;        // type of the mask
@group(0) @binding(5) var<storage, read> bias: array<Bias>;
fn masked(score: f32, batch: u32, head: u32, row: u32, key: u32) -> f32 {
  let at = batch * p.mask_batch + head * p.mask_head + row * p.mask_row + key * p.mask_key;
  let b = f32(bias[at]);
  return select(score + b, MASKED, b <= MASKED);
}
const HAS_MASK: bool = true;
