"""Talk with a language model, or complete a text.

One answer for a prompt on the command line or on stdin, a conversation otherwise. Text goes to stdout as it comes,
everything about it to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from nn.generate.options import SamplingOptions
    from nn.llm import LLM, Answer

HELP = """\
/reset             forget the conversation
/system TEXT       set the system message and forget the conversation
/set NAME VALUE    change a setting: temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
                   frequency_penalty, seed, max_tokens
/stats             speed and lengths of the last answer
/quit              leave (or Ctrl-D); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without one (and with a terminal) a conversation begins")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="smollm2", metavar="NAME|PATH", help="see pull --list; default smollm2"
    )
    model.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer together; default 4096")
    model.add_argument("--gpu-memory", metavar="SIZE", help="most that weights and cache may take: 6G, 800M, 0.5")
    model.add_argument("--system", metavar="TEXT", help="system message")
    model.add_argument("--raw", action="store_true", help="complete the prompt as it is, without a chat template")
    how = parser.add_argument_group("sampling", "applied in this order: penalties, temperature, top-k, top-p, min-p")
    how.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token; default 0.7")
    how.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens, 0 is off; default 40")
    how.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest up to probability P; default 0.95"
    )
    how.add_argument(
        "--min-p", type=float, metavar="P", help="keep tokens P times as likely as the first; off"
    )
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
    options = _options(args)
    if args.logprobs and not args.json:
        raise ValueError("--logprobs goes with --json: there is no place for numbers in the text")
    prompt = args.prompt
    if prompt is None and not term.is_terminal(sys.stdin):
        prompt = sys.stdin.read()
        if not prompt.strip():
            raise ValueError("the prompt is empty: give it as an argument or on stdin")
    if prompt is None and args.json:
        raise ValueError("--json needs a prompt, as an argument or on stdin")
    if args.raw and args.system is not None:
        raise ValueError("--raw completes the prompt as it is; --system belongs to a conversation")
    llm = _load(args)
    if prompt is not None:
        return _once(llm, prompt, args, options)
    if args.raw:
        raise ValueError("--raw needs a prompt, as an argument or on stdin")
    return Conversation(llm, args.system, options).run()


def _options(args: argparse.Namespace) -> SamplingOptions:
    from nn.generate.options import SamplingOptions

    given = {f.name: getattr(args, f.name, None) for f in fields(SamplingOptions)}
    given["stop"] = tuple(args.stop) if args.stop else None
    return SamplingOptions(**{name: value for name, value in given.items() if value is not None})


def _load(args: argparse.Namespace) -> LLM:
    from apps.pull import ensure
    from gpu import Device
    from nn.io import registry
    from nn.llm import LLM

    model = args.model
    if model in registry.MODELS or model.startswith("hf:"):
        model = ensure(model)
    device = Device.open(args.device, backend=args.backend)
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
        for _ in llm.generate(ids, options, answer):
            pass
        print(json.dumps(as_json(answer), ensure_ascii=False))
        return 0
    interrupted = _print_answer(llm, ids, options, answer)
    term.note(summary(llm, answer))
    return term.INTERRUPTED if interrupted else 0


class Conversation:
    """The interactive loop. `messages` is the history that the template renders."""

    def __init__(self, llm: LLM, system: str | None, options: SamplingOptions) -> None:
        from nn.llm import messages_of

        self.llm, self.options = llm, options
        self.messages: list[dict[str, Any]] = [dict(m) for m in messages_of([], system)]
        self.last: Answer | None = None
        self.llm.chat_ids([{"role": "user", "content": "."}])  # a model without a template is refused here, by name

    def run(self) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        term.note(f"{self.llm.path.stem} on {self.llm.device.caps.name}. /help lists the commands.")
        while True:
            try:
                line = input(term.style("> ", "bold"))
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            try:
                if not line.strip():
                    continue
                if line.startswith("/"):
                    if self.command(line):
                        return 0
                else:
                    self.answer(line)
            except ValueError as error:  # a wrong setting, a full context: the conversation goes on
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
        elif word == "/system":
            self.messages = [{"role": "system", "content": rest}] if rest else []
        elif word == "/set":
            name, _, value = rest.partition(" ")
            self.options = changed(self.options, name, value.strip())
        elif word == "/stats":
            print(summary(self.llm, self.last) if self.last else "no answer yet")
        elif word == "/help":
            print(HELP)
        else:
            raise ValueError(f"no command {word}; /help lists them")
        return False

    def answer(self, line: str) -> None:
        from nn.llm import Answer

        messages = [*self.messages, {"role": "user", "content": line}]
        answer = Answer()
        _print_answer(self.llm, self.llm.chat_ids(messages), self.options, answer)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.last = answer
        if answer.finish_reason == "length" and self.options.max_tokens is None:
            term.note("the context is full: /reset begins afresh")


def changed(options: SamplingOptions, name: str, value: str) -> SamplingOptions:
    """Options with one setting from its text. Raises ValueError naming what there is."""
    name = name.replace("-", "_")
    kinds = {f.name: f.type for f in fields(options) if f.name not in ("logit_bias", "stop", "logprobs")}
    if name not in kinds:
        raise ValueError(f"/set: no setting {name or '(none)'}; there are {', '.join(kinds)}")
    if value in ("none", "off") and "None" in str(kinds[name]):
        return replace(options, **{name: None})
    try:
        number = float(value) if str(kinds[name]) == "float" else int(value)
    except ValueError:
        raise ValueError(f"/set {name}: {value or '(nothing)'!r} is not a number") from None
    return replace(options, **{name: number})


def _print_answer(llm: LLM, ids: list[int], options: SamplingOptions, answer: Answer) -> bool:
    """Stream an answer to stdout; True if Ctrl-C stopped it."""
    with _Interrupt() as interrupt, _Waiting() as waiting:
        pieces = llm.generate(ids, options, answer)
        with contextlib.closing(pieces):
            for piece in pieces:
                waiting.done()
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                if interrupt.asked:
                    break
    if not answer.text.endswith("\n"):
        print(flush=True)
    return interrupt.asked


class _Interrupt:
    """Ctrl-C between two tokens: noted, not raised, so that the engine stays whole. A second one is raised."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():
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
    """A line on the terminal while nothing comes yet, with the seconds; gone with the first piece."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._shown = False

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
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _run(self) -> None:
        start = time.monotonic()
        while not self._over.wait(1.0):
            seconds = int(time.monotonic() - start)
            why = "reading the prompt" if seconds < 10 else "reading the prompt; a first run also compiles shaders"
            sys.stderr.write("\r" + term.style(f"{why} ({seconds} s)", "dim", stream=sys.stderr))
            sys.stderr.flush()
            self._shown = True


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
