"""safetensors files, single or sharded: tensors by name, over memory mappings.

Format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, data), little-endian.

    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"key": "text"}}

Offsets count from the end of the header; the tensors fill the data without holes or overlaps. The format is read here
and not by the `safetensors` package because that one's NumPy interface copies every tensor, has no bf16, and would be
one more dependency for some hundred lines; the tests hold this file against it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nn.io.errors import DAMAGED, FormatError, quote
from nn.io.mapped import MappedFile
from nn.io.weights import DENSE, TensorInfo, WeightSource

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Bounds on what a header may make us build; a header of 100,000 tensors is about 12 MB with 800,000 marks.
MAX_HEADER_BYTES = 1 << 25
MAX_MARKS = 1 << 21  # "," "[" "{" and ":" in it
MAX_RANK = 32
FOREIGN = "this is not a safetensors file, or it is damaged"

DTYPES = {name.upper(): name for name in DENSE}  # as the format spells them -> ours


class _Object(dict[str, Any]):
    """A JSON object; `twice` is a key that it holds twice, if any."""

    twice: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        made.twice = next(key for key, _ in pairs if key in seen or seen.add(key))
    return made


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _parse(path: Path, text: bytes, offset: int, field: str) -> _Object:
    """A JSON object from outside, within bounds. Raises FormatError."""
    marks = sum(text.count(mark) for mark in b",[{:")
    if marks > MAX_MARKS:
        raise FormatError(path, offset, field, f"at most {MAX_MARKS} commas, colons and brackets", marks)
    try:
        found = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_not_json)
    except RecursionError:
        raise FormatError(path, offset, field, "JSON of little depth", "brackets nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, a number of 5,000 digits
        raise FormatError(path, offset, field, "a JSON object", quote(str(error), 100)) from None
    if not isinstance(found, _Object):
        raise FormatError(path, offset, field, "a JSON object", f"a {type(found).__name__}")
    if found.twice is not None:
        raise FormatError(path, offset, field, "each name once", f"{quote(found.twice)} twice")
    for name in found:
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise FormatError(path, offset, field, "names in Unicode", quote(name))
    return found


def _show(value: object) -> str:
    """A JSON value as it may be shown, however large or deep it is."""
    if isinstance(value, dict):
        return f"an object with {quote(', '.join(list(value)[:5])) if value else 'nothing in it'}"
    if isinstance(value, list) and (len(value) > MAX_RANK or any(isinstance(item, (list, dict)) for item in value)):
        return f"a list of {len(value)}"
    return quote(value) if isinstance(value, str) else str(value)[:200]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _read_header(file: MappedFile) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    def fail(field: str, wanted: str, got: object, offset: int = 8, hint: str = DAMAGED) -> NoReturn:
        raise FormatError(file.path, offset, field, wanted, got, hint)

    if file.size < 8:
        fail("header length", "8 bytes", f"{file.size} before the end of the file", 0)
    (length,) = struct.unpack_from("<Q", file.buffer)
    if length > MAX_HEADER_BYTES:
        fail("header length", f"at most {MAX_HEADER_BYTES}", length, 0, FOREIGN)
    if length > file.size - 8:
        fail("header length", f"at most the {file.size - 8} bytes that follow", length, 0, FOREIGN)
    if file.buffer[8:9] != b"{" or not length:
        fail("header", "a JSON object that starts at once", quote(file.buffer[8 : 8 + min(length, 16)]), 8, FOREIGN)
    header = _parse(file.path, file.buffer[8 : 8 + length], 8, "header")

    metadata = header.pop("__metadata__", _Object())
    if not isinstance(metadata, _Object) or not all(isinstance(text, str) for text in metadata.values()):
        fail("__metadata__", "an object of texts", _show(metadata))
    if metadata.twice is not None:
        fail("__metadata__", "each key once", f"{quote(metadata.twice)} twice")

    base, data_bytes = 8 + length, file.size - 8 - length
    infos = {name: _tensor_info(name, entry, base, fail) for name, entry in header.items()}
    end, before = base, "the header"
    for info in sorted(infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            kind = "an overlap" if info.offset < end else "a hole"
            got = f"{info.offset - base}, {kind}"
            fail(f"data_offsets of {quote(info.name)}", f"a start at {end - base}, where {before} ends", got)
        end, before = info.offset + info.nbytes, quote(info.name)
    if end != file.size:
        fail("data", f"{end - base} bytes, as the tensors take", data_bytes, base)
    return infos, dict(metadata)


def _tensor_info(name: str, entry: Any, base: int, fail: Any) -> TensorInfo:
    shown = quote(name)
    if (
        not isinstance(entry, _Object)
        or entry.twice is not None
        or not {"dtype", "shape", "data_offsets"} <= set(entry)
    ):
        got = f"{quote(entry.twice)} twice" if isinstance(entry, _Object) and entry.twice else _show(entry)
        fail(f"entry of {shown}", "dtype, shape and data_offsets", got)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(f"dtype of {shown}", f"one of {', '.join(DTYPES)}", _show(dtype))
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        fail(f"shape of {shown}", f"a list of at most {MAX_RANK} whole numbers", _show(shape))
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[1] < offsets[0]
    ):
        fail(f"data_offsets of {shown}", "a start and an end not before it", _show(offsets))
    start, end = offsets
    nbytes = math.prod(shape) * DENSE[DTYPES[dtype]].itemsize
    if nbytes != end - start:
        fail(f"data_offsets of {shown}", f"{nbytes} bytes, as {shape} {dtype} takes", end - start)
    return TensorInfo(name, tuple(shape), DTYPES[dtype], base + start, nbytes)


class Checkpoint(WeightSource):
    """Open safetensors weights, one file or all shards of an index. Close it, or use it in a `with`.

    Attributes: `path` as given, `metadata` (the texts of all files' `__metadata__`), `tensors` by name. With an index,
    only what it lists is there, each tensor from the shard that it names.
    """

    def __init__(
        self, path: Path, files: list[MappedFile], tensors: dict[str, TensorInfo], metadata: dict[str, str]
    ) -> None:
        super().__init__(path, files, tensors)
        self.metadata = metadata

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a .safetensors file, an index (`*.index.json`) or a folder that holds `model.safetensors`, its index, or
        a single .safetensors file, looked for in this order.

        Raises OSError if a file cannot be opened, FormatError if one is invalid, or missing, or lacks a tensor that the
        index places in it.
        """
        path = Path(path)
        found = _find(path) if path.is_dir() else path
        files: list[MappedFile] = []
        try:
            if found.name.endswith(".index.json"):
                return cls(path, files, *_open_shards(found, files))
            files.append(MappedFile(found))
            return cls(path, files, *_read_header(files[0]))
        except BaseException:
            for file in files:
                file.close()
            raise


def _find(folder: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        got = ", ".join(file.name for file in found[:5]) or "no .safetensors file"
        raise FormatError(folder, None, "folder", f"{SINGLE} or {INDEX}", got, "name the file itself")
    return found[0]


def _is_plain_name(name: str) -> bool:
    """Whether a name from outside can only mean a file in the folder at hand."""
    return (
        name.isprintable()
        and len(name.encode()) < 256
        and name not in ("", "..")
        and Path(name).name == name
        and "\\" not in name
    )


def _open_shards(index: Path, files: list[MappedFile]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Map every shard that the index names onto `files`; the index decides where a tensor is."""
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise FormatError(index, 0, "index", f"at most {MAX_HEADER_BYTES} bytes", index.stat().st_size)
    places = _parse(index, index.read_bytes(), 0, "index").get("weight_map")
    if not isinstance(places, _Object) or not all(isinstance(shard, str) for shard in places.values()):
        raise FormatError(index, None, "weight_map", "an object of tensor and file names", _show(places))
    if places.twice is not None:
        raise FormatError(index, None, "weight_map", "each tensor once", f"{quote(places.twice)} twice")
    held: dict[str, dict[str, TensorInfo]] = {}
    metadata: dict[str, str] = {}
    for shard in dict.fromkeys(places.values()):
        if not _is_plain_name(shard):
            hint = "the index may only name files beside it"
            raise FormatError(index, None, "weight_map", "names of files beside the index", quote(shard), hint)
        path = index.with_name(shard)
        if not path.is_file():
            raise FormatError(index, None, "weight_map", f"the shard {shard} beside it", "no such file", "fetch it")
        files.append(MappedFile(path))
        infos, texts = _read_header(files[-1])
        held[shard] = {name: info._replace(file=len(files) - 1) for name, info in infos.items()}
        metadata |= texts
    tensors: dict[str, TensorInfo] = {}
    for name, shard in places.items():
        if name not in held[shard]:
            raise FormatError(index, None, "weight_map", f"{quote(name)} in {shard}", "a shard without it")
        tensors[name] = held[shard][name]
    return tensors, metadata


def save_file(
    tensors: Mapping[str, np.ndarray],
    path: str | os.PathLike[str],
    *,
    bf16: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a .safetensors file, which appears whole or not at all.

    Args:
        tensors: any shapes; NumPy floats, integers and bool.
        bf16: names of uint16 arrays that hold bf16 bits.
        metadata: texts for `__metadata__`.
    Raises: OSError; ValueError for a type that the format lacks, a `bf16` name that is not a uint16 array, or a tensor
        called `__metadata__`.
    """
    path = Path(path)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    arrays: list[np.ndarray] = []
    end = 0
    # Widest elements first, as the format's own writer does: every tensor is then aligned to its element.
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        dtype = _dtype_of(name, array, name in bf16)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
        arrays.append(array)
    for name in bf16:
        if name not in tensors:
            raise ValueError(f"save_file: bf16 names {name!r}, which is not among the tensors")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.writelines(_little_endian(arrays))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _dtype_of(name: str, array: np.ndarray, bf16: bool) -> str:
    if name == "__metadata__":
        raise ValueError("save_file: a tensor may not be called '__metadata__', the format keeps that name for itself")
    if bf16:
        if array.dtype != np.uint16:
            raise ValueError(f"save_file: {name!r} is {array.dtype}; a bf16 tensor is given as its bits in uint16")
        return "BF16"
    kind = array.dtype.kind
    code = "BOOL" if kind == "b" else f"{kind.upper()}{8 * array.dtype.itemsize}"
    if kind not in "bfiu" or code not in DTYPES:
        raise ValueError(
            f"save_file: {name!r} is {array.dtype}, which safetensors cannot hold; convert it, to float32 say"
        )
    return code


def _little_endian(arrays: Iterable[np.ndarray]) -> Iterable[memoryview]:
    for array in arrays:
        whole = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        yield whole.view(np.uint8).data
