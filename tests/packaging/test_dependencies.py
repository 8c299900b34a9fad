"""What the product imports is what it declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"huggingface-hub": "huggingface_hub"}  # distribution -> import name, where they differ


def declared(*extras: str) -> set[str]:
    entries = PROJECT["dependencies"] + [entry for extra in extras for entry in PROJECT["optional-dependencies"][extra]]
    names = [re.match(r"[A-Za-z0-9._-]+", entry)[0] for entry in entries]
    return {MODULES.get(name, name) for name in names}


def imported(folder: str) -> dict[str, list[str]]:
    """Top-level module -> files that import it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.split(".")[0], []).append(path.relative_to(ROOT).as_posix())
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names}


def test_every_import_is_declared():
    for folder, allowed in {
        "gpu": {"gpu", *declared("dawn")},
        "nn": {"nn", "gpu", *declared("chat")},
        "apps": {"apps", "nn", "gpu", *declared("chat")},
    }.items():
        undeclared = {name: files for name, files in imported(folder).items() if name not in allowed}
        assert not undeclared, f"{folder} imports what pyproject.toml does not declare for it: {undeclared}"


def test_every_dependency_is_bounded_and_locked():
    locked = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if match := re.match(r"([a-z0-9._-]+)==([^ ;]+)", line):
            locked.setdefault(match[1], []).append(match[2])
    entries = PROJECT["dependencies"] + [
        entry for group in PROJECT["optional-dependencies"].values() for entry in group
    ]
    for entry in entries:
        name = re.match(r"[A-Za-z0-9._-]+", entry)[0].lower().replace("_", "-")
        if name == "pip":  # a tool: any version that is there will do
            continue
        assert ">=" in entry and "<" in entry, f"{entry}: needs a lower and an upper bound"
        assert name in locked, f"{name} is not in constraints.txt: the first lines there say how to make it again"
    assert "://" not in (ROOT / "constraints.txt").read_text()
