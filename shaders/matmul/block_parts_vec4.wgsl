// Parts of sums read four at a time: n is a multiple of 4.
@group(0) @binding(0) var<storage, read> parts: array<vec4<f32>>;   // [batches split, m, n]
fn part_four(z: u32, i: u32, j: u32) -> vec4<f32> { return parts[((z * p.m + i) * p.n + j) / 4u]; }
