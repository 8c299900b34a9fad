"""`anygpu`: one command, whose parts are imported only when they are asked for.

A part is a module of this folder with a docstring, `add_arguments(parser)` and `run(args) -> int`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from apps import term

COMMANDS = {
    "chat": "talk with a language model, or complete a text",
    "pull": "fetch a model into the cache",
    "info": "adapters and what they can do; a model's size and cost",
    "check": "test every shader on this device against NumPy",
    "trace": "follow one request through the model, step by step",
    "bench": "measure this device",
    "tune": "find the fastest kernels for this device",
}


def _common() -> argparse.ArgumentParser:
    """Options that stand before or after the command."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = parser.add_argument_group("device")
    group.add_argument("--device", metavar="N|NAME", help="adapter by number or part of its name (see anygpu info)")
    group.add_argument("--backend", choices=("wgpu", "dawn"), help="WebGPU implementation; dawn needs anygpu[dawn]")
    return parser


def version() -> str:
    """The installed distribution's version."""
    from importlib import metadata

    try:
        return metadata.version("anygpu")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `anygpu ARGV` and gives its exit code."""
    return term.run_main(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> int:
    top = argparse.ArgumentParser(
        prog="anygpu",
        parents=[_common()],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Neural networks in WGSL compute shaders, on any vendor's GPU.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<8}{text}" for name, text in COMMANDS.items())
        + "\n\nanygpu COMMAND --help tells more.",
        usage="anygpu [--device N|NAME] [--backend wgpu|dawn] COMMAND ...",
    )
    top.add_argument("--version", action="store_true", help="show the version")
    top.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    top.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = top.parse_args(argv)
    if "version" in args and args.version:
        print(f"anygpu {version()}")
        return 0
    if args.command is None:
        top.print_help()
        return 0
    if args.command not in COMMANDS:
        near = difflib.get_close_matches(args.command, COMMANDS, n=1)
        top.error(
            f"no command {args.command!r}" + (f"; did you mean {near[0]!r}?" if near else f": {', '.join(COMMANDS)}")
        )
    module = importlib.import_module(f"apps.{args.command}")
    parser = argparse.ArgumentParser(
        prog=f"anygpu {args.command}", parents=[_common()], description=(module.__doc__ or "").strip().splitlines()[0]
    )
    module.add_arguments(parser)
    chosen = argparse.Namespace(device=getattr(args, "device", None), backend=getattr(args, "backend", None))
    return module.run(parser.parse_args(args.rest, chosen))


if __name__ == "__main__":
    sys.exit(main())
