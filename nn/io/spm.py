"""SentencePiece's BPE kind: pieces with scores, the best-scored neighbours merged first (Gemma 3, Llama 2, Mistral).

Kudo & Richardson 2018, arXiv:1808.06226. Text is cut into characters; of all neighbours that together are a piece, the
pair with the highest score merges, the leftmost one first where scores are equal, until none is left. Characters that
are no piece become one byte token per UTF-8 byte. Spaces are written U+2581.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from nn.io.vocabulary import BYTE, NORMAL, USER_DEFINED, TokenizerError

SPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CACHE_WORDS = 1 << 16


class ScoredPieces:
    """Encodes text by score-ordered merges. Building it costs one pass over the vocabulary.

    Args:
        tokens: the pieces, by id.
        scores: one number a piece, higher merges first.
        types: GGUF token types; only normal and user-defined pieces take part in merges, so that no text gives a
            control or byte token by its spelling.
        unknown: id for characters without byte tokens, None: they are left out.
    """

    def __init__(self, tokens: list[str], scores: Sequence[float], types: Sequence[int], unknown: int | None) -> None:
        if len(scores) != len(tokens):
            raise TokenizerError(
                f"tokenizer: {len(scores)} scores for {len(tokens)} tokens; there must be one a token: fetch the file "
                "again"
            )
        self._scores = [float(score) for score in scores]
        self._ids = {t: i for i, (t, kind) in enumerate(zip(tokens, types)) if kind in (NORMAL, USER_DEFINED)}
        self._unknown = unknown
        self._bytes: dict[int, int] = {}
        for i, kind in enumerate(types):
            if kind == BYTE:
                self._bytes[piece_byte(tokens[i])] = i
        # Where a character stands before a space inside no piece, no merge crosses that border: words can be cut there
        # and remembered, with the same result.
        self._joins = set(re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(self._ids)))
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of text that holds no control token."""
        ids: list[int] = []
        for word in self._words(text.replace(" ", SPACE)):
            found = self._cache.get(word)
            if found is None:
                found = self._merge(word)
                if len(word) <= 64:
                    if len(self._cache) >= CACHE_WORDS:
                        self._cache.clear()
                    self._cache[word] = found
            ids += found
        return ids

    def piece(self, token: str) -> bytes:
        """The bytes that a normal piece stands for."""
        return token.replace(SPACE, " ").encode()

    def _words(self, text: str) -> list[str]:
        """Text cut before each space run, except where a piece may join the space to the character before it."""
        words, start = [], 0
        at = text.find(SPACE, 1)
        while at > 0:
            before = text[at - 1]
            if before != SPACE and before not in self._joins:
                words.append(text[start:at])
                start = at
            at = text.find(SPACE, at + 1)
        words.append(text[start:])
        return words

    def _merge(self, word: str) -> list[int]:
        ids, scores = self._ids, self._scores
        pieces = list(word)
        end = len(pieces)
        after = list(range(1, end + 1))  # index of the next live piece; pieces[i] is "" once i was merged away
        before = list(range(-1, end - 1))
        heap = []
        for left in range(end - 1):
            token = ids.get(pieces[left] + pieces[left + 1])
            if token is not None:
                heap.append((-scores[token], left, 2))
        heapify(heap)
        while heap:
            _, left, size = heappop(heap)
            right = after[left]
            if not pieces[left] or right >= end or len(pieces[left]) + len(pieces[right]) != size:
                continue  # one of the two has changed since
            merged = pieces[left] = pieces[left] + pieces[right]
            pieces[right] = ""
            following = after[left] = after[right]
            if following < end:
                before[following] = left
                token = ids.get(merged + pieces[following])
                if token is not None:
                    heappush(heap, (-scores[token], left, size + len(pieces[following])))
            previous = before[left]
            if previous >= 0:
                token = ids.get(pieces[previous] + merged)
                if token is not None:
                    heappush(heap, (-scores[token], previous, len(pieces[previous]) + size))
        result: list[int] = []
        for piece in pieces:
            if piece:
                token = ids.get(piece)
                if token is not None:
                    result.append(token)
                else:
                    self._spell(piece, result)
        return result

    def _spell(self, piece: str, result: list[int]) -> None:
        """A character that is no piece: its bytes, else the unknown token."""
        spelled = [self._bytes.get(byte) for byte in piece.encode()]
        if None not in spelled:
            result += spelled  # type: ignore[arg-type]
        elif self._unknown is not None:
            result.append(self._unknown)


def piece_byte(token: str) -> int:
    """The byte of a byte token such as <0x0A>."""
    match = BYTE_PIECE.fullmatch(token)
    if match is None:
        raise TokenizerError(
            f"tokenizer: byte token {token!r}; byte tokens are spelled <0x00> to <0xFF>: fetch the file again"
        )
    return int(match[1], 16)
