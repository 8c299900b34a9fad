"""The kernels that make products with weight matrices, and which of them a device and a size get.

`variants` lists all that are valid for a device and a product, `default` the one taken without tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nn.ops import linear_wide
from nn.quant.formats import format_of
from nn.quant.repack import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.device import Capabilities

ROW, BROADCAST = "matmul/row.wgsl", "matmul/row_broadcast.wgsl"
GEMV, GEMM = "matmul/gemv.wgsl", "matmul/gemm_weight.wgsl"
WIDE = "matmul/gemm_matrix.wgsl"
F32, DIGITS = "matmul/dots_f32.wgsl", "matmul/dots_digits.wgsl"
GEMV_TOKENS = 8  # twice as many, or more, go through the tiled kernel
_FILL = 128  # multiprocessors of a large GPU
_REACHED = {32: 0.8, 16: 0.42, 8: 0.15, 4: 0.08}  # by the sums an invocation holds, other things equal
_MANY = 16384  # rows that keep a large GPU busy however few invocations share one
_BYTES = {F32: 144, DIGITS: 112}  # of workgroup memory for a block of x
_MOST = 264  # workgroups of 256 that a large GPU runs at a time: more would copy x once more


@dataclass(frozen=True)
class Shape:
    """`tokens` rows of x times a weight matrix (rows, cols) in a storage format.

    paired: for an entry that works on pairs of rows (gated, rotated).
    """

    tokens: int
    rows: int
    cols: int
    format: str
    paired: bool = False

    @property
    def blocks(self) -> int:
        """Of 32 weights, in a row."""
        return -(-self.cols // BLOCK)


@dataclass(frozen=True)
class Variant:
    """A kernel file with its constants and parts; a workgroup makes `rows` rows of W times `tokens` rows of x.

    most: workgroups at most, which then make several tiles of rows each, one after another; 0 for no limit.
    """

    name: str
    path: str
    rows: int
    tokens: int
    constants: tuple[tuple[str, int], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    most: int = 0

    @property
    def sums(self) -> int:
        """Those that an invocation of gemm_weight.wgsl holds."""
        options = dict(self.constants)
        return options["RM"] * options["RN"]

    def grid(self, rows: int, tokens: int) -> int:
        """Workgroups for a matrix of so many rows."""
        tiles, groups = -(-tokens // self.tokens), -(-rows // self.rows)
        if self.most and tiles:
            rounds = -(-groups * tiles // max(self.most, tiles))
            groups = -(-groups // max(rounds, 1))
        return groups * tiles


def row_variant(tokens: int, *, dense: bool, broadcast: bool = False) -> Variant:
    """An invocation makes several rows: the more, the less often x is read. Dense formats fill more registers a row.

    broadcast: subgroups of eight or more hand x round, which reads it less often still.
    """
    per_item, tile, group = (2 if dense else 4), (4 if tokens > 1 else 1), 8
    if broadcast:
        constants = (("ROWS", per_item), ("TOKENS", tile))
        return Variant(f"rows {per_item} x {tile} broadcast", BROADCAST, per_item * group, tile, constants)
    per_item *= 2 if tokens > 1 else 1
    constants = (("ROWS", per_item), ("TOKENS", tile), ("WG", group))
    return Variant(f"rows {per_item} x {tile}", ROW, per_item * group, tile, constants)


def gemv_variant(
    dots: str, blocks: int, *, rows: int, tokens: int, lanes: int, unroll: int, group: int, memory: int, within: bool
) -> Variant:
    """`lanes` invocations share `rows` rows, `unroll` blocks of each on their way at a time.

    memory: bytes of workgroup memory there are. within: no more lanes than invocations in a subgroup.
    """
    most = max(8, (memory - 8 * group) // (_BYTES[dots] * tokens) // 8 * 8)
    chunk = -(-blocks // -(-blocks // most) // 8) * 8  # chunks of about one size
    constants = {"CHUNK": chunk, "LANES": lanes, "ROWS": rows, "TOKENS": tokens, "UNROLL": unroll, "WG": group}
    kind = "digits" if dots == DIGITS else "f32"
    return Variant(
        f"gemv {kind} {rows}x{tokens} lanes {lanes} unroll {unroll} group {group} chunk {chunk}",
        GEMV,
        group // lanes * rows,
        tokens,
        (*constants.items(), ("WITHIN", int(within))),
        (("dots", dots),),
        _MOST * 256 // group,
    )


def gemm_variant(across: int, rows: int, down: int, tokens: int, parts: int = 1, step: int = 1) -> Variant:
    """across x down invocations, `parts` times; rows x tokens an invocation, `step` blocks of columns at a time."""
    if parts > 1 and (down * tokens * parts > 32 * step or 8 * step % parts):
        raise ValueError(f"gemm_variant: {parts} parts do not fit steps of {step} blocks and {down * tokens} tokens")
    constants = {"TX": across, "RM": rows, "TY": down, "RN": tokens, "PARTS": parts, "STEP": step}
    name = f"gemm {across * rows}x{down * tokens}x{32 * step} of {rows}x{tokens}, {parts} parts"
    return Variant(name, GEMM, across * rows, down * tokens, tuple(constants.items()))


TILES = (
    gemm_variant(16, 8, 16, 8),
    gemm_variant(16, 8, 16, 4),
    gemm_variant(8, 8, 8, 8, step=2),
    gemm_variant(16, 4, 16, 4, step=2),
    gemm_variant(8, 8, 8, 4, parts=2, step=2),
    gemm_variant(8, 8, 8, 4, parts=4, step=4),
    gemm_variant(8, 8, 4, 4, parts=4, step=2),
    gemm_variant(8, 8, 4, 4, parts=8, step=4),
    gemm_variant(8, 8, 4, 2, parts=8, step=2),
    gemm_variant(8, 4, 8, 4, parts=4, step=4),
    gemm_variant(8, 4, 4, 4, parts=8, step=4),
    gemm_variant(4, 8, 8, 2, parts=8, step=4),
    gemm_variant(8, 4, 4, 2, parts=16, step=4),
    *(gemm_variant(16, 4, 8, tokens) for tokens in (8, 4, 2, 1)),
)


def wide_variant(tokens: int, rows: int, sub_tokens: int, sub_rows: int) -> Variant:
    """On matrix units, with the weights decoded to f16 first: tiles of tokens x rows, parts of them a subgroup."""
    constants = {"TILE_M": tokens, "TILE_N": rows, "TILE_K": 32, "SUB_M": sub_tokens, "SUB_N": sub_rows}
    return Variant(f"wide {tokens}x{rows} of {sub_tokens}x{sub_rows}", WIDE, rows, tokens, tuple(constants.items()))


WIDES = (wide_variant(256, 128, 64, 64), wide_variant(128, 64, 64, 32), wide_variant(64, 64, 32, 32))
WIDE_TOKENS = 128  # rows of x from which decoding the weights once can be worth it


def wide_fits(caps: Capabilities, form: Variant, shape: Shape) -> bool:
    """Formats whose values f16 holds, and a device and sizes for it."""
    stored = shape.format == "f16" or not format_of(shape.format).dense
    return stored and linear_wide.fits(caps, form, shape)


def gemm_fits(caps: Capabilities, form: Variant) -> bool:
    """Whether the device has the workgroup memory and the invocations."""
    options = dict(form.constants)
    group = options["TX"] * options["TY"] * options["PARTS"]
    memory = (form.rows + form.tokens) * 128 * options["STEP"]
    return memory <= caps.max_workgroup_bytes and group <= caps.max_invocations


def digits_fit(caps: Capabilities, shape: Shape) -> bool:
    """Whether the weights are bytes, and the device has the subgroups that the digits of x are made with."""
    return caps.wide_subgroups and not format_of(shape.format).dense


def default(caps: Capabilities, shape: Shape) -> Variant:
    """The kernel for this device and size."""
    tokens, dense = shape.tokens, format_of(shape.format).dense
    if caps.kind == "cpu":
        return row_variant(tokens, dense=dense, broadcast=caps.wide_subgroups)
    digits = digits_fit(caps, shape)
    # Three more dispatches: small matrices need more rows (SmolLM2: 128 54 us a token, not 30; 512 15, not 18).
    if tokens >= WIDE_TOKENS and tokens * shape.rows * shape.cols >= 1 << (30 if tokens < 512 else 27):
        for wide in WIDES:
            if wide_fits(caps, wide, shape) and (wide is WIDES[-1] or wide.grid(shape.rows, tokens) >= _FILL):
                return wide
    if tokens > (2 * GEMV_TOKENS if digits else GEMV_TOKENS):
        return _gemm(caps, shape)
    return _digits(caps, shape) if digits else _f32(caps, shape)


def _gemm(caps: Capabilities, shape: Shape) -> Variant:
    """The tile with the least time by a model fitted to measurements on a large GPU.

    A tile's invocations reach a part of the multiply-adds that grows with what each holds in registers and with how
    many of them a multiprocessor has to switch between; workgroups that do not come out even leave some of it idle.
    Tiles of 64 sums an invocation are left to the tuner: there they were slower than this model has it.
    """

    def cost(form: Variant) -> float:
        options = dict(form.constants)
        group = options["TX"] * options["TY"] * options["PARTS"]
        rounds = -(-form.grid(shape.rows, shape.tokens) // _FILL)
        at_a_time = min(rounds, 200_000 // ((form.rows + form.tokens) * 128 * options["STEP"]))
        busy = min(at_a_time * group / 32, 8)
        reached = _REACHED[form.sums] * busy / (busy + 8)
        return rounds * form.rows * form.tokens * (1 + 0.02 * options["PARTS"]) / reached

    return min((form for form in TILES if gemm_fits(caps, form) and form.sums < 64), key=cost)


def _tile(tokens: int) -> int:
    return next(n for n in (1, 2, 4) if n >= min(tokens, 4))


def _digits(caps: Capabilities, shape: Shape) -> Variant:
    """As measured on a large GPU. Many rows: more of them share what is read of x, and few invocations share a short
    row, because its blocks divide more evenly. Otherwise many invocations, to make each one's chain short."""
    tile, blocks, lanes = _tile(shape.tokens), shape.blocks, min(caps.subgroup_size, 32)
    rows, unroll, group = 2, 2, 512
    if shape.rows >= _MANY // 2 or (tile > 1 and shape.rows > _MANY // 4):
        rows, unroll, group = 4, 1, 256 if tile == 1 else 512
        if blocks < 64:
            lanes = 8
        elif tile == 1 and shape.rows < _MANY:  # 12,288 x 4,096 q4_0: 13.2 against 15.4 us (H200, the tuner)
            lanes, group = min(lanes, 16), 512
        elif tile == 1 and format_of(shape.format).row_bytes(256) < 160:  # under 5 bits: 18.2 against 19.8 us
            group = 512
    elif blocks <= 2 * lanes and tile == 1:
        rows, unroll, group = (2 if shape.paired or shape.rows >= 2048 else 1), 1, 256
    while lanes > 8 and lanes >= 2 * blocks:
        lanes //= 2
    return _gemv(caps, DIGITS, shape, rows, unroll, lanes, min(group, caps.max_invocations))


def _f32(caps: Capabilities, shape: Shape) -> Variant:
    """Dense weights, and devices without subgroups."""
    tile, blocks, lanes = _tile(shape.tokens), shape.blocks, 4
    wide = caps.subgroup_size if caps.subgroups else 16
    while lanes < min(wide, 8 if shape.rows >= _MANY and blocks < 64 else 32) and lanes < blocks:
        lanes *= 2
    rows = 2 if shape.paired or tile > 1 or (shape.rows >= 2048 and shape.format != "f32") else 1
    return _gemv(caps, F32, shape, rows, 1, lanes, 256)


def _gemv(caps: Capabilities, dots: str, shape: Shape, rows: int, unroll: int, lanes: int, group: int) -> Variant:
    return gemv_variant(
        dots, shape.blocks, rows=rows, tokens=_tile(shape.tokens), lanes=lanes, unroll=unroll, group=group,
        memory=caps.max_workgroup_bytes, within=_within(caps, lanes),
    )  # fmt: skip


def _within(caps: Capabilities, lanes: int) -> bool:
    """Whether so many invocations always lie in one subgroup. Intel's compilers choose a size for each kernel, 8 or
    more, so what was probed with another kernel says nothing there; elsewhere no kernel gets a smaller one than 32 or
    what was probed."""
    varies = "intel" in f"{caps.name} {caps.driver}".lower()
    return caps.subgroups and lanes <= (min(caps.subgroup_size, 8) if varies else caps.subgroup_size)


def variants(caps: Capabilities, shape: Shape) -> Sequence[Variant]:
    """All that are valid, in a fixed order; for software drivers those without workgroup memory, which costs there."""
    dense = format_of(shape.format).dense
    if caps.kind == "cpu":
        return list(dict.fromkeys((default(caps, shape), row_variant(shape.tokens, dense=dense))))
    found = [
        default(caps, shape),
        row_variant(shape.tokens, dense=dense),
    ]
    found += [t for t in TILES if gemm_fits(caps, t) and t.tokens < 2 * max(shape.tokens, 8)]
    found += [t for t in WIDES if shape.tokens >= WIDE_TOKENS // 2 and wide_fits(caps, t, shape)]
    if shape.tokens <= 2 * GEMV_TOKENS:
        wide = caps.subgroup_size if caps.subgroups else 16
        for dots in (F32, DIGITS) if digits_fit(caps, shape) else (F32,):
            for rows, unroll, group in ((1, 1, 256), (2, 1, 256), (2, 2, 512), (4, 1, 256), (4, 1, 512)):
                if (rows == 1 and shape.paired) or group > caps.max_invocations or (dots == F32 and unroll > 1):
                    continue
                found += [
                    _gemv(caps, dots, shape, rows, unroll, lanes, group) for lanes in (8, 16, 32) if lanes <= wide
                ]
    names: dict[str, Variant] = {}
    for form in found:
        names.setdefault(form.name, form)
    return list(names.values())
