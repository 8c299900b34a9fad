"""Follow one request through the model, from text to text: every step, its sizes, its time, and what bounds it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from apps import term

if TYPE_CHECKING:
    from nn.llm import LLM

TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="what to ask the model")
    parser.add_argument("--model", default="smollm2", metavar="NAME|PATH", help="see pull --list; default smollm2")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"answer tokens; default {TOKENS}")
    parser.add_argument("--raw", action="store_true", help="complete the prompt as it is, without a chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: the most likely token")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws, with a temperature; default 0")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer together")
    out = parser.add_argument_group("output")
    out.add_argument("--graph", action="store_true", help="no request: kernels and memory of a token's step")
    out.add_argument("--layers", action="store_true", help="show every layer by itself")
    out.add_argument("--out", metavar="FILE.json", help="write a trace for ui.perfetto.dev or chrome://tracing")
    out.add_argument("--html", metavar="FILE.html", help="write a page: timeline, roofline, probabilities")
    out.add_argument("--json", action="store_true", help="print one object, for machines")


def run(args: argparse.Namespace) -> int:
    from apps.trace import tell
    from apps.trace.request import follow
    from gpu.folders import write_whole
    from nn.generate.engine import GenerationError

    prompt = " ".join(args.prompt)
    _check(args, prompt)
    llm = _load(args)
    if args.graph:
        return _graph(args, llm)
    try:
        request = follow(
            llm,
            prompt,
            tokens=args.tokens,
            raw=args.raw,
            system=args.system,
            temperature=args.temperature,
            seed=args.seed,
            progress=term.note if term.is_terminal(sys.stderr) else lambda text: None,
        )
    except GenerationError as error:
        raise ValueError(str(error)) from error
    if args.out:
        tell.write_chrome(request, Path(args.out))
    if args.html:
        write_whole(args.html, tell.page(request, layers=args.layers))
    if args.json:
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        print(json.dumps(tell.as_json(request), ensure_ascii=not unicode))
    else:
        print(tell.text(request, layers=args.layers))
        for path, what in ((args.out, "open it in ui.perfetto.dev"), (args.html, "open it in a browser")):
            if path:
                term.note(f"wrote {path}: {what}")
    return 0


def _graph(args: argparse.Namespace, llm: LLM) -> int:
    """What one token's step becomes: kernels, what is fused into them, memory."""
    from gpu.folders import write_whole

    found = llm.engine.explain()
    print(found.text())
    if args.html:
        write_whole(args.html, found.html())
        term.note(f"wrote {args.html}: open it in a browser")
    return 0


def _check(args: argparse.Namespace, prompt: str) -> None:
    """What is wrong with the arguments is said before a model is loaded."""
    if args.graph and (args.prompt or args.json or args.out):
        raise ValueError("--graph shows the model's step, not a request: leave out the prompt, --json and --out")
    if not args.graph and not args.prompt:
        raise ValueError("give a prompt, or --graph for the kernels of a step")
    if args.tokens < 1:
        raise ValueError(f"--tokens must be a whole number over 0, got {args.tokens}")
    if not prompt.strip() and not args.raw and not args.graph:
        raise ValueError("the prompt is empty: give the model something to answer")
    if args.raw and args.system is not None:
        raise ValueError("--raw completes the prompt as it is; --system belongs to a conversation")
    term.check_outputs(out=args.out, html=args.html)


def _load(args: argparse.Namespace) -> LLM:
    from apps.pull import locate
    from gpu import Device
    from nn.llm import LLM

    model = locate(args.model)
    device = Device.open(args.device, backend=args.backend)
    with term.Bar("loading") as bar:
        return LLM(model, device=device, context=args.context, progress=lambda _, done, total: bar.update(done, total))
