"""Text to token ids and back, from what a model file holds: GGUF metadata, or tokenizer.json with its neighbours.

    tokenizer = Tokenizer.from_gguf(gguf.metadata)
    ids = tokenizer.encode("The capital of France is")
    stream = tokenizer.stream()
    for id in ids: print(stream.push(id), end="")
    print(stream.flush())

Text is first cut at whole tokens, the rest goes through the model's merges (nn/io/bpe.py, nn/io/spm.py). Text never
turns into a control token unless the caller says that it is a rendered chat template (`special=True`).
"""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from nn.io.bpe import ByteLevelBPE, pre_tokenizer
from nn.io.spm import ScoredPieces, piece_byte
from nn.io.tokenizer_json import read_folder
from nn.io.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, TokenizerError, Whole, WholeTokens

# Tokens that end an answer, by spelling: files name one or two of them at most. The first one present is `eot`.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "<EOT>")
END_OF_GENERATION = (
    *END_OF_TURN,
    *(
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_utterance>",
    ),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<reponame>"),
)
# Markers of chat templates: control tokens even where a file calls them user-defined, or user text could open a turn.
TURN_MARKERS = frozenset((*END_OF_GENERATION, "<start_of_turn>", "[INST]", "[/INST]"))


class Model(Protocol):
    """Merges: what is left once whole tokens are cut out."""

    def encode(self, text: str) -> list[int]: ...

    def piece(self, token: str) -> bytes: ...


class Tokenizer:
    """A vocabulary with its rules. Safe to share between threads once built.

    Attributes:
        bos, eos, eot: ids of the tokens that begin a text, end a text, end a turn; None where the file has none.
        stop_ids: all ids that end a generation.
        add_bos: does `encode` put `bos` in front.
        chat_template: source of the model's template, None for base models.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        model: Model,
        *,
        bos: int | None = None,
        eos: int | None = None,
        eot: int | None = None,
        stop_ids: Iterable[int] = (),
        add_bos: bool = False,
        space_prefix: str = "never",
        adds_own_prefix: bool = False,
        whole: Mapping[str, Whole] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`space_prefix`: where the encoder puts a space that decoding takes away again: "never", "start" of the text,
        or "each" piece of text, at the start and after whole tokens. `adds_own_prefix`: the model does it itself.
        `whole`: flags of whole tokens."""
        self._tokens, self._model = tokens, model
        self._types = types = [_type(token, kind) for token, kind in zip(tokens, types)]
        flags = whole or {}
        control, user = {}, {}
        for id, (token, kind) in enumerate(zip(tokens, types)):
            if kind in (CONTROL, UNKNOWN):
                control[token] = flags.get(token, Whole(id))
            elif kind == USER_DEFINED:
                user[token] = flags.get(token, Whole(id))
        self._control, self._user = WholeTokens(control), WholeTokens(user)
        self.bos, self.eos = self._checked("bos", bos), self._checked("eos", eos)
        named = [control[token].id for token in END_OF_GENERATION if token in control]
        turn = next((control[token].id for token in END_OF_TURN if token in control), None)
        self.eot = self._checked("eot", eot) if eot is not None else turn
        stops = [*named, *(self._checked("stop", id) for id in (eos, eot, *stop_ids))]
        self.stop_ids: frozenset[int] = frozenset(id for id in stops if id is not None)
        self.add_bos = add_bos and bos is not None
        self.chat_template = chat_template
        self._space_prefix, self._adds_own_prefix = space_prefix, adds_own_prefix

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata (keys tokenizer.ggml.*, tokenizer.chat_template).

        Kinds: "gpt2" (byte-level BPE; see bpe.PRE_TOKENIZERS) and "llama" (score-ordered pieces).
        Raises TokenizerError for another kind or pre-tokenizer, or where the parts do not fit together.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
            raise TokenizerError(
                f"tokenizer: kind {kind!r} (tokenizer.ggml.model) is not supported; supported: gpt2, llama"
                + ("" if kind else ". The file holds no tokenizer: take the model's complete GGUF file")
            )
        get = functools.partial(_value, metadata)
        tokens = get("tokenizer.ggml.tokens", "a list of texts", [])
        types = [
            int(number) for number in get("tokenizer.ggml.token_type", "a list of numbers", [NORMAL] * len(tokens))
        ]
        if not tokens or len(types) != len(tokens):
            raise TokenizerError(
                f"tokenizer: {len(tokens)} tokens and {len(types)} token types; there must be as many of both, and one "
                "at least: the file is damaged, fetch it again"
            )
        if (wrong := next((i for i, number in enumerate(types) if not 0 <= number <= BYTE), None)) is not None:
            raise TokenizerError(
                f"tokenizer: token {wrong} is of type {types[wrong]}; expected 0 to {BYTE}: the file is damaged, fetch "
                "it again"
            )
        common: dict[str, Any] = {
            name: get(f"tokenizer.ggml.{name}_token_id", "a whole number") for name in ("bos", "eos", "eot")
        }
        common["stop_ids"] = [get("tokenizer.ggml.eom_token_id", "a whole number")]
        common["chat_template"] = get("tokenizer.chat_template", "a text")
        if kind == "gpt2":
            pre = pre_tokenizer(get("tokenizer.ggml.pre", "a text", "default"))
            merges = get("tokenizer.ggml.merges", "a list of texts")
            if merges is None:
                raise TokenizerError(
                    "tokenizer: kind gpt2 needs tokenizer.ggml.merges, which is missing: fetch the file again"
                )
            add_bos = bool(get("tokenizer.ggml.add_bos_token", "true or false", pre.bos))
            return cls(tokens, types, ByteLevelBPE(tokens, types, merges, pre), add_bos=add_bos, **common)
        unknown = get("tokenizer.ggml.unknown_token_id", "a whole number", 0)
        scores = get("tokenizer.ggml.scores", "a list of numbers", [])
        prefix = "each" if get("tokenizer.ggml.add_space_prefix", "true or false", True) else "never"
        add_bos = bool(get("tokenizer.ggml.add_bos_token", "true or false", True))
        model = ScoredPieces(tokens, scores, types, unknown if 0 <= unknown < len(tokens) else None)
        return cls(tokens, types, model, add_bos=add_bos, space_prefix=prefix, **common)

    @classmethod
    def from_files(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Build from tokenizer.json (BPE, byte-level or with byte tokens) and, where they are there,
        tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and chat_template.jinja.

        Raises TokenizerError if tokenizer.json is missing, damaged, or of another kind.
        """
        return cls(**read_folder(folder))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None, barrier: str = "") -> list[int]:
        """Ids of `text`.

        Args:
            special: the text is a rendered chat template, in which control tokens are recognised. Never set it for text
                from elsewhere: without it no text gives a control token, and decoding gives the text back.
            add_bos: put `bos` in front; None: as the model wants it. A text that begins with it gets no second one.
            barrier: a character that is taken out once control tokens have been found (see chat_template.encode_chat).

        Lone surrogates become U+FFFD.
        """
        ids: list[int] = []
        first = True
        for part in self._control.cut(_encodable(text), barrier) if special else [_encodable(text)]:
            if isinstance(part, Whole):
                ids.append(part.id)
            else:
                part = part.replace(barrier, "") if barrier else part
                for piece in self._user.cut(part):
                    ids += [piece.id] if isinstance(piece, Whole) else self._model.encode(self._prefixed(piece, first))
                    first = False
            first = False
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. `skip_special`: control tokens give nothing, else their spelling. Bytes that are no UTF-8
        become U+FFFD. Raises TokenizerError for an id outside the vocabulary."""
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """Decodes ids one by one: all pieces joined are what `decode` gives for all ids."""
        return Detokenizer(self, skip_special=skip_special)

    def guard(self, text: str, barrier: str) -> str:
        """`text` with `barrier` wherever a control token begins, or could begin at its end: see encode's `barrier`."""
        return self._control.guard(text, barrier)

    def is_control(self, id: int) -> bool:
        """Is this a token that no text gives: begin or end of text, a turn's markers, unknown, unused."""
        return self._type(id) in (CONTROL, UNKNOWN, UNUSED)

    def token(self, id: int) -> str:
        """The spelling in the vocabulary, for display and for templates' bos_token."""
        self._type(id)
        return self._tokens[id]

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; of a control token, its spelling."""
        kind, token = self._type(id), self._tokens[id]
        if kind == BYTE:
            return bytes([piece_byte(token)])
        return self._model.piece(token) if kind == NORMAL else token.encode()

    def _prefixed(self, piece: str, first: bool) -> str:
        if self._adds_own_prefix or self._space_prefix == "never":
            return piece
        if self._space_prefix == "start" and (not first or piece.startswith((" ", "\u2581"))):
            return piece
        return " " + piece

    def _type(self, id: int) -> int:
        if not 0 <= id < len(self._types):
            raise TokenizerError(f"tokenizer: id {id} is not in the vocabulary; ids are 0 to {len(self._types) - 1}")
        return self._types[id]

    def _checked(self, name: str, id: int | None) -> int | None:
        """A special id from a file. 2^32 - 1 and -1 mean none there."""
        if id is None:
            return None
        if not isinstance(id, Integral) or isinstance(id, bool):
            raise TokenizerError(f"tokenizer: the {name} token is {id!r}; expected its number: fetch the file again")
        if id in (-1, 0xFFFFFFFF):
            return None
        if not 0 <= id < len(self._types):
            raise TokenizerError(
                f"tokenizer: the {name} token is {id}, the vocabulary has {len(self._types)} tokens: fetch the file "
                "again"
            )
        return int(id)


class Detokenizer:
    """Ids in, text out, as soon as it is certain: bytes of an unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prefix = tokenizer._space_prefix
        self._drop_space = self._prefix != "never"

    def push(self, id: int) -> str:
        """Text that this id completes, possibly none. Raises TokenizerError for an id outside the vocabulary."""
        tokenizer = self._tokenizer
        kind, data = tokenizer._type(id), tokenizer.token_bytes(id)
        if kind in (NORMAL, BYTE):
            if self._drop_space and data.startswith(b" "):  # the one that encode put there
                data = data[1:]
            self._drop_space = False
        else:
            self._drop_space = self._prefix == "each"
            if self._skip and tokenizer.is_control(id):
                return ""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest: U+FFFD for a character that was never finished. The next push begins a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._drop_space = self._prefix != "never"
        return rest


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a whole number": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "true or false": lambda value: isinstance(value, Integral) and value in (0, 1),
    "a list of texts": lambda value: isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value),
    "a list of numbers": lambda value: (
        isinstance(value, (list, tuple, np.ndarray))
        and (array := np.asarray(value)).ndim == 1
        and (array.size == 0 or (array.dtype.kind in "iuf" and not np.isnan(array).any()))
    ),
}


def _value(metadata: Mapping[str, Any], key: str, kind: str, default: Any = None) -> Any:
    """A value of one of _KINDS, `default` where the file has none. Raises TokenizerError naming the key."""
    value = metadata.get(key)
    if value is None:
        return default
    if not _KINDS[kind](value):
        raise TokenizerError(
            f"tokenizer: {key} is {repr(value)[:60]}; expected {kind}: the file is damaged, fetch it again"
        )
    return value


def _type(token: str, kind: int) -> int:
    """A token's type; what marks turns is a control token whatever the file says."""
    looks_like_control = token in TURN_MARKERS or (token.startswith("<|") and token.endswith("|>") and len(token) > 4)
    return CONTROL if kind == USER_DEFINED and looks_like_control else kind


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
