"""Suite llm: tokens a second of prompt and answer by the host's clock, and the budget of a token.

    budget    bytes that a token reads (weights, keys and values) / copied bytes a second: what bandwidth alone needs
              dispatches * seconds from one empty dispatch to the next: what launching alone needs
    measured  seconds a token; GPU seconds of one step; host seconds to encode and submit one

Greedy, past the end of the text. Checked: the answer, chosen one token at a time, is the likeliest of the logits that
the same ids give as one prompt, which other kernels compute.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

import numpy as np

from apps import term
from apps.bench.case import Row
from apps.bench.measure import LONGEST_BATCH, Sample, repeat
from nn.generate.engine import Engine, Timings
from nn.generate.options import SamplingOptions
from nn.models.config import flops_per_token, kv_bytes
from nn.models.load import DoesNotFit, ModelFile, load_model
from nn.models.synthetic import SyntheticModel

if TYPE_CHECKING:
    from apps.bench.rows import Budget, Runner

SYNTHETIC = "synthetic:"
STAND_INS = {"smollm2": "smollm2-135m-q4_1", "gemma3": "gemma3-270m-q4_k"}  # where the file is not in the cache
LONG_PROMPT = 512
CHECKED = 16  # tokens of the answer that are compared
NEAR = 0.1  # of the logits' standard deviation: a token that much below the likeliest is a tie of two roundings


@dataclass(frozen=True)
class Plan:
    """Which models, and how long."""

    models: Sequence[str]
    prompt: int
    prompts: Sequence[int]  # lengths timed on their own besides `prompt`
    tokens: int
    runs: int


def plan_for(kind: str, *, model: str | None, prompt: int | None, tokens: int | None, runs: int | None) -> Plan:
    """What is measured where nothing, or not everything, is said. kind: of the device."""
    gpu = kind == "gpu"
    if model is not None:
        models: Sequence[str] = model.split(",")
    else:
        models = [
            *map(stand_in, STAND_INS if gpu else ("smollm2",)),
            *([f"{SYNTHETIC}llama-7b-q4_0"] if gpu else []),
        ]
    return Plan(
        models,
        prompt or (128 if gpu else 36),
        () if prompt or not gpu else (LONG_PROMPT,),
        tokens or (128 if gpu else 24),
        runs or (5 if gpu else 2),
    )


def stand_in(name: str) -> str:
    """The model, or one with its shapes and random weights where its file is not in the cache."""
    from nn.io import registry

    return name if registry.resolve(name) is not None else SYNTHETIC + STAND_INS[name]


def run(
    runner: Runner, plan: Plan, budget: Budget, *, profile: bool, peer: Any, say: Callable[[str], None]
) -> list[Any]:
    """Measure every model; rows go to the runner. Returns what the JSON holds under "decode"."""
    found = []
    for name in plan.models:
        if budget.left <= 0:
            runner.add(Row("llm", name, "", status="skipped", note="no time left (--budget)"))
            continue
        try:
            file = open_model(name)
            try:
                report, rows = measure(runner, file, plan, profile=profile, peer=peer)
            finally:
                file.close()
        except DoesNotFit as error:
            runner.add(Row("llm", name, "", status="skipped", note=str(error)))
            continue
        for row in rows:
            runner.add(row)
        say(text_of(report))
        found.append(report)
        runner.made.drop()
    return found


def open_model(name: str) -> ModelFile | SyntheticModel:
    """A model by registry name, path or synthetic:NAME."""
    if name.startswith(SYNTHETIC):
        return SyntheticModel.named(name.removeprefix(SYNTHETIC))
    from apps.pull import locate

    return ModelFile(locate(name))


def measure(
    runner: Runner, file: ModelFile | SyntheticModel, plan: Plan, *, profile: bool, peer: Any
) -> tuple[dict[str, Any], list[Row]]:
    """One model: the report and its rows."""
    device, config = runner.device, file.config
    longest = max(plan.prompt + plan.tokens, *plan.prompts, 0)
    if longest > config.context_max:
        raise ValueError(
            f"--prompt {plan.prompt:,} and --tokens {plan.tokens:,} are more than the {config.context_max:,} tokens "
            f"that {file.path.name} was made for"
        )
    start = time.perf_counter()
    engine = Engine(load_model(file, device, context=min(config.context_max, longest + 64)))
    device.wait()
    loaded = time.perf_counter()
    ids = [(7 * i + 3) % config.vocab for i in range(max(plan.prompt, *plan.prompts, 0))]
    first, decoded, answer = _decode(engine, ids[: plan.prompt], plan)
    problem = _wrong(engine, ids[: plan.prompt], answer)
    prompts = {plan.prompt: [t.prompt_seconds for t in decoded]}
    for length in plan.prompts:
        prompts[length] = _prompt(engine, ids[:length], plan.runs)
    step = _step_seconds(runner, engine, plan)
    report: dict[str, Any] = {
        "model": file.path.name,
        "prompt_tokens": plan.prompt,
        "answer_tokens": plan.tokens,
        "runs": plan.runs,
        "prompt_rate": round(plan.prompt / statistics.median(prompts[plan.prompt]), 1),
        "prompt_rates": {str(n): round(n / statistics.median(s), 1) for n, s in prompts.items()},
        "answer_rate": round(statistics.median(t.answer_rate for t in decoded), 1),
        "load_seconds": round(loaded - start, 2),
        "first_token_seconds": round(first, 2),
        "dispatches": engine.dispatches,
        "budget": budget_of(runner, file, engine, plan),
        "gpu_us": round(step * 1e6, 1),
        "encode_us": round(_encode_seconds(engine, plan) * 1e6, 1),
    }
    if profile:
        report["kernels"] = kernels_of(engine)
    rows = _rows(runner, file, plan, report, prompts, [t.answer_seconds for t in decoded], problem)
    if peer is not None and problem is None:
        _beside(peer, file, plan, rows, report)
    return report, rows


def _decode(engine: Engine, ids: list[int], plan: Plan) -> tuple[float, list[Timings], list[int]]:
    """Seconds to the very first token, timings of all runs but the first, and the answer."""
    options = SamplingOptions(temperature=0.0, max_tokens=plan.tokens)
    first, timings, answer = 0.0, [], []
    start = time.perf_counter()
    with term.Bar("bench", unit="runs") as bar:
        for i in range(plan.runs + 1):
            engine.reset()
            timing = Timings()
            answer = []
            for n, token in enumerate(engine.generate(ids, options, timing)):
                if i == 0 and n == 0:
                    first = time.perf_counter() - start
                answer.append(token.id)
            timings.append(timing)
            bar.update(i + 1, plan.runs + 1)
    return first, timings[1:], answer


def _prompt(engine: Engine, ids: list[int], runs: int) -> list[float]:
    """Seconds from a prompt to its first token."""
    options, seconds = SamplingOptions(temperature=0.0, max_tokens=1), []
    for _ in range(runs + 1):
        engine.reset()
        timing = Timings()
        for _ in engine.generate(ids, options, timing):
            pass
        seconds.append(timing.prompt_seconds)
    return seconds[1:]


def _wrong(engine: Engine, ids: list[int], answer: list[int]) -> str | None:
    """What is wrong with the answer, or None."""
    answer = answer[:CHECKED]
    engine.reset()
    logits = engine.logits([*ids, *answer[:-1]])[len(ids) - 1 :].astype(np.float64)
    engine.reset()
    if not np.isfinite(logits).all():
        return "the logits of the prompt are not all finite"
    short = (logits.max(1) - logits[np.arange(len(answer)), answer]) / logits.std(1)
    worst = int(np.argmax(short))
    if short[worst] > NEAR:
        return (
            f"token {worst} of the answer is {answer[worst]}; as part of a prompt its logit lies {short[worst]:.2f} "
            f"standard deviations below that of {int(logits[worst].argmax())}"
        )
    return None


def _step_state(plan: Plan) -> bytes:
    """The step after the prompt: position, tokens, seed, draw. Each step moves the position on by itself."""
    return struct.pack("<4I", plan.prompt, 1, 0, 1)


def _step_seconds(runner: Runner, engine: Engine, plan: Plan) -> float:
    """Seconds of one decode step on the device, in a row of at most as many as the answer has."""

    def batch(steps: int) -> float:
        engine.model.step.buffer.write(_step_state(plan))
        return runner.watch.batch([engine.decode_plan], steps) / steps

    steps = max(1, min(plan.tokens, int(LONGEST_BATCH / max(batch(1), 1e-6))))

    return repeat(lambda: batch(steps), 0.4, clock=runner.watch.clock).median


def _encode_seconds(engine: Engine, plan: Plan) -> float:
    """Host seconds to encode and submit one step."""
    times = []
    for _ in range(13):
        start = time.perf_counter()
        engine.decode_plan.replay(write=(engine.model.step.buffer, _step_state(plan)))
        times.append(time.perf_counter() - start)
        engine.device.wait()
    return statistics.median(times[3:])


def budget_of(runner: Runner, file: Any, engine: Engine, plan: Plan) -> dict[str, float]:
    """Bytes a token and the rates that this device's ceilings allow."""
    nbytes = token_bytes(file, plan.prompt + plan.tokens // 2, engine.model.kv_dtype)
    ceilings = runner.ceilings
    return {
        "bytes_a_token": nbytes,
        "bandwidth_rate": round(ceilings.copy / nbytes, 1),
        "launch_rate": round(1.0 / (engine.dispatches * ceilings.launch), 1),
    }


def token_bytes(file: Any, keys: int, kv_dtype: str) -> int:
    """Bytes that a token reads: every weight once (one row of an embedding that is not the head too), keys, values."""
    config = file.config
    names = file.sources if isinstance(file, ModelFile) else file.shapes
    total = sum(file.parameter_bytes(name) for name in names if name not in ("embed", "positions"))
    rows = 1.0 if config.tied_head else 1.0 / config.vocab
    return int(total + rows * file.parameter_bytes("embed") + kv_bytes(config, keys, kv_dtype))


def kernels_of(engine: Engine) -> list[dict[str, Any]]:
    """Where the device's time of a step goes, by kernel."""
    from gpu.profile import by_kernel, profile_plan

    return [
        {"kernel": label, "dispatches": count, "us": round(seconds * 1e6, 2)}
        for label, count, seconds in by_kernel(profile_plan(engine.decode_plan))
    ]


def _rows(
    runner: Runner,
    file: Any,
    plan: Plan,
    report: dict[str, Any],
    prompts: dict[int, list[float]],
    answers: list[float],
    problem: str | None,
) -> list[Row]:
    ceilings, config, name = runner.ceilings, file.config, file.path.name
    bound = report["budget"]["bandwidth_rate"]
    decode = _row(f"{name} decode after {plan.prompt}", answers, plan.tokens - 1)
    decode.nbytes = report["budget"]["bytes_a_token"]
    decode.flops = flops_per_token(config, phase="decode", context=plan.prompt + plan.tokens // 2)
    decode.ceiling, decode.share = "copy", decode.rate / bound
    rows = [decode]
    for length, seconds in prompts.items():
        row = _row(f"{name} prompt {length}", seconds, length)
        row.flops = flops_per_token(config, phase="prefill", context=length)
        row.nbytes = report["budget"]["bytes_a_token"] / length  # weights are read once for all of them
        peak = ceilings.matrix or ceilings.fma
        row.ceiling, row.share = "matrix" if ceilings.matrix else "fma", row.rate * row.flops / peak
        rows.append(row)
    for row in rows:
        if problem is not None:
            row.status, row.note = "wrong", problem
    return rows


def _row(key: str, seconds: Sequence[float], tokens: int) -> Row:
    """One row in seconds a token."""
    sample = Sample.of([s / max(tokens, 1) for s in seconds], "wall")
    rate = 1.0 / sample.median if sample.median > 0 else 0.0
    return Row(
        "llm", key, "", seconds=sample.median, low=sample.low, high=sample.high, spread=sample.spread,
        batches=sample.batches, clock="wall", rate=rate, unit="tok/s",
    )  # fmt: skip


def _beside(peer: Any, file: Any, plan: Plan, rows: list[Row], report: dict[str, Any]) -> None:
    """The peer's rates of the same work in the rows."""
    try:
        theirs = peer.rates(
            file.path, prompt=plan.prompt, prompts=list(plan.prompts), tokens=plan.tokens, runs=plan.runs
        )
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, HTTPException, SubprocessError) as error:
        rows[0].note = f"{peer.short}: {error}"
        return
    report["peer_rates"] = theirs
    keys = ["decode", str(plan.prompt), *map(str, plan.prompts)]
    for row, key in zip(rows, keys, strict=True):
        if theirs.get(key):
            row.peer, row.peer_seconds = peer.short, 1.0 / theirs[key]
            row.ratio = row.peer_seconds / row.seconds


def text_of(d: dict[str, Any]) -> str:
    """The budget and the profile of one model as lines."""
    b = d["budget"]
    lines = [
        f"  budget of a token: {d['dispatches']} dispatches ({b['launch_rate']:,.0f} tokens/s by launch cost alone), "
        f"{term.size_text(b['bytes_a_token'])} ({b['bandwidth_rate']:,.0f} tokens/s by bandwidth alone)",
        f"  measured: {1e6 / max(d['answer_rate'], 1e-9):,.0f} us a token; {d['gpu_us']:,.0f} us on the device alone; "
        f"the host takes {d['encode_us']:,.0f} us to encode and submit; {d['load_seconds']} s to load, "
        f"{d['first_token_seconds']} s more to the first token",
    ]
    if "kernels" in d:
        total = sum(k["us"] for k in d["kernels"])
        rows = [(k["kernel"], k["dispatches"], k["us"], f"{100 * k['us'] / total:.0f} %") for k in d["kernels"]]
        lines += ["", term.table(rows, header=("kernel", "dispatches", "us a token", "share"), right=(1, 2, 3))]
    return "\n".join(lines)
