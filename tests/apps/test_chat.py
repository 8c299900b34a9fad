"""anygpu chat on a scripted model: one answer, a pipe, --json, and whole conversations on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from apps import chat, cli
from nn import LLM
from nn.generate.options import SamplingOptions
from tests.fixtures import tiny_chat
from tests.fixtures.tiny_chat import CHAT

ROOT = Path(cli.__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "ANYGPU_TRACEBACK": "", "NO_COLOR": ""}
ENDLESS = ("\n one two three four one",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Its answers do not end by themselves."""
    return tiny_chat.write(tmp_path_factory.mktemp("endless") / "endless", scripts=ENDLESS)


@pytest.fixture(scope="module")
def shared(_device, folder):
    return LLM(folder, device=_device)


@pytest.fixture
def say(device, shared, monkeypatch, capsys):
    """Runs `anygpu chat ARGUMENTS` in this process, with a model that is loaded already."""

    def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        shared.engine.reset()
        monkeypatch.setattr(chat, "_load", lambda args: shared)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        code = cli.main(["chat", *arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return run


# One answer ----------------------------------------------------------------------------------------------------------


def test_one_answer(say):
    code, out, error = say("Why?", "--temperature", "0")
    assert (code, out) == (0, CHAT + "\n")
    assert re.fullmatch(
        r"prompt \d+ tokens [\d.]+/s, answer 6 tokens [\d.]+/s, first after [\d.]+ s \| .+ \| \w+\n", error
    )
    assert say("Why", "is", "it", "--temperature", "0")[1] == CHAT + "\n"  # quotes may be left out


def test_prompt_from_a_pipe(say, shared):
    code, out, _ = say("--json", "--temperature", "0", stdin="Why?\n")
    assert code == 0
    prompt = shared.chat_ids([{"role": "user", "content": "Why?"}])  # the end of the last line is not part of it
    assert json.loads(out)["timings"]["prompt_tokens"] == len(prompt)
    assert say("--raw", "--temperature", "0", "--max-tokens", "2", stdin="A\r\n")[1] == " one two\n"


def test_a_pipe_that_does_not_end_or_cannot_be_read(say, monkeypatch, capsys):
    monkeypatch.setattr(chat, "MAX_PROMPT", 100)
    assert say("--json", stdin="x" * 100)[0] == 0
    for raw in (False, True):
        code, out, error = say(*(["--raw"] if raw else []), stdin="x" * 101)
        assert (code, out) == (2, "") and "the prompt on stdin has over 100 characters" in error

    class Broken(io.StringIO):
        def read(self, size=-1):
            raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(sys, "stdin", Broken())
    assert cli.main(["chat"]) == 2
    assert "stdin cannot be read: Bad file descriptor" in capsys.readouterr().err


def test_raw_is_the_text_itself(say):
    assert say("A", "--raw", "--temperature", "0", "--max-tokens", "3")[:2] == (0, " one two three\n")
    assert say("U", "--raw", "--temperature", "0")[1] == "\U0001f600!\n"
    assert say("", "--raw", "--max-tokens", "2")[0] == 0  # from nothing


def test_json(say, shared):
    code, out, _ = say("Why?", "--json", "--temperature", "0", "--logprobs")
    assert code == 0 and out.count("\n") == 1
    got = json.loads(out)
    assert list(got) == ["text", "ids", "finish_reason", "logprobs", "timings"]
    assert got["text"] == CHAT and got["finish_reason"] == "stop"
    assert shared.tokenizer.decode(got["ids"]) == CHAT and got["ids"][-1] == shared.tokenizer.eot
    assert len(got["logprobs"]) == 6 and all(-1 < value <= 0 for value in got["logprobs"])
    times = got["timings"]
    assert times["answer_tokens"] == 6 and times["cached_tokens"] == 0 and times["prompt_tokens"] > 5
    assert all(times[name] > 0 for name in ("prompt_seconds", "prompt_rate", "answer_seconds", "answer_rate"))
    got = json.loads(say("A", "--json", "--raw", "--max-tokens", "2", "--temperature", "0")[1])
    assert got["finish_reason"] == "length" and "logprobs" not in got
    text = json.loads(say("U", "--json", "--raw", "--temperature", "0")[1])["text"]
    assert text == "\U0001f600!"


def test_sampling_options_reach_the_sampler(say):
    def ids(*options):
        return json.loads(say("A", "--raw", "--json", "--max-tokens", "12", *options)[1])["ids"]

    hot = ("--temperature", "5", "--top-k", "0", "--top-p", "1")
    assert ids(*hot, "--seed", "7") == ids(*hot, "--seed", "7") != ids(*hot, "--seed", "8")
    greedy = ids("--temperature", "0")
    assert len(set(greedy)) == 4
    for same in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1"), ("--seed", "1", "--temperature", "0")):
        assert ids("--temperature", "5", *same) == greedy
    for other in ("--repeat-penalty", "--presence-penalty", "--frequency-penalty"):
        assert len(set(ids("--temperature", "0", other, "50"))) > 4


def test_stop_strings(say):
    code, out, _ = say("A", "--raw", "--temperature", "0", "--stop", "nothing", "--stop", "wo th", "--max-tokens", "9")
    assert (code, out) == (0, " one t\n")
    got = json.loads(say("A", "--raw", "--json", "--temperature", "0", "--stop", " three")[1])
    assert got["text"] == " one two" and got["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["x", "--temperature", "-1"], "temperature must be from 0 to 100, got -1.0; 0 takes the most likely token"),
        (["x", "--top-p", "0"], "top_p must be over 0, got 0: it would keep no token; use temperature 0 for the most"),
        (["x", "--max-tokens", "0"], "max_tokens must be a whole number over 0, got 0"),
        (["x", "--seed", "-5"], "seed must be a whole number from 0 to 2^32 - 1, got -5"),
        (["x", "--stop", ""], "stop must be a non-empty string or several, got ['']"),
        (["x", "--logprobs"], "--logprobs goes with --json: there is no place for numbers in the text"),
        (["x", "--raw", "--system", "s"], "--raw completes the prompt as it is; --system belongs to a conversation"),
        ([""], "the prompt is empty: give it as an argument or on stdin"),
        ([" \n"], "the prompt is empty"),
        ([], "the prompt is empty"),
        (["--json"], "the prompt is empty"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_one_line_before_anything_is_loaded(say, monkeypatch, arguments, line):
    monkeypatch.setattr(chat, "_load", lambda args: pytest.fail("loaded a model"))
    code, out, error = say(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith(f"anygpu: {line}") and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--raw"])
def test_on_a_terminal_some_options_need_a_prompt(say, monkeypatch, capsys, option):
    monkeypatch.setattr(chat.term, "is_terminal", lambda stream: stream is sys.stdin)
    assert say(option)[::2] == (2, f"anygpu: {option} needs a prompt, as an argument or on stdin\n")


@pytest.mark.parametrize("arguments", [["--top-k", "x"], ["--temperature"], ["--backend", "cuda"], ["--nope"]])
def test_options_that_cannot_be_read(say, capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        say("x", *arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and arguments[0] in error
    assert error.count("\n") == 2  # usage, and what is wrong


def real(*arguments: object, **options) -> subprocess.CompletedProcess:
    """`anygpu chat` as a process of its own."""
    command = [sys.executable, "-m", "apps", "chat", *map(str, arguments)]
    environment = {**os.environ, **ENVIRONMENT, **options.pop("environment", {})}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120, **options)


def test_models_that_cannot_be_opened(folder, tmp_path, capsys):
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    for arguments, words in (
        (["--model", "smolm2"], r"no model is called 'smolm2'\. Known names: smollm2, qwen2\.5-coder, gemma3"),
        (["--model", str(tmp_path / "none.gguf")], r"none\.gguf: no such file or folder"),
        (["--model", str(empty)], r"empty\.gguf.*empty file"),
        (["--model", str(tmp_path)], str(tmp_path)),
        (["--model", ""], "the model's name is empty: give a name or a path"),
        (["--model", "~no such user/x.gguf"], "~no such user/x.gguf: the home folder it names is not known"),
        (["--model", str(folder), "--context", "5000"], r"context must be from 1 to 2,048 tokens, .* got 5,000"),
        (["--model", str(folder), "--context", "0"], "context must be from 1 to 2,048"),
        (["--model", str(folder), "--context", "4"], "the prompt has .* tokens, the context holds 4"),
        (["--model", str(folder), "--gpu-memory", "lots"], "--gpu-memory: 'lots' is not a size"),
        (["--model", str(folder), "--gpu-memory", "600k"], r"does not fit .* needs .* has .* Try --context"),
        (["--model", str(folder), "--device", "no such"], "no such"),
    ):
        assert cli.main(["chat", "x", *arguments]) == 2
        out, error = capsys.readouterr()
        last = error.splitlines()[-1]
        assert out == "" and last.startswith("anygpu: ") and re.search(words, last), error


def test_base_models_and_models_without_system_role(tmp_path, capsys):
    base = tiny_chat.write(tmp_path / "base", template=None)
    strict = tiny_chat.write(tmp_path / "strict", template=tiny_chat.NO_SYSTEM + tiny_chat.TEMPLATE)
    ones = np.ones((tiny_chat.config()["vocab_size"], tiny_chat.SIZE))
    broken = tiny_chat.write(tmp_path / "broken", changes={"lm_head.weight": np.nan * ones})
    for arguments, words in (
        (["x", "--model", str(base)], "base has no chat template: it is a base model"),
        (["x", "--model", str(strict), "--system", "s"], "System role not supported"),
        (["x", "--model", str(broken)], "the model cannot choose a next token: the model's numbers are broken"),
    ):
        assert cli.main(["chat", *arguments]) == 2
        out, error = capsys.readouterr()
        last = error.splitlines()[-1]
        assert out.strip() == "" and last.startswith("anygpu: ") and words in last and "Traceback" not in error
    assert cli.main(["chat", "A", "--model", str(base), "--raw", "--temperature", "0", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == " one\n"


def test_a_terminal_without_utf8_gets_question_marks_and_escapes(folder):
    ascii_only = {"PYTHONIOENCODING": "", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    for environment in (ascii_only, {"PYTHONIOENCODING": "ascii"}):
        done = real("U", "--raw", "--model", folder, "--temperature", "0", environment=environment)
        assert (done.returncode, done.stdout) == (0, b"?!\n") and b"Traceback" not in done.stderr
    done = real("--raw", "--json", "--model", folder, "--temperature", "0", input=b"U", environment=ascii_only)
    assert done.stdout.isascii() and json.loads(done.stdout)["text"] == "\U0001f600!"


def test_a_reader_that_leaves(endless):
    command = [sys.executable, "-m", "apps", "chat", "x", "--model", str(endless), "--temperature", "0"]
    process = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(10) == b" one two t"
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141 and b"Traceback" not in error and b"BrokenPipe" not in error


# A conversation ------------------------------------------------------------------------------------------------------


def _own_terminal() -> None:
    """In the child: its pty is its terminal, and Ctrl-C works although these tests may run as a background job."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`anygpu chat` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: object, stderr: int | None = None, **environment: str) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "apps", "chat", *map(str, arguments)],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdin=child,
            stdout=child,
            stderr=child if stderr is None else stderr,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(child)
        self._raw, self.shown = b"", ""  # everything so far
        self._at = 0  # where `expect` goes on

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.fd >= 0:
            os.close(self.fd)

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait for a regular expression in what was not looked at yet; gives the text up to its end."""
        until = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown[self._at :])) is None:
            if not self._read(until - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not come; shown:\n{self.shown}")
        begin, self._at = self._at, self._at + match.end()
        return self.shown[begin : self._at]

    def end(self, seconds: float = 60.0) -> int:
        """Wait for the end; gives the exit code."""
        while self._read(seconds):
            pass
        return self.process.wait(seconds)

    def _read(self, seconds: float) -> bool:
        if seconds <= 0 or not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the other end is closed
            return False
        self._raw += data
        # without colours, cursor movements, and the marks around the reading of a line, which come with a return
        text = re.sub(r"\x1b\[\?2004l\r|\x1b\[[?\d;]*[a-zA-Z]", "", self._raw.decode(errors="replace"))
        self.shown = text.replace("\r\n", "\n")
        return bool(data)


def test_a_conversation(folder):
    with Terminal("--model", folder, "--temperature", "0") as terminal:
        terminal.expect("tiny on .*\\. /help lists the commands\\.")
        terminal.expect("> ")
        for line, answer in (
            ("Why?", re.escape(CHAT) + r"\n\[[\d.]+ tokens/s\]"),
            ("/stats", r"prompt \d+ tokens [\d.]+/s, answer 6 tokens"),
            ("And at night?", re.escape(CHAT)),
            ("/stats", r"prompt \d+ tokens, \d+ cached [\d.]+/s"),  # the first turn was not read again
            ("/help", r"/reset +forget the conversation\n(.*\n)+/set NAME VALUE(.*\n)+"),
            ("/set top_k 7", r"top_k +7\n"),
            ("/set max-tokens=2", r"max_tokens +2\n"),
            ("Short!", r" The sky\n\[[\d.]+ tokens/s, max_tokens\]"),
            ("/set max_tokens none", r"max_tokens +none\n"),
            ("/set", r"temperature +0.0\n(.*\n)+max_tokens +none\n"),
            ("/set temprature 1", r"/set: no setting temprature; there are temperature, top_k"),
            ("/set temperature", r"/set temperature: '\(nothing\)' is not a number"),
            ("/set top_k 1.5", r"/set top_k: '1.5' is not a whole number"),
            ("/set top_p 7", r"top_p must be from 0 to 1, got 7.0; 1 is off"),
            ("/nonsense", r"no command /nonsense; /help lists them"),
            ("/system Be brief.", r"new system message; the conversation is forgotten"),
            ("/reset", r"the conversation is forgotten"),
            ("", ""),
            ('"""', "  "),
            ("two", "  "),
            ('lines"""', re.escape(CHAT)),
        ):
            terminal.send(line + "\n")
            terminal.expect(re.escape(line) + r"\s*\n[^>]*?" + answer)
            if '"' not in line and line != "two":
                terminal.expect("> ")
        terminal.send("/quit\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def test_ctrl_c_stops_the_answer_and_not_the_program(endless):
    with Terminal("--model", endless, "--temperature", "0") as terminal:
        terminal.expect("> ")
        terminal.send("Go on\n")
        terminal.expect("three")
        terminal.send("\x03")
        terminal.expect(r"\[[\d.]+ tokens/s, stopped\]\n> ", 10)
        said = terminal.shown.count("four")
        terminal.send("/set max_tokens 3\nAgain\n")  # the next prompt works, on top of what was said
        terminal.expect(r" one two three\n\[[\d.]+ tokens/s, max_tokens\]\n> ")
        terminal.send("/stats\n")
        cached = int(re.search(r"(\d+) cached", terminal.expect(r"\d+ cached"))[1])
        assert cached > 4 * said - 10
        terminal.expect("> ")
        terminal.send("not sent")
        terminal.expect("not sent")
        for _ in range(20):  # a Ctrl-C in the moment before the line editor takes over is lost
            terminal.send("\x03")
            with contextlib.suppress(AssertionError):
                terminal.expect("Ctrl-D or /quit leaves\n> ", 3)
                break
        else:
            raise AssertionError(terminal.shown)
        terminal.send("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def test_ctrl_c_ends_a_single_answer_with_its_own_code(endless):
    with Terminal("x", "--model", endless, "--temperature", "0") as terminal:
        terminal.expect("three")
        terminal.send("\x03")
        assert terminal.end() == 130
        assert re.search(r"\nprompt \d+ tokens [\d.]+/s, answer \d+ tokens", terminal.shown)
        assert "Traceback" not in terminal.shown


def test_a_full_context_is_said(endless):
    with Terminal("--model", endless, "--temperature", "0", "--context", "40") as terminal:
        terminal.expect("> ")
        terminal.send("Go on\n")
        terminal.expect(r"\[[\d.]+ tokens/s, the context is full: /reset begins afresh\]")
        terminal.send("More\n")
        terminal.expect(r"the prompt has \d+ tokens, the context holds 40; shorten it, start afresh")
        terminal.send("/reset\nGo on\n")
        terminal.expect(r"forgotten(.*\n)+ one two three")


@pytest.mark.parametrize("paste", ["one\ntwo\nthree\n", "\x1b[200~one\ntwo\nthree\x1b[201~\n"])
def test_pasted_lines_are_one_message(folder, paste):
    """Without the marks that terminals put around a paste, and with them."""
    with Terminal("--model", folder, "--temperature", "0") as terminal:
        terminal.expect("> ")
        terminal.send(paste)
        terminal.expect(re.escape(CHAT))
        terminal.expect("> ")
        terminal.send("/stats\n")
        prompt = int(re.search(r"prompt (\d+)", terminal.expect(r"prompt \d+ tokens"))[1])
        terminal.send("/quit\n")
        assert terminal.end() == 0
        assert terminal.shown.count(CHAT) == 1
    words = LLM(folder).chat_ids([{"role": "user", "content": "one\ntwo\nthree"}])
    assert prompt == len(words)


def test_the_waiting_line_goes_away(shared, monkeypatch, capsys):
    """While a prompt is read, a line says how far; it is wiped before the text."""
    monkeypatch.setattr(chat.term, "is_terminal", lambda stream: stream is sys.stderr)
    with chat._Waiting(lambda: "reading the prompt") as waiting:
        time.sleep(1.3)
        waiting.done()
    assert not waiting._thread.is_alive()
    shown = capsys.readouterr().err
    line = "reading the prompt (1 s)"
    assert re.sub(r"\x1b\[\d*m", "", shown) == "\r\r" + line + "\r" + " " * len(line) + "\r"
    with chat._Waiting(lambda: "reading the prompt"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("when", ["prompt", "answer"])
def test_a_closed_terminal_is_quiet(endless, when, tmp_path):
    with (
        open(tmp_path / "stderr", "wb+") as errors,
        Terminal("--model", endless, "--temperature", "0", stderr=errors.fileno()) as terminal,
    ):
        terminal.expect("> ")
        if when == "answer":
            terminal.send("Go on\n")
            terminal.expect("three")
        os.close(terminal.fd)
        terminal.fd = -1
        assert terminal.process.wait(60) in (-signal.SIGHUP, 141)
        errors.seek(0)
        assert errors.read().endswith(b"/help lists the commands.\n")  # and nothing after it


def test_a_terminal_that_is_not_utf8(folder):
    with Terminal(
        "--model", folder, "--temperature", "0", PYTHONIOENCODING="ascii", LC_ALL="C", TERM="dumb"
    ) as terminal:
        terminal.expect("> ")
        terminal.send("caf\u00e9\n")
        terminal.expect(re.escape(CHAT))
        terminal.send("/quit\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def test_a_models_text_does_not_command_the_terminal(tmp_path):
    script = b"\n\x1b]0;x\x07\x9b31mok" + tiny_chat.END.encode()
    rude = tiny_chat.write(tmp_path / "rude", scripts=(script,))
    with Terminal("hi", "--model", rude, "--temperature", "0") as terminal:
        assert terminal.end() == 0
    assert "\u241b]0;x\u2407" in terminal.shown and "\x1b]" not in terminal.shown and "\x07" not in terminal.shown
    piped = real("hi", "--model", rude, "--temperature", "0")
    assert piped.stdout.startswith(b"\x1b]0;x\x07")  # to a file or a program it goes as it is


def test_settings_by_text():
    options = SamplingOptions()
    assert chat.changed(options, "temperature", "0.3").temperature == 0.3
    assert chat.changed(options, "top-k", "5").top_k == 5
    assert chat.changed(chat.changed(options, "seed", "9"), "seed", "off").seed is None
    for name in ("stop", "logit_bias", "logprobs", ""):
        with pytest.raises(ValueError, match="no setting"):
            chat.changed(options, name, "1")
    with pytest.raises(ValueError, match="is not a number"):
        chat.changed(options, "temperature", "none")
