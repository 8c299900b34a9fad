"""Byte-level BPE (GPT-2's kind) on the `tokenizers` library: text -> words by regular expressions -> merges by rank.

Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners"); Sennrich et al. 2016, arXiv:1508.07909.
GGUF files name the way text is cut into words (`tokenizer.ggml.pre`) but do not hold the expressions: they stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from nn.io.vocabulary import CONTROL, UNKNOWN, UNUSED, TokenizerError

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class PreTokenizer:
    """How a family cuts text into words. Each expression cuts what the one before it left.

    `whole_words`: a word that is in the vocabulary is that token, whatever the merges say. `bos`: a beginning-of-text
    token is added unless the file says otherwise. `nfc`: text is composed first (Unicode normalisation form C).
    """

    words: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


LLAMA3 = PreTokenizer((LLAMA3_WORDS,), whole_words=True, bos=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2_WORDS,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2_WORDS)),
    "qwen2": PreTokenizer((QWEN2_WORDS,), nfc=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer a file names. Raises TokenizerError with the supported ones."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise TokenizerError(
            f"tokenizer: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}. Load the model from a folder with tokenizer.json, which holds its own rules"
        ) from None


class ByteLevelBPE:
    """Encodes text that holds no whole tokens; a piece's characters stand for bytes."""

    def __init__(self, tokens: list[str], types: Sequence[int], merges: list[str], pre: PreTokenizer) -> None:
        vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, types)) if kind not in (UNKNOWN, CONTROL, UNUSED)}
        pairs = [_pair(number, merge, vocabulary) for number, merge in enumerate(merges)]
        model = models.BPE(vocabulary, pairs, ignore_merges=pre.whole_words)
        splits = [pre_tokenizers.Split(tokenizers.Regex(words), "isolated") for words in pre.words]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        self._tokenizer.decoder = decoders.ByteLevel()
        if pre.nfc:
            self._tokenizer.normalizer = normalizers.NFC()
        self._byte = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, token: str) -> bytes:
        """The bytes that a normal piece stands for."""
        try:
            return bytes([self._byte[character] for character in token])
        except KeyError:
            return token.encode()  # a token added later, in plain text


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: visible Latin-1 characters stand for themselves, the others, in order, are
    U+0100 and up."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in visible}
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(b for b in range(256) if b not in visible)}
    return alphabet


def _pair(number: int, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    """A merge "left right". Both, and what they make, are tokens."""
    left, _, right = merge.partition(" ")
    if not right or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise TokenizerError(
            f"tokenizer: merge {number} is {merge[:60]!r}; expected two tokens with a space between, which make a "
            "third: the file is damaged, fetch it again"
        )
    return left, right
