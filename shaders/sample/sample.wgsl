// Choosing the next token from one row of logits, on the device.
// Order: penalties, logit bias, temperature, top-k, top-p, min-p, then one draw from what is kept.
//   adjust:  work[i] = (penalised(logits[i]) + bias[i]) / temperature        Grid: ceil(vocab / WG) workgroups, folded.
//   select:  one workgroup; result = (token, flags, log-probability bits, kept count); seen[token] += 1.
// penalised: repeat (Keskar et al. 2019, arXiv:1909.05858): l > 0 ? l / r : l * r for every token seen in prompt or
// answer; presence and frequency: l - presence - frequency * count for tokens of the answer.
// top-k keeps values >= the k-th largest; top-p (Holtzman et al. 2020, arXiv:1904.09751) the smallest set of the largest
// whose mass reaches p; min-p keeps values with probability >= min_p * the largest. Values equal to a threshold stay.
// The draw is u = Philox2x32-10(key seed, counter draw) (Salmon et al. 2011), so a seed gives the same tokens every run.
override WG: u32 = 256u;         // a power of two
const LOWEST: f32 = -3.0e38;     // stands for -inf: removed
const BROKEN: f32 = 3.0e38;      // stands for NaN and +inf: the model's numbers are broken
const IN_PROMPT: u32 = 0x80000000u;
struct Params { vocab: u32 }
struct Step { position: u32, tokens: u32, seed: u32, draw: u32 }
struct Settings {
  temperature: f32,   // 0: the largest logit, no draw
  top_k: u32,         // 0: off
  top_p: f32,         // 1: off
  min_p: f32,         // 0: off
  repeat: f32,        // 1: off
  presence: f32,
  frequency: f32,
  logprob: u32,       // 1: give the log-probability under the unadjusted logits
}
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> settings: Settings;
@group(0) @binding(2) var<storage, read> bias: array<f32>;          // adjust_biased only
@group(0) @binding(3) var<storage, read> step: Step;
@group(0) @binding(4) var<storage, read> adjusted: array<f32>;      // work, as select sees it
@group(0) @binding(5) var<storage, read_write> work: array<f32>;
@group(0) @binding(6) var<storage, read_write> seen: array<u32>;    // bit 31: in the prompt; below: times in the answer
@group(0) @binding(7) var<storage, read_write> kept: array<vec2<u32>>;  // candidates: (order key, token)
@group(0) @binding(8) var<storage, read_write> result: array<u32, 4>;
@group(0) @binding(9) var<uniform> p: Params;
// include lib/reduce.wgsl
var<workgroup> histogram: array<atomic<u32>, 256>;
var<workgroup> lane_mass: array<f32, WG>;
var<workgroup> lane_count: array<u32, WG>;
var<workgroup> shared_key: u32;
var<workgroup> shared_rank: u32;
var<workgroup> chosen: u32;

fn broken(v: f32) -> bool {     // NaN or +inf, by bits: comparisons may be compiled as if there were none
  let bits = bitcast<u32>(v);
  return (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u;
}
fn adjusted_value(i: u32, added: f32) -> f32 {
  var l = logits[i];
  if (broken(l)) { return BROKEN; }
  l = max(l, LOWEST);
  if (l <= LOWEST) { return LOWEST; }
  let mark = seen[i];
  if (mark != 0u) { l = select(l * settings.repeat, l / settings.repeat, l > 0.0); }
  let count = mark & ~IN_PROMPT;
  if (count > 0u) { l -= settings.presence + settings.frequency * f32(count); }
  l += added;
  if (settings.temperature > 0.0) { l /= settings.temperature; }
  return clamp(l, LOWEST, 2.9e38);
}
@compute @workgroup_size(WG)
fn adjust(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i < p.vocab) { work[i] = adjusted_value(i, 0.0); }
}
@compute @workgroup_size(WG)
fn adjust_biased(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  let i = (wg.y * grid.x + wg.x) * WG + lane;
  if (i < p.vocab) { work[i] = adjusted_value(i, bias[i]); }
}

// A u32 that orders like the float: larger value, larger key.
fn key_of(v: f32) -> u32 {
  let bits = bitcast<u32>(v);
  return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}
fn value_of(key: u32) -> f32 {
  return bitcast<f32>(select(~key, key & 0x7fffffffu, (key & 0x80000000u) != 0u));
}
fn uniform_draw(seed: u32, counter: u32) -> f32 {   // in (0, 1)
  var x = vec2<u32>(counter, 0u);
  var key = seed;
  for (var round = 0u; round < 10u; round++) {
    let product = multiply_wide(0xD256D193u, x.x);
    x = vec2<u32>(product.x ^ key ^ x.y, product.y);
    key += 0x9E3779B9u;
  }
  return (f32(x.x >> 8u) + 0.5) * (1.0 / 16777216.0);
}
fn multiply_wide(a: u32, b: u32) -> vec2<u32> {     // (high, low) words of a * b
  let a0 = a & 0xffffu;
  let a1 = a >> 16u;
  let b0 = b & 0xffffu;
  let b1 = b >> 16u;
  let middle = a1 * b0 + ((a0 * b0) >> 16u);
  let other = a0 * b1 + (middle & 0xffffu);
  return vec2<u32>(a1 * b1 + (middle >> 16u) + (other >> 16u), a * b);
}
// The key of the k-th largest value (k from 1 to vocab), found eight bits at a time.
fn kth_key(lane: u32, k: u32) -> u32 {
  if (lane == 0u) { shared_key = 0u; shared_rank = k; }
  for (var shift = 24i; shift >= 0i; shift -= 8i) {
    for (var b = lane; b < 256u; b += WG) { atomicStore(&histogram[b], 0u); }
    let prefix = workgroupUniformLoad(&shared_key);
    for (var i = lane; i < p.vocab; i += WG) {
      let key = key_of(adjusted[i]);
      if (shift == 24i || (key >> u32(shift + 8i)) == (prefix >> u32(shift + 8i))) {
        atomicAdd(&histogram[(key >> u32(shift)) & 255u], 1u);
      }
    }
    workgroupBarrier();
    if (lane == 0u) {
      var left = shared_rank;
      var bin = 255u;
      while (bin > 0u && atomicLoad(&histogram[bin]) < left) { left -= atomicLoad(&histogram[bin]); bin--; }
      shared_key = prefix | (bin << u32(shift));
      shared_rank = left;
    }
    workgroupBarrier();
  }
  return workgroupUniformLoad(&shared_key);
}
// Mass of the candidates whose key is above `key`: sum of exp(value - top).
fn mass_above(lane: u32, count: u32, key: u32, top: f32) -> f32 {
  var sum = 0.0;
  for (var i = lane; i < count; i += WG) {
    let candidate = kept[i].x;
    if (candidate > key) { sum += exp(value_of(candidate) - top); }
  }
  return wg_sum(lane, sum);
}
@compute @workgroup_size(WG)
fn select_token(@builtin(local_invocation_index) lane: u32) {
  var best = LOWEST;
  for (var i = lane; i < p.vocab; i += WG) { best = max(best, adjusted[i]); }
  let top = wg_max(lane, best);
  if (top <= LOWEST || top >= BROKEN) {          // uniform: nothing to choose from, or broken numbers
    if (lane == 0u) { result = array<u32, 4>(0u, select(1u, 2u, top >= BROKEN), 0u, 0u); }
    return;
  }
  var token = 0u;
  var survivors = 1u;
  if (settings.temperature <= 0.0) {
    var first = LOWEST;                          // the lowest index that holds the largest value
    for (var i = lane; i < p.vocab; i += WG) { if (adjusted[i] == top) { first = max(first, -f32(i)); } }
    token = u32(-wg_max(lane, first));
  } else {
    // candidates: values of the top k that are at least min_p times as likely as the largest
    var floor_key = key_of(LOWEST) + 1u;
    if (settings.top_k > 0u && settings.top_k < p.vocab) { floor_key = max(floor_key, kth_key(lane, settings.top_k)); }
    var mine = 0u;
    for (var i = lane; i < p.vocab; i += WG) { if (key_of(adjusted[i]) >= floor_key) { mine++; } }
    lane_count[lane] = mine;
    workgroupBarrier();
    var start = 0u;
    for (var l = 0u; l < lane; l++) { start += lane_count[l]; }
    if (lane == WG - 1u) { shared_rank = start + mine; }
    for (var i = lane; i < p.vocab; i += WG) {
      let key = key_of(adjusted[i]);
      if (key >= floor_key) { kept[start] = vec2<u32>(key, i); start++; }
    }
    storageBarrier();
    let count = workgroupUniformLoad(&shared_rank);
    if (settings.top_p < 1.0) {
      let limit = settings.top_p * mass_above(lane, count, 0u, top);
      var low = floor_key;                       // the smallest key whose mass above is under the limit is kept
      var high = key_of(top);
      while (low < high) {
        let middle = low + (high - low) / 2u;
        if (mass_above(lane, count, middle, top) < limit) { high = middle; } else { low = middle + 1u; }
      }
      floor_key = low;
    }
    if (settings.min_p > 0.0) { floor_key = max(floor_key, min(key_of(top + log(settings.min_p)), key_of(top))); }
    // the draw: lanes own interleaved candidates; the lane in whose share the target lies walks its own
    var mass = 0.0;
    var alive = 0u;
    for (var i = lane; i < count; i += WG) {
      let key = kept[i].x;
      if (key >= floor_key) { mass += exp(value_of(key) - top); alive++; }
    }
    lane_mass[lane] = mass;
    lane_count[lane] = alive;
    workgroupBarrier();
    if (lane == 0u) {
      var total = 0.0;
      for (var l = 0u; l < WG; l++) { total += lane_mass[l]; }
      let target_mass = uniform_draw(step.seed, step.draw) * total;
      var before = 0.0;
      var owner = 0u;
      for (var l = 0u; l < WG; l++) {            // the last lane with candidates takes what rounding leaves over
        if (lane_count[l] > 0u) {
          owner = l;
          if (before + lane_mass[l] > target_mass) { break; }
          before += lane_mass[l];
        }
      }
      var all = 0u;
      for (var l = 0u; l < WG; l++) { all += lane_count[l]; }
      var sum = before;
      for (var i = owner; i < count; i += WG) {
        let candidate = kept[i];
        if (candidate.x >= floor_key) {
          chosen = candidate.y;
          sum += exp(value_of(candidate.x) - top);
          if (sum > target_mass) { break; }
        }
      }
      shared_rank = all;
    }
    token = workgroupUniformLoad(&chosen);
    survivors = workgroupUniformLoad(&shared_rank);
  }
  var logprob = 0.0;
  if (settings.logprob != 0u) {
    var largest = LOWEST;
    for (var i = lane; i < p.vocab; i += WG) { largest = max(largest, logits[i]); }
    let peak = wg_max(lane, largest);
    var sum = 0.0;
    for (var i = lane; i < p.vocab; i += WG) { sum += exp(max(logits[i], LOWEST) - peak); }
    logprob = logits[token] - peak - log(wg_sum(lane, sum));
  }
  if (lane == 0u) {
    seen[token] += 1u;
    result = array<u32, 4>(token, 0u, bitcast<u32>(logprob), survivors);
  }
}
