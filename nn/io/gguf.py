"""GGUF files: metadata and tensors by name, over memory mappings.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

    magic "GGUF", u32 version, u64 tensor count, u64 key count
    key count times:    string key, u32 value type, value        (a string is u64 length + UTF-8 bytes)
    tensor count times: string name, u32 rank, rank x u64 dims (fastest axis first), u32 type, u64 offset
    padding to `general.alignment`, then the tensor data; offsets count from here

The reader trusts nothing: each length is held against the bytes that are left and against the limits below before it
is used, so a hostile file costs neither time nor memory. Arrays of metadata (a vocabulary) are decoded when asked for.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nn.io.errors import DAMAGED, FormatError, quote
from nn.io.mapped import MappedFile
from nn.io.weights import TensorInfo, WeightSource

MAGIC = b"GGUF"

# Far above any model known (262,144 vocabulary entries, some thousands of tensors), low enough to walk in a second.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_RANK = 4  # as in ggml
MAX_NAME_BYTES = (1 << 16) - 1
MAX_TEXT_BYTES = 1 << 25  # keys, names and string values of one file together
MAX_STRINGS = 1 << 22  # elements of all string arrays of one file together
MAX_ARRAY_BYTES = 1 << 26  # one metadata array

# Tensor type number -> name, elements a block, bytes a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
}

# Metadata value type number -> how it is stored. String and array are apart.
SCALARS: dict[int, np.dtype] = {
    number: np.dtype(name)
    for number, name in enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"])
    if name
}
BOOL, STRING, ARRAY = 7, 8, 9
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
TOO_LARGE = "no model comes near this limit: the file is damaged or was made to do harm"

Value = bool | int | float | str | np.ndarray | list[str]


class _Array(NamedTuple):
    """A metadata array that has not been decoded yet."""

    type: int
    offset: int
    count: int


def _show(value: Any) -> str:
    """A metadata value as it may be shown, however large it is."""
    if isinstance(value, (_Array, np.ndarray, list)):
        return "an array"
    return quote(value) if isinstance(value, str) else str(value)


class Metadata(Mapping[str, Value]):
    """A file's keys and values, in file order.

    Values are int, float, bool or str; numeric arrays are NumPy arrays, string arrays lists of str. Arrays are decoded
    at the first look-up, which raises FormatError if one holds invalid UTF-8 or a bool that is neither 0 nor 1, and
    ValueError once the file is closed.
    """

    def __init__(self, file: MappedFile, values: dict[str, Value | _Array]) -> None:
        self._file, self._values = file, values

    def __getitem__(self, key: str) -> Value:
        try:
            value = self._values[key]
        except KeyError:
            near = difflib.get_close_matches(key, list(self._values)[:2000], n=3)
            raise KeyError(f"{self._file.path}: no metadata key {key!r}; near: {', '.join(near) or '(none)'}") from None
        if isinstance(value, _Array):
            value = self._strings(key, value) if value.type == STRING else self._numbers(key, value)
            self._values[key] = value
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def length(self, key: str) -> int:
        """Elements of an array, without decoding it; 1 for anything else. Raises KeyError."""
        value = self._values[key] if key in self._values else self[key]
        if isinstance(value, _Array):
            return value.count
        return len(value) if isinstance(value, (list, np.ndarray)) else 1

    def _numbers(self, key: str, array: _Array) -> np.ndarray:
        dtype = SCALARS[array.type]
        stored = self._file.view(array.offset, array.count * dtype.itemsize)
        if array.type == BOOL and stored.size and stored.max() > 1:
            index = int(np.argmax(stored > 1))
            raise FormatError(
                self._file.path, array.offset + index, f"element {index} of {key!r}", "0 or 1", stored[index]
            )
        return stored.copy().view(dtype)  # a copy outlives the file, and is aligned

    def _strings(self, key: str, array: _Array) -> list[str]:
        buffer, unpack, at = self._file.buffer, U64.unpack_from, array.offset
        strings: list[str] = []
        try:
            for _ in range(array.count):
                start = at + 8
                at = start + unpack(buffer, at)[0]
                strings.append(buffer[start:at].decode())
        except UnicodeDecodeError as error:
            raise FormatError(
                self._file.path, start, f"string {len(strings)} of {key!r}", "UTF-8", quote(error.object)
            ) from None
        return strings


class _Header:
    """Reads the fields of one file in order. `at` is the next byte."""

    def __init__(self, file: MappedFile) -> None:
        self.path, self.buffer, self.size, self.at = file.path, file.buffer, file.size, 0
        self.text_left, self.strings_left = MAX_TEXT_BYTES, MAX_STRINGS

    def fail(self, field: str, wanted: str, got: object, *, offset: int | None = None, hint: str = DAMAGED) -> NoReturn:
        raise FormatError(self.path, self.at if offset is None else offset, field, wanted, got, hint)

    def take(self, nbytes: int, field: str) -> int:
        """Step over `nbytes` bytes, giving where they start."""
        start, left = self.at, self.size - self.at
        if nbytes > left:
            self.fail(field, f"{nbytes} bytes", f"{left} before the end of the file")
        self.at += nbytes
        return start

    def u32(self, field: str) -> int:
        return U32.unpack_from(self.buffer, self.take(4, field))[0]

    def u64(self, field: str) -> int:
        return U64.unpack_from(self.buffer, self.take(8, field))[0]

    def count(self, field: str, limit: int, smallest: int) -> int:
        """How many entries follow, each of at least `smallest` bytes."""
        count, left = self.u64(field), self.size - self.at
        if count > limit:
            self.fail(field, f"at most {limit}", count, offset=self.at - 8, hint=TOO_LARGE)
        if count * smallest > left:
            self.fail(field, f"at most {left // smallest} in the {left} bytes left", count, offset=self.at - 8)
        return count

    def text(self, field: str, limit: int = MAX_TEXT_BYTES) -> str:
        length = self.u64(f"length of {field}")
        if length > min(limit, self.text_left):
            limit = min(limit, self.text_left)
            self.fail(f"length of {field}", f"at most {limit} bytes", length, offset=self.at - 8, hint=TOO_LARGE)
        self.text_left -= length
        start = self.take(length, field)
        try:
            return self.buffer[start : self.at].decode()
        except UnicodeDecodeError as error:
            self.fail(field, "UTF-8", quote(error.object), offset=start)

    def value(self, key: str) -> Value | _Array:
        kind = self.u32(f"value type of {key}")
        if kind == STRING:
            return self.text(f"value of {key}")
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            self.fail(f"value type of {key}", "a type number from 0 to 12", kind, offset=self.at - 4)
        dtype = SCALARS[kind]
        start = self.take(dtype.itemsize, f"value of {key}")
        if kind == BOOL and self.buffer[start] > 1:
            self.fail(f"value of {key}", "0 or 1", self.buffer[start], offset=start)
        return np.frombuffer(self.buffer[start : self.at], dtype)[0].item()

    def array(self, key: str) -> _Array:
        kind = self.u32(f"element type of {key}")
        if kind == ARRAY:
            self.fail(f"element type of {key}", "numbers or strings", "arrays", offset=self.at - 4)
        if kind != STRING and kind not in SCALARS:
            self.fail(f"element type of {key}", "a type number from 0 to 12", kind, offset=self.at - 4)
        size = 8 if kind == STRING else SCALARS[kind].itemsize  # at least
        limit = min(self.strings_left, MAX_ARRAY_BYTES // size) if kind == STRING else MAX_ARRAY_BYTES // size
        count = self.count(f"length of {key}", limit, size)
        array = _Array(kind, self.at, count)
        if kind == STRING:
            self.strings_left -= count
            self.step_over_strings(key, count)
        else:
            self.take(count * size, f"value of {key}")
        return array

    def step_over_strings(self, key: str, count: int) -> None:
        buffer, unpack, at = self.buffer, U64.unpack_from, self.at
        end = min(self.size, at + MAX_ARRAY_BYTES)
        last = end - 8  # where a length can still be read
        for _ in range(count):  # a quarter of a million times for a large vocabulary: nothing else in here
            if at > last:
                break
            at += 8 + unpack(buffer, at)[0]
        else:
            if at <= end:
                self.at = at
                return
        field, wanted = f"strings of {key}", f"{count} strings within {end - self.at} bytes"
        self.fail(field, wanted, "longer ones", hint=TOO_LARGE if end < self.size else DAMAGED)


def _read_header(file: MappedFile) -> tuple[Metadata, dict[str, TensorInfo]]:
    h = _Header(file)
    start = bytes(h.buffer[:4])
    if start != MAGIC:
        h.fail("magic", repr(MAGIC), quote(start), hint="this is not a GGUF file, or it is damaged")
    h.at = 4
    version = h.u32("version")
    if version not in (2, 3):
        hint = "convert the model again with a current converter"
        if version and not version & 0xFFFF:
            h.fail("version", "a little-endian file", "a big-endian one", offset=4, hint=hint)
        h.fail("version", "2 or 3", version, offset=4, hint=hint)
    tensor_count = h.count("tensor count", MAX_TENSORS, 24)
    key_count = h.count("key count", MAX_KEYS, 13)

    values: dict[str, Value | _Array] = {}
    places: dict[str, int] = {}
    for i in range(key_count):
        place = h.at
        key = h.text(f"key {i}", MAX_NAME_BYTES)
        if key in values:
            h.fail(f"key {i}", "a name not used before", quote(key), offset=place)
        values[key] = h.value(quote(key))
        places[key] = place

    infos: dict[str, TensorInfo] = {}
    for i in range(tensor_count):
        place = h.at
        info = _read_tensor_info(h, i)
        if info.name in infos:
            h.fail(f"name of tensor {i}", "a name not used before", quote(info.name), offset=place)
        infos[info.name] = info

    alignment = values.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        h.fail("general.alignment", "a power of two", _show(alignment), offset=places["general.alignment"])
    return Metadata(file, values), _place_tensors(h, infos, -(-h.at // alignment) * alignment, alignment)


def _read_tensor_info(h: _Header, i: int) -> TensorInfo:
    name = h.text(f"name of tensor {i}", MAX_NAME_BYTES)
    shown = quote(name)
    rank = h.u32(f"rank of {shown}")
    if rank > MAX_RANK:
        h.fail(f"rank of {shown}", f"at most {MAX_RANK}", rank, offset=h.at - 4)
    start = h.take(8 * rank, f"dimensions of {shown}")
    dims: tuple[int, ...] = struct.unpack_from(f"<{rank}Q", h.buffer, start)
    if 0 in dims:
        h.fail(f"dimensions of {shown}", "1 or more on each axis", list(dims), offset=start)
    number = h.u32(f"type of {shown}")
    if number not in TYPES:
        h.fail(
            f"type of {shown}", "a known type number", number, offset=h.at - 4, hint="use a model in a common format"
        )
    type_name, block, block_bytes = TYPES[number]
    if block > 1 and (not dims or dims[0] % block):
        wanted = f"rows of a multiple of {block} for {type_name}"
        h.fail(f"dimensions of {shown}", wanted, list(dims), offset=start)
    nbytes = math.prod(dims) // block * block_bytes
    offset = h.u64(f"offset of {shown}")
    if nbytes > h.size:
        wanted = f"at most the {h.size} bytes of the file"
        h.fail(f"dimensions of {shown}", wanted, f"{list(dims)}, {nbytes} bytes", offset=start)
    return TensorInfo(name, dims[::-1], type_name, offset, nbytes)


def _place_tensors(h: _Header, infos: dict[str, TensorInfo], base: int, alignment: int) -> dict[str, TensorInfo]:
    """Turn offsets into file positions, holding them against the file and one another. `base`: where data starts."""
    room = max(h.size - base, 0)
    placed: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        if info.offset % alignment:
            h.fail(f"offset of {quote(name)}", f"a multiple of {alignment}", info.offset, offset=h.at)
        if info.offset + info.nbytes > room:
            got = f"{info.offset} + {info.nbytes} bytes"
            h.fail(f"data of {quote(name)}", f"an end within the {room} bytes of data", got, offset=h.at)
        placed[name] = info._replace(offset=base + info.offset)
    before = None
    for info in sorted(placed.values(), key=lambda info: info.offset):
        if before is not None and info.offset < before.offset + before.nbytes:
            wanted = f"a start after {quote(before.name)}, which ends at {before.offset + before.nbytes}"
            h.fail(f"data of {quote(info.name)}", wanted, info.offset, offset=info.offset)
        before = info
    return placed


class GGUF(WeightSource):
    """An open GGUF model, one file or all shards of a split one. Close it, or use it in a `with`.

    Attributes: `path` and `metadata` (of the first shard), `tensors` by name in file order.
    """

    def __init__(self, files: list[MappedFile], metadata: Metadata, tensors: dict[str, TensorInfo]) -> None:
        super().__init__(files[0].path, files, tensors)
        self.metadata = metadata

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUF:
        """Map the file and read its header; any shard of a split model opens all of it.

        Raises OSError if it cannot be opened, FormatError if it or a shard is not valid, or a shard is missing.
        """
        files: list[MappedFile] = []
        try:
            metadata, tensors = _map(Path(path), files)
            count = metadata.get("split.count", 1)
            if isinstance(count, bool) or not isinstance(count, int):
                raise FormatError(path, None, "split.count", "a whole number", _show(count))
            if count > 1:
                metadata, tensors = _join(files, metadata, tensors, count)
            return cls(files, metadata, tensors)
        except BaseException:
            for file in files:
                file.close()
            raise


def _map(path: Path, files: list[MappedFile]) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Map one more file onto the end of `files` and read its header."""
    files.append(MappedFile(path))
    return _read_header(files[-1])


def _join(
    files: list[MappedFile], metadata: Metadata, tensors: dict[str, TensorInfo], count: int
) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Add the other shards of a split model to `files`, which holds the one that was named."""
    path = files[0].path
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        wanted = f"NAME-00001-of-{count:05d}.gguf, as this is one of {count} shards"
        raise FormatError(path, None, "file name", wanted, path.name, "give the shards their original names")
    if int(match["number"]) != 1:
        files.pop().close()
        metadata, tensors = _map(path.with_name(f"{match['stem']}-00001-of-{count:05d}.gguf"), files)
    tensors = dict(tensors)
    for i in range(count):
        shard = path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf")
        keys, found = metadata, {}
        if i:
            if not shard.is_file():
                raise FormatError(
                    path,
                    None,
                    f"shard {i + 1} of {count}",
                    f"the file {shard.name} beside it",
                    "no such file",
                    "fetch it",
                )
            keys, found = _map(shard, files)
        for key, wanted in (("split.no", i), ("split.count", count)):
            if keys.get(key) != wanted:
                raise FormatError(
                    shard, None, key, str(wanted), _show(keys.get(key)), "the shards are of different models"
                )
        for name, info in found.items():
            if name in tensors:
                raise FormatError(
                    shard, None, f"tensor {quote(name)}", "a name not used in another shard", "a second one"
                )
            tensors[name] = info._replace(file=i)
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise FormatError(path, None, "split.tensors.count", f"{len(tensors)}, as in the shards", _show(total))
    return metadata, tensors
