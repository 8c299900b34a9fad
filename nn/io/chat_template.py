"""A model's chat template: messages -> the text it was trained on -> token ids.

Templates are Jinja programs out of downloaded files, so they are not trusted: they run in nn/io/jinja_sandbox.py,
without a way into Python and with a budget, after which rendering stops with ChatTemplateError. What harmless templates
give equals transformers' `apply_chat_template`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from nn.io.jinja_sandbox import BUDGET, Budget, ChatTemplateError, Environment
from nn.io.tokenizer import Tokenizer

MAX_SOURCE = 1 << 16  # characters of a template; the longest in use have some 20,000
MAX_CHARACTERS = 1 << 22  # looked at or made while rendering, beyond 64 times what went in
MAX_SECONDS = 1.5
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_. -]{0,63}")


class ChatTemplate:
    """A compiled template. Rendering leaves no state behind, so threads may share it.

    Args:
        source: the Jinja source, as in `tokenizer.chat_template`.
        bos, eos: spelling of the tokens that templates call bos_token and eos_token; "" where there are none.
        now: the clock behind `strftime_now`.
    """

    def __init__(
        self, source: str, bos: str = "", eos: str = "", *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"chat template: {len(source)} characters; expected at most {MAX_SOURCE}")
        self._fixed = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = Environment(now).program(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
            raise ChatTemplateError(f"chat template: cannot be compiled: {_reason(error)}") from None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that came with the model. Raises ChatTemplateError for a base model, which has none."""
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "chat template: this model has none (a base model completes text): use raw completion, or a model "
                "tuned for chat"
            )
        bos, eos = ("" if id is None else tokenizer.token(id) for id in (tokenizer.bos, tokenizer.eos))
        return cls(tokenizer.chat_template, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: {"role": ..., "content": ...}, with what else the template knows.
            add_generation_prompt: end with what opens the assistant's answer.
            tools: JSON schemas of functions the model may call.
            variables: further names for the template (enable_thinking=False, ...).

        Raises ChatTemplateError, with the template's own words where it refuses the messages.
        """
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        budget = Budget(MAX_CHARACTERS + 64 * _size(given), MAX_SECONDS)
        parts: list[str] = []
        try:
            for part in self._template.generate({**self._fixed, **given, BUDGET: budget}):
                parts.append(part)
        except ChatTemplateError:
            raise
        except RecursionError:
            raise ChatTemplateError("chat template: calls itself without end; use another model file") from None
        except Exception as error:  # a template can raise what Python can
            raise ChatTemplateError(f"chat template: {_reason(error)}") from error
        return "".join(parts)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """Ids of a conversation. Control tokens written by the template are recognised, those spelled in messages are not.

    For messages that spell no control token this is, id for id, `encode(render(messages), special=True)`: merges cross
    the border between markup and content as they did when the model was trained. Otherwise a private character is put
    inside each control token that a message spells, or begins at its end (two parts of a message could make one
    together); control tokens are looked for in the text rendered from that; then the character is taken out again.
    White space at the ends of contents stays at the ends, so templates that trim work the same. Where the two
    renderings differ otherwise, the messages are refused. Roles are the program's words, not the user's, and are held
    to one plain name: templates build control tokens from them.

    There is exactly one beginning-of-text token where the model wants one, whether the template writes it or not.

    Raises ChatTemplateError as `ChatTemplate.render` does.
    """
    for number, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not ROLE.fullmatch(role):
            raise ChatTemplateError(
                f"chat: message {number} has role {role!r}; expected a name such as 'system', 'user' or 'assistant'"
            )
    render = functools.partial(template.render, add_generation_prompt=add_generation_prompt, **variables)
    text = render(messages, tools=tools)
    barrier = _unused_character(text, messages, tools)
    guard = functools.partial(tokenizer.guard, barrier=barrier)
    guarded_messages, guarded_tools = _map_strings(list(messages), guard), _map_strings(tools, guard)
    if guarded_messages == list(messages) and guarded_tools == tools:
        return tokenizer.encode(text, special=True)
    guarded = render(guarded_messages, tools=guarded_tools)
    if guarded.replace(barrier, "") != text:
        raise ChatTemplateError(
            "chat: a message spells a control token of this model, and the model's template rewrites messages, so that "
            "the two cannot be told apart; remove the control token from the message"
        )
    return tokenizer.encode(guarded, special=True, barrier=barrier)


def _unused_character(text: str, *values: Any) -> str:
    """A private-use character that occurs nowhere in here."""
    used = set(text)
    for value in values:
        _map_strings(value, lambda string: used.update(string) or string)
    return next(chr(code) for code in range(0xF8FF, 0xDFFF, -1) if chr(code) not in used)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(k, change): v if k == "role" else _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _size(value: Any) -> int:
    """Characters of all strings in here."""
    sizes: list[int] = []
    _map_strings(value, lambda string: sizes.append(len(string)) or string)
    return sum(sizes)


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return f"line {line}: {text[:300]}" if line else text[:300]
