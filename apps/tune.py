"""Time kernel variants on this device and remember which are fastest.

Without options: the standard shapes of every kernel family, which takes some minutes. What was found is used from then
on (ANYGPU_TUNE=use, the default); results may differ from before in the last digits.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from apps import term

if TYPE_CHECKING:
    from gpu import Device, Family
    from gpu.tune_run import Verdict

Work = list[tuple["Family[Any, Any]", Any]]
PROMPTS = {"cpu": (5, 20), "gpu": (5, 20, 100, 400)}  # tokens: one for each size of chunk that the engine makes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", metavar="NAME", help="only this kernel family")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help="with --family: these shapes instead of the standard ones, as m=4096,n=4096,k=4096,dtype=f16",
    )
    parser.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="the shapes of this model instead of the standard ones; also synthetic:NAME, as in bench",
    )
    parser.add_argument("--budget", type=float, metavar="S", help="seconds of running a shape class; default 1.5")
    parser.add_argument(
        "--backends",
        action="store_true",
        help="instead: which WebGPU implementation is faster here, by the speed of --model M, default smollm2",
    )
    parser.add_argument("--show", action="store_true", help="only show what is known of this device")
    parser.add_argument("--clear", action="store_true", help="forget what is known of this device")
    parser.add_argument("--json", action="store_true", help="one object")


def run(args: argparse.Namespace) -> int:
    from gpu import Device

    _check_arguments(args)
    if args.backends:
        return _backends(args)
    with Device.open(args.device, backend=args.backend) as device:
        if args.clear:
            return _clear(device)
        if not args.show:
            work = (
                _model_work(device, args.model, args.family) if args.model else _work(device, args.family, args.shapes)
            )
            if not work:
                raise ValueError(f"--model {args.model}: it uses no kernel family that is tuned")
            verdicts = _measure(device, work, args.budget)
            lacking = len(work) - len(verdicts) if args.shapes else 0  # a line in the log has said why
        else:
            verdicts, lacking = [], 0
        report = collect(device, verdicts)
    print(json.dumps(report, indent=2, ensure_ascii=False) if args.json else as_text(report))
    return 1 if lacking else 0


def _check_arguments(args: argparse.Namespace) -> None:
    if args.shapes and not args.family:
        raise ValueError("--shapes goes with --family: a shape is one of a kernel family")
    if args.shapes and args.model:
        raise ValueError("--shapes and --model are two ways to say what to measure; give one")
    if args.budget is not None and not (math.isfinite(args.budget) and args.budget > 0):
        raise ValueError(f"--budget must be a number of seconds over 0, got {args.budget:g}")
    if args.backends and (args.backend or args.family or args.budget is not None):
        raise ValueError("--backends compares wgpu and dawn; it does not go with --backend, --family or --budget")
    alone = [name for name in ("show", "clear", "backends") if getattr(args, name)]
    others = [name for name in ("family", "shapes", "model", "budget") if getattr(args, name) is not None]
    if alone == ["backends"]:
        return
    if alone and (others or len(alone) > 1):
        raise ValueError(f"--{alone[0]} tunes nothing; it does not go with --{[*alone[1:], *others][0]}")


# --- what to measure --------------------------------------------------------------------------------------------------


def _family(name: str) -> Family[Any, Any]:
    from nn import ops

    families = ops.families()
    if name not in families:
        raise ValueError(f"--family {name}: there is no such kernel family; there are {', '.join(families)}")
    return families[name]


def _work(device: Device, family: str | None, shapes: list[str] | None) -> Work:
    """The shapes asked for, or the standard ones: one of each class."""
    from nn import ops

    chosen = list(ops.families().values()) if family is None else [_family(family)]
    if shapes:
        return [(chosen[0], parse_shape(chosen[0], device, text)) for text in shapes]
    return [(f, shape) for f in chosen for shape in f.standard(device.caps)]


def parse_shape(family: Family[Any, Any], device: Device, text: str) -> Any:
    """A shape of a family from "m=64,n=64,k=64"; what is left out is as in the family's standard shapes."""
    example = family.standard(device.caps)[0]
    fields = {f.name: f for f in dataclasses.fields(example)}
    given: dict[str, Any] = {}
    for item in text.replace(" ", ",").split(","):
        name, equals, value = item.partition("=")
        if not equals or name not in fields:
            raise ValueError(f"--shapes {text}: '{item}' is not NAME=VALUE with one of the names {', '.join(fields)}")
        given[name] = _value(text, name, value, getattr(example, name))
    wanted = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given]
    if wanted:
        raise ValueError(f"--shapes {text}: {', '.join(wanted)} not given")
    shape = type(example)(**given)
    if problem := _problem(family, device, shape):
        raise ValueError(f"--shapes {text}: {problem}")
    return shape


def _problem(family: Family[Any, Any], device: Device, shape: Any) -> str:
    """Why no call can have this shape here; empty if one can."""
    from nn.models.load import default_memory
    from nn.ops.attention import MAX_HEAD

    heads, shared, size = (getattr(shape, name, 1) for name in ("heads", "kv_heads", "d"))
    if heads % shared:
        return f"heads={heads} is no multiple of kv_heads={shared}"
    if size > MAX_HEAD:
        return f"d={size}; heads have 1 to {MAX_HEAD} features"
    try:
        need, room = family.nbytes(shape) if family.nbytes else 0, default_memory(device)
    except ValueError as error:
        return str(error)
    return f"takes {term.size_text(need)}, this device is given {term.size_text(room)}" if need > room else ""


def _value(text: str, name: str, value: str, like: Any) -> Any:
    if isinstance(like, str):
        from nn.quant.formats import FORMATS

        known = list(FORMATS) if name == "format" else ["f32", "f16"]
        if value not in known:
            raise ValueError(f"--shapes {text}: {name}={value}; expected one of {', '.join(known)}")
        return value
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        found = None
    if isinstance(like, bool):
        if found in (0, 1):
            return bool(found)
    elif isinstance(like, int) and isinstance(found, int) and 0 < found < 1 << 31:
        return found
    elif isinstance(like, float) and isinstance(found, int | float):
        return float(found)
    wanted = "0 or 1" if isinstance(like, bool) else "a whole number over 0" if isinstance(like, int) else "a number"
    raise ValueError(f"--shapes {text}: {name}={value}; expected {wanted}")


def _model_work(device: Device, model: str, family: str | None) -> Work:
    """What the families are asked for while the model reads prompts of several lengths and answers."""
    from apps import workloads

    only = None if family is None else _family(family).name
    lengths = PROMPTS[device.caps.kind]
    engine = workloads.open_engine(device, model, 2 * max(lengths))
    with device.tuner.watched() as met:
        for length in lengths:
            workloads.read_and_write(engine, length, 2)
        _ = engine.decode_plan  # an answer of one token does not need it
    return [(f, shape) for f, shape in met if only in (None, f.name)]


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(device: Device, work: Work, budget: float | None) -> list[tuple[Family[Any, Any], Any, Verdict]]:
    """Every class once, with a bar. What is done is kept when Ctrl-C ends it."""
    found = []
    with term.tidied(), term.Bar("tuning", unit="classes") as bar:
        for done, (family, shape) in enumerate(work):
            bar.update(done, len(work))
            verdict = device.tuner.measure(family, shape, budget=budget)
            if verdict is not None:
                found.append((family, shape, verdict))
        bar.update(len(work), len(work))
    return found


def collect(device: Device, verdicts: list[tuple[Family[Any, Any], Any, Verdict]]) -> dict[str, Any]:
    """What is known of this device, and what was measured now. Seconds a call."""
    tuner = device.tuner
    measured = [
        {
            "family": family.name,
            "shape_class": family.shape_class(shape),
            "variants": [dataclasses.asdict(timing) for timing in verdict.timings],
        }
        for family, shape, verdict in verdicts
    ]
    entries = sorted(tuner.table.values(), key=lambda entry: entry.key)
    return {
        "device": tuner.identity,
        "file": None if tuner.path is None else str(tuner.path),
        "mode": tuner.mode,
        "hash": tuner.hash(),
        "entries": [dataclasses.asdict(entry) for entry in entries],
        "measured": measured,
    }


def as_text(report: dict[str, Any]) -> str:
    """A table of what is known, the classes measured now if there are any, and what is done with it."""
    now = {(row["family"], row["shape_class"]) for row in report["measured"]}
    entries = [e for e in report["entries"] if not now or (e["family"], e["shape_class"]) in now]
    rows = []
    for e in entries:
        won = e["winner"] != e["default"]
        rows.append((e["family"], e["shape_class"], e["default"], e["winner"] if won else "-", f"{e['ratio']:.2f}"))
    device = report["device"]
    lines = [f"{device['name']}, {device['backend_version']}, {'checked' if device['checked'] else 'trusted'} shaders"]
    if rows:
        lines.append(
            term.table(rows, header=("family", "shape class", "default", "winner", "times faster"), right=(4,))
        )
    else:
        lines.append("Nothing is measured yet: anygpu tune does it.")
    lines.append(f"{report['file'] or 'no home folder: not kept'} ({report['hash']})")
    if report["mode"] == "off":
        lines.append("ANYGPU_TUNE=off is set: what is known here is not used.")
    return "\n".join(lines)


def _clear(device: Device) -> int:
    count, path = len(device.tuner.table), device.tuner.path
    device.tuner.clear()
    print(f"{count} shape classes forgotten, {path} removed", file=sys.stderr)
    return 0


# --- which WebGPU implementation --------------------------------------------------------------------------------------


def _backends(args: argparse.Namespace) -> int:
    """Time the workloads through both implementations and remember which is faster."""
    from apps import workloads
    from apps.bench.llm import stand_in
    from gpu import Device, backend_choice

    missing = [name for name in ("wgpu", "dawn") if name not in backend_choice.installed()]
    if missing:
        raise ValueError(
            f"--backends needs both implementations; {missing[0]} is not installed: pip install 'anygpu[dawn]'"
        )
    with Device.open(args.device, backend="wgpu") as device:
        adapter = device.caps.name
    model = args.model or stand_in("smollm2")
    with term.tidied(), term.Bar("comparing wgpu and dawn", unit="runs") as bar:
        seconds, failed = workloads.compare(model, args.device, bar.update)
    table = backend_choice.remember(adapter, seconds)
    entries = {e.shape_class: e for e in table.values()}
    rows = [
        {
            "workload": name,
            "seconds": {backend: s[name] for backend, s in seconds.items() if name in s},
            "winner": entries[name].winner if name in entries else None,
        }
        for name in backend_choice.WORKLOADS
        if any(name in s for s in seconds.values())
    ]
    if args.json:
        print(
            json.dumps(
                {"adapter": adapter, "model": model, "workloads": rows, "failed": failed}, indent=2, ensure_ascii=False
            )
        )
        return 0
    cells = [
        (r["workload"], *(_milliseconds(r["seconds"].get(name)) for name in ("wgpu", "dawn")), r["winner"] or "-")
        for r in rows
    ]
    print(f"{adapter}, {model}")
    print(term.table(cells, header=("workload", "wgpu, ms", "dawn, ms", "taken"), right=(1, 2)))
    for name, why in failed.items():
        print(f"{name} gave no result: {why}")
    return 0


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.3f}"
