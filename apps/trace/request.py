"""One request, followed: what went in, what came out, and the profile of everything in between.

The request is run three times: once so that kernels are compiled, once unwatched for its speed (with timestamps around
whole submits, so that gaps are the true ones), and once with every dispatch timed by itself. All three give the same
tokens. The rivals of each chosen token are computed afterwards, from the logits of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

import gpu
from nn.generate.engine import Timings
from nn.generate.options import SamplingOptions
from nn.models.config import KV_BYTES

if TYPE_CHECKING:
    from gpu.tracing import Event, Profile
    from nn.llm import LLM

CANDIDATES = 6


@dataclass(frozen=True)
class Candidate:
    """A token that could have been chosen; probability: the model's, before temperature and the rest."""

    id: int
    piece: str
    probability: float


@dataclass(frozen=True)
class Chosen:
    """A token of the answer. probability: the model's, before temperature and the rest; None where it was not told.
    candidates: the likeliest tokens in its place, itself among them or behind them."""

    id: int
    piece: str
    special: bool
    probability: float | None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Cache:
    """The KV cache: bytes a position, positions used and there, storage type."""

    bytes_a_token: int
    used: int
    context: int
    dtype: str


@dataclass
class Step:
    """Submits of the request that belong together. token: number of the answer's token that it chose; turns: more than
    one where events are whole submits that choose several."""

    name: str
    token: int
    turns: int = 1
    events: list[Event] = field(default_factory=list)
    dispatches: int = 0

    @property
    def seconds(self) -> float:
        """On the device."""
        return sum(event.seconds for event in self.events)

    @property
    def start(self) -> float:
        """Seconds since the profile began."""
        return self.events[0].start

    @property
    def end(self) -> float:
        """Seconds since the profile began."""
        return max(event.end for event in self.events)


@dataclass
class Request:
    """Everything that is told about a request. profile: every dispatch. unwatched: whole submits, for speed and gaps.
    steps: the prompt, up to the first token, then a step for each further one; unwatched_steps: the same, each timed as
    a whole."""

    llm: LLM
    prompt: str
    raw: bool
    rendered: str | None
    ids: list[int]
    answer: list[Chosen]
    text: str
    finish: str
    timings: Timings
    options: SamplingOptions
    cache: Cache
    profile: Profile
    unwatched: Profile
    steps: list[Step]
    unwatched_steps: list[Step]

    @property
    def model(self) -> str:
        """The name of the model's file."""
        return self.llm.path.name

    @property
    def typical(self) -> Step | None:
        """The step of one token whose time on the device is the median; None where there is only the prompt's."""
        used = [step for step in self.steps[1:] if step.token < len(self.answer)]
        decoded = sorted(used, key=lambda step: step.seconds)
        return decoded[(len(decoded) - 1) // 2] if decoded else None

    def whole_seconds(self, step: Step) -> float | None:
        """Device seconds of a step that is not cut into dispatches; its share where a submit makes several tokens."""
        for whole in self.unwatched_steps:
            if whole.token <= step.token < whole.token + whole.turns:
                return whole.seconds / whole.turns
        return None


def follow(
    llm: LLM,
    prompt: str,
    *,
    tokens: int,
    raw: bool = False,
    system: str | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Request:
    """Run a request of at most `tokens` answer tokens and tell what happened.

    Raises: ContextFull where prompt and answer do not fit the context, what LLM.chat_ids and Engine.generate raise.
    """
    from nn.llm import messages_of

    engine, device = llm.engine, llm.device
    options = SamplingOptions(temperature=temperature, seed=seed, max_tokens=tokens, logprobs=True)
    ids = llm.text_ids(prompt) if raw else llm.chat_ids(messages_of(prompt, system))
    if len(ids) + tokens - 1 > llm.context:
        from nn.generate.engine import ContextFull

        raise ContextFull(
            f"the prompt has {len(ids):,} tokens and {tokens:,} are wanted behind it; the context holds "
            f"{llm.context:,}: shorten it, pass fewer --tokens, or a larger --context"
        )
    progress("compiling")
    engine.reset()
    list(engine.generate(ids, options))
    progress("measuring")
    timings = Timings()
    engine.reset()
    list(engine.generate(ids, options, timings))
    engine.reset()
    with gpu.profile(device, per="submit") as unwatched:
        list(engine.generate(ids, options))
    progress("tracing")
    engine.reset()
    answer: list[Chosen] = []
    words, text, rendered, finish = llm.tokenizer.stream(), "", None, "length"
    with gpu.profile(device, ceilings=unwatched.ceilings) as profile:
        if not raw and llm.template is not None:
            with profile.span("chat template") as told:
                rendered = llm.template.render(messages_of(prompt, system))
                told["characters"] = len(rendered)
        with profile.span("tokenise") as told:
            again = llm.text_ids(prompt) if raw else llm.chat_ids(messages_of(prompt, system))
            told["tokens"] = len(again)
        steps = engine.generate(ids, options)
        number = 0
        while finish == "length":
            with profile.span("prompt" if number == 0 else f"token {number}") as told:
                token = next(steps, None)
                if token is None:
                    break
                piece, special = piece_of(llm, token.id), llm.tokenizer.is_control(token.id)
                told["chose"] = piece
            probability = None if token.logprob is None else float(np.exp(token.logprob))
            answer.append(Chosen(token.id, piece, special, probability))
            if token.id in llm.tokenizer.stop_ids:
                finish = "stop"
            else:
                with profile.span("detokenise"):
                    text += words.push(token.id)
            number += 1
        with profile.span("finish"):
            steps.close()
            text += words.flush()
    progress("comparing")
    answer = with_rivals(llm, ids, answer)
    config = llm.config
    width = 2 * config.layers * config.kv_dim * KV_BYTES[engine.model.kv_dtype]
    used = len(ids) + len(answer) - 1  # the last token chosen is not in it
    loose = steps_of(unwatched, len(answer))
    return Request(
        llm=llm,
        prompt=prompt,
        raw=raw,
        rendered=rendered,
        ids=ids,
        answer=answer,
        text=text,
        finish=finish,
        timings=timings,
        options=options,
        cache=Cache(width, used, llm.context, engine.model.kv_dtype),
        profile=profile,
        unwatched=unwatched,
        steps=steps_of(profile, len(answer)),
        unwatched_steps=loose,
    )


def piece_of(llm: LLM, id: int) -> str:
    """The text of one token by itself; its name where it has no text."""
    if llm.tokenizer.is_control(id):
        return llm.tokenizer.token(id)
    return llm.tokenizer.token_bytes(id).decode("utf-8", "replace")


def with_rivals(llm: LLM, ids: list[int], answer: list[Chosen]) -> list[Chosen]:
    """The tokens with their likeliest rivals, by the model's probabilities: softmax of the logits as they are."""
    logits = llm.engine.logits([*ids, *(token.id for token in answer[:-1])])[len(ids) - 1 :].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    weights = np.exp(logits)
    found = []
    for token, row in zip(answer, weights / weights.sum(1, keepdims=True), strict=True):
        best = np.argsort(-row, kind="stable")[:CANDIDATES].tolist()
        best += [] if token.id in best else [token.id]
        rivals = tuple(Candidate(i, piece_of(llm, i), float(row[i])) for i in best)
        found.append(replace(token, candidates=rivals, probability=token.probability or float(row[token.id])))
    return found


def steps_of(profile: Profile, tokens: int) -> list[Step]:
    """Events by the token that they led to: everything up to the first choice is the prompt. A replay chooses where it
    samples; what was under way for tokens that nobody asked for any more is a step of its own."""
    by_replay: dict[int, list[Event]] = {}
    for event in profile.events:
        by_replay.setdefault(profile.submits[event.submit].replay, []).append(event)
    steps = [Step("prompt", 0)]
    chosen = 0
    for replay in sorted(by_replay):
        events = by_replay[replay]
        whole = not any(event.kind == "sampling" for event in events)  # events are submits
        for event, following in zip(events, [*events[1:], None], strict=True):
            step = steps[-1]
            step.events.append(event)
            step.dispatches += event.dispatches
            samples = event.kind == "sampling" or (whole and "sampling" in profile.submits[event.submit].kinds)
            if samples and (whole or following is None or following.kind != "sampling"):
                step.turns = profile.submits[event.submit].turns if whole else 1
                chosen += step.turns
                steps.append(Step(f"token {chosen}" if chosen < tokens else "not used", chosen))
    return [step for step in steps if step.events]
