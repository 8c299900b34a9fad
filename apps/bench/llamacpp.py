"""llama.cpp as a peer of the llm suite: a running llama-server, or a Python binding in a process of its own.

    --against llama.cpp=http://127.0.0.1:8080   a llama-server that has loaded the same file
    --against llama.cpp                         an installed binding: inferna or llama_cpp (llama-cpp-python)
    --against llama.cpp=FOLDER                  the same, found in FOLDER

A server is asked for completions. The binding gets every layer onto its GPU backend and runs as llama-bench does: a
prompt in one batch, then one token at a time. This file is also that process:

    python -m apps.bench.llamacpp MODEL PROMPT[,PROMPT] TOKENS RUNS
"""

from __future__ import annotations

import http.client
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINDINGS = ("inferna", "llama_cpp")
TIMEOUT = 600.0


def peer(where: str) -> Server | Binding:
    """The peer that the text behind "llama.cpp=" means. Raises ValueError."""
    if where.startswith(("http://", "https://")):
        return Server(where.rstrip("/"))
    if where and not Path(where).is_dir():
        raise ValueError(f"--against llama.cpp={where}: neither the URL of a llama-server nor a folder with a binding")
    if not where and not any(importlib.util.find_spec(name) for name in BINDINGS):
        raise ValueError(
            "--against llama.cpp: no Python binding is installed (inferna or llama_cpp); install one, or give the URL "
            "of a llama-server: --against llama.cpp=http://127.0.0.1:8080"
        )
    return Binding(where)


class Server:
    """A llama-server. Which file it has loaded is its own affair; its name goes into the report."""

    short = "llama.cpp"

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            props = self._ask("/props", None, timeout=10.0)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(f"--against llama.cpp={url}: no llama-server answers there ({error})") from error
        self.name = (
            f"llama.cpp {props.get('build_info', '')} with {Path(str(props.get('model_path', '?'))).name} at {url}"
        )

    def _ask(self, path: str, body: dict[str, Any] | None, *, timeout: float = TIMEOUT) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found = json.loads(answer.read())
        if not isinstance(found, dict):
            raise ValueError(f"its answer to {path} is {str(found)[:40]!r}, not an object")
        return found

    def rates(self, model: Path, *, prompt: int, prompts: list[int], tokens: int, runs: int) -> dict[str, float]:
        """Tokens a second: "decode" after `prompt`, and of each prompt length."""
        found: dict[str, list[float]] = {}
        for length in (prompt, *prompts):
            for run in range(runs + 1):
                body = {"prompt": ids_of(length), "n_predict": tokens if length == prompt else 1, "temperature": 0.0}
                timings = self._ask("/completion", body | {"cache_prompt": False, "ignore_eos": True}).get("timings")
                if not timings:
                    raise RuntimeError("the server's answer has no timings")
                if run:
                    found.setdefault(str(length), []).append(timings["prompt_per_second"])
                    if length == prompt:
                        found.setdefault("decode", []).append(timings["predicted_per_second"])
        return {key: statistics.median(values) for key, values in found.items()}


class Binding:
    """A Python binding, in a process of its own: its Vulkan backend does not share ours."""

    short = "llama.cpp"

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.name = f"llama.cpp by a Python binding{f' in {folder}' if folder else ''}"

    def rates(self, model: Path, *, prompt: int, prompts: list[int], tokens: int, runs: int) -> dict[str, float]:
        """Tokens a second: "decode" after `prompt`, and of each prompt length."""
        if model.suffix != ".gguf" or not model.is_file():
            raise ValueError(f"it reads .gguf files; {model.name} is none")
        root = Path(__file__).resolve().parents[2]
        paths = [self.folder, str(root), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        lengths = ",".join(map(str, (prompt, *prompts)))
        command = [sys.executable, "-m", "apps.bench.llamacpp", str(model), lengths, str(tokens), str(runs)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
        result = json.loads(done.stdout.strip().splitlines()[-1])
        self.name = result.pop("name")
        return result


def ids_of(count: int) -> list[int]:
    """Token ids that every vocabulary has."""
    return [(7 * i + 3) % 30_000 + 100 for i in range(count)]


def main(arguments: list[str]) -> int:
    """The process of a Binding: prints one JSON object."""
    model, lengths, tokens, runs = arguments
    prompts = [int(n) for n in lengths.split(",")]
    room = max(max(prompts), prompts[0] + int(tokens)) + 64
    open_it = _inferna if importlib.util.find_spec("inferna") else _llama_cpp
    name, clear, decode = open_it(model, room)
    found: dict[str, list[float]] = {}
    for run in range(int(runs) + 1):
        for length in prompts:
            clear()
            ids = ids_of(max(length, int(tokens)))
            start = time.perf_counter()
            decode(ids[:length], 0)
            middle = time.perf_counter()
            if run:
                found.setdefault(str(length), []).append(length / (middle - start))
            if length != prompts[0]:
                continue
            middle = time.perf_counter()
            for i in range(int(tokens)):
                decode([ids[i]], length + i)
            if run:
                found.setdefault("decode", []).append(int(tokens) / (time.perf_counter() - middle))
    print(json.dumps({"name": name, **{key: statistics.median(values) for key, values in found.items()}}))
    return 0


Opened = tuple[str, Callable[[], Any], Callable[[list[int], int], Any]]


def _inferna(model: str, room: int) -> Opened:
    """(name, forget everything, decode ids at a position and wait)."""
    n: Any = importlib.import_module("inferna.llama._llama_native")
    n.disable_logging()
    n.ggml_backend_load_all()
    n.llama_backend_init()
    parameters = n.LlamaModelParams()
    parameters.n_gpu_layers = 99
    held = n.LlamaModel(model, parameters, verbose=False)
    settings = n.LlamaContextParams()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = room, max(room, 512), 512
    context = n.LlamaContext(held, settings, verbose=False)

    def decode(ids: list[int], position: int) -> None:
        batch = n.LlamaBatch(n_tokens=max(len(ids), 1), embd=0, n_seq_max=1)
        for i, token in enumerate(ids):
            batch.add(token, position + i, [0], i == len(ids) - 1)
        context.decode(batch)
        context.synchronize()

    return (
        f"llama.cpp {n.llama_version()}, ggml {n.ggml_version()} {n.ggml_commit()} (inferna)",
        context.kv_cache_clear,
        decode,
    )


def _llama_cpp(model: str, room: int) -> Opened:
    package: Any = importlib.import_module("llama_cpp")
    held = package.Llama(model, n_gpu_layers=-1, n_ctx=room, n_batch=512, verbose=False)

    def decode(ids: list[int], position: int) -> None:
        held.n_tokens = position
        held.eval(ids)

    return f"llama.cpp (llama-cpp-python {package.__version__})", held.reset, decode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
