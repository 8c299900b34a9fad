"""Small wrong changes of shaders, drawn from a seed.

+ for -, < for <=, a guard left out, a wrong index factor, 0 for 1, max for min. A draw is stable: each possible change
has a key made of the seed and of its own line, and those with the smallest keys are taken, so that editing one shader
changes only that shader's mutants. A file's share goes by its length, and within a file every kind is equally likely.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu import wgsl

# Lines that are not arithmetic of the shader: values and code that the caller sets, bindings, sizes of arrays, and
# barriers, whose absence a software driver that runs a workgroup's invocations in turn may not show.
_NOT_CODE = re.compile(r"^\s*(override|const|alias|struct|var<)|@binding|@workgroup_size|[bB]arrier\(|^\s*@|// slot\b")


@dataclass(frozen=True)
class Mutant:
    """`line` (from 1) of `file` reads `after` where it read `before`."""

    file: str
    line: int
    kind: str
    before: str
    after: str

    def write(self, root: Path) -> None:
        """Put the changed file below `root`, where the unchanged ones lie."""
        path = root / self.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.before
        lines[self.line - 1] = self.after + "\n"
        path.write_text("".join(lines), encoding="utf-8")

    def undo(self, root: Path) -> None:
        """Put the shader as it is back below `root`."""
        (root / self.file).write_text((wgsl.SHADERS / self.file).read_text(encoding="utf-8"), encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}\n    {self.before.strip()}\n    {self.after.strip()}"


def draw(seed: int) -> list[Mutant]:
    """Every possible mutant of every shader, in the order in which the seed takes them."""
    keyed = []
    for path in sorted(wgsl.SHADERS.rglob("*.wgsl")):
        file = path.relative_to(wgsl.SHADERS).as_posix()
        mutants = list(of_file(file))
        lines = sum(bool(line.strip()) for line in _code_lines(file))
        by_kind = Counter(mutant.kind for mutant in mutants)
        repeats: dict[tuple[str, str], int] = defaultdict(int)
        for mutant in mutants:
            share = lines / len(by_kind) / by_kind[mutant.kind]
            text = (mutant.before.strip(), mutant.after.strip())
            name = "\0".join((str(seed), file, *text, str(repeats[text])))
            repeats[text] += 1
            uniform = (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest()) + 1) / 2.0**56
            keyed.append((-math.log(uniform) / share, mutant))  # the first of these is drawn in proportion to its share
    return [mutant for _, mutant in sorted(keyed, key=lambda pair: pair[0])]


def of_file(file: str) -> Iterator[Mutant]:
    """Every change that is tried on one shader."""
    lines = (wgsl.SHADERS / file).read_text(encoding="utf-8").splitlines()
    for number, (line, code) in enumerate(zip(lines, _code_lines(file), strict=True), 1):
        if _NOT_CODE.search(line):
            continue
        for kind, start, end, text in _changes(code):
            yield Mutant(file, number, kind, line, line[:start] + text + line[end:])


def _code_lines(file: str) -> list[str]:
    """The lines with everything behind // blanked out; comments over several lines are not in use."""
    text = (wgsl.SHADERS / file).read_text(encoding="utf-8")
    assert "/*" not in text, f"{file}: block comments are not looked through here"
    return [line.split("//")[0] for line in text.splitlines()]


def _changes(code: str) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, end, new text) of every change of one line."""
    for m in re.finditer(r" ([+-])(=?) ", code):
        yield "+-", m.start(), m.end(), f" {'-' if m[1] == '+' else '+'}{m[2]} "
    for m in re.finditer(r" (<=|>=|<|>) ", code):
        yield "<", m.start(), m.end(), f" {m[1][0] if m[1].endswith('=') else m[1] + '='} "
    for m in re.finditer(r"\bif \(", code):
        end = _closing(code, m.end())
        if end is not None:
            leaves = re.match(r"\)\s*\{\s*(return|continue|break)\b", code[end:])
            yield "guard", m.end(), end, "false" if leaves else "true"
    for m in re.finditer(r" (&&|\|\|) ", code):
        yield "guard", m.start(), m.end(), f" {'||' if m[1] == '&&' else '&&'} "
    for m in re.finditer(r"[\])\w] \* ((?:p\.)?[A-Za-z_]\w*|\d+u)(?![\w(.])", code):
        yield "factor", m.start(1), m.end(1), f"({m[1]} + 1u)"
    for m in re.finditer(r"(?<![\w.])([01])(u|\.0)(?!\w)", code):
        yield "01", m.start(1), m.end(1), "1" if m[1] == "0" else "0"
    for m in re.finditer(r"\b(max|min)\(", code):
        yield "max", m.start(1), m.end(1), "min" if m[1] == "max" else "max"


def _closing(code: str, start: int) -> int | None:
    """Where the parenthesis that was opened before `start` closes; None if that is on another line."""
    depth = 1
    for i in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i
    return None
