"""How long this device takes for what people do with it, through one WebGPU implementation, or through each in turn.

`python -m apps.workloads MODEL [ADAPTER]` prints one object, seconds by workload (gpu.backend_choice.WORKLOADS).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from gpu import Device
    from nn.generate.engine import Engine, Timings

CHAT = (128, 256)  # tokens read and written
RUNS = 4  # the best counts, the first is for compiling
LIMIT = 300.0  # seconds that one implementation may take


def measure(device: Device, model: str) -> dict[str, float]:
    """Seconds of each workload. model: a name, a path, or synthetic:NAME."""
    found = _language(device, model)
    if device.caps.f16:
        found["gemm_f16"] = _product(device)
    return found


def open_engine(device: Device, model: str, tokens: int) -> Engine:
    """A model's engine for so many tokens, or as many as it takes; its weights come from a file or from nowhere."""
    from apps.bench.llm import open_model
    from nn.generate.engine import Engine
    from nn.models.load import load_model

    file = open_model(model)
    try:
        with term.Bar("loading") as bar:
            return Engine(
                load_model(
                    file,
                    device,
                    context=min(tokens, file.config.context_max),
                    progress=lambda done, total: bar.update(done, total),
                )
            )
    finally:
        file.close()


def read_and_write(engine: Engine, length: int, tokens: int) -> Timings:
    """A made-up prompt of so many tokens and the most likely answer, as far as the context goes, never ending early."""
    from nn.generate.engine import Timings
    from nn.generate.options import SamplingOptions

    length = min(length, engine.model.context // 2)
    timings, options = Timings(), SamplingOptions(temperature=0.0, max_tokens=min(tokens, length))
    engine.reset()
    ids = [(7 * i + 3) % engine.model.config.vocab for i in range(length)]
    for _ in engine.generate(ids, options, timings):
        pass
    return timings


def _language(device: Device, model: str) -> dict[str, float]:
    """A prompt, an answer after the first token, and a chat made of both."""
    length, tokens = (512, 128) if device.caps.kind == "gpu" else (32, 8)
    engine = open_engine(device, model, 2 * length)
    timings = [read_and_write(engine, length, tokens) for _ in range(RUNS)][1:]
    read = min(t.prompt_seconds / t.prompt_tokens for t in timings)
    write = min(t.answer_seconds / max(1, t.answer_tokens - 1) for t in timings)
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
    model: str, adapter: str | None, progress: Callable[[int, int], None]
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


def _in_a_process(backend: str, model: str, adapter: str | None) -> dict[str, float]:
    """Each in a process of its own: two implementations in one would share its allocations and threads."""
    command = [sys.executable, "-m", "apps.workloads", model, *([adapter] if adapter else [])]
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
    """Measure in this process and print one object; the arguments stand at the top of this file."""
    from gpu import Device

    model, *adapter = argv
    with Device.open(adapter[0] if adapter else None) as device:
        print(json.dumps(measure(device, model)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
