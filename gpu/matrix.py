"""Matrix units in WGSL: shaders are written in Tint's spelling, and turned into naga's for wgpu-native.

Tint (what our files say)                                  naga
    subgroup_matrix_left<f16, 16, 16>                          coop_mat16x16<f16, A>
    subgroup_matrix_right<f16, 16, 16>                         coop_mat16x16<f16, B>
    subgroup_matrix_result<f32, 16, 16>                        coop_mat16x16<f32, C>
    subgroupMatrixLoad<T>(&x, at, false, stride)               coopLoadT<T>(&x[at], stride)
    subgroupMatrixLoad<T>(&x, at, true, stride)                coopLoad<T>(&x[at], stride)   columns
    subgroupMatrixMultiplyAccumulate(l, r, sum)                coopMultiplyAdd(l, r, sum)
    subgroupMatrixStore(&x, at, m, false, stride)              coopStoreT(m, &x[at], stride)

The order (column-major or not) is `true`, `false`, or the name of a `const` that is one of them. naga has square
matrices of 8 or 16 only and no arithmetic with scalars; other uses are errors that name the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gpu.errors import ShaderError
from gpu.wgsl import Source, closing, strip_comments

TINT_LINE = "enable chromium_experimental_subgroup_matrix; diagnostic(off, chromium.subgroup_matrix_uniformity); "
NAGA_LINE = "enable wgpu_cooperative_matrix; "

_ROLES = {"left": "A", "right": "B", "result": "C"}
_TYPE = re.compile(r"\bsubgroup_matrix_(left|right|result)\s*<\s*(\w+)\s*,\s*(\w+)\s*,\s*(\w+)\s*>")
_WORD = re.compile(r"\b(coop_mat\d+x\d+)__(\w+?)__([ABC])\b")
_CALL = re.compile(r"\b(subgroupMatrix\w+)\s*(<)?")
_ORDER = re.compile(r"\bconst\s+(\w+)\s*(?::\s*bool)?\s*=\s*(true|false)\s*;")
_ARGUMENTS = {"subgroupMatrixLoad": 4, "subgroupMatrixStore": 5, "subgroupMatrixMultiplyAccumulate": 3}


def to_naga(source: Source) -> str:
    """The code of `source` in naga's spelling, line for line. Raises ShaderError where naga has no such thing."""
    if "matrices" not in source.extensions():
        return source.code
    code = strip_comments(source.code)
    orders = dict(_ORDER.findall(code))

    def where(at: int) -> str:
        return source.where(code.count("\n", 0, at) + 1)

    def type_name(m: re.Match[str]) -> str:
        if m[3] != m[4] or m[3] not in ("8", "16"):
            raise ShaderError(f"{where(m.start())}: {m[0]}: naga has matrices of 8x8 and 16x16 only; use one of these")
        return f"coop_mat{m[3]}x{m[3]}__{m[2]}__{_ROLES[m[1]]}" + "\n" * m[0].count("\n")

    code = _TYPE.sub(type_name, code)  # one word each, so that arguments can be split at commas
    return _WORD.sub(r"\1<\2, \3>", _calls(code, orders, where))


def _calls(code: str, orders: dict[str, str], where: Callable[[int], str]) -> str:
    out: list[str] = []
    done = 0
    for m in _CALL.finditer(code):
        if m.start() < done:  # inside a call that was rewritten with its arguments
            continue
        name = m[1]
        if name not in _ARGUMENTS:
            known = ", ".join(_ARGUMENTS)
            raise ShaderError(f"{where(m.start())}: {name}: naga has no such call for matrices; use {known}")
        opening = m.end()
        template = ""
        if m[2]:
            opening = closing(code, m.end() - 1, "<>") + 1
            template = code[m.end() - 1 : opening]
        start = code.find("(", opening)
        end = closing(code, start, "()")
        given = _split(code[start + 1 : end])
        if len(given) != _ARGUMENTS[name]:
            raise ShaderError(f"{where(m.start())}: {name} takes {_ARGUMENTS[name]} arguments, here are {len(given)}")
        given = [_calls(argument, orders, lambda at, base=start: where(base)) for argument in given]
        if name == "subgroupMatrixMultiplyAccumulate":
            new = f"coopMultiplyAdd({', '.join(given)})"
        else:
            pointer, at, *matrix, order, stride = given
            turned = "" if _is_columns(order, orders, name, where(m.start())) else "T"
            place = f"{pointer.strip()}[{at.strip()}]"
            if name == "subgroupMatrixLoad":
                new = f"coopLoad{turned}{template}({place},{stride})"
            else:
                new = f"coopStore{turned}({matrix[0].strip()}, {place},{stride})"
        missing = code.count("\n", m.start(), end + 1) - new.count("\n")  # line for line, so that errors name the line
        out += [code[done : m.start()], new, "\n" * missing]
        done = end + 1
    return "".join(out) + code[done:]


def _is_columns(order: str, orders: dict[str, str], name: str, place: str) -> bool:
    word = order.strip()
    word = orders.get(word, word)
    if word not in ("true", "false"):
        raise ShaderError(f"{place}: {name}: order '{word}'; expected true, false, or a const that is one of them")
    return word == "true"


def _split(text: str) -> list[str]:
    """Arguments of a call: split at commas outside brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    rest = text[last:]
    return [*parts, rest] if rest.strip() else parts  # a trailing comma is allowed
