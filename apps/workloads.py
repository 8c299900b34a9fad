"""How long this device takes for what people do with it, through one WebGPU implementation, or through each in turn.

`python -m apps.workloads MODEL|- [ADAPTER]` prints one object, seconds by workload (gpu.backend_choice.WORKLOADS).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu import Device

CHAT = (128, 256)  # tokens read and written
RUNS = 4  # the best counts, the first is for compiling
LIMIT = 300.0  # seconds that one implementation may take


def measure(device: Device, model: str | None) -> dict[str, float]:
    """Seconds of each workload; those that read and write tokens only with a model."""
    found = {} if model is None else _language(device, model)
    if device.caps.f16:
        found["gemm_f16"] = _product(device)
    return found


def _language(device: Device, model: str) -> dict[str, float]:
    """A prompt, an answer after the first token, and a chat made of both; with the model's own tokens, never ending."""
    from nn.generate.engine import Engine, Timings
    from nn.generate.options import SamplingOptions
    from nn.models.load import ModelFile, load_model

    length, tokens = (512, 128) if device.caps.kind == "gpu" else (32, 8)
    file = ModelFile(model)
    try:
        length = min(length, file.config.context_max // 2)
        tokens = min(tokens, file.config.context_max - length - 1)
        engine = Engine(load_model(file, device, context=length + tokens + 1))
        ids = [(7 * i + 3) % file.config.vocab for i in range(length)]
    finally:
        file.close()
    reads, writes = [], []
    for _ in range(RUNS):
        engine.reset()
        timings = Timings()
        for _ in engine.generate(ids, SamplingOptions(temperature=0.0, max_tokens=tokens), timings):
            pass
        reads.append(timings.prompt_seconds / length)
        writes.append(timings.answer_seconds / max(1, timings.answer_tokens - 1))
    read, write = min(reads[1:]), min(writes[1:])
    return {"chat": CHAT[0] * read + CHAT[1] * write, "prompt": length * read, "decode": write}


def _product(device: Device) -> float:
    """2048 x 2048 x 2048 f16 (256 on a software driver), by the variant that the operation takes."""
    from gpu.profile import Stopwatch
    from nn.ops.matmul_tune import MATMUL
    from nn.ops.matmul_variants import Shape

    size = 2048 if device.caps.kind == "gpu" else 256
    shape = Shape(size, size, size, dtype="f16")
    trial, variant, watch = MATMUL.trial(device, shape), MATMUL.pick(device, shape), Stopwatch(device)
    recorder = device.recorder()
    trial.record(recorder, variant, 0)
    plan = recorder.plan()
    return min([watch.seconds(plan, runs=4) for _ in range(2 * RUNS)][1:])


def compare(
    model: str | None, adapter: str | None, progress: Callable[[int, int], None]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Seconds by implementation and workload, each the better of two processes in turns; and why one gave nothing."""
    from gpu.backend import NAMES

    best: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    rounds = [name for _ in range(2) for name in NAMES]
    for done, name in enumerate(rounds):
        progress(done, len(rounds))
        if name in failed:
            continue
        try:
            seconds = _in_a_process(name, model, adapter)
        except ValueError as error:
            failed[name] = str(error)
            best.pop(name, None)
            continue
        mine = best.setdefault(name, {})
        for workload, value in seconds.items():
            mine[workload] = min(value, mine.get(workload, value))
    progress(len(rounds), len(rounds))
    return best, failed


def _in_a_process(backend: str, model: str | None, adapter: str | None) -> dict[str, float]:
    """Each in a process of its own: two implementations in one would share its allocations and threads."""
    command = [sys.executable, "-m", "apps.workloads", model or "-", *([adapter] if adapter else [])]
    environment = {**os.environ, "ANYGPU_BACKEND": backend}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it did not end within {LIMIT:.0f} s") from None
    if done.returncode:
        raise ValueError(([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return {str(name): float(value) for name, value in found.items()}


def main(argv: list[str]) -> int:
    from gpu import Device

    model, *adapter = argv
    with Device.open(adapter[0] if adapter else None) as device:
        print(json.dumps(measure(device, None if model == "-" else model)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
