// The rows' logarithms of sums of exponentials, for the way back: (batch, heads, q_len) f32. Rows that see no key give 0.
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;
fn store_lse(at: u32, top: f32, total: f32) { lse[at] = select(top + log(total), 0.0, total == 0.0); }
