"""The safetensors reader and writer against the `safetensors` package, and malformed files."""

import json
import os
import struct
import sys
import time
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from nn.io.errors import FormatError
from nn.io.safetensors import Checkpoint, save_file
from nn.io.weights import open_weights
from nn.ops.base import Spec

NUMPY_TYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
SHAPES = [(), (1,), (3,), (0,), (2, 0, 3), (2, 3, 5)]


def arrays(rng):
    return {
        f"{kind}{shape}": np.asarray(rng.integers(0, 2 if kind == "?" else 100, shape)).astype(kind)
        for kind in NUMPY_TYPES
        for shape in SHAPES
    }


def same(source, want):
    assert set(source.names()) == set(want)
    for name, array in want.items():
        got = source.raw(name)
        assert got.shape == array.shape == source.spec(name).shape and got.nbytes == source.nbytes(name)
        assert got.dtype == (np.uint8 if array.dtype == np.bool_ else array.dtype)
        np.testing.assert_array_equal(got, array)
        assert not got.nbytes or not got.flags.writeable
        source.release(name)


def raw_file(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_package_writes(tmp_path, rng):
    want = arrays(rng)
    safetensors.numpy.save_file(want, tmp_path / "m.safetensors", metadata={"format": "pt"})
    with Checkpoint.open(tmp_path / "m.safetensors") as source:
        same(source, want)
        assert source.metadata == {"format": "pt"}
        assert source.file_bytes == (tmp_path / "m.safetensors").stat().st_size
        with pytest.raises(KeyError, match=r"m\.safetensors: no tensor 'f4\(3\)'; of the 72 in it, near: f4\(3,\)"):
            source.raw("f4(3)")


def test_the_package_reads_what_we_write(tmp_path, rng):
    want = arrays(rng)
    want["strided"] = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    want["big-endian"] = np.arange(3, dtype=">f4")
    save_file(want, tmp_path / "m.safetensors", metadata={"a": "b"})
    got = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].shape == array.shape
        np.testing.assert_array_equal(got[name], array)
    with safetensors.safe_open(tmp_path / "m.safetensors", "numpy") as file:
        assert file.metadata() == {"a": "b"}
    del want["big-endian"]
    with Checkpoint.open(tmp_path / "m.safetensors") as source:
        for name in want:
            np.testing.assert_array_equal(source.raw(name), want[name])
            assert source.info(name).offset % want[name].dtype.itemsize == 0


def test_bf16_travels_as_bits(tmp_path):
    bits = np.array([[0x3F80, 0x7F80, 0x0001]], np.uint16)
    save_file({"w": bits, "u": bits}, tmp_path / "m.safetensors", bf16={"w"})
    (_, w), (_, u) = sorted(safetensors.deserialize((tmp_path / "m.safetensors").read_bytes()), reverse=True)
    assert (w["dtype"], w["shape"], bytes(w["data"])) == ("BF16", [1, 3], bits.tobytes()) and u["dtype"] == "U16"
    with Checkpoint.open(tmp_path / "m.safetensors") as source:
        assert source.spec("w") == Spec((1, 3), "bf16") and source.spec("u") == Spec((1, 3), "u16")
        np.testing.assert_array_equal(source.raw("w"), bits)
        assert source.raw("w").dtype == np.uint16


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"c": np.ones(2, np.complex64)}, {}, "save_file: 'c' is complex64, which safetensors cannot hold"),
        ({"c": np.array(["x"])}, {}, "save_file: 'c' is <U1, which safetensors cannot hold"),
        (
            {"c": np.ones(2, np.float32)},
            {"bf16": ["c"]},
            "'c' is float32; a bf16 tensor is given as its bits in uint16",
        ),
        ({"c": np.ones(2, np.float32)}, {"bf16": ["d"]}, "bf16 names 'd', which is not among the tensors"),
        ({"__metadata__": np.ones(2)}, {}, "a tensor may not be called '__metadata__'"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, tensors, options, message):
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones(1)}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        save_file(tensors, path, **options)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones(1)}, path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_file({"a": np.zeros(99)}, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.safetensors"]


# Shards: CASES 16


def sharded(folder, *, weight_map=None):
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file(
        {"w": np.float32([1.0]), "a": np.float32([5.0])}, folder / one, metadata={"format": "pt"}
    )
    safetensors.numpy.save_file({"w": np.float32([2.0])}, folder / two)
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": one, "w": two} if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / one, folder / two


@pytest.mark.parametrize("named", ["", "model.safetensors.index.json"])
def test_the_index_decides_which_shard_a_tensor_is_from(tmp_path, named):
    first, second = sharded(tmp_path)
    with open_weights(tmp_path / named) as source:
        assert source.names() == ["a", "w"]
        assert source.raw("w").tolist() == [2.0] and source.raw("a").tolist() == [5.0]
        assert source.file_bytes == first.stat().st_size + second.stat().st_size
        source.release("w")


def test_a_missing_shard_is_named(tmp_path):
    _, second = sharded(tmp_path)
    second.unlink()
    with pytest.raises(
        FormatError, match=r"weight_map: wanted the shard model-00002-of-00002\.safetensors beside it, got no"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "../model.safetensors"}, r"wanted names of files beside the index, got '\.\./model\.safetensors'"),
        ({"w": "/etc/passwd"}, r"wanted names of files beside the index, got '/etc/passwd'"),
        ({"w": ".."}, r"wanted names of files beside the index, got '\.\.'"),
        ({"w": ""}, r"wanted names of files beside the index, got ''"),
        ({"w": "a\nb"}, r"wanted names of files beside the index, got 'a\\nb'"),
        ({"w": "é" * 200}, r"wanted names of files beside the index, got 'é+' \(cut, 200 in all\)"),
        ({"w": 3}, r"weight_map: wanted an object of tensor and file names, got an object with 'w'"),
        ([], r"weight_map: wanted an object of tensor and file names, got \[\]"),
        (
            {"x": "model-00001-of-00002.safetensors"},
            r"wanted 'x' in model-00001-of-00002\.safetensors, got a shard without",
        ),
    ],
)
def test_a_bad_index_is_refused(tmp_path, weight_map, message):
    sharded(tmp_path, weight_map=weight_map)
    with pytest.raises(FormatError, match=message):
        Checkpoint.open(tmp_path)


def test_an_index_that_is_no_json_or_names_a_tensor_twice_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ("{", r"index: wanted a JSON object"),
        ("[]", r"index: wanted a JSON object, got a list"),
        ('{"weight_map": {"w": "a", "w": "b"}}', r"weight_map: wanted each tensor once, got 'w' twice"),
        ("[" * 100_000, r"index: wanted JSON of little depth, got brackets nested too deeply"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=message):
            Checkpoint.open(tmp_path)


def test_a_folder_opens_by_its_single_file(tmp_path):
    with pytest.raises(
        FormatError, match=r"folder: wanted model\.safetensors or .*index\.json, got no \.safetensors file"
    ):
        Checkpoint.open(tmp_path)
    for name, value in (("b.safetensors", 1.0), ("model.safetensors", 2.0)):
        save_file({"w": np.float32([value])}, tmp_path / name)
        with Checkpoint.open(tmp_path) as source:
            assert source.raw("w").tolist() == [value]
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match=r"got a\.safetensors, b\.safetensors; name the file itself"):
        Checkpoint.open(tmp_path)


# Malformed files

CASES = {
    "seven bytes": (b"\x01" * 7, r"byte 0, header length: wanted 8 bytes, got 7 before the end of the file"),
    "length past the end": (raw_file({}, length=3), r"header length: wanted at most the 2 bytes that follow, got 3"),
    "length 2^60": (
        raw_file({}, length=2**60),
        r"header length: wanted at most \d+, got 1152921504606846976; this is not a",
    ),
    "length 2^64-1": (raw_file({}, length=2**64 - 1), r"header length: wanted at most"),
    "length 0": (raw_file(b"", b"{}"), r"byte 8, header: wanted a JSON object that starts at once, got ''|b''"),
    "leading space": (raw_file(b" {}"), r"header: wanted a JSON object that starts at once, got b' \{\}'; this is not"),
    "not JSON": (raw_file(b"{]"), r"header: wanted a JSON object, got 'Expecting property name"),
    "two objects": (raw_file(b"{}{}"), r"header: wanted a JSON object, got 'Extra data"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), r"header: wanted a JSON object, got .*utf-8"),
    "NaN": (raw_file(b'{"a": NaN}'), r"header: wanted a JSON object, got 'NaN is not JSON'"),
    "number of 5,000 digits": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), r"header: wanted a JSON object"),
    "half a surrogate": (raw_file(b'{"\\ud800": 1}'), r"header: wanted names in Unicode, got '\\ud800'"),
    "nested": (raw_file(b'{"a":' + b"[" * 100_000), r"header: wanted JSON of little depth"),
    "nested objects": (raw_file(b'{"a":' * 100_000), r"header: wanted JSON of little depth"),
    "16 million empty lists": (raw_file(b'{"a":[' + b"[]," * 5_000_000 + b"0]}"), r"header: wanted at most \d+ commas"),
    "name twice": (
        raw_file(b'{"w": %s, "w": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        r"header: wanted each name once, got 'w' twice",
    ),
    "field twice": (
        raw_file(b'{"w": {"dtype": "F32", "dtype": "F16"}}'),
        r"entry of 'w': wanted .*, got 'dtype' twice",
    ),
    "metadata no texts": (
        raw_file({"__metadata__": {"a": 1}}),
        r"__metadata__: wanted an object of texts, got an object wi",
    ),
    "metadata list": (raw_file({"__metadata__": [1]}), r"__metadata__: wanted an object of texts, got \[1\]"),
    "entry number": (raw_file({"w": 3}), r"entry of 'w': wanted dtype, shape and data_offsets, got 3"),
    "entry lacks dtype": (raw_file({"w": {"shape": []}}), r"entry of 'w': wanted .*, got an object with 'shape'"),
    "unknown dtype": (raw_file({"w": entry("F31")}, bytes(8)), r"dtype of 'w': wanted one of F64, .*, got 'F31'"),
    "dtype list": (raw_file({"w": entry(["F32"])}, bytes(8)), r"dtype of 'w': wanted one of F64, .*, got \['F32'\]"),
    "shape negative": (
        raw_file({"w": entry(shape=(-2,))}, bytes(8)),
        r"shape of 'w': wanted a list of at .*, got \[-2\]",
    ),
    "shape fraction": (raw_file({"w": entry(shape=(2.0,))}, bytes(8)), r"shape of 'w': wanted a list .*, got \[2\.0\]"),
    "shape true": (
        raw_file({"w": entry(shape=(True, 2))}, bytes(8)),
        r"shape of 'w': wanted a list .*, got \[True, 2\]",
    ),
    "shape nested": (
        raw_file({"w": entry(shape=([2],))}, bytes(8)),
        r"shape of 'w': wanted a list .*, got a list of 1",
    ),
    "33 dims": (
        raw_file({"w": entry(shape=(1,) * 33)}, bytes(4)),
        r"shape of 'w': wanted a list of at most 32 whole numb",
    ),
    "2^32 x 2^32": (
        raw_file({"w": entry(shape=(2**32, 2**32))}, bytes(8)),
        r"data_offsets of 'w': wanted 73786976294838206464 bytes, as \[4294967296, 4294967296\] F32 takes, got 8",
    ),
    "size mismatch": (raw_file({"w": entry(shape=(3,))}, bytes(8)), r"wanted 12 bytes, as \[3\] F32 takes, got 8"),
    "offsets backwards": (
        raw_file({"w": entry(offsets=(8, 0))}, bytes(8)),
        r"data_offsets of 'w': wanted a start and an end",
    ),
    "offsets three": (
        raw_file({"w": entry(offsets=(0, 8, 8))}, bytes(8)),
        r"data_offsets of 'w': wanted a start .*, got \[",
    ),
    "offsets negative": (raw_file({"w": entry(offsets=(-8, 0))}, bytes(8)), r"data_offsets of 'w': wanted a start and"),
    "past the end": (raw_file({"w": entry()}, bytes(7)), r"data: wanted 8 bytes, as the tensors take, got 7"),
    "offset 2^62": (
        raw_file({"w": entry(offsets=(2**62, 2**62 + 8))}, bytes(8)),
        r"wanted a start at 0, where the header",
    ),
    "trailing bytes": (raw_file({"w": entry()}, bytes(9)), r"data: wanted 8 bytes, as the tensors take, got 9"),
    "overlap": (
        raw_file({"w": entry(), "v": entry(offsets=(4, 12))}, bytes(12)),
        r"data_offsets of 'v': wanted a start at 8, where 'w' ends, got 4, an overlap",
    ),
    "same place": (
        raw_file({"w": entry(), "v": entry()}, bytes(8)),
        r"wanted a start at 8, where '.' ends, got 0, an over",
    ),
    "hole": (
        raw_file({"w": entry(), "v": entry(offsets=(12, 20))}, bytes(20)),
        r"data_offsets of 'v': wanted a start at 8, where 'w' ends, got 12, a hole",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_malformed_file_is_refused(tmp_path, name):
    path = tmp_path / "m.safetensors"
    content, pattern = CASES[name]
    path.write_bytes(content)
    start = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=pattern) as caught:
            Checkpoint.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.thread_time() - start < 1
    assert peak < 4 * len(content) + 2**22
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < 500 + len(str(path))


def test_package_refuses_them_too(tmp_path):
    """What we refuse the package refuses, but for what the format's own text forbids and the package lets pass."""
    path = tmp_path / "m.safetensors"
    opened = set()
    for name, (content, _) in CASES.items():
        path.write_bytes(content)
        try:
            safetensors.numpy.load_file(path)
        except Exception:
            continue
        opened.add(name)
    assert opened <= {"leading space", "name twice"}


VALID = raw_file({"__metadata__": {"k": "v"}, "a": entry(), "b": entry("BF16", (2, 3), (8, 20))}, bytes(range(20)))
EDIT = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, len(VALID) - 1), st.integers(0, 255)),
    st.tuples(st.just("digit"), st.integers(0, len(VALID) - 1), st.sampled_from(b'0123456789-.eE[]{},:" ')),
    st.tuples(st.just("cut"), st.integers(0, len(VALID) - 1), st.integers(1, 40)),
    st.tuples(st.just("double"), st.integers(0, len(VALID) - 1), st.integers(1, 40)),
)


def opens_or_refuses(path, content):
    path.write_bytes(content)
    try:
        with Checkpoint.open(path) as source:
            total = 0
            for name in source.names():
                raw = source.raw(name)
                assert raw.shape == source.spec(name).shape and raw.nbytes == source.nbytes(name)
                total += raw.nbytes
            assert total <= len(content) - 8
            return True
    except FormatError as error:
        assert "\n" not in str(error)
        return False


@settings(max_examples=600, deadline=None)
@given(edits=st.lists(EDIT, min_size=1, max_size=4), fix_length=st.booleans())
def test_any_mutation_opens_or_is_refused(tmp_path_factory, edits, fix_length):
    content = bytearray(VALID)
    for kind, at, value in edits:
        if kind in ("byte", "digit"):
            content[at : at + 1] = bytes([value])
        elif kind == "cut":
            del content[at : at + value]
        else:
            content[at:at] = content[at : at + value]
    if fix_length:  # so that the damage reaches the JSON
        content[:8] = struct.pack("<Q", max(len(content) - 28, 0))
    opens_or_refuses(tmp_path_factory.getbasetemp() / "mutated.safetensors", bytes(content))


@settings(max_examples=200, deadline=None)
@given(text=st.binary(max_size=200))
def test_any_bytes_open_or_are_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    opens_or_refuses(path, text)
    opens_or_refuses(path, raw_file(b"{" + text))


def test_truncation_at_every_byte_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    assert opens_or_refuses(path, VALID)
    for length in range(len(VALID)):
        assert not opens_or_refuses(path, VALID[:length])


def test_a_header_of_a_hundred_thousand_tensors_opens(tmp_path):
    """The limits leave room above the largest real headers."""
    path = tmp_path / "m.safetensors"
    header = {
        f"model.layers.{i}.mlp.experts.{i}.weight": entry("F16", (1, 1), (2 * i, 2 * i + 2)) for i in range(100_000)
    }
    path.write_bytes(raw_file(header, bytes(200_000)))
    with Checkpoint.open(path) as source:
        assert len(source.names()) == 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_streaming_all_tensors_takes_no_memory_of_its_own(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({f"t{i}": np.ones(1 << 21, np.float32) for i in range(8)}, path)  # 64 MiB

    def own_kib():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))

    with Checkpoint.open(path) as source:
        before, highest = own_kib(), 0
        for name in source.names():
            assert source.raw(name)[::1024].sum() == 2048
            source.release(name)
            highest = max(highest, own_kib() - before)
        assert highest < 2 * 1024
