"""What all tokenizers share: token types, and finding whole tokens in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Token types as GGUF numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class TokenizerError(ValueError):
    """A tokenizer that is damaged, or of a kind that is not supported. Says which, and what is."""


@dataclass(frozen=True)
class Whole:
    """A token that is matched as a whole. `lstrip`/`rstrip`: it swallows white space before/after it; `word`: only
    where no word character stands next to it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False
    word: bool = False


class WholeTokens:
    """Cuts text at tokens that are matched as units, before any merging: leftmost first, then the longest one.

    Args:
        tokens: spelling -> token. Thousands are fine: candidates are found by first character, then by length.
    """

    def __init__(self, tokens: dict[str, Whole]) -> None:
        self.tokens = {text: token for text, token in tokens.items() if text}
        by_first: dict[str, set[int]] = {}
        for text in self.tokens:
            by_first.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(lengths, reverse=True) for first, lengths in by_first.items()}
        self._first = re.compile(_any_of(self._lengths)) if by_first else None

    def cut(self, text: str, barrier: str = "") -> Iterator[str | Whole]:
        """Pieces of text and tokens, in order; no piece is empty. Nothing that holds the barrier is a token."""
        start = at = 0
        while self._first is not None and (candidate := self._first.search(text, at)) is not None:
            at = candidate.start()
            length = self._length_at(text, at)
            if length == 0 or (length == 1 and barrier and text.startswith(barrier, at + 1)):
                at += 1
                continue
            token = self.tokens[text[at : at + length]]
            piece = text[start:at].rstrip() if token.lstrip else text[start:at]
            if piece:
                yield piece
            yield token
            start = at = at + length
            if token.rstrip:
                start = at = len(text) - len(text[at:].lstrip())
        if start < len(text):
            yield text[start:]

    def guard(self, text: str, barrier: str) -> str:
        """`text` with `barrier` inside everything that is such a token, or could become one with what follows.

        The barrier stands after the first character of each match, and of each beginning of a token at the end of the
        text. So `cut` finds no token that begins in here, whatever the text is put into, and white space at both ends
        stays where it is.
        """
        if self._first is None:
            return text
        parts, start = [], 0
        for candidate in self._first.finditer(text):
            at = candidate.start()
            if self._length_at(text, at, loose=True) or self._begins(text, at):
                parts += [text[start : at + 1], barrier]
                start = at + 1
        parts.append(text[start:])
        return "".join(parts)

    def _length_at(self, text: str, at: int, *, loose: bool = False) -> int:
        """Length of the longest token at this place, 0: none. `loose`: whatever stands around it."""
        for length in self._lengths[text[at]]:
            token = self.tokens.get(text[at : at + length])
            if token is None:
                continue
            if loose or not token.word:
                return length
            if not (_is_word(text[at - 1 : at]) or _is_word(text[at + length : at + length + 1])):
                return length
        return 0

    def _begins(self, text: str, at: int) -> bool:
        """Is the rest of the text the beginning of a longer token?"""
        rest = len(text) - at
        return rest < self._lengths[text[at]][0] and any(token.startswith(text[at:]) for token in self.tokens)


def _any_of(characters: Iterable[str]) -> str:
    return "[" + "".join(re.escape(character) for character in characters) + "]"


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
