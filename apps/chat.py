"""Talk with a language model, or complete a text.

One answer for a prompt on the command line or on stdin, a conversation otherwise. Text goes to stdout as it comes,
everything about it to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from nn.generate.options import SamplingOptions
    from nn.llm import LLM, Answer

HELP = '''\
/reset             forget the conversation
/system TEXT       set the system message (none without TEXT) and forget the conversation
/set NAME VALUE    change a setting; /set alone lists them
/stats             speed and lengths of the last answer
/quit              leave (or Ctrl-D); Ctrl-C stops an answer
"""                begins a message of several lines, and ends it'''
MAX_PROMPT = 16_000_000  # characters
ENDINGS = {"cancelled": "stopped", "length": "the context is full: /reset begins afresh"}
# A model's text must not command the terminal: control characters show as symbols.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "anygpu chat [PROMPT] [options]; anygpu chat --help lists them"
    parser.add_argument("prompt", nargs="*", help="the prompt; without one, on a terminal, a conversation begins")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="smollm2", metavar="NAME|PATH", help="see pull --list; default smollm2")
    model.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer together; default 4096")
    model.add_argument("--gpu-memory", metavar="SIZE", help="most that weights and cache may take: 6G, 800M, 0.5")
    model.add_argument("--system", metavar="TEXT", help="system message")
    model.add_argument("--raw", action="store_true", help="complete the prompt as it is, without a chat template")
    how = parser.add_argument_group("sampling", "applied in this order: penalties, temperature, top-k, top-p, min-p")
    how.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token; default 0.7")
    how.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens, 0 is off; default 40")
    how.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest up to probability P; default 0.95")
    how.add_argument("--min-p", type=float, metavar="P", help="keep tokens P times as likely as the first; off")
    how.add_argument("--repeat-penalty", type=float, metavar="R", help="divide the logits of seen tokens; 1 is off")
    how.add_argument("--presence-penalty", type=float, metavar="X", help="subtract X from tokens in the answer; 0")
    how.add_argument("--frequency-penalty", type=float, metavar="X", help="subtract X for each time in the answer; 0")
    how.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer on one device")
    how.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: what the context holds")
    how.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one object: text, ids, finish_reason, timings")
    out.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each token")


def run(args: argparse.Namespace) -> int:
    options, prompt = _options(args), _prompt(args)  # what is wrong here is said before a model is loaded
    if args.logprobs and not args.json:
        raise ValueError("--logprobs goes with --json: there is no place for numbers in the text")
    if args.raw and args.system is not None:
        raise ValueError("--raw completes the prompt as it is; --system belongs to a conversation")
    if prompt is None and (args.json or args.raw):
        raise ValueError(f"--{'json' if args.json else 'raw'} needs a prompt, as an argument or on stdin")
    llm = _load(args)
    if prompt is None:
        return Conversation(llm, args.system, options).run()
    from nn.generate.engine import GenerationError

    try:
        return _once(llm, prompt, args, options)
    except GenerationError as error:
        raise ValueError(str(error)) from error


def _prompt(args: argparse.Namespace) -> str | None:
    if args.prompt:
        prompt = " ".join(args.prompt)
    elif term.is_terminal(sys.stdin):
        return None
    else:
        text = "" if sys.stdin is None else _read_stdin()
        prompt = text.removesuffix("\n").removesuffix("\r")  # the end of the last line is not part of it
    if not prompt.strip() and not (args.raw and args.prompt):
        raise ValueError("the prompt is empty: give it as an argument or on stdin")
    return prompt


def _read_stdin() -> str:
    """All of stdin. Raises ValueError where it cannot be read or does not end."""
    try:
        text = sys.stdin.read(MAX_PROMPT + 1)
    except OSError as error:
        raise ValueError(f"stdin cannot be read: {error.strerror}; give the prompt as an argument") from error
    if len(text) > MAX_PROMPT:
        raise ValueError(f"the prompt on stdin has over {MAX_PROMPT:,} characters: no context holds that; shorten it")
    return text


def _options(args: argparse.Namespace) -> SamplingOptions:
    from nn.generate.options import SamplingOptions

    given = {f.name: getattr(args, f.name, None) for f in fields(SamplingOptions)}
    return SamplingOptions(**{name: value for name, value in given.items() if value is not None})


def _load(args: argparse.Namespace) -> LLM:
    from apps.pull import locate
    from gpu import Device
    from nn.llm import LLM

    model = locate(args.model)
    device = Device.open(args.device, backend=args.backend, workload="chat")
    if "measured" in device.backend_why:
        term.note(f"using {device.caps.backend}: {device.backend_why}")
    with term.Bar("loading") as bar:
        return LLM(
            model,
            device=device,
            context=args.context,
            gpu_memory=args.gpu_memory,
            progress=lambda what, done, total: bar.update(done, total),
        )


def _once(llm: LLM, prompt: str, args: argparse.Namespace, options: SamplingOptions) -> int:
    from nn.llm import Answer, messages_of

    ids = llm.text_ids(prompt) if args.raw else llm.chat_ids(messages_of(prompt, args.system))
    answer = Answer()
    if args.json:
        with _Waiting(lambda: f"{len(answer.ids)} tokens"):
            for _ in llm.generate(ids, options, answer):
                pass
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        print(json.dumps(as_json(answer), ensure_ascii=not unicode))
        return 0
    print_answer(llm, ids, options, answer)
    term.note(summary(llm, answer))
    return term.INTERRUPTED if answer.finish_reason == "cancelled" else 0


class Conversation:
    """The interactive loop. `messages` is the history that the template renders."""

    def __init__(self, llm: LLM, system: str | None, options: SamplingOptions) -> None:
        self.llm, self.options = llm, options
        self.last: Answer | None = None
        self.messages = self._begin(system)

    def _begin(self, system: str | None) -> list[dict[str, Any]]:
        """The messages of a new conversation. Raises ValueError where the model has no template or no system role."""
        from nn.llm import messages_of

        messages = [dict(message) for message in messages_of([], system)]
        self.llm.chat_ids([*messages, {"role": "user", "content": "."}])
        return messages

    def run(self) -> int:
        from nn.generate.engine import GenerationError

        with contextlib.suppress(ImportError):
            import readline  # line editing and history for input()

            readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is one message, to be sent by Enter
        term.note(f"{self.llm.path.stem} on {self.llm.device.caps.name}. /help lists the commands.")
        while True:
            try:
                line = read_message()
                if line.startswith("/"):
                    if self.command(line):
                        return 0
                elif line.strip():
                    self.answer(line)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                term.note("Ctrl-D or /quit leaves")
            except (ValueError, GenerationError) as error:  # a wrong setting, a full context: the conversation goes on
                print(term.style(str(error), "yellow", stream=sys.stderr), file=sys.stderr)

    def command(self, line: str) -> bool:
        """Run a /command; True means leave. Raises ValueError for one that is wrong."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word in ("/quit", "/exit", "/bye"):
            return True
        if word == "/reset":
            self.messages = [m for m in self.messages if m["role"] == "system"]
            self.llm.engine.reset()
            term.note("the conversation is forgotten")
        elif word == "/system":
            self.messages = self._begin(rest or None)
            term.note(f"{'new' if rest else 'no'} system message; the conversation is forgotten")
        elif word == "/set":
            if rest:
                self.options = changed(self.options, *rest.replace("=", " ", 1).split(maxsplit=1))
            shown = settings(self.options)
            print(term.table([(name, "none" if shown[name] is None else shown[name]) for name in shown]))
        elif word == "/stats":
            print(summary(self.llm, self.last) if self.last else "no answer yet")
        elif word == "/help":
            print(HELP)
        else:
            raise ValueError(f"no command {word}; /help lists them")
        return False

    def answer(self, line: str) -> None:
        """Ask, show the answer, and remember both; also what was said before Ctrl-C."""
        from nn.llm import Answer

        messages = [*self.messages, {"role": "user", "content": line}]
        self.last = answer = Answer()
        print_answer(self.llm, self.llm.chat_ids(messages), self.options, answer)
        if answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        how = ENDINGS.get(answer.finish_reason)
        if answer.finish_reason == "length" and len(answer.ids) == self.options.max_tokens:
            how = "max_tokens"
        speed = f"{answer.timings.answer_rate:.1f} tokens/s" if len(answer.ids) > 1 else None
        if shown := ", ".join(filter(None, (speed, how))):
            term.note(f"[{shown}]")


def read_message() -> str:
    """What a person enters: a line, lines that were pasted together, or all between two triple quotes.

    Raises EOFError at the end, KeyboardInterrupt for Ctrl-C.
    """
    line = input("> ")
    if line.lstrip().startswith('"""'):
        text = line.lstrip()[3:]
        while '"""' not in text:
            text += "\n" + input("  ")
        return text[: text.index('"""')].strip("\n")
    with contextlib.suppress(EOFError):
        while line and not line.startswith("/") and _more_lines():
            line += "\n" + input()
    return line


def _more_lines() -> bool:
    """Is there more on stdin already: the rest of a paste, on terminals that do not mark pastes."""
    try:
        return bool(select.select([sys.stdin], [], [], 0.03)[0])
    except (OSError, ValueError):  # Windows consoles cannot be asked
        return False


def settings(options: SamplingOptions) -> dict[str, Any]:
    """What /set knows."""
    others = ("logit_bias", "stop", "logprobs")
    return {f.name: getattr(options, f.name) for f in fields(options) if f.name not in others}


def changed(options: SamplingOptions, name: str, value: str = "") -> SamplingOptions:
    """Options with one setting from its text. Raises ValueError naming what there is."""
    name = name.replace("-", "_")
    if name not in settings(options):
        raise ValueError(f"/set: no setting {name}; there are {', '.join(settings(options))}")
    kind = next(str(f.type) for f in fields(options) if f.name == name)
    if value in ("none", "off") and "None" in kind:
        return replace(options, **{name: None})
    try:
        number = float(value) if kind == "float" else int(value)
    except ValueError:
        wanted = "a number" if kind == "float" else "a whole number"
        raise ValueError(f"/set {name}: {value or '(nothing)'!r} is not {wanted}") from None
    return replace(options, **{name: number})


def print_answer(llm: LLM, ids: list[int], options: SamplingOptions, answer: Answer) -> None:
    """Stream an answer to stdout, until it ends or Ctrl-C (finish_reason "cancelled")."""

    def state() -> str:
        done = len(llm.engine.cached)
        return f"reading the prompt: {done} of {len(ids)} tokens" + ("" if done else "; a first run compiles shaders")

    controls = CONTROLS if term.is_terminal(sys.stdout) else {}
    with _Interrupt() as interrupt, _Waiting(state) as waiting:
        for piece in llm.generate(ids, options, answer, cancelled=lambda: interrupt.asked):
            waiting.done()
            sys.stdout.write(piece.text.translate(controls))
            sys.stdout.flush()
    if not answer.text.endswith("\n"):
        print(flush=True)


class _Interrupt:
    """Ctrl-C between two tokens: noted, not raised, so that the engine stays whole. A second one is raised."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupt:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a job in the background of a shell script
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class _Waiting:
    """A line on the terminal while nothing comes yet, with the seconds; gone when something does."""

    def __init__(self, what: Callable[[], str]) -> None:
        self._what, self._shown = what, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Waiting:
        if term.is_terminal(sys.stderr):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        """Take the line away."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write("")

    def _run(self) -> None:
        start = time.monotonic()
        while not self._over.wait(1.0):
            self._write(f"{self._what()} ({int(time.monotonic() - start)} s)")

    def _write(self, text: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]
        if text or self._shown:
            with contextlib.suppress(OSError, ValueError):  # nobody looks any more
                sys.stderr.write("\r" + " " * self._shown + "\r" + term.style(text, "dim", stream=sys.stderr))
                sys.stderr.flush()
        self._shown = len(text)


def summary(llm: LLM, answer: Answer) -> str:
    """One line: speed of prompt and answer, device, backend."""
    t, caps = answer.timings, llm.device.caps
    cached = f", {t.cached_tokens} cached" if t.cached_tokens else ""
    rate = f" {t.answer_rate:.1f}/s" if t.answer_tokens > 1 else ""
    return (
        f"prompt {t.prompt_tokens} tokens{cached} {t.prompt_rate:.1f}/s, answer {t.answer_tokens} tokens{rate}, "
        f"first after {t.prompt_seconds:.2f} s | {caps.name} | {caps.backend}"
    )


def as_json(answer: Answer) -> dict[str, Any]:
    """What --json prints. Times in seconds, rates in tokens a second."""
    t = answer.timings
    out: dict[str, Any] = {"text": answer.text, "ids": answer.ids, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        out["logprobs"] = answer.logprobs
    out["timings"] = {
        "prompt_tokens": t.prompt_tokens,
        "cached_tokens": t.cached_tokens,
        "prompt_seconds": round(t.prompt_seconds, 4),
        "prompt_rate": round(t.prompt_rate, 2),
        "answer_tokens": t.answer_tokens,
        "answer_seconds": round(t.answer_seconds, 4),
        "answer_rate": round(t.answer_rate, 2),
    }
    return out
