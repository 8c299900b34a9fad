"""Suite llm: tokens a second of prompt and answer, by the host's clock."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from gpu import Device

DECODE_ROWS = (
    ("prompt tokens/s", "prompt_rate"),
    ("answer tokens/s", "answer_rate"),
    ("load, seconds", "load_seconds"),
    ("first token after the first prompt, seconds", "first_token_seconds"),
    ("dispatches a token", "dispatches"),
)


def text_of(d: dict[str, Any]) -> str:
    """The report as aligned lines."""
    lines = [f"llm: {d['model']}, prompt {d['prompt_tokens']}, answer {d['answer_tokens']}, median of {d['runs']}"]
    lines.append(term.table([(name, d[key]) for name, key in DECODE_ROWS], right=(1,)))
    if "kernels" in d:
        total = sum(k["us"] for k in d["kernels"])
        rows = [(k["kernel"], k["dispatches"], k["us"], f"{100 * k['us'] / total:.0f} %") for k in d["kernels"]]
        lines += ["", term.table(rows, header=("kernel", "dispatches", "us a token", "share"), right=(1, 2, 3))]
    return "\n".join(lines)


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
