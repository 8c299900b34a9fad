"""The kernels of attention, and which of them a device and a shape get.

`variants` lists all that are valid for a device and a shape, `default` the one taken without tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.device import Capabilities

Kind = Literal["tile", "decode", "lanes", "split", "narrow", "matrix"]  # entries attention_KIND of shaders/attention/
LANES_ROWS = 8  # up to this many query rows lanes.wgsl is used, where subgroups are wide enough
SPLIT_KEYS = 1024  # for more keys than this a row is shared by several workgroups, which takes a second dispatch
MATRIX_ROWS = 64  # for more query rows than this matrix units are used, where q, k and v are f16
DECODE_ROWS = 256  # up to this many query rows decode.wgsl is used, twice as many for few keys


@dataclass(frozen=True)
class Shape:
    """A call: q (batch, heads, q_len, d) of elem; k and v (batch, kv_heads, k_len, d) of kv.

    limit: at most so many keys are seen, where that is known to be less than k_len (0: it is not).
    step: rows and keys come from a step buffer (a KV cache of k_len). wide: d and every stride are multiples of 4;
    wide8: d and the strides of k and v are multiples of 8.
    """

    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    d: int
    batch: int = 1
    elem: str = "f32"
    kv: str = "f32"
    causal: bool = False
    step: bool = False
    wide: bool = True
    wide8: bool = True
    limit: int = 0

    @property
    def bound(self) -> int:
        """Most keys that a row sees."""
        return min(self.limit or self.k_len, self.k_len)


@dataclass(frozen=True)
class Variant:
    """A kernel file with its constants. rows: query rows a workgroup, where that is chosen here."""

    name: str
    kind: Kind
    rows: int = 1
    constants: tuple[tuple[str, int], ...] = ()

    def fits(self, caps: Capabilities, shape: Shape) -> bool:
        """Whether the device and the shape allow it."""
        constants = dict(self.constants)
        if self.kind == "tile":
            pm, pn, ty, wide = (constants[name] for name in ("PM", "PN", "TY", "WIDE"))
            nbytes = 16 * (self.rows * max(9, 2 * pn + 1) + 8 * pn * max(9, 8 * wide)) + 4 * 8 * ty * pm
            fits = 8 * ty <= caps.max_invocations and nbytes <= caps.max_workgroup_bytes
            return fits and wide <= -(-shape.d // 32)
        if self.kind == "matrix":
            if not (caps.matrix_f16 and caps.f16 and shape.wide and shape.wide8):
                return False
            if shape.kv != "f16" or shape.elem != "f16" or caps.subgroup_size != 32 or shape.k_len == 0:
                return False
            lanes, keys = 32 * constants["SUBGROUPS"], constants["KEYS"]
            row = 16 * -(-shape.d // 16) + 8
            nbytes = 4 * keys * row + self.rows * (4 * (keys + 4) + 2 * (keys + 8) + 4) + 16
            return lanes <= caps.max_invocations and nbytes <= caps.max_workgroup_bytes and self.rows % keys == 0
        if self.kind in ("lanes", "split"):
            wg, heads, size = constants["WG"], constants["HEADS"], max(caps.subgroup_size, 8)
            nbytes = wg // 8 * heads * 4 + wg // size * heads * (8 + 16 * -(-shape.d // 4)) + 4
            room = wg <= caps.max_invocations and wg >= size and nbytes <= caps.max_workgroup_bytes
            return caps.wide_subgroups and room and (shape.heads // shape.kv_heads) % heads == 0
        return True


def tile_variant(pm: int, pn: int, ty: int, wide: int) -> Variant:
    """pm query rows and pn keys an invocation, 8 * ty invocations; wide: v's features staged at once, in 32s."""
    constants = (("PM", pm), ("PN", pn), ("TY", ty), ("WIDE", wide))
    return Variant(f"tile {pm * ty}x{8 * pn} by {8 * ty} wide {wide}", "tile", pm * ty, constants)


def matrix_variant(subgroups: int, rm: int, keys: int) -> Variant:
    """16 * rm query rows a subgroup, keys a tile."""
    constants = (("SUBGROUPS", subgroups), ("RM", rm), ("KEYS", keys))
    return Variant(f"matrix {16 * rm * subgroups}x{keys} by {subgroups}", "matrix", 16 * rm * subgroups, constants)


def lanes_variant(wg: int, ahead: int, *, heads: int = 1, splits: int = 1) -> Variant:
    """wg invocations, each with `ahead` keys under way for `heads` query heads; splits: workgroups that share a row."""
    constants = (("WG", wg), ("AHEAD", ahead), ("HEADS", heads), ("SPLITS", splits))
    if splits == 1:
        return Variant(f"lanes {wg}x{ahead} heads {heads}", "lanes", 1, constants)
    return Variant(f"split {splits} of {wg}x{ahead} heads {heads}", "split", 1, constants)


DECODE, NARROW = Variant("decode", "decode"), Variant("narrow", "narrow")
SMALL_TILE = tile_variant(4, 4, 16, 1)  # fits every device
SMALL_LANES = lanes_variant(64, 1)  # fits every head, as does the next one
SMALL_SPLIT = lanes_variant(64, 1, splits=16)
EVERY = (
    SMALL_TILE,
    tile_variant(4, 4, 16, 2),
    tile_variant(4, 4, 32, 4),
    tile_variant(4, 4, 8, 2),
    matrix_variant(4, 1, 32),
    matrix_variant(8, 1, 32),
    matrix_variant(8, 1, 16),
    DECODE,
    NARROW,
    SMALL_LANES,
    lanes_variant(256, 4),
    lanes_variant(512, 4),
    SMALL_SPLIT,
    lanes_variant(64, 4, splits=16),
    lanes_variant(128, 4, splits=32),
    lanes_variant(64, 4, heads=4, splits=64),
)


def variants(caps: Capabilities, shape: Shape) -> Sequence[Variant]:
    """All that are valid, in a fixed order."""
    return [variant for variant in EVERY if variant.fits(caps, shape)]


def default(caps: Capabilities, shape: Shape) -> Variant:
    """The kernel for this device and shape, as measured on an H200 and on lavapipe."""
    if caps.kind == "cpu":
        return NARROW
    wanted = [tile_variant(4, 4, 16, 2) if shape.d <= 64 else tile_variant(4, 4, 32, 4), SMALL_TILE]
    if shape.q_len <= LANES_ROWS and caps.wide_subgroups:
        if shape.bound <= SPLIT_KEYS:
            wanted = [lanes_variant(256 if shape.bound <= 256 else 512, 4), lanes_variant(256, 4), SMALL_LANES]
        elif shape.bound <= 4096 and shape.heads * shape.batch <= 16:
            wanted = [lanes_variant(64, 4, splits=16), SMALL_SPLIT]
        else:
            wanted = [lanes_variant(64, 4, heads=4, splits=64), lanes_variant(128, 4, splits=32), SMALL_SPLIT]
    elif shape.q_len > MATRIX_ROWS and shape.elem == shape.kv == "f16" and caps.matrix_f16:
        wanted = [matrix_variant(4 if shape.d <= 64 else 8, 1, 32), matrix_variant(8, 1, 16), *wanted]
    elif shape.q_len <= (DECODE_ROWS if shape.bound > SPLIT_KEYS else 2 * DECODE_ROWS):
        return DECODE
    return next(v for v in wanted if v.fits(caps, shape))


KEEPING = ("tile", "narrow")  # kernels that can keep the logarithms of the rows' sums


def keeping(caps: Capabilities, shape: Shape) -> Variant:
    """The kernel where the way back needs the logarithms of the rows' sums."""
    if caps.kind == "cpu":
        return NARROW
    wanted = tile_variant(4, 4, 16, 2) if shape.d <= 64 else tile_variant(4, 4, 32, 4)
    return wanted if wanted.fits(caps, shape) else SMALL_TILE


@dataclass(frozen=True)
class GradVariant:
    """A kernel of the gradients, shaders/attention/grad_KIND.wgsl. rows: of its own side a workgroup."""

    name: str
    kind: Literal["tile", "serial"]
    rows: int
    constants: tuple[tuple[str, int], ...] = ()

    def fits(self, caps: Capabilities, shape: Shape) -> bool:
        """Whether the device and the shape allow it."""
        constants = dict(self.constants)
        if not constants:
            return True
        pn, wide = constants["PN"], constants["WIDE"]
        nbytes = 16 * (self.rows * max(9, 2 * pn + 1) + 8 * pn * max(9, 8 * wide))
        return (
            8 * constants["TY"] <= caps.max_invocations
            and nbytes <= caps.max_workgroup_bytes
            and wide <= -(-shape.d // 32)
        )


def grad_tile(pm: int, pn: int, ty: int, wide: int) -> GradVariant:
    """pm own rows and pn rows of the other side an invocation, 8 * ty invocations, features staged in 32 wide."""
    constants = (("PM", pm), ("PN", pn), ("TY", ty), ("WIDE", wide))
    return GradVariant(f"tile {pm * ty}x{8 * pn} by {8 * ty} wide {wide}", "tile", pm * ty, constants)


SMALL_GRAD = grad_tile(4, 4, 16, 1)
GRADS = (SMALL_GRAD, grad_tile(4, 4, 16, 2))


def grad_default(caps: Capabilities, shape: Shape) -> GradVariant:
    """The kernel of the gradients for this device and shape, as measured on an H200."""
    wanted = grad_tile(4, 4, 16, 2) if shape.d <= 64 else SMALL_GRAD
    return wanted if wanted.fits(caps, shape) else SMALL_GRAD


__all__ = [
    "EVERY",
    "GRADS",
    "KEEPING",
    "GradVariant",
    "Kind",
    "Shape",
    "Variant",
    "default",
    "grad_default",
    "keeping",
    "lanes_variant",
    "matrix_variant",
    "tile_variant",
    "variants",
]
