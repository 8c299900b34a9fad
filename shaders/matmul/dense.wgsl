// Operands of the dense matrix products, element by element (gemm.wgsl, gemm_serial.wgsl).
// include matmul/dense_params.wgsl
@group(0) @binding(0) var<storage, read> a: array<Elem>;
@group(0) @binding(1) var<storage, read> b: array<Elem>;
@group(0) @binding(3) var<storage, read_write> out: array<Elem>;   // [batches, m, n] from out_offset on

fn put(z: u32, i: u32, j: u32, value: f32) {
  let row = z * p.m + i;
  out[p.out_offset + row * p.n + j] = Elem(epilogue(value, row, j));
}
