// Functions that WGSL lacks or defines too loosely for tensors. The fuser copies the ones a kernel calls into it.
// NaN and infinity are recognised by their bits: compilers may assume that comparisons never see them.

fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }

fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

// A NaN and an infinity that the compiler cannot see through: constants of these values are errors.
fn make_nan(x: f32) -> f32 { return bitcast<f32>((bitcast<u32>(x) & 0u) | 0x7fc00000u); }

fn make_inf(x: f32) -> f32 { return bitcast<f32>((bitcast<u32>(x) & 0u) | 0x7f800000u); }

// exp for every input: 0 below -104, infinity above 88.8, NaN stays.
fn exp_f32(x: f32) -> f32 {
  let e = exp(clamp(x, -87.0, 88.7));
  let low = select(e, 0.0, x < -87.0);
  let high = select(low, make_inf(x), x > 88.72284);
  return select(high, x, is_nan(x));
}

// e^x - 1 without cancellation near 0: Taylor to x^7 below 1/4, where it is exact to f32.
fn expm1_f32(x: f32) -> f32 {
  let t = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * (0.0013888889 + x * 0.0001984127))))));
  return select(exp_f32(x) - 1.0, t, abs(x) < 0.25);
}

// log for every input: -infinity at 0, NaN below.
fn log_f32(x: f32) -> f32 {
  let finite = log(clamp(x, 1.1754944e-38, 3.4028e38));
  let low = select(finite, -make_inf(x), x == 0.0);
  let high = select(low, x, is_inf(x) || is_nan(x));
  return select(high, make_nan(x), x < 0.0);
}

// log(1 + x), by its series for small |x|: 2 atanh(x / (2 + x)).
fn log1p_f32(x: f32) -> f32 {
  let s = x / (2.0 + x);
  let q = s * s;
  let series = 2.0 * s * (1.0 + q * (0.33333334 + q * (0.2 + q * 0.14285715)));
  return select(log_f32(1.0 + x), series, abs(x) < 0.25);
}

// x^y with IEEE's cases: a negative base with an integer exponent, x^0 = 1, 0^y, infinities. Conditions are joined by & and |:
// with && and || SwiftShader compiles this for minutes and gigabytes.
fn pow_f32(x: f32, y: f32) -> f32 {
  let whole = trunc(y) == y;
  let odd = whole & (abs(y) < 16777216.0) & ((i32(clamp(y, -16777216.0, 16777216.0)) & 1) != 0);
  let magnitude = exp2_f32(y * log2_f32(abs(x)));
  var r = select(magnitude, -magnitude, odd & ((bitcast<u32>(x) >> 31u) != 0u));
  r = select(r, make_nan(x), (x < 0.0) & !whole & !is_inf(x) & !is_inf(y));
  r = select(r, x + y, is_nan(x) | is_nan(y));
  return select(r, 1.0, (y == 0.0) | (x == 1.0) | ((x == -1.0) & is_inf(y)));
}

fn exp2_f32(x: f32) -> f32 {
  let e = exp2(clamp(x, -126.0, 127.99999));
  let low = select(e, 0.0, x < -149.0);
  let tiny = select(low, exp2(clamp(x + 24.0, -126.0, 0.0)) * 5.9604645e-8, x < -126.0 && x >= -149.0);
  let high = select(tiny, make_inf(x), x >= 128.0);
  return select(high, x, is_nan(x));
}

fn log2_f32(x: f32) -> f32 {
  let finite = log2(clamp(x, 1.1754944e-38, 3.4028e38));
  let low = select(finite, -make_inf(x), x == 0.0);
  let high = select(low, x, is_inf(x) || is_nan(x));
  return select(high, make_nan(x), x < 0.0);
}

// tanh without overflow: drivers compute it from exp(2x), which is infinite above 44.
fn tanh_f32(x: f32) -> f32 {
  let a = min(abs(x), 10.0);
  let e = exp(-2.0 * a);
  let q = x * x;
  let series = x * (1.0 + q * (-0.33333334 + q * (0.13333334 + q * (-0.053968254 + q * (0.021869488 - q * 0.008863236)))));
  let big = (1.0 - e) / (1.0 + e);
  let r = select(select(big, -big, x < 0.0), series, a < 0.25);
  return select(r, x, is_nan(x));
}

fn sigmoid_f32(x: f32) -> f32 {
  let e = exp(-min(abs(x), 88.0));
  let s = select(1.0, e, x < 0.0) / (1.0 + e);
  return select(select(s, 0.0, x < -88.7), x, is_nan(x));
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
fn softplus_f32(x: f32) -> f32 {
  return select(max(x, 0.0) + log1p_f32(exp(-min(abs(x), 88.0))), x, is_nan(x));
}

// erf: its series below 1, 1 - erfc above by a fit of e^(-x^2) times a polynomial of 1 / (1 + x/2)
// (Press et al., Numerical Recipes, 2nd ed., section 6.2; relative error of erfc 1.2e-7).
fn erf_f32(x: f32) -> f32 {
  let a = min(abs(x), 10.0);
  let q = x * x;
  let series = x * (1.1283792 + q * (-0.37612639 + q * (0.11283792 + q * (-0.026866171 + q * (0.0052239776 +
    q * (-0.00085483274 + q * (0.00012055333 + q * (-1.4925650e-5 + q * 1.6462115e-6))))))));
  let t = 1.0 / (1.0 + 0.5 * a);
  let fit = t * exp(-a * a - 1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * (-0.18628806 +
    t * (0.27886807 + t * (-1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277)))))))));
  let big = select(1.0 - fit, fit - 1.0, x < 0.0);
  return select(select(big, series, a < 1.0), x, is_nan(x));
}

fn gelu_f32(x: f32) -> f32 { return 0.5 * x * (1.0 + erf_f32(x * 0.70710678)); }

// tanh form of GELU; 0.5 * (1 + tanh(u)) is sigmoid(2u), which cannot overflow. x^3 is kept finite.
fn gelu_tanh_f32(x: f32) -> f32 {
  let c = clamp(x, -30.0, 30.0);
  return x * sigmoid_f32(1.5957691 * (c + 0.044715 * c * c * c));
}

fn silu_f32(x: f32) -> f32 { return select(x * sigmoid_f32(x), 0.0, x < -110.0); }

// The larger (smaller) of two; NaN if either is.
fn max_f32(a: f32, b: f32) -> f32 {
  let m = select(b, a, a > b || is_nan(a));
  return select(m, b, is_nan(b));
}

fn min_f32(a: f32, b: f32) -> f32 {
  let m = select(b, a, a < b || is_nan(a));
  return select(m, b, is_nan(b));
}

fn max_i32(a: i32, b: i32) -> i32 { return max(a, b); }

fn min_i32(a: i32, b: i32) -> i32 { return min(a, b); }

fn max_u32(a: u32, b: u32) -> u32 { return max(a, b); }

fn min_u32(a: u32, b: u32) -> u32 { return min(a, b); }

// Floored division: the remainder has the divisor's sign.
fn remainder_f32(x: f32, y: f32) -> f32 {
  let r = fmod_f32(x, y);
  return select(r, r + y, r != 0.0 && ((r < 0.0) != (y < 0.0)));
}

fn remainder_i32(x: i32, y: i32) -> i32 {
  let r = fmod_i32(x, y);
  return select(r, r + y, r != 0 && ((r < 0) != (y < 0)));
}

fn remainder_u32(x: u32, y: u32) -> u32 { return x % y; }

// Truncated division: the remainder has the dividend's sign. One correction step, since x / y is rounded.
fn fmod_f32(x: f32, y: f32) -> f32 {
  let d = abs(y);
  let a = abs(x);
  var r = fma(-trunc(a / d), d, a);
  r = select(r, r + d, r < 0.0);
  r = select(r, r - d, r >= d);
  r = select(r, a, is_inf(y) && is_finite(x));
  return select(r, -r, x < 0.0);
}

// Not x % y: Vulkan leaves it undefined for negative operands, and one vendor's driver takes it literally.
fn fmod_i32(x: i32, y: i32) -> i32 { return x - (x / y) * y; }

fn fmod_u32(x: u32, y: u32) -> u32 { return x % y; }

fn floor_divide_f32(x: f32, y: f32) -> f32 {
  let r = remainder_f32(x, y);
  return select(floor((x - r) / y + 0.5), x / y, y == 0.0 || !is_finite(x));
}

fn floor_divide_i32(x: i32, y: i32) -> i32 {
  let q = x / y;
  return select(q, q - 1, q * y != x && ((x < 0) != (y < 0)));
}

fn floor_divide_u32(x: u32, y: u32) -> u32 { return x / y; }

fn sign_f32(x: f32) -> f32 { return select(sign(x), x, is_nan(x)); }

fn sign_i32(x: i32) -> i32 { return sign(x); }

fn sign_u32(x: u32) -> u32 { return min(x, 1u); }

// Float to integer: toward zero, saturating, NaN to 0.
fn to_i32(x: f32) -> i32 {
  let inside = i32(clamp(x, -2147483648.0, 2147483520.0));
  return select(select(inside, 2147483647, x >= 2147483648.0), 0, is_nan(x));
}

fn to_u32(x: f32) -> u32 {
  let inside = u32(clamp(x, 0.0, 4294967040.0));
  return select(select(inside, 4294967295u, x >= 4294967296.0), 0u, is_nan(x));
}

// Rounded to the nearest f16 and back, ties to even. In integers: drivers drop the pair f32(f16(x)).
fn round_f16(x: f32) -> f32 {
  let bits = bitcast<u32>(x);
  let normal = bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
  let r = select(normal, round(x * 16777216.0) * 5.9604645e-8, abs(x) < 6.1035156e-5);   // subnormals: steps of 2^-24
  let all = select(r, bitcast<f32>((bits & 0x80000000u) | 0x7f800000u), abs(x) >= 65520.0);
  return select(all, x, is_nan(x));
}

// Is x not zero? By bits, so that NaN counts as true.
fn truth_f32(x: f32) -> bool { return (bitcast<u32>(x) << 1u) != 0u; }

// A key that orders as the value does, with NaN on top and -0 equal to 0: for argmax.
fn order_f32(x: f32) -> u32 {
  let bits = bitcast<u32>(select(x, 0.0, x == 0.0));
  let key = select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
  return select(key, 0xffffffffu, is_nan(x));
}

fn order_down_f32(x: f32) -> u32 { return select(~order_f32(x), 0xffffffffu, is_nan(x)); }

fn order_i32(x: i32) -> u32 { return bitcast<u32>(x) ^ 0x80000000u; }

fn order_down_i32(x: i32) -> u32 { return ~order_i32(x); }

fn order_u32(x: u32) -> u32 { return x; }

fn order_down_u32(x: u32) -> u32 { return ~x; }

// A random word for an index, a draw number and a seed, without state: pcg3d (Jarzynski & Olano 2020, "Hash Functions for GPU
// Rendering", section 4).
fn random_bits(index: u32, draw: u32, seed: u32) -> u32 {
  var v = vec3<u32>(index, draw, seed) * 1664525u + 1013904223u;
  v.x += v.y * v.z;
  v.y += v.z * v.x;
  v.z += v.x * v.y;
  v ^= v >> vec3<u32>(16u);
  v.x += v.y * v.z;
  v.y += v.z * v.x;
  v.z += v.x * v.y;
  return v.x;
}

// The same as a number in [0, 1), of 24 bits.
fn random_unit(index: u32, draw: u32, seed: u32) -> f32 { return f32(random_bits(index, draw, seed) >> 8u) * 0x1p-24f; }
