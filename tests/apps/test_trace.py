"""`anygpu trace` on a model that says what the test wants: the steps, their sizes, and what is written."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from apps import cli
from apps.trace import tell
from apps.trace.request import CANDIDATES, follow
from gpu import Cost
from gpu.chrome import trace_of
from nn.generate.engine import ContextFull, Engine
from nn.llm import LLM
from tests.fixtures import tiny_chat
from tests.gpu.test_profile import check_trace, embedded

PROMPT = "Why?"
LAYER = ["qkv_rope", "cached_attention", "linear", "gated_mlp", "linear"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("trace") / "model")


@pytest.fixture
def llm(folder, device):
    return LLM(folder, device=device, context=256)


@pytest.fixture
def request_(llm):
    return follow(llm, PROMPT, tokens=4)


def names(step):
    return [event.name for event in step.events]


def test_the_answer_is_the_models(llm, request_):
    assert request_.text == llm.chat(PROMPT, temperature=0, max_tokens=4) == " The sky is blue"
    assert [token.piece for token in request_.answer] == [" The", " sky", " is", " blue"]
    assert request_.ids == llm.chat_ids([{"role": "user", "content": PROMPT}])
    assert request_.finish == "length"
    assert request_.timings.answer_tokens == 4


def test_an_answer_that_ends_by_itself(llm):
    request = follow(llm, PROMPT, tokens=40)
    assert (request.text, request.finish) == (tiny_chat.CHAT, "stop")
    assert request.answer[-1].special and request.answer[-1].piece == tiny_chat.END
    used = [step for step in request.steps if step.name != "not used"]
    assert len(used) == len(request.answer) == 6


def test_probabilities_are_those_of_the_logits(llm, request_):
    ids = [*request_.ids, *(token.id for token in request_.answer)]
    logits = llm.engine.logits(ids)[len(request_.ids) - 1 : -1].astype(np.float64)
    want = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for token, row in zip(request_.answer, want, strict=True):
        assert token.probability == pytest.approx(row[token.id], rel=1e-4)
        assert [c.probability for c in token.candidates] == pytest.approx(np.sort(row)[::-1][:CANDIDATES].tolist())
        assert token.candidates[0].id == token.id and token.candidates[0].piece == token.piece


def test_a_token_that_was_not_the_likeliest_is_among_the_candidates(llm):
    request = follow(llm, "V", raw=True, tokens=12, temperature=1.5, seed=3)
    for token in request.answer:
        assert token.id in [c.id for c in token.candidates]


def test_every_step_has_its_kernels(device, request_):
    """One layer of five dispatches a token; norms apart where a chunk of a prompt needs them."""
    if not device.caps.timestamps:
        return
    assert [step.name for step in request_.steps] == ["prompt", "token 1", "token 2", "token 3"]
    for step in request_.steps[1:]:
        assert names(step) == ["embedding", *LAYER, "norm_linear", "sample_token", "sample_token"]
        assert step.dispatches == len(step.events)
    prompt = list(dict.fromkeys(names(request_.steps[0])))
    assert prompt[0] == "embedding" and prompt[-1] == "sample_token"
    assert {name.split(":")[0] for name in prompt} == {"embedding", *LAYER, "last_row", "norm_linear", "sample_token"}
    paths = [event.path for event in request_.steps[1].events]
    assert paths == ["embed", *["layers.0.attention"] * 3, *["layers.0.mlp"] * 2, "head", "sample", "sample"]


def test_attention_reads_what_the_cache_holds_by_then(device, llm, request_):
    if not device.caps.timestamps:
        return
    width = {"f16": 2, "f32": 4}[llm.engine.model.kv_dtype]
    for i, step in enumerate(request_.steps[1:]):
        (event,) = [event for event in step.events if event.kind == "attention"]
        keys = len(request_.ids) + i + 1  # the token's own among them
        assert event.cost == Cost(2 * keys * (4 * 32 + 4), 64 * 4 + 2 * keys * 32 * width + 16, 64 * 4)


def test_several_tokens_a_submit_are_told_apart(device, folder, monkeypatch):
    """As on a GPU, where the host runs ahead."""
    llm = LLM(folder, device=device, context=256)
    llm.engine = Engine(llm.engine.model, ahead=2)
    monkeypatch.setattr(llm.engine, "_set_burst", lambda seconds: setattr(llm.engine, "burst", 4))
    request = follow(llm, "A", raw=True, tokens=9)
    assert request.text == (" one two three four" * 3)[: len(request.text)] and len(request.answer) == 9
    if not device.caps.timestamps:
        return
    assert [step.name for step in request.steps] == ["prompt", *(f"token {i}" for i in range(1, 9))]
    assert max(made.count for made in request.profile.submits) >= 4 * 9
    for i, step in enumerate(request.steps[1:]):
        assert names(step) == ["embedding", *LAYER, "norm_linear", "sample_token", "sample_token"]
        (event,) = [event for event in step.events if event.kind == "attention"]
        assert event.cost is not None and event.cost.flops == 2 * (len(request.ids) + i + 1) * (4 * 32 + 4)
        assert (request.whole_seconds(step) or 0) > 0
    covered = [step.token + i for step in request.unwatched_steps for i in range(step.turns)]
    assert covered == list(range(9)) and max(step.turns for step in request.unwatched_steps) == 4


def test_the_cache_is_counted(llm, request_):
    width = {"f16": 2, "f32": 4}[llm.engine.model.kv_dtype]
    cache = request_.cache
    assert cache.bytes_a_token == 2 * 32 * width
    assert (cache.used, cache.context) == (len(request_.ids) + 3, 256)


def test_without_timestamps_steps_are_whole_submits(llm, device):
    caps, device.caps = device.caps, replace(device.caps, timestamps=False)
    try:
        request = follow(llm, PROMPT, tokens=3)
        text = tell.text(request)
    finally:
        device.caps = caps
    assert [step.name for step in request.steps] == ["prompt", "token 1", "token 2"]
    assert all(event.kind == "submit" for step in request.steps for event in step.events)
    assert request.steps[1].dispatches == 9
    assert "has no timestamps" in text and "waiting included" in text
    assert embedded(tell.page(request))["answer"][0]["piece"] == " The"


def test_a_prompt_alone(llm):
    request = follow(llm, PROMPT, tokens=1)
    assert request.typical is None
    assert "the prompt, up to the first token:" in tell.text(request)
    assert tell.as_json(request)["shown"] == "the prompt, up to the first token"
    assert embedded(tell.page(request))["views"][0][0] == "prompt"


def test_the_terminal_tells_the_steps_in_order(request_):
    text = tell.text(request_)
    at = [text.index(word) for word in ("chat template", "tokenised", "prompt  ", "KV cache", "sampled", "detokenised")]
    assert at == sorted(at)
    assert '" The"' in text and "unwatched: prompt" in text and "roofline: copies" in text
    table = text[text.index("one token of the answer") : text.index("unwatched")]
    assert max(map(len, table.splitlines())) < 120


def test_layers_are_shown_together_or_apart(device, request_):
    if not device.caps.timestamps:
        return
    together, apart = tell.text(request_), tell.text(request_, layers=True)
    assert "layers.*.attention qkv_rope" in together and "layers.0.attention" not in together
    assert "layers.0.attention qkv_rope" in apart and "layers.*" not in apart


def test_text_of_a_model_cannot_command_the_terminal(llm, folder):
    shown = tell.shown("\x1b[2J\x07\n\t\x9b1m")
    assert shown == '"␛[2J␇␊␉�1m"'
    request = follow(llm, "\x1b[31m", raw=True, tokens=1)
    assert "\x1b" not in tell.text(request)


def run(capsys, folder, *more):
    code = cli.main(["trace", "--model", str(folder), "--context", "256", "--tokens", "3", PROMPT, *more])
    return code, capsys.readouterr()


def test_everything_as_json(capsys, folder):
    code, told = run(capsys, folder, "--json")
    out = json.loads(told.out)
    assert code == 0
    assert out["prompt"]["text"] == PROMPT and len(out["prompt"]["ids"]) == len(out["prompt"]["pieces"])
    assert out["prompt"]["rendered"].startswith(tiny_chat.START)
    assert out["answer"]["text"] == " The sky is" and out["answer"]["finish_reason"] == "length"
    assert [token["piece"] for token in out["answer"]["tokens"]] == [" The", " sky", " is"]
    assert [step["name"] for step in out["steps"]] == ["prompt", "token 1", "token 2"]
    assert sum(row["dispatches"] for row in out["kinds"]) == out["steps"][1]["dispatches"]
    assert out["kv_cache"]["bytes_used"] == out["kv_cache"]["positions_used"] * out["kv_cache"]["bytes_a_token"]
    assert out["ceilings"]["f32_flops"] > 0 and out["unwatched"]["answer_tokens_per_second"] > 0


def test_files_are_written(capsys, folder, tmp_path):
    code, told = run(capsys, folder, "--out", str(tmp_path / "t.json"), "--html", str(tmp_path / "t.html"))
    assert code == 0 and "one token of the answer" in told.out
    trace = json.loads((tmp_path / "t.json").read_text())
    assert check_trace(trace) > 10
    assert trace["otherData"]["answer"] == " The sky is"
    spans = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "host"]
    assert {"chat template", "tokenise", "prompt", "token 1", "token 2", "detokenise", "encode", "submit"} <= set(spans)
    data = embedded((tmp_path / "t.html").read_text(encoding="utf-8"))
    assert data["quote"] == [PROMPT, "The sky is"]
    assert [token["piece"] for token in data["answer"]] == [" The", " sky", " is"]
    assert [name for name, _ in data["story"]][:2] == ["chat template", "tokenised"]


def test_a_trace_of_a_request_is_valid(request_):
    assert check_trace(trace_of(request_.profile)) > 20


def test_hostile_text_is_text_on_the_page(llm):
    prompt = "</script><script>alert(1)</script><!--<script>"
    page = tell.page(follow(llm, prompt, raw=True, tokens=2))
    assert "<script>alert" not in page and len(re.findall(r"<script\b", page)) == 2
    data = embedded(page)
    assert data["quote"][0] == prompt
    assert "".join(piece for _, piece, _ in data["prompt"]) == prompt


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tokens", "0"], "--tokens must be a whole number over 0, got 0"),
        (["--raw", "--system", "Be brief."], "--raw completes the prompt as it is; --system belongs to a conversation"),
        (["--out", "nowhere/t.json"], "--out nowhere/t.json: there is no folder"),
        (["--html", "nowhere/t.html"], "--html nowhere/t.html: there is no folder"),
        (["--tokens", "5000"], "5,000 are wanted behind it; the context holds 256"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_what_cannot_be_traced(capsys, folder, arguments, words):
    code, told = run(capsys, folder, *arguments)
    assert code == 2
    assert words in told.err and not told.out


def test_an_empty_prompt(capsys, folder):
    assert cli.main(["trace", "--model", str(folder), " "]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_a_context_that_is_too_short(llm):
    with pytest.raises(ContextFull, match="pass fewer --tokens, or a larger --context"):
        follow(llm, PROMPT, tokens=250)


def test_the_graph_of_a_step(capsys, folder, tmp_path):
    page = tmp_path / "graph.html"
    assert cli.main(["trace", "--graph", "--model", str(folder), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    for part in ("decode step:", "kernels", "in layers.0", "saved", "lower bound", "memory plan"):
        assert part in out
    assert "<svg" in page.read_text(encoding="utf-8")
    for wrong, words in ((["--graph", "hello"], "leave out the prompt"), ([], "give a prompt, or --graph")):
        assert cli.main(["trace", *wrong, "--model", str(folder)]) != 0
        assert words in capsys.readouterr().err
