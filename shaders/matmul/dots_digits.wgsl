// Inner products of blocks of weights with x in integers, for gemv.wgsl and the formats whose weights are bytes: part `dots`.
// A block of x is 32 integers of 24 bits and a step, x[k] = step * (65536 a[k] + 256 b[k] + c[k]) with signed bytes a, b, c:
// what is rounded away is at most 2^-24 of the block's largest number, as in f32. The sums over bytes are exact, four
// products an instruction (dot4I8Packed); they are added up over blocks in f32. A block of x takes 7 vec4: two of each digit, then
// step and, for the formats' offsets, the sums of both halves. Needs subgroups of 8 or more, numbered in order.
const STRIDE: u32 = 7u;    // odd, so that neighbouring invocations meet different banks
const TOP: f32 = 8323072.0;   // 127 * 65536: the integer that a block's largest number becomes
var<workgroup> staged: array<vec4<u32>, CHUNK * TOKENS * STRIDE>;

// Keeps vec4 j of the block of x that lies at `at`; an invocation with `inside` false has none. The eight invocations of a
// block are neighbours. Call in uniform control flow.
fn stage(at: u32, j: u32, value: vec4<f32>, inside: bool) {
  let four = max(abs(value), abs(value.yxwz));
  var top = max(four.x, four.z);
  top = max(top, subgroupShuffleXor(top, 1u));
  top = max(top, subgroupShuffleXor(top, 2u));
  top = max(top, subgroupShuffleXor(top, 4u));
  var sum = (value.x + value.y) + (value.z + value.w);
  sum += subgroupShuffleXor(sum, 1u);
  sum += subgroupShuffleXor(sum, 2u);
  let other = subgroupShuffleXor(sum, 4u);
  let number = vec4<i32>(round(value * (TOP / max(top, 1e-30))));
  let c = (number << vec4<u32>(24u)) >> vec4<u32>(24u);
  let rest = (number - c) >> vec4<u32>(8u);
  let b = (rest << vec4<u32>(24u)) >> vec4<u32>(24u);
  let a = (rest - b) >> vec4<u32>(8u);
  if (inside) {
    staged[at + (j >> 2u)][j & 3u] = pack4xI8(a);
    staged[at + 2u + (j >> 2u)][j & 3u] = pack4xI8(b);
    staged[at + 4u + (j >> 2u)][j & 3u] = pack4xI8(c);
    // A number that is not finite makes both sums so, and the step: no weight hides it.
    if (j == 0u) { staged[at + 6u] = bitcast<vec4<u32>>(vec4<f32>(top / TOP + 0.0 * (sum + other), sum, other, 0.0)); }
  }
}

fn dots(weights: vec4<u32>, x: vec4<u32>) -> i32 {
  return dot4I8Packed(weights.x, x.x) + dot4I8Packed(weights.y, x.y) + dot4I8Packed(weights.z, x.z)
       + dot4I8Packed(weights.w, x.w);
}
// The number with these sums of products for its digits.
fn combined(a: i32, b: i32, c: i32) -> f32 { return fma(f32(a), 65536.0, f32((b << 8u) + c)); }

// Adds the products of a block of each row with the block of x that lies at `at` for the first token.
fn add_block(block: ptr<function, array<Block, ROWS>>, at: u32, sums: ptr<function, array<f32, SUMS>>) {
  for (var t = 0u; t < TOKENS; t++) {
    let i = at + t * CHUNK * STRIDE;
    let a0 = staged[i];
    let a1 = staged[i + 1u];
    let b0 = staged[i + 2u];
    let b1 = staged[i + 3u];
    let c0 = staged[i + 4u];
    let c1 = staged[i + 5u];
    let more = bitcast<vec4<f32>>(staged[i + 6u]);
    for (var r = 0u; r < ROWS; r++) {
      let k = (*block)[r];
      let low = vec4<u32>(packed4(k, 0u), packed4(k, 1u), packed4(k, 2u), packed4(k, 3u));
      let high = vec4<u32>(packed4(k, 4u), packed4(k, 5u), packed4(k, 6u), packed4(k, 7u));
      let step = scales(k) * more.x;
      var sum = (*sums)[r * TOKENS + t];
      if (HALVES) {
        sum = fma(step.x, combined(dots(low, a0), dots(low, b0), dots(low, c0)), sum);
        sum = fma(step.y, combined(dots(high, a1), dots(high, b1), dots(high, c1)), sum);
        sum = fma(offsets(k).x, more.y, fma(offsets(k).y, more.z, sum));
      } else {
        let a = dots(low, a0) + dots(high, a1);
        let b = dots(low, b0) + dots(high, b1);
        sum = fma(step.x, combined(a, b, dots(low, c0) + dots(high, c1)), sum);
        sum = fma(offsets(k).x, more.y + more.z, sum);
      }
      (*sums)[r * TOKENS + t] = sum;
    }
  }
}
