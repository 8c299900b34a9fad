"""Loads WGSL files: includes, parts, constants, types and slots; and reads from the text what a kernel binds.

A shader file states its bindings and its Params once, in WGSL; Python learns them here, so nothing is numbered twice.
What the loader understands, one construct a line:

    // include lib/reduce.wgsl              paste a file (with subgroups on: lib/reduce_subgroup.wgsl where it exists)
    // include quant/q8_0.wgsl as format    paste a part; parts={"format": "quant/q4_1.wgsl"} replaces it
    alias Elem = f32;                       replaced by types={"Elem": "f16"}
    override WG: u32 = 256u;                a pipeline constant, set by constants={"WG": 64}
    const TILE: u32 = 4u;                   a line rewritten by constants={"TILE": 8}
    fn epilogue(v: f32) -> f32 { return v; }   // slot     replaced by slots={"epilogue": "fn epilogue..."}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.errors import ShaderError

SHADERS = Path(__file__).resolve().parent.parent / "shaders"

_INCLUDE = re.compile(r"^\s*//\s*include\s+(\S+?)(?:\s+as\s+(\w+))?\s*$")
_ALIAS = re.compile(r"^(\s*alias\s+(\w+)\s*=\s*)([\w<>]+)(\s*;.*)$")
_CONST = re.compile(r"^(\s*const\s+(\w+)(?:\s*:\s*(\w+))?\s*=\s*)([^;]+)(;.*)$")
_OVERRIDE = re.compile(r"^\s*override\s+(\w+)\s*(?::\s*(\w+))?\s*(?:=[^;]*)?;", re.MULTILINE)
_SLOT = re.compile(r"^\s*fn\s+(\w+)\s*\(.*//\s*slot\b.*$")
_BINDING = re.compile(
    r"@group\((\d+)\)\s*@binding\((\d+)\)\s*var<\s*(uniform|storage)\s*(?:,\s*(read_write|read)\s*)?>\s*(\w+)\s*:\s*([^;]+);"
)
_STRUCT = re.compile(r"struct\s+(\w+)\s*\{([^}]*)\}")
_FUNCTION = re.compile(r"((?:@\w+(?:\([^)]*\))?\s*)*)fn\s+(\w+)\s*\(")
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # identifiers, but not members: wg.x is no use of x
_SCALARS = {"u32": "I", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class Binding:
    """One `var` with @group and @binding. `access` is "read", "read_write" or "uniform"; `type` the WGSL type."""

    group: int
    index: int
    name: str
    access: str
    type: str


@dataclass(frozen=True)
class Source:
    """A shader text ready for the driver, and what was read from it."""

    path: str
    code: str
    lines: tuple[tuple[str, int], ...]  # per line of `code`: the file and line it came from
    bindings: tuple[Binding, ...]
    params: tuple[tuple[str, str], ...]  # fields of the uniform struct: (name, scalar type), 4 bytes each
    entries: tuple[str, ...]
    overrides: frozenset[str]
    constants: Mapping[str, Any] = field(default_factory=dict)  # the override values to set

    def where(self, line: int) -> str:
        """File and line, as written by a person, of a line (from 1) of the assembled text."""
        if 1 <= line <= len(self.lines):
            path, number = self.lines[line - 1]
            return f"{path}:{number}"
        return self.path

    def used_by(self, entry: str) -> tuple[Binding, ...]:
        """The bindings that `entry` reaches, directly or through the functions it calls."""
        functions = _function_bodies(self.code)
        if entry not in functions:
            raise ShaderError(f"{self.path}: no entry point '{entry}'; it has {', '.join(self.entries) or 'none'}")
        seen: set[str] = set()
        words: set[str] = set()
        todo = [entry]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            found = set(_WORD.findall(functions[name]))
            words |= found
            todo += [word for word in found if word in functions and word not in seen]
        return tuple(b for b in self.bindings if b.name in words)


def load(
    path: str,
    *,
    types: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
    parts: Mapping[str, str] | None = None,
    slots: Mapping[str, str] | None = None,
    subgroups: bool = False,
    root: Path = SHADERS,
) -> Source:
    """Assemble the file `path` below shaders/. Raises ShaderError on an unknown option or a missing file."""
    assembler = _Assembler(root, dict(parts or {}), subgroups)
    assembler.paste(path, None)
    unused = set(parts or {}) - assembler.parts_seen
    if unused:
        raise ShaderError(
            f"{path}: no part {sorted(unused)}; it includes the parts {sorted(assembler.parts_seen) or 'none'}"
        )
    return assemble(path, assembler.text, assembler.lines, types=types, constants=constants, slots=slots)


def assemble(
    path: str,
    text: list[str],
    lines: list[tuple[str, int]],
    *,
    types: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
    slots: Mapping[str, str] | None = None,
) -> Source:
    """Apply types, constants and slots to pasted lines and read bindings, Params and entries from the result."""
    types, slots, wanted = dict(types or {}), dict(slots or {}), dict(constants or {})
    out: list[str] = []
    where: list[tuple[str, int]] = []
    done: set[str] = set()
    for line, place in zip(text, lines, strict=True):
        replaced = [line]
        if (m := _ALIAS.match(line)) and m[2] in types:
            replaced = [m[1] + types[m[2]] + m[4]]
            done.add(m[2])
        elif (m := _CONST.match(line)) and m[2] in wanted:
            replaced = [m[1] + _literal(wanted[m[2]], m[3] or _type_of_literal(m[4])) + m[5]]
            done.add(m[2])
        elif (m := _SLOT.match(line)) and m[1] in slots:
            replaced = slots[m[1]].splitlines()
            done.add(m[1])
        out += replaced
        where += [place] * len(replaced)
    code = "\n".join(out) + "\n"
    bare = strip_comments(code)
    overrides = frozenset(m[1] for m in _OVERRIDE.finditer(bare))
    pipeline_constants = {k: v for k, v in wanted.items() if k in overrides}
    unknown = (set(types) | set(wanted) | set(slots)) - done - set(pipeline_constants)
    if unknown:
        raise ShaderError(
            f"{path}: nothing named {sorted(unknown)} to set; look for a missing alias, const, override or slot"
        )
    bindings = tuple(
        Binding(int(g), int(b), name, "uniform" if space == "uniform" else (access or "read"), type_.strip())
        for g, b, space, access, name, type_ in _BINDING.findall(bare)
    )
    structs = dict(_STRUCT.findall(bare))
    params: tuple[tuple[str, str], ...] = ()
    for binding in bindings:
        if binding.access == "uniform":
            params = _fields(path, binding.type, structs)
    entries = tuple(m[2] for m in _FUNCTION.finditer(bare) if "@compute" in m[1])
    return Source(path, code, tuple(where), bindings, params, entries, overrides, pipeline_constants)


def strip_comments(code: str) -> str:
    """The code with comments blanked out, line structure kept."""
    code = re.sub(r"//[^\n]*", "", code)
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), code, flags=re.DOTALL)


class _Assembler:
    def __init__(self, root: Path, parts: dict[str, str], subgroups: bool) -> None:
        self.root, self.parts, self.subgroups = root, parts, subgroups
        self.text: list[str] = []
        self.lines: list[tuple[str, int]] = []
        self.parts_seen: set[str] = set()
        self._pasted: set[str] = set()

    def paste(self, path: str, source: str | None) -> None:
        file = self.root / path
        if path in self._pasted:
            return
        self._pasted.add(path)
        try:
            content = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ShaderError(
                f"{source or 'the loader'} asks for shader '{path}', which is not there ({error.strerror})"
            ) from error
        for number, line in enumerate(content.splitlines(), 1):
            include = _INCLUDE.match(line)
            if include is None:
                self.text.append(line)
                self.lines.append((path, number))
                continue
            target, part = include[1], include[2]
            if part is not None:
                self.parts_seen.add(part)
                target = self.parts.get(part, target)
            variant = target.removesuffix(".wgsl") + "_subgroup.wgsl"
            if self.subgroups and (self.root / variant).is_file():
                target = variant
            self.paste(target, f"{path}:{number}")


def _literal(value: Any, type_: str) -> str:
    if type_ == "bool":
        return "true" if value else "false"
    if type_ == "f32":
        return f"{float(value)!r}f" if "e" in repr(float(value)) else f"{float(value)!r}"
    return f"{int(value)}{'u' if type_ == 'u32' else ''}"


def _type_of_literal(text: str) -> str:
    text = text.strip()
    if text in ("true", "false"):
        return "bool"
    if text.endswith("u"):
        return "u32"
    return "f32" if "." in text or text.endswith("f") else "i32"


def _fields(path: str, struct: str, structs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if struct not in structs:
        raise ShaderError(f"{path}: the uniform's type {struct} is not a struct of this file")
    fields = []
    for part in structs[struct].split(","):
        if not part.strip():
            continue
        name, _, type_ = (p.strip() for p in part.partition(":"))
        if type_ not in _SCALARS:
            raise ShaderError(f"{path}: {struct}.{name} is {type_}; Params fields are u32, i32 or f32")
        fields.append((name, type_))
    return tuple(fields)


def _function_bodies(code: str) -> dict[str, str]:
    """Name -> signature and body of every function."""
    code = strip_comments(code)
    bodies = {}
    for m in _FUNCTION.finditer(code):
        depth, i = 0, code.index("{", m.end())
        start = m.end()
        while True:
            if code[i] == "{":
                depth += 1
            elif code[i] == "}":
                depth -= 1
                if depth == 0:
                    break
            i += 1
        bodies[m[2]] = code[start : i + 1]
    return bodies
