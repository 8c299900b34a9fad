// Choosing the next token from one row of logits, on the device.
// Order: penalties, logit bias, temperature, top-k, top-p, min-p, then one draw from what is kept.
//   adjust:  work[i] = (penalised(logits[i]) + bias[i]) / temperature, and behind them the largest of every BLOCK values.
//            Grid: ceil(vocab / BLOCK) workgroups, folded.
//   select:  one workgroup; result[0] = (token, flags, log-probability bits, kept count); seen[token] += 1; with p.kept_results
//            over 0 also result[1 + step.draw % kept_results]; then step.position and step.draw go up by 1, so that the next
//            token's dispatches may follow in the same submit.
// Only blocks that can hold one of the k largest are looked into: the k-th largest of the blocks' largest values is a bound.
// penalised: repeat (Keskar et al. 2019, arXiv:1909.05858): l > 0 ? l / r : l * r for every token seen in prompt or
// answer; presence and frequency: l - presence - frequency * count for tokens of the answer.
// top-k keeps values >= the k-th largest; top-p (Holtzman et al. 2020, arXiv:1904.09751) the smallest set of the largest
// whose mass reaches p; min-p keeps values with probability >= min_p * the largest. Values equal to a threshold stay.
// The draw is u = Philox2x32-10(key seed, counter draw) (Salmon et al. 2011), so a seed gives the same tokens every run.
override WG: u32 = 256u;         // a power of two, at least 256
const SPAN: u32 = 1u;            // values an invocation adjusts; ceil(vocab / (WG SPAN)) is at most BLOCKS
const BLOCKS: u32 = 1024u;
const LOWEST: f32 = -3.0e38;     // stands for -inf: removed
const BROKEN: f32 = 3.0e38;      // stands for NaN and +inf: the model's numbers are broken
const IN_PROMPT: u32 = 0x80000000u;
struct Params { vocab: u32, kept_results: u32 }
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
@group(0) @binding(3) var<storage, read_write> step: Step;
@group(0) @binding(4) var<storage, read> adjusted: array<f32>;      // work, as select sees it
@group(0) @binding(5) var<storage, read_write> work: array<f32>;    // [vocab], then the blocks' largest values
@group(0) @binding(6) var<storage, read_write> seen: array<u32>;    // bit 31: in the prompt; below: times in the answer
@group(0) @binding(7) var<storage, read_write> kept: array<vec2<u32>>;  // candidates: (order key, token)
@group(0) @binding(8) var<storage, read_write> result: array<vec4<u32>>;
@group(0) @binding(9) var<uniform> p: Params;
// include lib/reduce.wgsl
var<workgroup> histogram: array<atomic<u32>, 256>;
var<workgroup> lane_mass: array<f32, WG>;
var<workgroup> lane_count: array<u32, WG>;
var<workgroup> lane_key: array<u32, WG>;
var<workgroup> block_list: array<u32, BLOCKS>;
var<workgroup> lowest_key: atomic<u32>;
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
fn store_largest(block: u32, lane: u32, value: f32) {
  let largest = wg_max(lane, value);
  if (lane == 0u) { work[p.vocab + block] = largest; }
}
@compute @workgroup_size(WG)
fn adjust(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
  let block = wg.y * grid.x + wg.x;
  if (block * WG * SPAN >= p.vocab) { return; }   // uniform: the whole workgroup leaves
  var largest = LOWEST;
  for (var n = 0u; n < SPAN; n++) {
    let i = (block * SPAN + n) * WG + lane;
    if (i < p.vocab) { let value = adjusted_value(i, 0.0); work[i] = value; largest = max(largest, value); }
  }
  store_largest(block, lane, largest);
}
@compute @workgroup_size(WG)
fn adjust_biased(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                 @builtin(local_invocation_index) lane: u32) {
  let block = wg.y * grid.x + wg.x;
  if (block * WG * SPAN >= p.vocab) { return; }
  var largest = LOWEST;
  for (var n = 0u; n < SPAN; n++) {
    let i = (block * SPAN + n) * WG + lane;
    if (i < p.vocab) { let value = adjusted_value(i, bias[i]); work[i] = value; largest = max(largest, value); }
  }
  store_largest(block, lane, largest);
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
fn blocks() -> u32 { return (p.vocab + WG * SPAN - 1u) / (WG * SPAN); }
// Key i of what is looked through: the candidates, or the blocks' largest values.
fn key_at(i: u32, of_blocks: bool) -> u32 {
  if (of_blocks) { return key_of(adjusted[p.vocab + i]); }
  return kept[i].x;
}
// The key of the k-th largest of `count` (k from 1 to count): by comparing all with all where each has an invocation, else
// eight bits at a time.
fn kth_key(lane: u32, k: u32, count: u32, of_blocks: bool) -> u32 {
  if (count <= WG) {
    var mine = 0u;
    if (lane < count) { mine = key_at(lane, of_blocks); }
    lane_key[lane] = mine;
    if (lane == 0u) { atomicStore(&lowest_key, 0xffffffffu); }
    workgroupBarrier();
    var above = 0u;
    for (var i = 0u; i < count; i++) { above += select(0u, 1u, lane_key[i] > mine); }
    if (lane < count && above < k) { atomicMin(&lowest_key, mine); }
    workgroupBarrier();
    if (lane == 0u) { shared_key = atomicLoad(&lowest_key); }
    return workgroupUniformLoad(&shared_key);
  }
  if (lane == 0u) { shared_key = 0u; shared_rank = k; }
  for (var shift = 24i; shift >= 0i; shift -= 8i) {
    for (var b = lane; b < 256u; b += WG) { atomicStore(&histogram[b], 0u); }
    let prefix = workgroupUniformLoad(&shared_key);
    let left = workgroupUniformLoad(&shared_rank);
    for (var i = lane; i < count; i += WG) {
      let key = key_at(i, of_blocks);
      if (shift == 24i || (key >> u32(shift + 8i)) == (prefix >> u32(shift + 8i))) {
        atomicAdd(&histogram[(key >> u32(shift)) & 255u], 1u);
      }
    }
    workgroupBarrier();
    // invocation l holds bin 255 - l; the bin in which the rank falls is the first whose sum from the top reaches it
    var bin = 0u;
    if (lane < 256u) { bin = atomicLoad(&histogram[255u - lane]); }
    let before = sum_before(lane, bin);
    if (before < left && left <= before + bin) {
      shared_key = prefix | ((255u - lane) << u32(shift));
      shared_rank = left - before;
    }
    workgroupBarrier();
  }
  return workgroupUniformLoad(&shared_key);
}
// Sum of `count` over the invocations before this one (Hillis & Steele 1986). Call in uniform control flow.
fn sum_before(lane: u32, count: u32) -> u32 {
  var sum = count;
  for (var n = 1u; n < WG; n *= 2u) {
    workgroupBarrier();
    lane_count[lane] = sum;
    workgroupBarrier();
    if (lane >= n) { sum += lane_count[lane - n]; }
  }
  workgroupBarrier();
  return sum - count;
}
// Lists the blocks with a value of at least `floor_key`, in order. Returns how many.
fn list_blocks(lane: u32, floor_key: u32) -> u32 {
  let share = (blocks() + WG - 1u) / WG;
  let first = lane * share;
  let end = min(first + share, blocks());
  var mine = 0u;
  for (var b = first; b < end; b++) { if (key_at(b, true) >= floor_key) { mine++; } }
  var at = sum_before(lane, mine);
  if (lane == WG - 1u) { shared_rank = at + mine; }
  for (var b = first; b < end; b++) { if (key_at(b, true) >= floor_key) { block_list[at] = b; at++; } }
  return workgroupUniformLoad(&shared_rank);
}
// Puts every value of the listed blocks that is at least `floor_key` into `kept`, those of an invocation one after the
// other. Returns how many.
fn gather(lane: u32, listed: u32, floor_key: u32) -> u32 {
  var mine = 0u;
  for (var n = 0u; n < listed * SPAN; n++) {
    let i = (block_list[n / SPAN] * SPAN + n % SPAN) * WG + lane;
    if (i < p.vocab) { if (key_of(adjusted[i]) >= floor_key) { mine++; } }
  }
  var at = sum_before(lane, mine);
  if (lane == WG - 1u) { shared_rank = at + mine; }
  for (var n = 0u; n < listed * SPAN; n++) {
    let i = (block_list[n / SPAN] * SPAN + n % SPAN) * WG + lane;
    if (i < p.vocab) {
      let key = key_of(adjusted[i]);
      if (key >= floor_key) { kept[at] = vec2<u32>(key, i); at++; }
    }
  }
  storageBarrier();
  return workgroupUniformLoad(&shared_rank);
}
// Mass of the candidates whose key is above `key`, at least `floor_key`: sum of exp(value - top).
fn mass_above(lane: u32, count: u32, key: u32, top: f32) -> f32 {
  var sum = 0.0;
  for (var i = lane; i < count; i += WG) {
    let candidate = kept[i].x;
    if (candidate > key) { sum += exp(value_of(candidate) - top); }
  }
  return wg_sum(lane, sum);
}
// The smallest key from floor_key on whose mass above is under the part top_p of the whole.
fn top_p_key(lane: u32, count: u32, floor_key: u32, top: f32) -> u32 {
  if (count <= WG) {                             // an invocation each
    var mine = 0u;
    if (lane < count) { mine = kept[lane].x; }
    lane_key[lane] = mine;
    lane_mass[lane] = select(0.0, exp(value_of(mine) - top), lane < count && mine >= floor_key);
    if (lane == 0u) { atomicStore(&lowest_key, 0xffffffffu); }
    workgroupBarrier();
    var above = 0.0;
    var all = 0.0;
    for (var i = 0u; i < count; i++) {
      all += lane_mass[i];
      above += select(0.0, lane_mass[i], lane_key[i] > mine);
    }
    if (lane < count && mine >= floor_key && above < settings.top_p * all) { atomicMin(&lowest_key, mine); }
    workgroupBarrier();
    if (lane == 0u) { shared_key = atomicLoad(&lowest_key); }
    return workgroupUniformLoad(&shared_key);
  }
  let limit = settings.top_p * mass_above(lane, count, floor_key - 1u, top);
  var low = floor_key;
  var high = key_of(top);
  while (low < high) {
    let middle = low + (high - low) / 2u;
    if (mass_above(lane, count, middle, top) < limit) { high = middle; } else { low = middle + 1u; }
  }
  return low;
}
// The token of the `count` candidates on which the draw falls; shared_rank: how many are at least `floor_key`.
fn drawn(lane: u32, count: u32, floor_key: u32, top: f32) -> u32 {
  // lanes own runs of candidates; the lane in whose run the target lies walks it
  let share = (count + WG - 1u) / WG;
  var mass = 0.0;
  var alive = 0u;
  for (var i = lane * share; i < min(lane * share + share, count); i++) {
    let key = kept[i].x;
    if (key >= floor_key) { mass += exp(value_of(key) - top); alive++; }
  }
  lane_mass[lane] = mass;
  lane_count[lane] = alive;
  workgroupBarrier();
  if (lane == 0u) {
    let lanes = (count + share - 1u) / share;
    var total = 0.0;
    for (var l = 0u; l < lanes; l++) { total += lane_mass[l]; }
    let target_mass = uniform_draw(step.seed, step.draw) * total;
    var before = 0.0;
    var owner = 0u;
    for (var l = 0u; l < lanes; l++) {           // the last lane with candidates takes what rounding leaves over
      if (lane_count[l] > 0u) {
        owner = l;
        if (before + lane_mass[l] > target_mass) { break; }
        before += lane_mass[l];
      }
    }
    var all = 0u;
    for (var l = 0u; l < lanes; l++) { all += lane_count[l]; }
    var sum = before;
    for (var i = owner * share; i < min(owner * share + share, count); i++) {
      let candidate = kept[i];
      if (candidate.x >= floor_key) {
        chosen = candidate.y;
        sum += exp(value_of(candidate.x) - top);
        if (sum > target_mass) { break; }
      }
    }
    shared_rank = all;
  }
  return workgroupUniformLoad(&chosen);
}
// The lowest index that holds the largest value.
fn first_of_largest(lane: u32, top: f32) -> u32 {
  var found = LOWEST;                            // indices as negative floats: exact, and the largest is the first
  for (var b = lane; b < blocks(); b += WG) { if (adjusted[p.vocab + b] == top) { found = max(found, -f32(b)); } }
  let block = u32(-wg_max(lane, found));
  found = LOWEST;
  for (var n = 0u; n < SPAN; n++) {
    let i = (block * SPAN + n) * WG + lane;
    if (i < p.vocab) { if (adjusted[i] == top) { found = max(found, -f32(i)); } }
  }
  return u32(-wg_max(lane, found));
}

fn finish(value: vec4<u32>) {
  result[0] = value;
  if (p.kept_results > 0u) { result[1u + step.draw % p.kept_results] = value; }
  step.position += 1u;
  step.draw += 1u;
}

@compute @workgroup_size(WG)
fn select_token(@builtin(local_invocation_index) lane: u32) {
  var best = LOWEST;
  for (var b = lane; b < blocks(); b += WG) { best = max(best, adjusted[p.vocab + b]); }
  let top = wg_max(lane, best);
  if (top <= LOWEST || top >= BROKEN) {          // uniform: nothing to choose from, or broken numbers
    if (lane == 0u) { finish(vec4<u32>(0u, select(1u, 2u, top >= BROKEN), 0u, 0u)); }
    return;
  }
  var token = 0u;
  var survivors = 1u;
  if (settings.temperature <= 0.0) {
    token = first_of_largest(lane, top);
  } else {
    // candidates: values of the top k, then those of the top p, then those at least min_p times as likely as the largest
    var floor_key = key_of(LOWEST) + 1u;
    let limited = settings.top_k > 0u && settings.top_k < p.vocab;
    if (limited && settings.top_k <= blocks()) { floor_key = max(floor_key, kth_key(lane, settings.top_k, blocks(), true)); }
    let count = gather(lane, list_blocks(lane, floor_key), floor_key);
    if (limited && settings.top_k < count) { floor_key = max(floor_key, kth_key(lane, settings.top_k, count, false)); }
    if (settings.top_p < 1.0) { floor_key = top_p_key(lane, count, floor_key, top); }
    if (settings.min_p > 0.0) { floor_key = max(floor_key, min(key_of(top + log(settings.min_p)), key_of(top))); }
    token = drawn(lane, count, floor_key, top);
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
    finish(vec4<u32>(token, 0u, bitcast<u32>(logprob), survivors));
  }
}
