// Adds up the parts of a matrix product whose k axis was cut (gemm_block.wgsl, p.split > 1):
//   out[z, i, j] = sum_s parts[z split + s, i, j];   _bias: + bias[j].   Parts are added in order: the same bits every time.
// Grid: ceil(batches * m * ceil(n / 4) / 256) workgroups; an invocation makes four neighbours of a row.
// include matmul/block.wgsl
// include matmul/block_parts_vec4.wgsl as parts
// include matmul/block_out_vec4.wgsl as out

fn sum_of(z: u32, i: u32, j: u32) -> vec4<f32> {
  var sum = vec4<f32>();
  for (var s = 0u; s < p.split; s++) { sum += part_four(z * p.split + s, i, j); }
  return sum;
}
fn index_of(wg: vec3<u32>, grid: vec3<u32>, lane: u32) -> u32 { return (wg.y * grid.x + wg.x) * 256u + lane; }

@compute @workgroup_size(256)
fn matmul(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let wide = (p.n + 3u) / 4u;
  let at = index_of(wg, grid, lane);
  let row = at / wide;
  let j = at % wide * 4u;
  if (row >= p.batches * p.m) { return; }
  put_four(row / p.m, row % p.m, j, sum_of(row / p.m, row % p.m, j));
}

@compute @workgroup_size(256)
fn matmul_bias(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
               @builtin(local_invocation_index) lane: u32) {
  let wide = (p.n + 3u) / 4u;
  let at = index_of(wg, grid, lane);
  let row = at / wide;
  let j = at % wide * 4u;
  if (row >= p.batches * p.m) { return; }
  put_four(row / p.m, row % p.m, j, sum_of(row / p.m, row % p.m, j) + bias_four(j));
}
