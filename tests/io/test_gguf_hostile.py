"""Malformed GGUF files: each gives a FormatError that says what is wrong, at once and without taking memory."""

import os
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nn.io.errors import FormatError
from nn.io.gguf import GGUF

HUGE = 2**60


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    text = text if isinstance(text, bytes) else text.encode()
    return u64(len(text)) + text


def strings(*texts, count=None):
    return u32(8) + u64(len(texts) if count is None else count) + b"".join(map(string, texts))


def key(name, kind, value):
    return string(name) + u32(kind) + value


def tensor(name="t", dims=(32,), kind=0, offset=0):
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def file(
    keys=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, key_count=None, tensor_count=None, alignment=32
):  # fmt: skip
    head = magic + u32(version)
    head += u64(len(tensors) if tensor_count is None else tensor_count) + u64(
        len(keys) if key_count is None else key_count
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data if data else head


DATA = bytes(range(256)) * 16
VALID = file(
    [
        key("general.alignment", 4, u32(32)),
        key("name", 8, string("x")),
        key("flag", 7, b"\1"),
        key("words", 9, strings("a", "", "bcd")),
        key("scores", 9, u32(6) + u64(2) + struct.pack("<2f", 1, 2)),
        key("flags", 9, u32(7) + u64(2) + b"\0\1"),
    ],
    [tensor("a", (32, 2), 0, 0), tensor("b", (32, 3), 8, 256), tensor("c", (3,), 1, 384)],
    DATA[:390],
)

CASES = {
    # the file as a whole
    "wrong magic": (file(magic=b"GGML"), r"byte 0, magic: wanted b'GGUF', got b'GGML'; this is not a GGUF file"),
    "three bytes": (b"GGU", r"magic: wanted b'GGUF', got b'GGU'"),
    "version 1": (file(version=1), r"byte 4, version: wanted 2 or 3, got 1; convert the model again"),
    "version 4": (file(version=4), r"version: wanted 2 or 3, got 4"),
    "version 0": (file(version=0), r"version: wanted 2 or 3, got 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"wanted a little-endian file, got a big-endian one; conv"),
    "key count 2^60": (file(key_count=HUGE), rf"byte 16, key count: wanted at most 65536, got {HUGE}; no model"),
    "key count 9": (file(key_count=9), r"key count: wanted at most 0 in the 0 bytes left, got 9; the file is damaged"),
    "tensor count 2^60": (file(tensor_count=HUGE), rf"byte 8, tensor count: wanted at most 131072, got {HUGE}"),
    "tensor count 9": (file(tensor_count=9), r"tensor count: wanted at most 0 in the 8 bytes left, got 9"),
    # keys and values
    "key length 2^60": (
        file([u64(HUGE) + bytes(99)]),
        rf"byte 24, length of key 0: wanted at most 65535 bytes, got {HUGE}",
    ),
    "key past the end": (file([u64(200) + bytes(99)]), r"byte 32, key 0: wanted 200 bytes, got 99 before the end"),
    "key not UTF-8": (file([key(b"a\xff\n", 0, b"\0")]), r"byte 32, key 0: wanted UTF-8, got b'a\\xff\\n'"),
    "key twice": (file([key("k", 0, b"\0")] * 2), r"byte 38, key 1: wanted a name not used before, got 'k'"),
    "value type 13": (
        file([key("k", 13, u64(0))]),
        r"byte 33, value type of 'k': wanted a type number from 0 to 12, got 13",
    ),
    "bool 2": (file([key("k", 7, b"\2")]), r"byte 37, value of 'k': wanted 0 or 1, got 2"),
    "string length 2^60": (
        file([key("k", 8, u64(HUGE))]),
        rf"length of value of 'k': wanted at most \d+ bytes, got {HUGE}",
    ),
    "string past the end": (
        file([key("k", 8, u64(9))]),
        r"byte 45, value of 'k': wanted 9 bytes, got 0 before the end",
    ),
    "string not UTF-8": (file([key("k", 8, string(b"\x80"))]), r"value of 'k': wanted UTF-8, got b'\\x80'"),
    "array of unknown, 2^60": (
        file([key("k", 9, u32(99) + u64(HUGE))]),
        r"byte 37, element type of 'k': wanted a type number from 0 to 12, got 99",
    ),
    "array of 2^60 u8": (
        file([key("k", 9, u32(0) + u64(HUGE))]),
        rf"byte 41, length of 'k': wanted at most \d+, got {HUGE}",
    ),
    "array of 9 f64": (
        file([key("k", 9, u32(12) + u64(9) + bytes(17))]),
        r"length of 'k': wanted at most 2 in the 17 bytes left, got 9",
    ),
    "array of 2^60 strings": (
        file([key("k", 9, strings(count=HUGE))]),
        rf"length of 'k': wanted at most \d+, got {HUGE}",
    ),
    "strings past the end": (
        file([key("k", 9, u32(8) + u64(2) + string("x") + u64(HUGE))]),
        r"strings of 'k': wanted 2 strings within 17 bytes, got longer ones; the file is damaged",
    ),
    "strings one short": (
        file([key("k", 9, u32(8) + u64(2) + string("x" * 8))]),
        r"strings of 'k': wanted 2 strings within 16 bytes, got longer ones",
    ),
    "array of arrays, 10^5 deep": (
        file([key("k", 9, (u32(9) + u64(1)) * 100_000 + u32(0) + u64(0))]),
        r"byte 37, element type of 'k': wanted numbers or strings, got arrays",
    ),
    "alignment 0": (
        file([key("general.alignment", 4, u32(0))]),
        r"byte 24, general.alignment: wanted a power of two, got 0",
    ),
    "alignment 48": (file([key("general.alignment", 4, u32(48))]), r"general.alignment: wanted a power of two, got 48"),
    "alignment -8": (
        file([key("general.alignment", 5, struct.pack("<i", -8))]),
        r"general.alignment: wanted a power of two, got -8",
    ),
    "alignment true": (
        file([key("general.alignment", 7, b"\1")]),
        r"general.alignment: wanted a power of two, got True",
    ),
    "alignment text": (file([key("general.alignment", 8, string("\n"))]), r"wanted a power of two, got '\\n'"),
    "alignment array": (file([key("general.alignment", 9, strings("x"))]), r"wanted a power of two, got an array"),
    # tensors
    "dims [4, 0]": (
        file([], [tensor(dims=(4, 0))], DATA),
        r"dimensions of 't': wanted 1 or more on each axis, got \[4, 0\]",
    ),
    "dims [2^32, 2^32]": (
        file([], [tensor(dims=(2**32, 2**32))], DATA),
        rf"dimensions of 't': wanted at most the \d+ bytes of the file, got \[4294967296, 4294967296\], {2**66} bytes",
    ),
    "dims [2^63, 2]": (file([], [tensor(dims=(2**63, 2))], DATA), r"dimensions of 't': wanted at most the \d+ bytes"),
    "9 dims": (file([], [tensor(dims=(1,) * 9)], DATA), r"byte 33, rank of 't': wanted at most 4, got 9"),
    "2^31 dims": (file([], [string("t") + u32(2**31)], DATA), r"rank of 't': wanted at most 4, got 2147483648"),
    "name length 2^60": (
        file([], [u64(HUGE) + bytes(99)]),
        rf"length of name of tensor 0: wanted at most 65535 bytes, got {HUGE}",
    ),
    "name not UTF-8": (file([], [tensor(b"\xc0")], DATA), r"name of tensor 0: wanted UTF-8, got b'\\xc0'"),
    "unknown type": (
        file([], [tensor(kind=4)], DATA),
        r"type of 't': wanted a known type number, got 4; use a model in",
    ),
    "type 2^32-1": (
        file([], [tensor(kind=2**32 - 1)], DATA),
        r"type of 't': wanted a known type number, got 4294967295",
    ),
    "row of 896 in q4_k": (
        file([], [tensor(dims=(896, 2), kind=12)], DATA),
        r"dimensions of 't': wanted rows of a multiple of 256 for q4_k, got \[896, 2\]",
    ),
    "scalar in q8_0": (
        file([], [tensor(dims=(), kind=8)], DATA),
        r"wanted rows of a multiple of 32 for q8_0, got \[\]",
    ),
    "offset past the end": (
        file([], [tensor(offset=4096)], DATA),
        r"data of 't': wanted an end within the 4096 bytes of data, got 4096 \+ 128 bytes",
    ),
    "offset 2^63": (
        file([], [tensor(offset=2**63)], DATA),
        rf"data of 't': wanted an end within .* got {2**63} \+ 128",
    ),
    "end past the end": (file([], [tensor(dims=(1025,))], DATA), r"data of 't': wanted an end within the 4096 bytes"),
    "no data": (file([], [tensor(dims=(1,))] * 1, b""), r"data of 't': wanted an end within the 0 bytes of data"),
    "offset 16": (file([], [tensor(offset=16)], DATA), r"offset of 't': wanted a multiple of 32, got 16"),
    "tensor twice": (
        file([], [tensor(), tensor(offset=128)], DATA),
        r"name of tensor 1: wanted a name not used before, got 't'",
    ),
    "overlap": (
        file([], [tensor("a", (64,), offset=128), tensor("b", (64,), offset=0), tensor("c", (1,), offset=224)], DATA),
        r"data of 'a': wanted a start after 'b', which ends at \d+, got \d+",
    ),
    "same place": (file([], [tensor("a"), tensor("b")], DATA), r"data of 'b': wanted a start after 'a', which ends at"),
    # splits
    "split.count text": (file([key("split.count", 8, string("3"))]), r"split.count: wanted a whole number, got '3'"),
    "65,535 shards": (file([key("split.count", 2, b"\xff\xff")]), r"file name: wanted NAME-00001-of-65535.gguf"),
}


def drain(path):
    """Open the file and take out everything that is in it, checking that it is consistent."""
    with GGUF.open(path) as model:
        size = os.path.getsize(path)
        assert model.file_bytes == size
        for name in model.metadata:
            length = model.metadata.length(name)
            value = model.metadata[name]
            assert isinstance(value, (bool, int, float, str)) or len(value) == length
        taken = np.zeros(size, bool)
        for info in model.tensors.values():
            raw = model.raw(info.name)
            assert raw.nbytes == info.nbytes == model.nbytes(info.name) > 0
            assert model.spec(info.name).shape == info.shape and 0 not in info.shape
            assert not taken[info.offset : info.offset + info.nbytes].any()
            taken[info.offset : info.offset + info.nbytes] = True
            assert taken.sum() <= size
            raw.reshape(-1).view(np.uint8).max()
            model.release(info.name)


def refuse(path, pattern=None, *, seconds=1.0, mib=4.0):
    """Opening the file raises FormatError within `seconds` of processor time and `mib` MiB; the error is returned."""
    start = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=pattern) as caught:
            drain(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.thread_time() - start < seconds
    assert peak < mib * 2**20
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < 400 + len(str(path))
    return caught.value


def test_the_valid_file_is_valid(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(VALID)
    drain(path)
    with GGUF.open(path) as model:
        assert model.metadata["words"] == ["a", "", "bcd"] and model.metadata["flags"].tolist() == [False, True]
        assert model.raw("c").shape == (3,) and model.raw("b").shape == (3, 34)


@pytest.mark.parametrize("name", CASES)
def test_malformed_file_is_refused(tmp_path, name):
    path = tmp_path / "m.gguf"
    content, pattern = CASES[name]
    path.write_bytes(content)
    error = refuse(path, pattern)
    assert error.path == str(path) and error.field and error.wanted and error.hint


def test_late_checks_of_arrays(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file([key("w", 9, strings("a", b"\xfe\xff")), key("f", 9, u32(7) + u64(3) + b"\1\0\7")]))
    with GGUF.open(path) as model:
        with pytest.raises(FormatError, match=r"byte 66, string 1 of 'w': wanted UTF-8, got b'\\xfe\\xff'"):
            model.metadata["w"]
        with pytest.raises(FormatError, match=r"element 2 of 'f': wanted 0 or 1, got 7"):
            model.metadata["f"]


def test_truncation_at_every_byte_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    for length in range(1, len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(FormatError, match=r"before the end|bytes left|within|magic|at most"):
            GGUF.open(path)


SPARSE = {  # real lengths that a file full of holes backs up: only the limits refuse these
    "u8 array of 8 GiB": (key("k", 9, u32(0) + u64(2**33)), "length of 'k': wanted at most"),
    "2^29 empty strings": (key("k", 9, strings(count=2**29)), "length of 'k': wanted at most"),
    "2^22 strings, one of 1 GiB": (
        key("k", 9, u32(8) + u64(2**22) + u64(2**30)),
        "strings of 'k': wanted 4194304 strings",
    ),
    "string of 4 GiB": (key("k", 8, u64(2**32)), "length of value of 'k': wanted at most"),
    "key of 4 GiB": (u64(2**32), "length of key 0: wanted at most"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_file_is_refused(tmp_path, name):
    path = tmp_path / "m.gguf"
    content, pattern = SPARSE[name]
    path.write_bytes(file([content]))
    os.truncate(path, 2**34)
    refuse(path, pattern)


def test_four_million_empty_strings_are_walked_in_time(tmp_path):
    """The most that the limits let through."""
    path = tmp_path / "m.gguf"
    path.write_bytes(file([key("k", 9, strings(count=2**22))]))
    os.truncate(path, 2**26)
    start = time.thread_time()
    with GGUF.open(path) as model:
        assert model.metadata.length("k") == 2**22
    assert time.thread_time() - start < 2  # 0.35 s when alone


EXTREMES = [0, 1, 2, 7, 8, 9, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]
POSITION = st.integers(0, len(VALID) - 1)
EDIT = st.one_of(
    st.tuples(st.just("byte"), POSITION, st.integers(0, 255)),
    st.tuples(st.just("u32"), POSITION, st.sampled_from([value for value in EXTREMES if value < 2**32])),
    st.tuples(st.just("u64"), POSITION, st.sampled_from(EXTREMES)),
    st.tuples(st.just("cut"), POSITION, st.integers(1, 64)),
    st.tuples(st.just("double"), POSITION, st.integers(1, 64)),
    st.tuples(st.just("end"), POSITION, st.just(0)),
)


def edited(edits):
    content = bytearray(VALID)
    for kind, at, value in edits:
        if kind == "byte":
            content[at : at + 1] = bytes([value])
        elif kind == "u32":
            content[at : at + 4] = u32(value)
        elif kind == "u64":
            content[at : at + 8] = u64(value)
        elif kind == "cut":
            del content[at : at + value]
        elif kind == "double":
            content[at:at] = content[at : at + value]
        else:
            del content[at:]
    return bytes(content)


def opens_or_refuses(path, content):
    path.write_bytes(content)
    tracemalloc.start()
    try:
        drain(path)
    except FormatError as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20


@settings(max_examples=600, deadline=None)
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
@example(edits=[("end", 0, 0)])
def test_any_mutation_opens_or_is_refused(tmp_path_factory, edits):
    opens_or_refuses(tmp_path_factory.getbasetemp() / "mutated.gguf", edited(edits))


@settings(max_examples=200, deadline=None)
@given(tail=st.binary(max_size=300), keys=st.integers(0, 5), tensors=st.integers(0, 5))
def test_any_bytes_open_or_are_refused(tmp_path_factory, tail, keys, tensors):
    path = tmp_path_factory.getbasetemp() / "bytes.gguf"
    opens_or_refuses(path, tail)
    opens_or_refuses(path, b"GGUF" + u32(3) + u64(tensors) + u64(keys) + tail)


def test_every_extreme_at_every_place(tmp_path):
    """Each 8-byte window of the header overwritten by extreme values: lengths, counts and offsets among them."""
    path = tmp_path / "m.gguf"
    refused = 0
    header = len(VALID) - 390
    for at in range(header):
        for value in (0, 2**32, 2**60, 2**64 - 1):
            path.write_bytes(VALID[:at] + u64(value) + VALID[at + 8 :])
            try:
                drain(path)
            except FormatError:
                refused += 1
    assert refused > 2 * header
