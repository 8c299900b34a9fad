"""Tokenizers from folders: the `tokenizers` library reading the same tokenizer.json is the truth."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from nn.io.bpe import GPT2_WORDS, QWEN2_WORDS
from nn.io.tokenizer import Tokenizer
from nn.io.vocabulary import TokenizerError
from tests.fixtures.tokenizer_small import small
from tests.fixtures.tokenizer_strings import nasty_strings

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [*nasty_strings()[:120], *nasty_strings()[-200:]]


def byte_level(*, words: str = GPT2_WORDS, nfc: bool = False) -> tokenizers.Tokenizer:
    metadata = small("bpe")
    types = metadata["tokenizer.ggml.token_type"]
    tokens = [t for t, kind in zip(metadata["tokenizer.ggml.tokens"], types) if kind == 1]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


def byte_fallback(*, space: str) -> tokenizers.Tokenizer:
    """Pieces with byte tokens; spaces by Metaspace (first), a normaliser (each) or not at all (never)."""
    metadata = small("spm")
    rows = list(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]))
    vocabulary = {t: i for i, (t, kind) in enumerate(rows) if kind in (1, 2, 6)}
    pieces = [t for t, kind in rows if kind == 1]
    merges = [(t[:1], t[1:]) for t in pieces if len(t) == 2 and t[0] in vocabulary and t[1] in vocabulary]
    merges += [(t[:2], t[2:]) for t in pieces if len(t) > 2 and t[:2] in vocabulary and t[2:] in vocabulary]
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    if space == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("\u2581")] if space == "each" else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "<eos>", "<|im_start|>", "<|im_end|>"])
    return made


MADE = {
    "byte level": lambda: byte_level(),
    "byte level, composed": lambda: byte_level(words=QWEN2_WORDS, nfc=True),
    "byte tokens": lambda: byte_fallback(space="never"),
    "byte tokens, space first": lambda: byte_fallback(space="first"),
    "byte tokens, space before each": lambda: byte_fallback(space="each"),
}


def write(folder, made: tokenizers.Tokenizer, **files) -> None:
    made.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize("name", MADE)
def test_ids_equal_the_librarys(tmp_path, name):
    made = MADE[name]()
    write(tmp_path, made)
    tokenizer = Tokenizer.from_files(tmp_path)
    for special in (False, True):
        made.encode_special_tokens = not special
        wanted = [made.encode(text, add_special_tokens=False).ids for text in TEXTS]
        wrong = [t for t, ids in zip(TEXTS, wanted) if tokenizer.encode(t, special=special) != ids]
        assert wrong == []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_control, ids))
        lossy = "composed" in name or "\u2581" in text or (name.endswith("first") and text.startswith(" "))
        assert lossy or tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|im_end|>b", special=True).count(made.token_to_id("<|im_end|>")) == 1


def test_user_defined_tokens_are_found_beside_control_tokens(tmp_path):
    made = byte_level()
    write(tmp_path, made)
    text = "x<tool_call>y</tool_call><|im_end|>"
    assert Tokenizer.from_files(tmp_path).encode(text, special=True) == made.encode(text).ids


def test_whole_tokens_that_swallow_space_or_stand_alone(tmp_path):
    made = byte_level()
    made.add_special_tokens([AddedToken("<|right|>", rstrip=True), AddedToken("<|left|>", lstrip=True)])
    made.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    write(tmp_path, made)
    tokenizer = Tokenizer.from_files(tmp_path)
    for text in ("a <|right|> \n b", "a \n<|left|> b", "<|right|>", " <|left|>", "a word b", "swordfish word", "word"):
        assert tokenizer.encode(text, special=True) == made.encode(text).ids, text


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}], ids=["post-processor", "config"])
def test_special_tokens_stops_and_template_come_from_the_neighbours(tmp_path, config):
    made = byte_level()
    bos = made.token_to_id("<|endoftext|>")
    pair = [("<|endoftext|>", bos)]
    made.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, pair)
    config = config | {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "T"}
    stops = [made.token_to_id("<|im_end|>"), 7]
    write(
        tmp_path, made, tokenizer_config=config, generation_config={"eos_token_id": stops}, config={"vocab_size": 1200}
    )
    tokenizer = Tokenizer.from_files(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eot) == (bos, stops[0], stops[0])
    assert tokenizer.stop_ids == {*stops, bos}
    assert tokenizer.vocab_size == 1200 and tokenizer.is_control(1199)
    assert tokenizer.chat_template == "T"
    assert tokenizer.add_bos is ("add_bos_token" not in config)
    assert (tokenizer.encode("hi")[0] == bos) is tokenizer.add_bos
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert Tokenizer.from_files(tmp_path).chat_template == "beside"


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    write(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert Tokenizer.from_files(tmp_path).chat_template == "D"


def test_folders_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file; a model folder needs"):
        Tokenizer.from_files(tmp_path)
    path = tmp_path / "tokenizer.json"
    for text, words in [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON list; expected an object"),
        ("{}", r"not a tokenizer that can be used \(KeyError: 'model'\)"),
        ('{"model": {"type": "WordPiece", "vocab": {}}}', "model type 'WordPiece' is not supported; supported: BPE"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "expected 1 to"),
        ('{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', "ids run to 4000000000"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "not a tokenizer that can be used"),
    ]:
        path.write_text(text)
        with pytest.raises(TokenizerError, match=words):
            Tokenizer.from_files(tmp_path)
