"""Fetch models into the cache folder, where chat and everything else finds them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apps import term
from nn.io import registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(registry.MODELS)} or hf:ORG/NAME")
    parser.add_argument("--list", action="store_true", help="list the models known by name, and those in the cache")
    parser.add_argument("--force", action="store_true", help="fetch again what is in the cache already")


def run(args: argparse.Namespace) -> int:
    if args.list or not args.names:
        print(_listing())
        if not args.names:
            return 0
    for name in args.names:
        if not name.startswith("hf:"):
            registry.lookup(name)  # a wrong name stops before the first download
    for name in args.names:
        print(ensure(name, force=args.force))
    return 0


def locate(model: str) -> Path:
    """The file or folder of a model by name or path, fetched with a progress bar if need be. Raises ModelError."""
    return ensure(model) if registry.is_name(model) else registry.locate(model)


def ensure(name: str, *, force: bool = False) -> Path:
    """A model's file (hf: folder), fetched with a progress bar if it is not in the cache. Raises ModelError."""
    if not force and (path := registry.resolve(name)) is not None:
        return path
    if name.startswith("hf:"):
        return registry.fetch(name, force=force)  # huggingface_hub shows a bar of its own
    model = registry.lookup(name)
    print(f"Fetching {model.summary} ({term.size_text(model.download)}, {model.licence})", file=sys.stderr)
    with term.tidied(), term.Bar(name) as bar:
        return registry.fetch(name, bar.update, notice=lambda text: print(text, file=sys.stderr), force=force)


def _listing() -> str:
    rows = []
    for model in registry.MODELS.values():
        path = registry.resolve(model.name)
        rows.append((model.name, term.size_text(model.nbytes), model.licence, model.summary, path or "not fetched"))
    return term.table(rows, header=("name", "size", "licence", "model", "where"), right=(1,))
