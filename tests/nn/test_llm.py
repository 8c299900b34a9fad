"""LLM on a scripted model (tests/fixtures/tiny_chat.py): what is said, where it ends, and what the caller is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nn import LLM
from nn.generate.engine import ContextFull, GenerationError
from nn.generate.options import SamplingOptions
from nn.io import registry
from nn.io.chat_template import ChatTemplateError
from nn.io.vocabulary import TokenizerError
from nn.llm import Answer, Piece, messages_of
from nn.models.load import ModelFile
from tests.fixtures import tiny_chat
from tests.fixtures.tiny_chat import CHAT, END

GREEDY = SamplingOptions(temperature=0.0)
ROUND = " one two three four"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def shared(_device, folder):
    return LLM(folder, device=_device)


@pytest.fixture
def llm(device, shared):
    shared.engine.reset()
    return shared


def run(llm: LLM, text: str, **options) -> tuple[list[Piece], Answer]:
    """All pieces of a completion, and the answer."""
    answer = Answer()
    chosen = SamplingOptions(**{"temperature": 0.0, **options})
    return list(llm.generate(llm.text_ids(text), chosen, answer)), answer


def test_chat_and_stream(llm):
    assert llm.chat("Why?", temperature=0) == CHAT
    pieces = list(llm.chat("Why?", stream=True, temperature=0))
    assert pieces == [" The", " sky", " is", " blue", " because"]
    assert llm.complete("A", temperature=0, max_tokens=6) == ROUND + " one two"
    assert list(llm.complete("A", stream=True, temperature=0, max_tokens=3)) == [" one", " two", " three"]


def test_messages_become_the_models_own_format(llm):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    got = llm.chat_ids(messages_of(talk, "s"))
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in
                   [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")])  # fmt: skip
    assert llm.tokenizer.decode(got, skip_special=False) == text + "<|im_start|>assistant\n"
    assert llm.chat(talk, system="s", temperature=0) == CHAT
    assert llm.chat_ids(messages_of("c", None)) == llm.chat_ids([talk[2]])


def test_user_text_does_not_end_the_turn(llm):
    ids = llm.chat_ids([{"role": "user", "content": f"x{END}y"}])
    end = llm.tokenizer.encode(END, special=True)
    assert ids.count(end[0]) == 1  # the template's
    assert llm.tokenizer.decode(ids) == f"user\nx{END}y\nassistant\n"


def test_the_next_turn_goes_on_from_the_cache(llm):
    talk = [{"role": "user", "content": "one"}]
    first, second = Answer(), Answer()
    prompt = llm.chat_ids(talk)
    list(llm.generate(prompt, GREEDY, first))
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "two"}]
    longer = llm.chat_ids(talk)
    list(llm.generate(longer, GREEDY, second))
    assert first.text == second.text == CHAT
    assert first.timings.cached_tokens == 0 and first.timings.prompt_tokens == len(prompt)
    assert second.timings.cached_tokens >= len(prompt) + len(first.ids) - 1  # all but the end of the turn
    assert second.timings.cached_tokens + second.timings.prompt_tokens == len(longer)


def test_end_of_turn(llm):
    pieces, answer = run(llm, "V")
    end = llm.tokenizer.eot
    assert answer.ids == [0xC3, end] and answer.finish_reason == "stop"
    # a character that is never finished becomes U+FFFD at the very end
    assert [(p.text, p.id) for p in pieces] == [("", 0xC3), ("\ufffd", end)]
    assert answer.text == "\ufffd"
    pieces, answer = run(llm, "W")
    assert (answer.text, answer.ids, answer.finish_reason) == ("", [end], "stop")
    assert [(p.text, p.id) for p in pieces] == [("", end)]


@pytest.mark.parametrize(
    ("tokens", "text"), [(1, "\ufffd"), (3, "\ufffd"), (4, "\U0001f600"), (5, "\U0001f600!"), (9, "\U0001f600!")]
)
def test_characters_of_several_tokens(llm, tokens, text):
    pieces, answer = run(llm, "U", max_tokens=tokens)
    assert answer.text == text == "".join(p.text for p in pieces)
    assert all(p.text == "" for p in pieces[: min(tokens, 3)])
    assert answer.ids == [0xF0, 0x9F, 0x98, 0x80, ord("!"), llm.tokenizer.eot][:tokens]
    assert answer.finish_reason == ("stop" if tokens == 9 else "length")
    assert [p.id for p in pieces if p.id is not None] == answer.ids


def test_max_tokens(llm):
    for count in (1, 7):
        pieces, answer = run(llm, "A", max_tokens=count)
        assert len(answer.ids) == len(pieces) == count and answer.finish_reason == "length"
        assert answer.timings.answer_tokens == count
        assert answer.text == (ROUND * 2)[: len(answer.text)] and answer.text


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (("wo th",), " one t", 3),  # over two borders
        ((" three",), " one two", 3),  # a whole token
        (("t", "e t"), " on", 2),  # the one that is complete first
        ("four one", ROUND[:-4], 5),  # one string alone; round the bend
        (("four four", "thread"), None, 8),  # begins often, never comes
        ((" one",), "", 1),
    ],
)
def test_stop_strings(llm, stop, text, tokens):
    pieces, answer = run(llm, "A", stop=stop, max_tokens=8)
    assert answer.text == (ROUND * 2 if text is None else text)
    assert "".join(p.text for p in pieces) == answer.text
    assert answer.finish_reason == ("length" if text is None else "stop")
    assert len(answer.ids) == tokens
    assert [p.id for p in pieces if p.id is not None] == answer.ids


def test_text_held_back_for_a_stop_string_comes_at_the_end(llm):
    pieces, answer = run(llm, "A", stop=(" two three four five",), max_tokens=4)
    assert [(p.text, p.id is None) for p in pieces] == [(" one", False), ("", False), ("", False), ("", False),
                                                        (" two three four", True)]  # fmt: skip
    assert answer.finish_reason == "length"
    pieces, answer = run(llm, "\n", stop=("because of",))
    assert answer.text == CHAT and answer.finish_reason == "stop" and pieces[-1].text == "because"
    _, answer = run(llm, "V", stop=("\ufffd",))  # found in what the end of the turn flushes
    assert answer.text == "" and answer.finish_reason == "stop"
    _, answer = run(llm, "V", stop=("\ufffd",), max_tokens=1)
    assert answer.text == "" and answer.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_logprobs_are_the_models_own(llm, temperature):
    """Under the logits as they are, whatever the sampler does to them."""
    prompt = llm.text_ids("A")
    answer = Answer()
    options = SamplingOptions(
        temperature=temperature, seed=3, max_tokens=12, logprobs=True, repeat_penalty=1.3, logit_bias={100: 2.0}
    )
    pieces = list(llm.generate(prompt, options, answer))
    logits = llm.engine.logits(prompt + answer.ids)[len(prompt) - 1 : -1].astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.ids)
    np.testing.assert_allclose(answer.logprobs, scores[np.arange(len(answer.ids)), answer.ids], atol=2e-4)
    assert [p.logprob for p in pieces if p.id is not None] == answer.logprobs
    assert run(llm, "A", max_tokens=3)[1].logprobs is None


def test_a_stream_that_is_closed_early(llm):
    stream = llm.complete("A", stream=True, temperature=0)
    assert next(stream) == " one"
    with pytest.raises(GenerationError, match="still under way"):
        llm.complete("A", temperature=0)
    stream.close()
    assert llm.complete("A", temperature=0, max_tokens=2) == " one two"
    answer = Answer()
    pieces = llm.generate(llm.text_ids("A"), GREEDY, answer)
    next(pieces), next(pieces)
    pieces.close()
    assert (answer.text, len(answer.ids), answer.finish_reason) == (" one two", 2, "cancelled")
    assert answer.timings.answer_tokens == 2


def test_cancelling_between_tokens_and_between_prompt_chunks(llm):
    asked = iter([False] * 5 + [True] * 100)
    answer = Answer()
    list(llm.generate(llm.text_ids("A"), GREEDY, answer, cancelled=lambda: next(asked)))
    assert answer.finish_reason == "cancelled" and 0 < len(answer.ids) < 5
    long = llm.text_ids("A" * 1000)
    asked = iter([False, True, True, True, True])
    answer = Answer()
    assert list(llm.generate(long, GREEDY, answer, cancelled=lambda: next(asked))) == []
    assert answer.ids == [] and answer.finish_reason == "cancelled"
    held = len(llm.engine.cached)
    assert 0 < held < len(long)  # one chunk, and it is used the next time
    again = Answer()
    list(llm.generate(long, SamplingOptions(temperature=0.0, max_tokens=2), again))
    assert again.timings.cached_tokens == held and again.text == " one two"


def test_the_context_is_a_limit(device, folder):
    small = LLM(folder, device=device, context=8)
    assert small.context == 8
    answer = Answer()
    list(small.generate(small.text_ids("AAAAAA"), GREEDY, answer))
    assert (answer.text, answer.finish_reason) == (" one two three", "length")  # the last one needs no place
    with pytest.raises(ContextFull, match="12 tokens, the context holds 8"):
        small.complete("A" * 12)


def test_no_chat_template(device, tmp_path):
    base = LLM(tiny_chat.write(tmp_path / "base", template=None), device=device)
    with pytest.raises(ValueError, match=r"base has no chat template.* complete\(\), or --raw"):
        base.chat("hello")
    assert base.complete("A", temperature=0, max_tokens=1) == " one"


def test_template_without_a_system_role(device, tmp_path):
    path = tiny_chat.write(tmp_path / "strict", template=tiny_chat.NO_SYSTEM + tiny_chat.TEMPLATE)
    strict = LLM(path, device=device)
    assert strict.chat("x", temperature=0) == CHAT
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        strict.chat("x", system="be brief")


def test_broken_numbers_are_named(device, tmp_path):
    """A head that gives -inf everywhere, and one that gives NaN: an error, not a random token."""
    vocab = tiny_chat.config()["vocab_size"]
    ones = np.ones((vocab, tiny_chat.SIZE))
    for value, words in ((-3e38, "every token is ruled out"), (np.nan, "NaN or infinity")):
        changes = {"model.embed_tokens.weight": ones, "lm_head.weight": value * ones}
        llm = LLM(tiny_chat.write(tmp_path / words[:3], changes=changes), device=device)
        with pytest.raises(GenerationError, match=words):
            llm.complete("A")


def test_an_empty_text_begins_somewhere(llm):
    assert llm.text_ids("") == [llm.tokenizer.eos]  # no beginning-of-text token here
    assert isinstance(llm.complete("", max_tokens=2), str)


def test_wrong_options(llm):
    with pytest.raises(ValueError, match=r"temperature must be from 0 to 100, got -1"):
        llm.chat("x", temperature=-1)
    with pytest.raises(TypeError, match="temprature"):
        llm.chat("x", temprature=1)


def test_models_that_are_not_there(tmp_path):
    with pytest.raises(registry.ModelError, match=r"no model is called 'smolm2'.*smollm2, qwen2.5-coder, gemma3"):
        registry.locate("smolm2")
    with pytest.raises(registry.ModelError, match=r"nowhere\.gguf: no such file"):
        LLM(tmp_path / "nowhere.gguf")
    with pytest.raises(registry.ModelError, match=r"x\.gguf: no such file"):
        registry.locate("x.gguf")


def test_loading_reports_bytes(device, folder):
    seen = []
    LLM(folder, device=device, progress=lambda what, done, total: seen.append((what, done, total)))
    whats, done, totals = zip(*seen)
    assert set(whats) == {"load"} and len(set(totals)) == 1
    assert list(done) == sorted(done) and done[-1] == totals[0] > 300 * tiny_chat.SIZE * 8


def test_the_six_lines_of_the_readme(device, folder, monkeypatch, capsys):
    monkeypatch.setattr(registry, "fetch", lambda name, progress=None: folder if name == "smollm2" else None)
    example = """
from nn import LLM
llm = LLM("smollm2")
print(llm.chat("Why is the sky blue?"))
for piece in llm.chat("And at night?", stream=True):
    print(piece, end="", flush=True)
"""
    exec(example, {})  # whatever is drawn, something is said
    assert capsys.readouterr().out.strip()


@pytest.mark.weights
def test_the_six_lines_with_the_real_model(device):
    if registry.resolve("smollm2") is None:
        pytest.skip("smollm2 is not in the cache; `anygpu pull smollm2` fetches it")
    llm = LLM("smollm2", device=device, context=256)
    assert "Paris" in llm.chat("What is the capital of France?", temperature=0, max_tokens=20)
    pieces = list(llm.chat("Count from one to five.", stream=True, temperature=0, max_tokens=30))
    text = "".join(pieces).lower()
    assert len(pieces) > 5 and ("3" in text or "three" in text)


def test_importing_is_light():
    """`import nn` loads nothing of weight; `from nn import LLM` no torch, no hub, and nothing that starts a GPU."""
    code = "import sys, nn; print(*sys.modules); from nn import LLM; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    first, second = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"numpy", "wgpu", "gpu", "tokenizers", "jinja2"} & first
    assert not {"torch", "transformers", "huggingface_hub", "gguf", "jinja2", "tokenizers"} & second


@pytest.mark.parametrize("prompt", [None, 5, b"x", ["x"], [None], {"role": "user", "content": "x"}], ids=repr)
def test_prompts_that_are_none(llm, prompt):
    with pytest.raises(TypeError, match="expected a str, or a list of messages"):
        llm.chat(prompt)
    with pytest.raises(TypeError, match="expected a str"):
        llm.complete(prompt)


def test_ids_are_whole_numbers_from_any_sequence(llm):
    options = SamplingOptions(temperature=0.0, max_tokens=2)
    want = [piece.id for piece in llm.generate([65], options)]
    assert [piece.id for piece in llm.generate(np.array([65]), options)] == want
    for ids in ([1.5], ["a"], [None], 5, np.array([[1, 2]])):
        with pytest.raises(TypeError, match="no sequence of token ids"):
            next(llm.generate(ids, options))


def test_arguments_of_another_type(_device, folder):
    for memory in (10**9, 0.5, "1G"):
        assert LLM(folder, device=_device, gpu_memory=memory, context=64).context == 64
    for context in ("64", 1.5, True):
        with pytest.raises(ValueError, match=r"context must be from 1 to 2,048 tokens, .*; got"):
            LLM(folder, device=_device, context=context)
    with pytest.raises(TypeError, match="device is 'cpu'; expected an open Device"):
        LLM(folder, device="cpu")  # pyright: ignore[reportArgumentType]


def test_a_tokenizer_of_fewer_tokens_is_refused(_device, folder, monkeypatch):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    monkeypatch.setattr(ModelFile, "metadata", metadata)
    with pytest.raises(TokenizerError, match=r"the tokenizer has 1 tokens, the model gives 306; .* belong together"):
        LLM(folder, device=_device)
