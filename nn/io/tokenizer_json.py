"""Reads a folder's tokenizer.json and its neighbours into what `Tokenizer` is built from.

tokenizer.json holds the whole pipeline (normaliser, pre-tokenizer, merges); it runs in the `tokenizers` library with
its added tokens taken out, because whole tokens are cut out beforehand, by our own rule for control tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from nn.io.bpe import byte_alphabet
from nn.io.errors import read_object
from nn.io.spm import BYTE_PIECE, SPACE
from nn.io.vocabulary import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, TokenizerError, Whole

MAX_BYTES = 1 << 28
MAX_TOKENS = 1 << 22


class JsonModel:
    """tokenizer.json's own pipeline for text without whole tokens."""

    def __init__(self, description: dict[str, Any], *, byte_level: bool) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
        self._byte = byte_alphabet() if byte_level else None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, token: str) -> bytes:
        """The bytes that a normal piece stands for."""
        if self._byte is None:
            return token.replace(SPACE, " ").encode()
        return b"".join(bytes([self._byte[c]]) if c in self._byte else c.encode() for c in token)


def read_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments of `Tokenizer` from the files in `folder`. Raises TokenizerError."""
    folder = Path(folder)
    description = _read(folder / "tokenizer.json", needed=True)
    config, map_, generation, model_config = (
        _read(folder / name)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
    )
    try:
        return _arguments(folder, description, {**map_, **config}, generation, model_config)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception; a damaged file gives KeyError and TypeError here
        raise TokenizerError(
            f"{folder / 'tokenizer.json'}: not a tokenizer that can be used ({type(error).__name__}: {error}); "
            "fetch the model again"
        ) from error


def _arguments(folder: Path, description: dict, config: dict, generation: dict, model_config: dict) -> dict[str, Any]:
    model = description["model"]
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(
            f"{folder / 'tokenizer.json'}: model type {model['type']!r} is not supported; supported: BPE"
        )
    byte_level = any(part["type"] == "ByteLevel" for part in _parts(description, "pre_tokenizer", "decoder"))
    added = description.get("added_tokens") or []
    prefix, own = _take_prefix(description)

    by_id = {id: (token, NORMAL) for token, id in model["vocab"].items()}
    if model.get("byte_fallback"):
        by_id |= {id: (t, BYTE) for id, (t, _) in by_id.items() if BYTE_PIECE.fullmatch(t)}
    whole = {}
    for entry in added:
        by_id[entry["id"]] = entry["content"], CONTROL if entry.get("special") else USER_DEFINED
        flags = (bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word"))
        whole[entry["content"]] = Whole(entry["id"], *flags)
    size = max(max(by_id, default=-1) + 1, int(model_config.get("vocab_size", 0)))
    if not by_id or min(by_id) < 0 or size > MAX_TOKENS:
        raise TokenizerError(f"{folder}: ids run to {size - 1}; expected 1 to {MAX_TOKENS} tokens, counted from 0")
    listed = [by_id.get(id, (f"[unused{id}]", UNUSED)) for id in range(size)]

    ids = {token: id for id, (token, _) in by_id.items()}
    bos, eos = (_special(config, f"{name}_token", ids, model_config) for name in ("bos", "eos"))
    stops = generation.get("eos_token_id", model_config.get("eos_token_id", []))
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = bos is not None and _template_adds(description, listed[bos][0])
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return {
        "tokens": [token for token, _ in listed],
        "types": [kind for _, kind in listed],
        "model": JsonModel(description, byte_level=byte_level),
        "bos": bos,
        "eos": eos,
        "stop_ids": [id for id in (stops if isinstance(stops, list) else [stops]) if id is not None],
        "add_bos": bool(add_bos),
        "space_prefix": prefix,
        "adds_own_prefix": own,
        "whole": whole,
        "chat_template": _chat_template(folder, config),
    }


def _take_prefix(description: dict[str, Any]) -> tuple[str, bool]:
    """Where the pipeline adds a space, and whether it does that itself. "First" means the first piece of the text,
    which only the caller can tell: that rule is taken out of the pipeline."""
    prefix, own = "never", False
    for part in _parts(description, "normalizer", "pre_tokenizer"):
        if part["type"] == "Prepend" and part["prepend"] == SPACE:
            prefix, own = "each", True
        elif part["type"] == "Metaspace":
            scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
            if scheme == "first":
                prefix, own = "start", False
                part["prepend_scheme"] = "never"
            elif scheme == "always":
                prefix, own = "each", True
    return prefix, own


def _parts(description: dict[str, Any], *names: str) -> Iterator[dict[str, Any]]:
    """The steps of a pipeline, sequences opened."""
    for name in names:
        step = description.get(name)
        if not step:
            continue
        if step["type"] == "Sequence":
            for key in ("normalizers", "pretokenizers", "decoders", "processors"):
                for inner in step.get(key) or []:
                    yield from _parts({"inner": inner}, "inner")
        else:
            yield step


def _template_adds(description: dict[str, Any], token: str) -> bool:
    """Does the post-processor put this token in front of a text?"""
    for step in _parts(description, "post_processor"):
        if step["type"] == "TemplateProcessing" and step["single"]:
            return step["single"][0].get("SpecialToken", {}).get("id") == token
    return False


def _special(config: dict[str, Any], name: str, ids: dict[str, int], model_config: dict[str, Any]) -> int | None:
    """A special token's id: by spelling from the tokenizer's own files, else by number from the model's."""
    spelled = config.get(name)
    if isinstance(spelled, dict):
        spelled = spelled.get("content")
    if spelled is not None and spelled in ids:
        return ids[spelled]
    number = model_config.get(f"{name}_id")
    if isinstance(number, list):
        number = number[0] if number else None
    return number


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {repr(template)[:60]}; expected a text, or a list "
            "of named ones: fetch the file again"
        )
    return template


def _read(path: Path, *, needed: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if needed:
            raise TokenizerError(
                f"{path}: no such file; a model folder needs tokenizer.json (a tokenizer.model alone cannot be read): "
                "fetch it from where the model came from"
            )
        return {}
    return read_object(path, most=MAX_BYTES, error=TokenizerError)
