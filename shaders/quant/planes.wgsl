// Shared by the storage formats: how a plane of a repacked weight matrix is read (nn/quant/repack.py makes them).
// The including kernel declares `w: array<vec4<u32>>`, the matrix's one buffer; planes start at whole vec4s.

// Word i of the plane that starts at vec4 `base`.
fn plane_word(base: u32, i: u32) -> u32 { return w[base + (i >> 2u)][i & 3u]; }

// Half i of the plane: two bytes, in the low half of the result; the other half is not cleared.
fn plane_half(base: u32, i: u32) -> u32 { return plane_word(base, i >> 1u) >> ((i & 1u) << 4u); }

// The f16 in the low half of a word. Needs no f16 feature.
fn f16_of(word: u32) -> f32 { return unpack2x16float(word).x; }

// The four bytes of a word as numbers. Through i32: a signed conversion is one instruction everywhere.
fn bytes4(x: u32) -> vec4<f32> {
  return vec4<f32>(vec4<i32>((vec4<u32>(x) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u)));
}
fn signed_bytes4(x: u32) -> vec4<f32> {
  return vec4<f32>(vec4<i32>(vec4<u32>(x) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u));
}
