"""Measure this device: tokens a second of a model, and the host's cost of recording a dispatch.

Medians of several runs. A speed is worth something only beside a peer or a ceiling measured in the same session.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from gpu import Device, Plan

DISPATCHES = 180
PAUSE = 0.01  # seconds before a timed call
BINDINGS = (2, 4, 6, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["decode", "record"], help="default: both")
    parser.add_argument("--model", default="smollm2", metavar="NAME|PATH", help="model to decode with; default smollm2")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="answer tokens a run; default 128")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="prompt tokens a run; default 128")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs to take the median of; default 5")
    parser.add_argument("--profile", action="store_true", help="with decode: time on the device, by kernel")
    parser.add_argument("--json", action="store_true", help="one object, for machines")


def run(args: argparse.Namespace) -> int:
    from gpu import Device

    for option in ("tokens", "prompt", "runs"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option} must be a whole number over 0, got {getattr(args, option)}")
    what = [args.what] if args.what else ["record", "decode"]
    start = time.perf_counter()
    device = Device.open(args.device, backend=args.backend)
    report: dict[str, Any] = {
        "device": device.caps.name,
        "driver": device.caps.driver,
        "backend": device.caps.backend_version,
        "python": platform.python_version(),
        "checked": device.caps.checked,
        "open_seconds": round(time.perf_counter() - start, 3),
    }
    if "record" in what:
        report["record"] = record_cost(device, runs=max(20, args.runs))
    if "decode" in what:
        report["decode"] = decode_speed(
            device, args.model, prompt=args.prompt, tokens=args.tokens, runs=args.runs, profile=args.profile
        )
    print(json.dumps(report) if args.json else text_of(report))
    return 0


def text_of(report: dict[str, Any]) -> str:
    """The report as aligned lines."""
    lines = [f"{report['device']} | {report['backend']} | {report['driver']}"]
    if "record" in report:
        rows = [
            (r["bindings"], r["us"], r["paused_us"], r["busy_us"], f"{r['busy_us'] / r['paused_us']:.2f}x")
            for r in report["record"]
        ]
        header = ("bindings", "us/dispatch", f"after {PAUSE * 1000:g} ms", "beside a busy thread", "ratio")
        lines += ["", "record: encode + finish + submit", term.table(rows, header=header, right=(0, 1, 2, 3, 4))]
    if "decode" in report:
        d = report["decode"]
        lines += [
            "",
            f"decode: {d['model']}, prompt {d['prompt_tokens']}, answer {d['answer_tokens']}, median of {d['runs']}",
        ]
        rows = [(name, d[key]) for name, key in DECODE_ROWS]
        lines.append(term.table(rows, right=(1,)))
        if "kernels" in d:
            total = sum(k["us"] for k in d["kernels"])
            rows = [(k["kernel"], k["dispatches"], k["us"], f"{100 * k['us'] / total:.0f} %") for k in d["kernels"]]
            lines += ["", term.table(rows, header=("kernel", "dispatches", "us a token", "share"), right=(1, 2, 3))]
    return "\n".join(lines)


DECODE_ROWS = (
    ("prompt tokens/s", "prompt_rate"),
    ("answer tokens/s", "answer_rate"),
    ("load, seconds", "load_seconds"),
    ("first token after the first prompt, seconds", "first_token_seconds"),
    ("dispatches a token", "dispatches"),
)


def record_cost(device: Device, *, runs: int) -> list[dict[str, float]]:
    """Microseconds a dispatch of encode + finish + submit, on distinct buffers.

    us: one replay right after the other. paused_us: each after a pause, when caches and clocks are cold. busy_us:
    beside a busy Python thread; waiting for the device is a pause there, so the fair ratio is busy_us / paused_us.
    """
    rows = []
    for bindings in BINDINGS:
        plan = _empty_plan(device, bindings)
        seconds = {"us": _median(plan, runs, pause=0.0), "paused_us": _median(plan, runs, pause=PAUSE)}
        with _Busy():
            seconds["busy_us"] = _median(plan, runs, pause=PAUSE)
        rows.append({"bindings": bindings} | {name: round(s * 1e6 / DISPATCHES, 2) for name, s in seconds.items()})
    return rows


def _empty_plan(device: Device, bindings: int) -> Plan:
    """Dispatches that do nothing, each on buffers of its own."""
    last = bindings - 1
    names = [f"b{i}" for i in range(bindings)]
    access = ["read"] * last + ["read_write"]
    declared = "".join(
        f"@group(0) @binding({i}) var<storage, {access[i]}> {name}: array<f32>;\n" for i, name in enumerate(names)
    )
    total = " + ".join(f"{name}[0]" for name in names[:-1])
    body = f"if (g.x == 77777u) {{ {names[-1]}[0] = {total}; }}"
    text = (
        f"{declared}@compute @workgroup_size(32)\nfn nothing(@builtin(global_invocation_id) g: vec3<u32>) {{ {body} }}"
    )
    kernel = device.kernel_source(text, "nothing", label=f"nothing on {bindings}")
    record = device.recorder()
    for _ in range(DISPATCHES):
        record(kernel, grid=1, **{name: device.alloc(256) for name in names})
    return record.plan()


def _median(plan: Plan, runs: int, *, pause: float) -> float:
    """Seconds of one replay's encode, finish and submit."""
    times = []
    for _ in range(runs + 3):
        time.sleep(pause)
        start = time.perf_counter()
        plan.replay()
        times.append(time.perf_counter() - start)
        plan.device.wait()
    return statistics.median(times[3:])


class _Busy:
    """A Python thread that never lets go of the interpreter on its own."""

    def __enter__(self) -> None:
        self._over = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def _spin(self) -> None:
        count = 0
        while not self._over:
            count += 1


def decode_speed(
    device: Device, model: str, *, prompt: int, tokens: int, runs: int, profile: bool = False
) -> dict[str, Any]:
    """Tokens a second of prompt and greedy answer (past the end of the text), medians of `runs` after a first one."""
    from apps.pull import locate
    from nn.generate.engine import Engine, Timings
    from nn.generate.options import SamplingOptions
    from nn.models.load import ModelFile, load_model

    file = ModelFile(locate(model))
    if prompt + tokens > file.config.context_max:
        raise ValueError(
            f"--prompt {prompt:,} and --tokens {tokens:,} are more than the {file.config.context_max:,} tokens that "
            f"{file.path.name} was made for"
        )
    start = time.perf_counter()
    engine = Engine(load_model(file, device, context=min(file.config.context_max, prompt + tokens + 64)))
    loaded = time.perf_counter()
    file.close()
    ids = [(7 * i + 3) % file.config.vocab for i in range(prompt)]
    options = SamplingOptions(temperature=0.0, max_tokens=tokens)
    first, timings = 0.0, []
    with term.Bar("bench", unit="runs") as bar:
        for i in range(runs + 1):
            engine.reset()
            timing = Timings()
            for n, _ in enumerate(engine.generate(ids, options, timing)):
                if i == 0 and n == 0:
                    first = time.perf_counter() - loaded
            timings.append(timing)
            bar.update(i + 1, runs + 1)
    report: dict[str, Any] = {
        "model": file.path.name,
        "prompt_tokens": prompt,
        "answer_tokens": tokens,
        "runs": runs,
        "prompt_rate": round(statistics.median(t.prompt_rate for t in timings[1:]), 1),
        "answer_rate": round(statistics.median(t.answer_rate for t in timings[1:]), 1),
        "load_seconds": round(loaded - start, 2),
        "first_token_seconds": round(first, 2),
        "dispatches": engine.dispatches,
    }
    if profile:
        from gpu.profile import by_kernel, profile_plan

        report["kernels"] = [
            {"kernel": label, "dispatches": count, "us": round(seconds * 1e6, 2)}
            for label, count, seconds in by_kernel(profile_plan(engine.decode_plan))
        ]
    return report
