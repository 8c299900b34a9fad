"""One conversation on one device: prompts in chunks, one token a step, the next steps under way before a token is read.

A step is a recorded Plan: embedding, layers, head, sampler; the chosen token stays on the device as the next step's
input. Per submit (of one step, or of a few where they are fast) the host writes 16 bytes (struct Step) and reads the
tokens back a submit later, so the device never waits for Python. Plans are recorded once for each chunk length; later
steps compile and allocate nothing.
"""

from __future__ import annotations

import operator
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nn.generate.options import SamplingOptions
from nn.graph.explain import Explanation
from nn.graph.schedule import compile_program
from nn.graph.scopes import Trace, named, tracing
from nn.ops.base import Array
from nn.ops.cache import last_row
from nn.ops.sample import FLAGS, IN_PROMPT, sample_token, settings_bytes
from nn.tensor import Tensor

if TYPE_CHECKING:
    from gpu import Pending, Plan
    from nn.models.decoder import Decoder

CHUNKS_GPU = (8, 32, 128, 512)  # rows of a prompt chunk, smallest that holds what is left
CHUNKS_CPU = (8, 32)
DECODE_KEYS = (256, 1024)  # decode steps on a GPU have plans for up to so many keys, and one for any number
# Drivers of laptops take a submit that runs for seconds for a hang: the first chunks of a size go out a few layers at a
# time, later ones in submits of at most this many seconds, going by how long the first took.
CHUNK_SUBMIT = 32
SUBMIT_SECONDS = 0.1
BURST = 4  # tokens of one submit at most, and
BURST_SECONDS = 0.01  # how long such a submit may take: what a person would see as a token's delay
FIRST_SUBMIT = 12  # dispatches of a chunk's first submit then: the device starts while the rest is encoded
STEP_SUBMIT = 1024
AHEAD_GPU = 2


class GenerationError(RuntimeError):
    """The model cannot go on: its numbers are broken, or nothing may be chosen."""


class ContextFull(ValueError):
    """The prompt does not fit the context; the message says by how much and what to do."""


@dataclass(frozen=True)
class Sampled:
    """One chosen token. logprob: natural log, under the unadjusted logits, or None if not asked for."""

    id: int
    logprob: float | None


@dataclass
class Timings:
    """Of one answer. Seconds by the host's clock; tokens that came out of the cache are not counted as prompt."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_tokens: int = 0
    answer_seconds: float = 0.0  # from the first token to the last

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, first token included in the time."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def answer_rate(self) -> float:
        """Answer tokens a second after the first."""
        return (self.answer_tokens - 1) / self.answer_seconds if self.answer_seconds > 0 else 0.0


class Engine:
    """Generates from a Decoder. Remembers what its cache holds, so that a prompt that goes on from it is not redone."""

    def __init__(self, model: Decoder, *, ahead: int | None = None) -> None:
        """ahead: submits under way while the last one's tokens are looked at; default 2 on a GPU, 0 on a CPU driver."""
        self.model, self.device = model, model.device
        default = AHEAD_GPU if self.device.caps.kind == "gpu" else 0  # on a software driver a wasted step is dear
        self.ahead = default if ahead is None else ahead
        vocab = model.config.vocab
        self._settings = self._state(settings_bytes(SamplingOptions()), (8,), "u32")
        self._seen = self._state(np.zeros(vocab, np.uint32), (vocab,), "u32")
        self._bias = self._state(np.zeros(vocab, np.float32), (vocab,), "f32")
        self._chosen = self._state(np.zeros(4 + 4 * BURST, np.uint32), (4 + 4 * BURST,), "u32")
        self._inputs: dict[int, Array] = {}
        self._plans: dict[tuple[str, int, bool], tuple[Plan, Array]] = {}
        self._bursts: dict[tuple[int, bool, int], Plan] = {}
        self.burst = 1
        self._cached: list[int] = []
        self._busy = False
        self.device.memory.reserve_staging(4 * self._chosen.size, self.ahead + 2)

    def _state(self, data: np.ndarray | bytes, shape: tuple[int, ...], dtype: str) -> Array:
        return Array(self.device.upload(data), shape, dtype)

    @property
    def cached(self) -> tuple[int, ...]:
        """Ids whose keys and values are in the cache."""
        return tuple(self._cached)

    @property
    def dispatches(self) -> int:
        """Dispatches of one decode step."""
        return len(self.decode_plan)

    @property
    def decode_plan(self) -> Plan:
        """The recorded plan of one decode step, for looking at."""
        return self._plan("decode", self._bucket(1))[0]

    def reset(self) -> None:
        """Forget the conversation."""
        self._cached = []

    def generate(
        self,
        ids: Sequence[int],
        options: SamplingOptions,
        timings: Timings | None = None,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Sampled]:
        """Tokens that follow the prompt `ids`, one by one, until max_tokens or until the context is full.

        The caller decides about stop tokens by closing the iterator. `cancelled` is asked before each chunk of the
        prompt and each token: True ends it, the cache keeps what is done. Tokens of the prompt that the cache already
        holds (from the start on) are not computed again.
        Raises: ContextFull before anything is computed; ValueError for ids outside the vocabulary; GenerationError.
        """
        if self._busy:
            raise GenerationError("generate: an answer is still under way; finish or close it before the next one")
        timings = Timings() if timings is None else timings
        ids = self._checked(ids)
        self._prepare(ids, options)
        seed = secrets.randbits(32) if options.seed is None else options.seed
        biased = bool(options.logit_bias)
        room = self.model.context - len(ids) + 1  # the last token needs no place in the cache
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        answer: list[int] = []
        pending: deque[tuple[Pending, int]] = deque()  # results under way, and how many tokens each holds
        submitted = 0  # tokens asked for; step i >= 1 puts token i - 1 into the cache and chooses token i
        self._busy = True
        try:
            start = first = time.perf_counter()
            sizes, rows = self._prefill(ids, timings, cancelled)
            while len(answer) < limit and not cancelled():
                burst = self.burst if answer else 1  # encoding many would make the first token wait
                while submitted < min(limit, len(answer) + 1 + self.ahead * burst):
                    count = 1 if submitted == 0 else _power_of_two(burst, limit - submitted)
                    position = len(ids) + submitted - 1
                    if submitted == 0:
                        plan = self._plan("head", sizes[-1], biased=biased)[0]
                    else:
                        plan = self._decode(count, self._bucket(position + count), biased=biased)
                    state = struct.pack("<4I", position, rows if submitted == 0 else 1, seed, submitted)
                    pending.append((self._replay(plan, state), count))
                    submitted += count
                later, count = pending.popleft()
                results = np.frombuffer(later.result(), np.uint32).reshape(-1, 4)[1:]
                now = time.perf_counter()
                if not answer:
                    timings.prompt_seconds, first = now - start, now
                    self._pace(sizes, now - start)
                for _ in range(count):
                    token = self._token(results[len(answer) % BURST], options)
                    answer.append(token.id)
                    timings.answer_tokens, timings.answer_seconds = len(answer), now - first
                    yield token
                    if cancelled():
                        break
                if len(answer) > 2:
                    self._set_burst((now - first) / (len(answer) - 1))
        finally:
            self._busy = False
            self._cached += answer[: max(submitted - 1, 0)]
            for late, _ in pending:
                late.result()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, (T, V) f32; the cache then holds `ids`. For scoring and tests: V floats a token."""
        ids = self._checked(ids)
        self._cached = []
        out = np.empty((len(ids), self.model.config.vocab), np.float32)
        at = 0
        while at < len(ids):
            size = self._chunk(len(ids) - at)
            count = min(size, len(ids) - at)
            plan, _ = self._plan("chunk", size)
            self._write_chunk(size, ids[at : at + count])
            plan.replay(write=(self.model.step.buffer, struct.pack("<4I", at, count, 0, 0)))
            scores, result = self._plan("logits", size)
            scores.replay()
            out[at : at + count] = self.device.read(result.buffer, np.float32, result.shape)[:count]
            at += count
        self._cached = list(ids)
        return out

    # Steps -------------------------------------------------------------------------------------------------------

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """The prompt as a list. Raises what `generate` says."""
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError:
            raise TypeError("generate: the prompt is no sequence of token ids, which are whole numbers") from None
        vocab, context = self.model.config.vocab, self.model.context
        if not ids:
            raise ValueError(
                "generate: the prompt is empty; it needs at least one token, such as the beginning-of-text token"
            )
        bad = next((i for i in ids if not 0 <= i < vocab), None)
        if bad is not None:
            raise ValueError(f"generate: token id {bad} is outside the vocabulary of {vocab:,}")
        if len(ids) > context:
            raise ContextFull(
                f"the prompt has {len(ids):,} tokens, the context holds {context:,}; shorten it, start afresh, or "
                "open the model with a longer context"
            )
        return ids

    def _prepare(self, ids: Sequence[int], options: SamplingOptions) -> None:
        """Put the request's settings and the prompt's tokens where the sampler sees them."""
        vocab = self.model.config.vocab
        seen = np.zeros(vocab, np.uint32)
        seen[np.asarray(ids, np.int64)] = IN_PROMPT
        self._seen.buffer.write(seen)
        self._settings.buffer.write(settings_bytes(options))
        if options.logit_bias:
            bias = np.zeros(vocab, np.float32)
            for token, value in options.logit_bias.items():
                if token >= vocab:
                    raise ValueError(f"logit_bias: token id {token} is outside the vocabulary of {vocab:,}")
                bias[token] = value
            self._bias.buffer.write(bias)

    def _prefill(self, ids: Sequence[int], timings: Timings, cancelled: Callable[[], bool]) -> tuple[list[int], int]:
        """Run the prompt, all but what the cache holds. Returns the chunks' sizes and the last one's rows."""
        same = 0
        for held, wanted in zip(self._cached, ids[:-1], strict=False):  # the last one is always run, for its logits
            if held != wanted:
                break
            same += 1
        del self._cached[same:]
        timings.cached_tokens, timings.prompt_tokens = same, len(ids) - same
        at, sizes, count = same, [], 0
        while at < len(ids) and not cancelled():
            size = self._chunk(len(ids) - at)
            count = min(size, len(ids) - at)
            plan, _ = self._plan("chunk", size)
            self._write_chunk(size, ids[at : at + count])
            plan.replay(write=(self.model.step.buffer, struct.pack("<4I", at, count, 0, 0)))
            self._cached += ids[at : at + count]
            sizes.append(size)
            at += count
        return sizes or [self._chunk(1)], count

    def _pace(self, sizes: Sequence[int], seconds: float) -> None:
        """Let later chunks go out in larger submits, when this many seconds for these chunks allow it."""
        largest = max(sizes)
        plan = self._plan("chunk", largest)[0]
        dispatch = seconds / (len(plan) * sizes.count(largest))  # the smaller chunks left out: rather high
        fitting = min(int(SUBMIT_SECONDS / dispatch), len(plan))
        if fitting > 1.5 * plan.per_submit:
            plan.split(fitting, first=FIRST_SUBMIT)

    def _replay(self, plan: Plan, step: bytes) -> Pending:
        pending = plan.replay(write=(self.model.step.buffer, step), read=(self._chosen.buffer, 4 * self._chosen.size))
        assert pending is not None
        return pending

    def _token(self, result: np.ndarray, options: SamplingOptions) -> Sampled:
        token, flag = int(result[0]), int(result[1])
        if flag:
            raise GenerationError(
                f"the model cannot choose a next token: {FLAGS[flag]}. "
                "Check the model file (anygpu check tests the device)."
            )
        return Sampled(token, float(result[2:3].view(np.float32)[0]) if options.logprobs else None)

    def _set_burst(self, seconds: float) -> None:
        """Several tokens a submit where one takes so few seconds that nobody sees them come together."""
        self.burst = 1
        while self.ahead > 0 and self.burst < BURST and 2 * self.burst * seconds <= BURST_SECONDS:
            self.burst *= 2

    # Plans -------------------------------------------------------------------------------------------------------

    def _chunk(self, tokens: int) -> int:
        sizes = CHUNKS_CPU if self.device.caps.kind == "cpu" else CHUNKS_GPU
        return next((size for size in sizes if size >= tokens), sizes[-1])

    def _write_chunk(self, size: int, ids: Sequence[int]) -> None:
        padded = np.zeros(size, np.uint32)
        padded[: len(ids)] = ids
        self._ids(size).buffer.write(padded)

    def _ids(self, size: int) -> Array:
        if size not in self._inputs:
            self._inputs[size] = self._state(np.zeros(size, np.uint32), (size,), "u32")
        return self._inputs[size]

    def _plan(self, kind: str, size: int, *, biased: bool = False) -> tuple[Plan, Array]:
        """The recorded plan of a step, and where its result lies.

        "chunk": ids of this size -> hidden. "head": the last row of that hidden -> a token. "decode": the token before
        -> a token, with so many keys in the cache at most. "logits": hidden of a chunk -> logits of all its rows.
        """
        key = (kind, size, biased)
        if key not in self._plans:
            self._plans[key] = self._record(kind, size, biased=biased)
        return self._plans[key]

    def _decode(self, count: int, keys: int, *, biased: bool) -> Plan:
        """The plan of `count` decode steps, each reading the token that the one before chose. keys: of `_bucket`."""
        key = (count, biased, keys)
        if key not in self._bursts:
            self._bursts[key] = self._plan("decode", keys, biased=biased)[0].repeated(count)
        return self._bursts[key]

    def _bucket(self, keys: int) -> int:
        """What a decode step's plan is made for, which fits `keys` keys: few of them want another kernel than many."""
        context = self.model.context
        sizes = () if self.device.caps.kind == "cpu" else DECODE_KEYS
        return min(next((size for size in sizes if size >= keys), context), context)

    def explain(self) -> Explanation:
        """The kernels of one decode step, what is fused into each, and the memory plan. Nothing is run."""
        trace = Trace()
        try:
            with tracing(trace):
                node = self._built("decode", self.model.context, biased=False).node
            return Explanation.of(self.device, [node], "decode step")
        finally:
            trace.undo()

    def _record(self, kind: str, size: int, *, biased: bool) -> tuple[Plan, Array]:
        result = self._built(kind, size, biased=biased)
        record = self.device.recorder()
        (array,) = compile_program(self.device, [result.node]).record(record)
        assert isinstance(array, Array)
        return record.plan(per_submit=CHUNK_SUBMIT if kind == "chunk" else STEP_SUBMIT), array

    def _built(self, kind: str, size: int, *, biased: bool) -> Tensor:
        """The graph of a step, as `_plan` names it."""
        model = self.model
        if kind == "chunk":
            result = model.hidden(Tensor(self._ids(size)))
        elif kind == "decode":
            previous = Array(self._chosen.buffer, (1,), "u32")
            result = self._sampled(model.logits(model.hidden(Tensor(previous), limit=size)), biased=biased)
        else:
            hidden = Tensor(self._plan("chunk", size)[1])
            if kind == "logits":
                result = model.logits(hidden)
            else:
                result = self._sampled(model.logits(last_row(hidden, Tensor(model.step))), biased=biased)
        return result

    def _sampled(self, logits: Tensor, *, biased: bool) -> Tensor:
        chosen = Tensor(self._chosen)
        state = (Tensor(self._settings), Tensor(self.model.step), Tensor(self._seen))
        with named("sample"):
            sample_token(logits, *state, chosen, bias=Tensor(self._bias) if biased else None)
        return chosen


def _power_of_two(most: int, left: int) -> int:
    """The largest of most, most / 2, ... that is at most `left`."""
    while most > left:
        most //= 2
    return most
