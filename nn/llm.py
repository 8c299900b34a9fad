"""LLM: a language model by name or path, ready to chat or complete. The whole of the high-level API.

from nn import LLM
llm = LLM("smollm2")
print(llm.chat("Why is the sky blue?"))
for piece in llm.chat("And at night?", stream=True):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, overload

from gpu import Device
from nn.generate.engine import Engine, Sampled, Timings
from nn.generate.options import SamplingOptions
from nn.generate.stops import StopText
from nn.io import registry
from nn.models.load import ModelFile, load_model

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it comes: the new text (may be empty), its token, and the token's log-probability.

    `id` is None where no token came: text that was held back until the end.
    """

    text: str
    id: int | None
    logprob: float | None = None


@dataclass
class Answer:
    """An answer, as far as it came.

    finish_reason: "stop" (end of turn or a stop string), "length" (max_tokens or context), or "cancelled": the iterator
    was closed, or has not ended yet. `ids` has every token that was made, the one that ended the turn included.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    finish_reason: str = "cancelled"
    timings: Timings = field(default_factory=Timings)


class LLM:
    """A language model on a device.

    Args:
        model: a name ("smollm2", "qwen2.5-coder", "gemma3"), fetched on first use; "hf:ORG/NAME"; the path of a .gguf
            file; or of a folder with config.json, *.safetensors and tokenizer.json.
        device: an open Device; None opens the default one.
        context: tokens of prompt and answer together; None takes 4096, or the model's own limit if that is less.
        kv_dtype: "f16" or "f32" storage of keys and values; None takes f16 on GPUs that have it.
        gpu_memory: what the model may take: bytes, "6G", or a fraction; None takes a rule a device (nn.models.load).
        progress: called as progress(what, done, total) with bytes, while fetching ("fetch") and loading ("load").
    Raises: ModelError, FormatError, ConfigError, TokenizerError, DoesNotFit, GpuError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        device: Device | None = None,
        context: int | None = None,
        kv_dtype: str | None = None,
        gpu_memory: str | float | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        from nn.io.chat_template import ChatTemplate
        from nn.io.tokenizer import Tokenizer
        from nn.io.vocabulary import TokenizerError

        if device is not None and not isinstance(device, Device):
            raise TypeError(f"LLM: device is {device!r}; expected an open Device, as Device.open() gives, or None")

        fetching, loading = (None if progress is None else partial(progress, what) for what in ("fetch", "load"))
        self.path = registry.locate(model, fetching)
        file = ModelFile(self.path)
        try:
            self.config = file.config
            folder = self.path if self.path.is_dir() else self.path.parent
            self.tokenizer = (
                Tokenizer.from_files(folder) if file.metadata is None else Tokenizer.from_gguf(file.metadata)
            )
            if file.metadata is not None and self.tokenizer.vocab_size < self.config.vocab:  # folders may pad
                raise TokenizerError(
                    f"{self.path.name}: the tokenizer has {self.tokenizer.vocab_size:,} tokens, the model gives "
                    f"{self.config.vocab:,}; the two do not belong together: fetch the model again"
                )
            self.template = ChatTemplate.of(self.tokenizer) if self.tokenizer.chat_template else None
            self.device = device or Device.open(workload="chat")
            decoder = load_model(
                file, self.device, context=context, kv_dtype=kv_dtype, gpu_memory=gpu_memory, progress=loading
            )
        finally:
            file.close()
        self.engine = Engine(decoder)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.engine.model.context

    @overload
    def chat(
        self, prompt: str | Sequence[Message], *, system: str | None = ..., stream: Literal[False] = ..., **options: Any
    ) -> str: ...
    @overload
    def chat(
        self, prompt: str | Sequence[Message], *, system: str | None = ..., stream: Literal[True], **options: Any
    ) -> Iterator[str]: ...
    def chat(
        self, prompt: str | Sequence[Message], *, system: str | None = None, stream: bool = False, **options: Any
    ) -> str | Iterator[str]:
        """Answer a prompt, or the last of several messages ({"role": ..., "content": ...}).

        Args:
            system: what the model is told about its task, put before the messages.
            stream: give the answer piece by piece.
            options: fields of SamplingOptions, such as temperature=0.
        Raises: ValueError for a model without a chat template (use `complete`), ContextFull.
        """
        ids = self.chat_ids(messages_of(prompt, system))
        return self._answer(ids, stream, options)

    @overload
    def complete(self, text: str, *, stream: Literal[False] = ..., **options: Any) -> str: ...
    @overload
    def complete(self, text: str, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
    def complete(self, text: str, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
        """Go on from a text, without a chat template. Arguments as for `chat`."""
        return self._answer(self.text_ids(text), stream, options)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins. Raises ValueError without a template."""
        from nn.io.chat_template import encode_chat

        if self.template is None:
            raise ValueError(
                f"{self.path.name} has no chat template: it is a base model, which completes text. Use complete(), or "
                "--raw on the command line"
            )
        return encode_chat(self.tokenizer, self.template, messages)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text to go on from; an empty one is the beginning-of-text token."""
        if not isinstance(text, str):
            raise TypeError(f"the text to go on from is a {type(text).__name__}; expected a str")
        ids = self.tokenizer.encode(text)
        if not ids:
            start = self.tokenizer.bos if self.tokenizer.bos is not None else self.tokenizer.eos
            ids = [0 if start is None else start]
        return ids

    def generate(
        self,
        ids: Sequence[int],
        options: SamplingOptions,
        answer: Answer | None = None,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Piece]:
        """Tokens after `ids` as pieces of text, up to the end of the turn, a stop string, or a limit.

        `answer`, if given, is filled on the way: it is complete when the iterator ends, and true for what came so far
        when it is closed early. Text is held back while it may be the start of a stop string or of a character.
        `cancelled` is asked between the chunks of a long prompt and between tokens: True ends the answer.
        Raises: ContextFull, GenerationError, ValueError for ids outside the vocabulary.
        """
        answer = Answer() if answer is None else answer
        answer.logprobs = [] if options.logprobs else None
        words, stop = self.tokenizer.stream(), StopText(options.stop)
        last: Sampled | None = None  # the token that ends the turn: it has no text
        with contextlib.closing(self.engine.generate(ids, options, answer.timings, cancelled=cancelled)) as tokens:
            for token in tokens:
                answer.ids.append(token.id)
                if answer.logprobs is not None and token.logprob is not None:
                    answer.logprobs.append(token.logprob)
                if token.id in self.tokenizer.stop_ids:
                    last = token
                    break
                text = stop.push(words.push(token.id))
                answer.text += text
                if stop.found is not None:
                    answer.finish_reason = "stop"
                yield Piece(text, token.id, token.logprob)
                if stop.found is not None:
                    return
        ended = last is not None or not cancelled()
        rest = (stop.push(words.flush()) if ended else "") + stop.flush()
        if ended:
            answer.finish_reason = "length" if last is None and stop.found is None else "stop"
        answer.text += rest
        if last is not None:
            yield Piece(rest, last.id, last.logprob)
        elif rest:
            yield Piece(rest, None)

    def _answer(self, ids: Sequence[int], stream: bool, options: Mapping[str, Any]) -> str | Iterator[str]:
        chosen = replace(SamplingOptions(), **options)
        pieces = (piece.text for piece in self.generate(ids, chosen))
        return (text for text in pieces if text) if stream else "".join(pieces)


def messages_of(prompt: str | Sequence[Message], system: str | None) -> list[Message]:
    """The messages of a prompt: one of the user's, or those given, behind the system's."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    if not isinstance(prompt, str):
        if not isinstance(prompt, (list, tuple)) or not all(isinstance(m, Mapping) for m in prompt):
            raise TypeError(
                f"the prompt is a {type(prompt).__name__}; expected a str, or a list of messages such as "
                '{"role": "user", "content": "..."}'
            )
        messages = list(prompt)
    return messages if system is None else [{"role": "system", "content": system}, *messages]
