"""Loads WGSL files: includes, parts, constants, types and slots; and reads from the text what a kernel binds.

A shader file states its bindings and its Params once, in WGSL; Python learns them here, so nothing is numbered twice.
What the loader understands, one construct a line:

    // include lib/reduce.wgsl              paste a file (with subgroups on: lib/reduce_subgroup.wgsl where it exists)
    // include quant/q8_0.wgsl as format    paste a part; parts={"format": "quant/q4_1.wgsl"} replaces it
    alias Elem = f32;                       replaced by types={"Elem": "f16"}
    override WG: u32 = 256u;                a pipeline constant, set by constants={"WG": 64}
    const TILE: u32 = 4u;                   a line rewritten by constants={"TILE": 8}
    fn epilogue(v: f32) -> f32 { return v; }   // slot     replaced by slots={"epilogue": "fn epilogue..."}
    struct Params { ... }                                  gets fields in front by slots={"Params": "k0: f32, "}

Block comments hide all of these. A file is pasted once, where it is first included. Matrix units are written in Tint's
spelling (subgroup_matrix_left, subgroupMatrixLoad ...); gpu/matrix.py turns it into naga's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.errors import ShaderError

SHADERS = Path(__file__).resolve().parent.parent / "shaders"

SCALARS = {"u32": "I", "i32": "i", "f32": "f"}  # types of Params fields -> struct codes

_INCLUDE = re.compile(r"^\s*//\s*include\s+(\S+?)(?:\s+as\s+(\w+))?\s*$")
_ALIAS = re.compile(r"^(\s*alias\s+(\w+)\s*=\s*)([^;]+)(;.*)$")
_CONST = re.compile(r"^(\s*const\s+(\w+)(?:\s*:\s*(\w+))?\s*=\s*)([^;]+)(;.*)$")
_OVERRIDE = re.compile(r"^\s*override\s+(\w+)\s*(?::\s*(\w+))?\s*(?:=[^;]*)?;", re.MULTILINE)
_SLOT = re.compile(r"^\s*fn\s+(\w+)\s*\(.*//\s*slot\b.*$")
_ATTRIBUTE = r"@\w+\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*"
_BINDING = re.compile(
    rf"((?:{_ATTRIBUTE})+)var\s*<\s*(uniform|storage)\s*(?:,\s*(read_write|read)\s*)?>\s*(\w+)\s*:\s*([^;]+);"
)
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{([^}]*)\}")
_FUNCTION = re.compile(rf"((?:{_ATTRIBUTE})*)\bfn\s+(\w+)\s*\(")
# Names, and what opens or closes a scope. Members (wg.x is no use of x), attributes and numbers match to be skipped.
_TOKEN = re.compile(rf"{_ATTRIBUTE}|\.\s*[A-Za-z_]\w*|[0-9][\w.]*|[A-Za-z_]\w*|[{{}};]")
_F16 = re.compile(r"\bf16\b|\b(?:vec[234]|mat[234]x[234])h\b|\b[0-9.]+h\b")
_SUBGROUP = re.compile(r"\bsubgroup")
_MATRIX = re.compile(r"\bsubgroup_?[mM]atrix")


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
        functions = _functions(self.code)
        if entry not in self.entries:
            raise ShaderError(f"{self.path}: no entry point '{entry}'; it has {', '.join(self.entries) or 'none'}")
        reached: set[str] = set()
        called = {entry}
        todo = [entry]
        while todo:
            names = _outer_names(*functions[todo.pop()])
            reached |= names
            new = {name for name in names if name in functions} - called
            called |= new
            todo += new
        return tuple(b for b in self.bindings if b.name in reached)

    def extensions(self) -> frozenset[str]:
        """The language extensions the code needs: "f16", "subgroups", "matrices"."""
        code = strip_comments(self.code)
        needs = {"f16": _F16.search(code), "subgroups": _SUBGROUP.search(code), "matrices": _MATRIX.search(code)}
        return frozenset(name for name, found in needs.items() if found)


def load(
    path: str,
    *,
    types: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
    parts: Mapping[str, str] | None = None,
    slots: Mapping[str, str] | None = None,
    subgroups: bool = False,
    root: Path | None = None,
) -> Source:
    """Assemble the file `path` below `root` (default: SHADERS). Raises ShaderError: an unknown option, no such file."""
    assembler = _Assembler(root or SHADERS, dict(parts or {}), subgroups)
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
    for name, value in wanted.items():
        if not isinstance(value, int | float):
            raise ShaderError(f"{path}: constant {name} is {value!r}; expected a number or a bool")
    fields = slots.pop("Params", "")
    out: list[str] = []
    where: list[tuple[str, int]] = []
    done: set[str] = set()
    for line, visible, place in zip(text, _visible(text), lines, strict=True):
        replaced = [line]
        if (m := _ALIAS.match(visible)) and m[2] in types:
            replaced = [m[1] + types[m[2]] + m[4]]
            done.add(m[2])
        elif (m := _CONST.match(visible)) and m[2] in wanted:
            literal = _literal(f"{path}: const {m[2]}", wanted[m[2]], m[3] or _type_of_literal(m[4]))
            replaced = [m[1] + literal + m[5]]
            done.add(m[2])
        elif (m := _SLOT.match(visible)) and m[1] in slots:
            replaced = slots[m[1]].splitlines()
            done.add(m[1])
        out += replaced
        where += [place] * len(replaced)
    code = "\n".join(out) + "\n"
    if fields:
        code = code.replace("struct Params {", f"struct Params {{ {fields}", 1)
    bare = strip_comments(code)
    overrides = frozenset(m[1] for m in _OVERRIDE.finditer(bare))
    pipeline_constants = {k: v for k, v in wanted.items() if k in overrides}
    unknown = (set(types) | set(wanted) | set(slots)) - done - set(pipeline_constants)
    if unknown:
        raise ShaderError(
            f"{path}: nothing named {sorted(unknown)} to set; look for a missing alias, const, override or slot"
        )
    bindings = tuple(_binding(path, *found) for found in _BINDING.findall(bare))
    structs = dict(_STRUCT.findall(bare))
    uniforms = [binding for binding in bindings if binding.access == "uniform"]
    if len(uniforms) > 1:
        names = ", ".join(binding.name for binding in uniforms)
        raise ShaderError(f"{path}: several uniforms ({names}); put all parameters into one Params struct")
    params = _fields(path, uniforms[0].type, structs) if uniforms else ()
    entries = tuple(m[2] for m in _FUNCTION.finditer(bare) if "@compute" in m[1])
    return Source(path, code, tuple(where), bindings, params, entries, overrides, pipeline_constants)


_IN_CODE, _IN_LINE, _IN_BLOCK = re.compile(r"//|/\*|\n"), re.compile(r"\n"), re.compile(r"/\*|\*/|\n")


def strip_comments(code: str, *, keep_line_comments: bool = False) -> str:
    """The code with comments blanked out, line structure kept. Block comments nest, as WGSL says."""
    out: list[str] = []
    depth, in_line, at = 0, False, 0
    while m := (_IN_BLOCK if depth else _IN_LINE if in_line else _IN_CODE).search(code, at):
        shown = not depth and (not in_line or keep_line_comments)
        out.append(code[at : m.start()] if shown else "")
        at = m.end()
        if m[0] == "\n":
            out.append("\n")
            in_line = False
        elif m[0] == "//":
            out.append("//" if keep_line_comments else "")
            in_line = True
        else:
            out.append(" ")  # a comment separates words
            depth += 1 if m[0] == "/*" else -1
    if not depth and (not in_line or keep_line_comments):
        out.append(code[at:])
    return "".join(out)


def _visible(text: list[str]) -> list[str]:
    """The lines without block comments. Line comments stay: includes and slots are written in them."""
    return strip_comments("\n".join(text), keep_line_comments=True).split("\n") if text else []


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
        written = content.splitlines()
        for number, (line, visible) in enumerate(zip(written, _visible(written), strict=True), 1):
            include = _INCLUDE.match(visible)
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


_RANGES = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1)}


def _literal(what: str, value: Any, type_: str) -> str:
    """`value` as WGSL of that type; a type that is an alias gets a number without suffix, which fits every scalar."""
    if type_ == "bool" or isinstance(value, bool):
        if type_ in SCALARS:
            return str(int(value)) + ("u" if type_ == "u32" else "")
        return "true" if value else "false"
    if not math.isfinite(value):
        raise ShaderError(f"{what} = {value}: WGSL has no such literal; use a large finite number")
    if type_ in _RANGES:
        low, high = _RANGES[type_]
        if value != int(value) or not low <= value <= high:
            raise ShaderError(f"{what} = {value}: a {type_} is a whole number in {low} to {high}")
        return f"{int(value)}{'u' if type_ == 'u32' else ''}"
    if type_ in ("f32", "f16"):
        return f"{float(value)!r}{'f' if type_ == 'f32' else 'h'}"
    return repr(float(value)) if value != int(value) else str(int(value))


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
        if type_ not in SCALARS or not name.isidentifier():
            raise ShaderError(f"{path}: {struct} has '{part.strip()}'; Params fields are plain u32, i32 or f32")
        fields.append((name, type_))
    return tuple(fields)


def _binding(path: str, attributes: str, space: str, access: str, name: str, type_: str) -> Binding:
    numbers = dict(re.findall(r"@(group|binding)\s*\(\s*(\d+)u?\s*\)", attributes))
    if numbers.keys() != {"group", "binding"}:
        raise ShaderError(f"{path}: binding {name} needs @group(n) @binding(n), with plain numbers")
    kind = "uniform" if space == "uniform" else access or "read"
    return Binding(int(numbers["group"]), int(numbers["binding"]), name, kind, type_.strip())


def _functions(code: str) -> dict[str, tuple[str, str]]:
    """Name -> (parameters, body) of every function, without comments."""
    code = strip_comments(code)
    functions = {}
    for m in _FUNCTION.finditer(code):
        end = closing(code, m.end() - 1, "()")
        opening = code.find("{", end)
        functions[m[2]] = (code[m.end() : end], code[opening : closing(code, opening, "{}") + 1])
    return functions


def closing(code: str, start: int, pair: str) -> int:
    """Where the bracket opened at `start` closes; the end of the code if it never does (the driver will complain)."""
    depth = 0
    for i in range(start, len(code)):
        depth += (code[i] == pair[0]) - (code[i] == pair[1])
        if depth == 0:
            return i
    return len(code)


def _outer_names(parameters: str, body: str) -> set[str]:
    """The names in a function's body that it does not declare itself: those of bindings, functions and constants.

    A local name hides the outer one from the end of its declaration to the end of its block.
    """
    scopes = [set(re.findall(r"(\w+)\s*:", re.sub(_ATTRIBUTE, "", parameters)))]
    loops: list[int] = []  # depths of scopes that `for` opened: their variable lives to the end of the loop's body
    declared: list[str] = []
    names: set[str] = set()
    previous = ""
    for token in _TOKEN.findall(re.sub(r"\bvar\s*<[^>]*>", "var ", body)):
        if token == "for":
            scopes.append(set())
            loops.append(len(scopes))
        elif token == "{":
            scopes.append(set())
        elif token == "}":
            scopes.pop()
            if loops and loops[-1] == len(scopes):
                loops.pop()
                scopes.pop()
        elif token == ";":
            scopes[-1].update(declared)
            declared = []
        elif previous in ("let", "var", "const"):
            declared.append(token)
        elif (token[0].isalpha() or token[0] == "_") and not any(token in scope for scope in scopes):
            names.add(token)
        previous = token
    return names
