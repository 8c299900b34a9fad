"""Peers of `anygpu bench`: a llama-server, a Python binding in a process of its own, NumPy; none of them needed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from apps import cli
from apps.bench import llamacpp
from tests.fixtures import tiny_chat

FAKE_BINDING = '''
"""Stands in for llama-cpp-python: remembers what it is asked to evaluate."""
import json, pathlib, time
__version__ = "0.0"
class Llama:
    def __init__(self, model, *, n_gpu_layers, n_ctx, n_batch, verbose):
        self.n_ctx, self.n_tokens = n_ctx, 0
        self.log = pathlib.Path(__file__).with_name("log.jsonl")
    def reset(self):
        self.n_tokens = 0
    def eval(self, ids):
        assert self.n_tokens + len(ids) <= self.n_ctx
        with self.log.open("a") as log:
            log.write(json.dumps([self.n_tokens, len(ids)]) + "\\n")
        time.sleep(0.001)
        self.n_tokens += len(ids)
'''


@pytest.fixture
def server():
    """A llama-server of a kind; `asked` are the bodies of its completions."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, what):
            data = json.dumps(what).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self._answer({"build_info": "b1234", "model_path": "/models/some.gguf"})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            rates = {"prompt_per_second": 10.0 * len(body["prompt"]), "predicted_per_second": 77.0}
            self._answer({"content": "", "timings": rates})

        def log_message(self, *_):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", asked
    listening.shutdown()
    listening.server_close()
    thread.join()


def test_a_server_is_asked_for_completions(server):
    url, asked = server
    peer = llamacpp.peer(url + "/")
    assert "b1234" in peer.name and "some.gguf" in peer.name and url in peer.name
    rates = peer.rates(Path("some.gguf"), prompt=6, prompts=[20], tokens=9, runs=2)
    assert rates == {"6": 60.0, "20": 200.0, "decode": 77.0}
    assert [(len(body["prompt"]), body["n_predict"]) for body in asked] == [(6, 9)] * 3 + [(20, 1)] * 3
    assert all(body["temperature"] == 0.0 and not body["cache_prompt"] for body in asked)


def test_a_models_rows_stand_beside_the_servers(server, capsys, tmp_path):
    url, _ = server
    folder = tiny_chat.write(tmp_path)
    arguments = ["--model", str(folder), "--prompt", "5", "--tokens", "4", "--runs", "1", "--json"]
    assert cli.main(["bench", "llm", *arguments, "--against", f"none,llama.cpp={url}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["decode"][0]["peer_rates"] == {"5": 50.0, "decode": 77.0}
    decode, prompt = report["rows"]
    assert decode["ratio"] == pytest.approx(decode["rate"] / 77.0, rel=1e-5)
    assert prompt["ratio"] == pytest.approx(prompt["rate"] / 50.0, rel=1e-5)


def test_nobody_answers():
    with pytest.raises(ValueError, match=r"--against llama.cpp=http://127.0.0.1:9: no llama-server answers there"):
        llamacpp.peer("http://127.0.0.1:9")


def test_no_binding_is_installed(monkeypatch):
    monkeypatch.setattr(llamacpp, "BINDINGS", ("no_such_binding",))
    with pytest.raises(ValueError, match="no Python binding is installed"):
        llamacpp.peer("")


def test_a_binding_runs_in_a_process_of_its_own(tmp_path):
    (tmp_path / "llama_cpp.py").write_text(FAKE_BINDING)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    peer = llamacpp.peer(str(tmp_path))
    rates = peer.rates(model, prompt=5, prompts=[8], tokens=3, runs=1)
    assert rates.keys() == {"5", "8", "decode"} and all(rate > 0 for rate in rates.values())
    assert peer.name == "llama.cpp (llama-cpp-python 0.0)"
    asked = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert asked == [[0, 5], [5, 1], [6, 1], [7, 1], [0, 8]] * 2  # one round to warm up, one that counts
    with pytest.raises(ValueError, match=r"it reads .gguf files; synthetic:x is none"):
        peer.rates(Path("synthetic:x"), prompt=5, prompts=[], tokens=3, runs=1)


def test_a_binding_that_fails_says_why(tmp_path):
    (tmp_path / "llama_cpp.py").write_text("raise OSError('no libllama here')")
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match="no libllama here"):
        llamacpp.peer(str(tmp_path)).rates(model, prompt=5, prompts=[], tokens=3, runs=1)


def test_a_missing_torch_is_named(capsys, monkeypatch):
    monkeypatch.setattr("apps.bench.peers.installed", lambda name: False)
    assert cli.main(["bench", "gemm", "--against", "torch"]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err
