"""The GGUF reader against the `gguf` package, which writes the files here and reads the real ones alongside."""

import sys

import gguf
import numpy as np
import pytest

from nn.io.errors import FormatError
from nn.io.gguf import GGUF, TYPES
from nn.io.mapped import MappedFile
from nn.io.registry import resolve
from nn.io.weights import open_weights
from nn.ops.base import Spec

SCALARS = {
    "add_uint8": 255,
    "add_int8": -128,
    "add_uint16": 65_535,
    "add_int16": -32_768,
    "add_uint32": 2**32 - 1,
    "add_int32": -(2**31),
    "add_uint64": 2**64 - 1,
    "add_int64": -(2**63),
    "add_float32": 0.5,
    "add_float64": 0.1,
    "add_bool": True,
    "add_string": "Grüße \x00 „…“ 🙂",
}
ARRAYS = {
    "ints": [3, -1, 2**31 - 1],
    "floats": [0.5, -2.25],
    "bools": [True, False, True],
    "strings": ["", "a", "é" * 300],
    "one": ["x"],
}


def write(path, fill, **options):
    writer = gguf.GGUFWriter(path, "llama", **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rss_kib(*fields):
    """What this process holds in memory, KiB: RssAnon is its own, RssFile and RssShmem (tmpfs) are mapped files."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) for line in status if line.split(":")[0] in fields)


def test_metadata_values_are_those_that_were_written(tmp_path):
    def fill(writer):
        for method, value in SCALARS.items():
            getattr(writer, method)(method, value)
        for key, value in ARRAYS.items():
            writer.add_array(key, value)

    write(tmp_path / "m.gguf", fill)
    with GGUF.open(tmp_path / "m.gguf") as model:
        assert list(model.metadata) == ["general.architecture", *SCALARS, *ARRAYS]
        assert not model.tensors
        for method, value in SCALARS.items():
            assert model.metadata[method] == value and type(model.metadata[method]) is type(value)
        for key, value in ARRAYS.items():
            assert model.metadata.length(key) == len(value)
            got = model.metadata[key]
            assert list(got) == value and model.metadata.length(key) == len(value)
            assert isinstance(got, list) == isinstance(value[0], str)
        assert model.metadata["bools"].dtype == np.bool_
        with pytest.raises(KeyError, match=r"m\.gguf: no metadata key 'intz'; near: ints"):
            model.metadata["intz"]
        assert model.metadata.get("absent", 7) == 7


def test_every_tensor_type_is_viewed_in_place(tmp_path):
    rng = np.random.default_rng(1)
    stored = {}
    for number, (name, block, nbytes) in TYPES.items():
        if block > 1:
            stored[name] = (number, rng.integers(0, 256, (3, 2 * nbytes), np.uint8), (3, 2 * block))
    dense = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f64": rng.standard_normal((1, 2, 3, 4)),
        "f16": rng.standard_normal(7).astype(np.float16),
        "i8": rng.integers(-128, 127, (5, 1), np.int8),
        "i16": rng.integers(-99, 99, (5, 3), np.int16),
        "i32": rng.integers(-99, 99, (1, 3), np.int32),
        "i64": rng.integers(-99, 99, (2, 2), np.int64),
    }
    bits = rng.integers(0, 2**16, (3, 5), np.uint16)

    def fill(writer):
        for name, (number, data, _) in stored.items():
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(number))
        for name, data in dense.items():
            writer.add_tensor(name, data)
        writer.add_tensor("bf16", bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    write(tmp_path / "m.gguf", fill)
    with GGUF.open(tmp_path / "m.gguf") as model:
        assert model.names() == [*stored, *dense, "bf16"]
        assert {name for name, _, _ in TYPES.values()} == set(model.names())
        for name, (_, data, shape) in stored.items():
            assert model.spec(name) == Spec(shape, name)
            np.testing.assert_array_equal(model.raw(name), data)
        for name, data in dense.items():
            assert model.spec(name) == Spec(data.shape, name)
            got = model.raw(name)
            assert got.dtype == data.dtype and not got.flags.writeable and got.base is not None
            np.testing.assert_array_equal(got, data)
            assert model.nbytes(name) == data.nbytes == model.tensors[name].nbytes
        assert model.spec("bf16") == Spec((3, 5), "bf16") and model.raw("bf16").dtype == np.uint16
        np.testing.assert_array_equal(model.raw("bf16"), bits)
        assert model.file_bytes == (tmp_path / "m.gguf").stat().st_size
        with pytest.raises(KeyError, match=r"m\.gguf: no tensor 'q4_9'; of the \d+ in it, near: q4_"):
            model.raw("q4_9")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments(tmp_path, version, alignment):
    a, b = np.arange(5, dtype=np.float32), np.arange(3, dtype=np.int8)

    def fill(writer):
        writer.add_custom_alignment(alignment)
        writer.add_tensor("a", a)
        writer.add_tensor("b", b)

    path = tmp_path / "m.gguf"
    write(path, fill)
    content = bytearray(path.read_bytes())
    content[4] = version
    path.write_bytes(content)
    with GGUF.open(path) as model:
        np.testing.assert_array_equal(model.raw("a"), a)
        np.testing.assert_array_equal(model.raw("b"), b)
        assert model.tensors["b"].offset % alignment == 0


def test_views_and_read_metadata_outlive_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    write(
        path, lambda w: (w.add_array("n", [1, 2]), w.add_array("s", ["x"]), w.add_tensor("a", np.ones(9, np.float32)))
    )
    model = GGUF.open(path)
    view, numbers = model.raw("a"), model.metadata["n"]
    assert numbers.flags.aligned and numbers.flags.writeable  # a copy: it does not hold the file
    model.close()
    model.close()
    assert view.sum() == 9 and list(numbers) == [1, 2] and list(model.metadata["n"]) == [1, 2]
    for late in (lambda: model.raw("a"), lambda: model.metadata["s"]):
        with pytest.raises(ValueError, match=r"m\.gguf: the file was closed"):
            late()


def split_model(folder, shards=3):
    """A model of `shards` shards with one tensor each, and their paths."""
    paths = [folder / f"m-{i + 1:05d}-of-{shards:05d}.gguf" for i in range(shards)]
    for i, path in enumerate(paths):

        def fill(writer, i=i):
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", shards)
            writer.add_int32("split.tensors.count", shards)
            writer.add_tensor(f"t{i}", np.full((2, 3), i, np.float32))

        write(path, fill)
    return paths


@pytest.mark.parametrize("named", [0, 2])
def test_a_split_model_opens_from_any_shard(tmp_path, named):
    paths = split_model(tmp_path)
    with open_weights(paths[named]) as model:
        assert model.names() == ["t0", "t1", "t2"] and model.path == paths[0]
        for i in range(3):
            assert (model.raw(f"t{i}") == i).all()
            model.release(f"t{i}")
        assert model.file_bytes == sum(path.stat().st_size for path in paths)


def test_a_missing_shard_is_named(tmp_path):
    paths = split_model(tmp_path)
    paths[1].unlink()
    with pytest.raises(
        FormatError, match=r"shard 2 of 3: wanted the file m-00002-of-00003\.gguf beside it, got no such"
    ):
        GGUF.open(paths[0])
    paths[0].unlink()
    with pytest.raises(FileNotFoundError, match="m-00001-of-00003"):
        GGUF.open(paths[2])


def test_shards_that_do_not_fit_together_are_refused(tmp_path):
    paths = split_model(tmp_path)
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(
        FormatError, match=r"m-00002-of-00003\.gguf: split\.no: wanted 1, got 2; the shards are of diff"
    ):
        GGUF.open(paths[0])
    paths[1].write_bytes(second.replace(b"t1", b"t0"))
    with pytest.raises(
        FormatError, match=r"m-00002-of-00003\.gguf: tensor 't0': wanted a name not used in another shard"
    ):
        GGUF.open(paths[0])
    paths[1].write_bytes(second)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=r"file name: wanted NAME-00001-of-00003\.gguf, as this is one of 3 shards"):
        GGUF.open(renamed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_streaming_all_tensors_keeps_memory_bounded(tmp_path):
    """96 MiB of tensors pass through raw and release: next to nothing of them stays, own or mapped."""
    path = tmp_path / "m.gguf"
    mib = 1 << 20
    block = np.random.default_rng(2).integers(0, 255, 8 * mib, np.uint8)
    write(path, lambda w: [w.add_tensor(f"t{i}", block.view(np.int8)) for i in range(12)])
    with GGUF.open(path) as model:
        own, mapped = rss_kib("RssAnon"), rss_kib("RssFile", "RssShmem")
        highest_own = highest_mapped = 0
        for name in model.names():
            assert (model.raw(name).view(np.uint8)[::4096] == block[::4096]).all()
            highest_mapped = max(highest_mapped, rss_kib("RssFile", "RssShmem") - mapped)
            model.release(name)
            highest_own = max(highest_own, rss_kib("RssAnon") - own)
        left = rss_kib("RssFile", "RssShmem") - mapped
        assert highest_own < 2 * 1024
        assert (
            4 * 1024 < highest_mapped < 20 * 1024
        )  # one tensor, its neighbours' edges; it was there before the release
        assert left < 2 * 1024
        np.testing.assert_array_equal(model.raw("t3").view(np.uint8), block)  # and comes back


def test_release_of_a_tiny_tensor_keeps_its_neighbours(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, lambda w: [w.add_tensor(f"t{i}", np.full(3, i, np.float32)) for i in range(4)])
    with GGUF.open(path) as model:
        held = model.raw("t2")
        for name in model.names():
            model.release(name)
        assert (held == 2).all() and (model.raw("t1") == 1).all()


def test_mapped_file_refuses_what_is_no_file(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(FormatError, match="empty: byte 0, file: wanted at least one byte, got an empty file"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(FormatError, match="wanted a regular file, got a folder"):
        GGUF.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        GGUF.open(tmp_path / "absent.gguf")


@pytest.mark.weights
def test_smollm2_equals_the_gguf_package():
    path = resolve("smollm2")
    if path is None:
        pytest.skip("smollm2 is not in the cache: anygpu pull smollm2")
    oracle = gguf.GGUFReader(path)
    with GGUF.open(path) as model:
        fields = {key: field for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
        assert list(model.metadata) == list(fields)
        for key, field in fields.items():
            got, want = model.metadata[key], field.contents()
            if isinstance(got, np.ndarray):
                got = got.tolist()
            assert got == want, key
        assert model.names() == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            info = model.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape[::-1].tolist())
            assert (info.dtype, info.offset, info.nbytes) == (
                tensor.tensor_type.name.lower(),
                tensor.data_offset,
                tensor.n_bytes,
            )
            got = model.raw(tensor.name)
            assert got.shape == tensor.data.shape
            np.testing.assert_array_equal(got.view(np.uint8), tensor.data.view(np.uint8))
            model.release(tensor.name)


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "tensors", "histogram", "vocabulary"),
    [
        ("gemma3", 236, {"f32": 109, "q8_0": 10, "q5_0": 81, "q4_k": 27, "q6_k": 9}, 262_144),
        ("qwen2.5-coder", 291, {"f32": 121, "q8_0": 13, "q5_0": 133, "q4_k": 12, "q6_k": 12}, 151_936),
    ],
)
def test_larger_models_open(name, tensors, histogram, vocabulary):
    path = resolve(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache: anygpu pull {name}")
    with GGUF.open(path) as model:
        assert len(model.tensors) == tensors
        types = [info.dtype for info in model.tensors.values()]
        assert {kind: types.count(kind) for kind in types} == histogram
        assert model.metadata.length("tokenizer.ggml.tokens") == vocabulary
        words = model.metadata["tokenizer.ggml.tokens"]
        assert len(words) == len(set(words)) == vocabulary
        end = max(info.offset + info.nbytes for info in model.tensors.values())
        assert 0 <= model.file_bytes - end < 32  # nothing is left over but padding
