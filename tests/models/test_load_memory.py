"""Loading a model takes little memory beside the device's buffers: weights go from the mapped file straight to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nn.io import registry

LIMIT = 300e6
# A fresh process, so that memory freed by other tests cannot hide anything. On a software driver the device's buffers
# are this process's own memory: shared (Mesa maps them from a memfd, RssShmem) or anonymous (older ones), so both are
# counted and the live buffers taken off again. On a GPU neither holds them. The file's mapped pages are RssFile:
# not counted, the system drops them at will (and the loader gives them back, which the last figure shows).
PROGRAM = """
import json, sys, threading
import nn.llm
from gpu import Device

def resident():
    sizes = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return {name: int(size.split()[0]) * 1024 for name, size in sizes.items()}

def own():
    now = resident()
    return now["RssAnon"] + now["RssShmem"]

device = Device.open()
base, mapped, over, peaks = own(), resident()["RssFile"], threading.Event(), []

def watch():
    while not over.wait(0.002):
        live = device.counters.bytes_live if device.caps.kind == "cpu" else 0
        peaks.append(own() - base - live)

watcher = threading.Thread(target=watch)
watcher.start()
llm = nn.llm.LLM(sys.argv[1], device=device, context=64)
over.set()
watcher.join()
file = resident()["RssFile"] - mapped
print(json.dumps({"peak": max(peaks), "samples": len(peaks), "live": device.counters.bytes_live, "file": file}))
"""


@pytest.mark.weights
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen2.5-coder"])
def test_loading_takes_little_beside_the_buffers(name):
    path = registry.resolve(name)
    if path is None:
        pytest.skip(f"{name} is not in the cache; `anygpu pull {name}` fetches it")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    size = path.stat().st_size
    assert got["live"] > 0.8 * size and got["samples"] > 20  # it did load, and was watched
    assert 0 < got["peak"] < LIMIT, got
    assert got["file"] < 0.5 * size, got  # pages of the model's file are given back
