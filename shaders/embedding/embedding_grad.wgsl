// Gradient of an embedding lookup with respect to its table: a scatter-add that gives the same bits every time.
//   parts[s, v, k] = scale * sum of dy[t, k] over the tokens t of chunk s with ids[t] = v, t ascending
// ids at and past vocab count as vocab - 1, as in embedding.wgsl. Chunk s has the tokens s chunk .. (s + 1) chunk - 1; where
// there are several, reduce/parts.wgsl adds them up.
// Grid: ceil(packs / WG) * blocks * chunks workgroups, blocks = ceil(vocab / rows): a workgroup has `rows` rows of the table, an
// invocation one pack of columns of theirs, which nobody else writes. The workgroup looks at 32 WG ids at a time: each
// invocation makes a word of 32 flags, of the tokens that are its rows'; all then go through the flags that are set.
// dy: [tokens, packs] of one or four elements (the part `pack`); parts: [chunks, vocab, packs] f32. The serial entry, for
// software drivers, has each invocation look at every id by itself.
alias Elem = f32;          // type of dy
override WG: u32 = 64u;    // invocations a workgroup
struct Params { tokens: u32, vocab: u32, rows: u32, chunk: u32, chunks: u32, packs: u32, blocks: u32, scale: f32 }
@group(0) @binding(0) var<storage, read> ids: array<u32>;
@group(0) @binding(1) var<storage, read> dy: array<Pack>;
@group(0) @binding(2) var<storage, read_write> parts: array<Real>;
@group(0) @binding(3) var<uniform> p: Params;
// include lib/pack4.wgsl as pack
const NONE: u32 = 0xffffffffu;
var<workgroup> flags: array<u32, WG>;

struct Place { chunk: u32, row0: u32, rows: u32, begin: u32, end: u32 }
fn place_of(index: u32) -> Place {
  var at: Place;
  at.chunk = index / p.blocks;
  at.row0 = index % p.blocks * p.rows;
  at.rows = min(p.rows, p.vocab - at.row0);
  at.begin = min(at.chunk * p.chunk, p.tokens);
  at.end = min(at.begin + p.chunk, p.tokens);
  return at;
}
// Which of this workgroup's rows token t belongs to; at.rows or more: none.
fn row_of(t: u32, at: Place) -> u32 { return min(ids[t], p.vocab - 1u) - at.row0; }   // earlier rows wrap around

@compute @workgroup_size(WG)
fn embedding_grad(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                  @builtin(local_invocation_index) lane: u32) {
  let across = (p.packs + WG - 1u) / WG;
  let index = wg.y * grid.x + wg.x;                   // grids past 65535 are folded into y
  let at = place_of(index / across);
  if (at.chunk >= p.chunks) { return; }               // uniform: the whole workgroup leaves
  let column = index % across * WG + lane;
  let mine = column < p.packs;
  let first = (at.chunk * p.vocab + at.row0) * p.packs + column;
  if (mine) {
    for (var r = 0u; r < at.rows; r++) { parts[first + r * p.packs] = Real(); }
  }
  var row = NONE;                                     // the row that `sum` belongs to
  var sum = Real();
  for (var tile = at.begin; tile < at.end; tile += 32u * WG) {
    var word = 0u;
    for (var i = 0u; i < 32u; i++) {
      let t = tile + lane * 32u + i;
      if (t < at.end) { word |= select(0u, 1u << i, row_of(t, at) < at.rows); }
    }
    workgroupBarrier();                               // everyone is done with the last flags
    flags[lane] = word;
    workgroupBarrier();
    if (mine) {
      for (var w = 0u; w < WG; w++) {
        var bits = flags[w];
        while (bits != 0u) {                          // four at a time, so that their loads are under way together
          var four: array<Real, 4>;
          var rows: array<u32, 4>;
          for (var e = 0u; e < 4u; e++) {
            rows[e] = NONE;
            four[e] = Real();
            if (bits != 0u) {
              let t = tile + 32u * w + firstTrailingBit(bits);
              bits &= bits - 1u;
              rows[e] = row_of(t, at);
              four[e] = wide(dy[t * p.packs + column]);
            }
          }
          for (var e = 0u; e < 4u; e++) {
            if (rows[e] != NONE) {
              if (rows[e] != row) {
                if (row != NONE) { parts[first + row * p.packs] = sum; }
                row = rows[e];
                sum = parts[first + row * p.packs];
              }
              sum += four[e] * p.scale;
            }
          }
        }
      }
    }
  }
  if (row != NONE) { parts[first + row * p.packs] = sum; }
}

@compute @workgroup_size(WG)
fn embedding_grad_serial(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
                         @builtin(local_invocation_index) lane: u32) {
  let across = (p.packs + WG - 1u) / WG;
  let index = wg.y * grid.x + wg.x;
  let at = place_of(index / across);
  let column = index % across * WG + lane;
  if (at.chunk >= p.chunks || column >= p.packs) { return; }
  let first = (at.chunk * p.vocab + at.row0) * p.packs + column;
  for (var r = 0u; r < at.rows; r++) { parts[first + r * p.packs] = Real(); }
  for (var t = at.begin; t < at.end; t++) {
    let row = row_of(t, at);
    if (row < at.rows) { parts[first + row * p.packs] += wide(dy[t * p.packs + column]) * p.scale; }
  }
}
