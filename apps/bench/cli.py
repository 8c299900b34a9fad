"""`anygpu bench`: options, the header, which suites with how much time, and the exit status."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from apps.bench.case import Row
    from apps.bench.ceilings import Ceilings
    from apps.bench.rows import Budget
    from gpu import Device

# Suites in the order they run, each with its part of --budget; what one leaves over, the next ones have.
SUITES = {"dispatch": 0.06, "gemm": 0.33, "attention": 0.13, "gemv": 0.2, "memory": 0.1, "llm": 0.18}
ALIASES = {"decode": "llm", "record": "dispatch"}
DEFAULT_BUDGET = 150.0  # seconds of `all`
FORMAT = 2  # of the JSON
LENGTHS = {  # of --shape
    "gemm": ((3, 4), "MxNxK or BATCHxMxNxK"),
    "gemv": ((2, 3), "NxK or BATCHxNxK"),
    "attention": ((4,), "BATCHxHEADSxTOKENSxSIZE"),
    "memory": ((2,), "ROWSxCOLUMNS"),
}
MAX_EXTENT = (1 << 31) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (*SUITES, "all", *ALIASES)
    listed = f"{', '.join(SUITES)} or all (the default); decode means llm, record dispatch"
    parser.add_argument("what", nargs="?", choices=names, default="all", metavar="SUITE", help=listed)
    parser.add_argument("--dtype", metavar="T[,T]", help="only rows of these element types or storage formats")
    parser.add_argument(
        "--shape",
        metavar="AxBx...",
        help="this size instead of the built-in ones. gemm: MxNxK or BATCHxMxNxK; gemv: NxK or BATCHxNxK; "
        "attention: BATCHxHEADSxTOKENSxSIZE; memory: ROWSxCOLUMNS",
    )
    parser.add_argument(
        "--against",
        metavar="PEER[,PEER]",
        help="torch (the default where it is installed), numpy, none, or llama.cpp[=WHERE] with the llm suite: "
        "WHERE is the URL of a running llama-server, or a folder that holds a Python binding (inferna or llama_cpp; "
        "left out: an installed one)",
    )
    parser.add_argument("--budget", type=float, metavar="S", help=f"seconds for everything; all: {DEFAULT_BUDGET:g}")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the result for machines, to FILE or stdout"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="a roofline picture of the rows; needs anygpu[bench]")
    parser.add_argument(
        "--compare", metavar="OLD.json", help="ratios to an earlier run; rows that lost over 5 %% stand out"
    )
    parser.add_argument(
        "--fail-over",
        type=float,
        metavar="PCT",
        help="with --compare: exit status 1 if a row lost more than PCT percent",
    )
    llm = parser.add_argument_group("llm")
    llm.add_argument(
        "--model",
        metavar="NAME|PATH[,...]",
        help="models to run: as for chat, or synthetic:NAME, random weights made on the device: smollm2-135m-q4_1, "
        "gemma3-270m-q4_k, llama-7b-q4_0; default: those in the cache, else their synthetic likes, and llama-7b",
    )
    llm.add_argument("--tokens", type=int, metavar="N", help="answer tokens a run; default 128, on CPUs 24")
    llm.add_argument("--prompt", type=int, metavar="N", help="prompt tokens a run; default 128 and 512, on CPUs 36")
    llm.add_argument("--runs", type=int, metavar="N", help="runs to take the median of; default 5, on CPUs 2")
    llm.add_argument("--profile", action="store_true", help="time on the device, by kernel")


def run(args: argparse.Namespace) -> int:
    from apps.bench.rows import Budget, failures

    options = checked(args)
    old = None
    if args.compare:
        from apps.bench.compare import load

        old = load(args.compare)
    if args.plot:
        from apps.bench.plot import check

        check(args.plot)  # before anything is measured
    quiet = args.json == "-"
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    budget = Budget(args.budget if args.budget is not None else DEFAULT_BUDGET if options.what == "all" else None)
    report, device = opened(args)
    rows: list[Row] = []
    interrupted = False

    def finish() -> bool:
        report["rows"] = [row.as_json() for row in rows]
        report["seconds"] = round(time.perf_counter() - budget.start, 1)
        lost = compared(old, report, args.fail_over, say)
        written(args, report)
        return lost

    try:
        measured(args, options, device, budget, report, rows, say)
    except KeyboardInterrupt:
        interrupted = report["interrupted"] = True
    except Exception:
        if rows:  # what was measured is kept, whatever ended it
            finish()
        raise
    lost = finish()
    bad = failures(rows)
    for row in bad[:10]:
        print(f"bench: {row.suite} {row.key}: {row.status.upper()}: {row.note}", file=sys.stderr)
    return term.INTERRUPTED if interrupted else 1 if bad or lost else 0


def measured(
    args: argparse.Namespace,
    options: argparse.Namespace,
    device: Device,
    budget: Budget,
    report: dict[str, Any],
    rows: list[Row],
    say: Callable[[str], None],
) -> None:
    """Run the suites; rows and report fill up on the way."""
    from apps.bench.ceilings import measure
    from apps.bench.measure import Stopwatch, warm
    from apps.bench.rows import Runner, header_line, row_line

    peer, rival = make_peers(options.against, device)
    if peer is not None:
        report["peer"] = peer.name
    if rival is not None:
        report["rival"] = rival.name
    say(header_text(report))
    watch = Stopwatch(device)
    warm(device, watch, limit=3.0 if device.caps.kind == "gpu" else 0.2)
    ceilings = measure(device)
    if device.caps.kind == "gpu":  # its clock is up only now: an idle one can be low and steady for seconds
        warm(device, watch, limit=1.0)
    report["ceilings"] = {key: float(f"{value:.5g}") for key, value in asdict(ceilings).items()}
    say(ceilings_text(ceilings))
    runner = Runner(device, watch, ceilings, peer, show=lambda row: say(row_line(row)), rows=rows)
    chosen = list(SUITES) if options.what == "all" else [options.what]
    weights = sum(SUITES[suite] for suite in chosen)
    for suite in chosen:
        part = None if budget.seconds is None else max(budget.left, 0.0) * SUITES[suite] / weights
        weights -= SUITES[suite]
        if suite == "dispatch":
            from apps.bench import dispatch

            report["record"] = dispatch.record_cost(device, runs=max(20, args.runs or 0))
            say("\n" + dispatch.text_of(report["record"]))
        elif suite == "llm":
            from apps.bench import llm

            say(f"\nllm\n{header_line(rival.short if rival else '')}")
            lengths = {"prompt": args.prompt, "tokens": args.tokens, "runs": args.runs}
            plan = llm.plan_for(device.caps.kind, model=args.model, **lengths)
            report["decode"] = llm.run(runner, plan, budget, profile=args.profile, peer=rival, say=say)
            if rival is not None:
                report["rival"] = rival.name  # a binding says its version when it has run
        else:
            say(f"\n{suite}\n{header_line(peer.short if peer else '')}")
            found = runner.suite(suite, dtypes=options.dtypes, shape=options.shape, budget=budget, seconds=part)
            if not found and options.what != "all":
                kinds = ", ".join(sorted(options.dtypes or ()))
                raise ValueError(f"bench {suite}: nothing is left of it; --dtype {kinds} is not measured there")


def compared(
    old: dict[str, Any] | None, report: dict[str, Any], most: float | None, say: Callable[[str], None]
) -> bool:
    """Show ratios to the old run; whether a row lost more than `most` percent."""
    if old is None:
        return False
    from apps.bench import compare

    found = compare.pairs(old, report)
    report["compared"] = compare.as_json(found)
    say("\n" + compare.text_of(old, report, found))
    return most is not None and any(100 * pair.loss > most for pair in found)


def written(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """The report and its picture where they were asked for."""
    from gpu.folders import write_whole

    if args.json == "-":
        print(json.dumps(report))
    elif args.json:
        write_whole(args.json, json.dumps(report, indent=1) + "\n")
    if args.plot and report.get("ceilings"):
        from apps.bench import plot

        plot.draw(report, args.plot)


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The options that need a look, in order. Raises ValueError."""
    for option in ("tokens", "prompt", "runs"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise ValueError(f"--{option} must be a whole number over 0, got {getattr(args, option)}")
    if args.budget is not None and not args.budget > 0:
        raise ValueError(f"--budget must be seconds over 0, got {args.budget:g}")
    if args.fail_over is not None and (args.compare is None or not args.fail_over >= 0):
        raise ValueError("--fail-over is percent, 0 or more, and goes with --compare OLD.json")
    term.check_outputs(json=None if args.json == "-" else args.json, plot=args.plot)
    what = ALIASES.get(args.what, args.what)
    dtypes = None
    if args.dtype:
        from nn.quant.formats import FORMATS

        dtypes = {word.strip().lower() for word in args.dtype.split(",")}
        if unknown := sorted(dtypes - set(FORMATS)):
            raise ValueError(f"--dtype {unknown[0] or repr('')}: known are {', '.join(FORMATS)}")
    shape = None
    if args.shape:
        if what in ("all", "dispatch", "llm"):
            raise ValueError(f"--shape goes with one of gemm, gemv, attention and memory, not with {what}")
        shape = _shape(str(what), args.shape)
    against = args.against.split(",") if args.against is not None else None
    for name in against or ():
        if name not in ("torch", "numpy", "none") and name.partition("=")[0] != "llama.cpp":
            raise ValueError(f"--against {name}: expected torch, numpy, none, llama.cpp or llama.cpp=URL")
    return argparse.Namespace(what=what, dtypes=dtypes, shape=shape, against=against)


def _shape(what: str, text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(re.fullmatch("0*[1-9][0-9]*", part) for part in parts):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(f"--shape {shown}: expected whole numbers over 0 with x between them, such as 4096x4096")
    if any(len(part) > 10 or int(part) > MAX_EXTENT for part in parts):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(f"--shape {shown}: no extent may be over {MAX_EXTENT:,}, what shaders count to")
    if len(parts) not in LENGTHS[what][0]:
        raise ValueError(f"--shape for {what} is {LENGTHS[what][1]}, got {text}")
    return tuple(int(part) for part in parts)


def opened(args: argparse.Namespace) -> tuple[dict[str, Any], Device]:
    """The device, and the report's first lines."""
    from apps.cli import version
    from gpu import Device

    start = time.perf_counter()
    device = Device.open(args.device, backend=args.backend)
    report: dict[str, Any] = {
        "format": FORMAT,
        "device": device.caps.name,
        "driver": device.caps.driver,
        "backend": device.caps.backend_version,
        "api": device.caps.api,
        "anygpu": version(),
        "python": platform.python_version(),
        "checked": device.caps.checked,
        "tuning": device.tuner.hash(),
        "open_seconds": round(time.perf_counter() - start, 3),
    }
    return report, device


def make_peers(against: list[str] | None, device: Device) -> tuple[Any, Any]:
    """The peers of the kernel suites (torch where it is installed, if nothing is said) and of the llm suite."""
    from apps.bench import llamacpp, peers

    wanted = against if against is not None else ["torch"] if peers.installed("torch") else []
    kernels = rival = None
    for name in wanted:
        if name == "numpy":
            kernels = peers.NumPy()
        elif name == "torch":
            if not peers.installed("torch"):
                raise ValueError("--against torch: PyTorch is not installed; pip install torch, or use --against numpy")
            kernels = peers.Torch(device.caps, rotate=512 << 20 if device.caps.kind == "gpu" else 16 << 20)
        elif name != "none":
            rival = llamacpp.peer(name.partition("=")[2])
    return kernels, rival


def header_text(report: dict[str, Any]) -> str:
    """What was measured on what, in one line."""
    parts = [
        report["device"],
        report["backend"],
        report["driver"],
        f"anygpu {report['anygpu']}",
        f"Python {report['python']}",
    ]
    parts += [report["peer"]] if report.get("peer") else []
    parts += [f"tuned {report['tuning']}"] if report["tuning"] != "default" else []
    parts += ["with bounds checks"] if report["checked"] else []
    return " | ".join(part for part in parts if part)


def ceilings_text(c: Ceilings) -> str:
    """The report's ceilings, in one line."""
    matrix = f", f16 matrix units {c.matrix * 1e-12:,.4g} TFLOP/s" if c.matrix else ""
    return (
        f"ceilings measured here: copy {c.copy * 1e-9:,.4g} GB/s, "
        f"f32 multiply-add {c.fma * 1e-12:,.4g} TFLOP/s{matrix}, "
        f"an empty dispatch after another {c.launch * 1e6:.3g} us"
    )
