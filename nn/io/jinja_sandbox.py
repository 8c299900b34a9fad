"""Jinja for programs out of downloaded files: no way into Python, and a budget that ends what does not end.

Jinja's own sandbox keeps templates away from Python's insides; it does not stop `range(99999)` inside itself, nor
"a" * 10**10. Here every loop turn, call, filter, test, comparison and value that is made pays by its size from a budget
of characters, before it is made where it could be huge, and each payment looks at the clock. Only filters and methods
whose cost is known are there: those that chat templates use.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_NUMBER = 100_000  # widths, counts, lengths of ranges
BUDGET = " budget"  # the context's name for it, which no template can spell

FILTERS = """
    abs batch capitalize count d default dictsort e escape first float groupby indent int items join last length list
    lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title tojson
    trim truncate unique upper wordcount
"""
METHODS = {
    str: """
        capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle isupper
        join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
        splitlines startswith strip swapcase title upper
    """,
    dict: " get items keys values copy ",
    list: " index count copy ",
    tuple: " index count ",
}
# These look at whole values, not only at how many elements there are.
DEEP = " changed count dictsort float groupby index int join max min sort string unique in eq == equalto ne != "


class ChatTemplateError(ValueError):
    """A template that is damaged, refuses these messages, or does more than render messages."""


@dataclass
class Budget:
    """What one rendering may use: characters made or looked at, and seconds."""

    characters: int
    seconds: float

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise ChatTemplateError("chat template: does more work than any conversation needs; use another model file")
        if time.monotonic() > self.deadline:
            raise ChatTemplateError(f"chat template: not done after {self.seconds} s; use another model file")

    def spend_for(self, *values: Any, deep: bool = True) -> None:
        """Pay for the size of values: all that is in them, or only their own elements."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            self.spend(1 + (len(value) if isinstance(value, (str, bytes, range, list, tuple, dict, set)) else 0))
            if deep and isinstance(value, Mapping):
                waiting += value.keys()
                waiting += value.values()
            elif deep and isinstance(value, (list, tuple, set)):
                waiting += value


def budget_of(context: Context) -> Budget:
    return context.parent[BUDGET]


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace() without names that reach Python's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _plain_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _plain_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (as in the base class)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Environment(ImmutableSandboxedEnvironment):
    """Compiles templates whose every step pays. Rendering needs a Budget under the name BUDGET."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%", "/", "//"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_paid,  # what is written
        )
        self.globals = {
            "range": _range,
            "dict": lambda *args, **items: dict(*args, **items),
            "namespace": Namespace,
            "raise_exception": _refuse,
            "strftime_now": lambda format: now().strftime(format),
        }
        filters = {**self.filters, "tojson": _to_json}
        self.filters = {name: _paying(name, filters[name]) for name in FILTERS.split()}
        self.filters |= {" step": _step, " joined": _joined, " paid": _paid}
        self.tests = {name: _paying(name, test) for name, test in self.tests.items()}

    def program(self, source: str) -> jinja2.Template:
        tree = self.parse(source)
        _make_pay(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in METHODS.items():
            if isinstance(obj, kind) and callable(value):
                return attr in methods.split()
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is no method here: its widths make strings of any size."""
        return

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(__context)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(__obj, Macro):
            budget.spend(100)
        elif isinstance(__obj, LoopContext):  # a recursive loop goes through args[0] without the filter `step`
            budget.spend(
                1000 + 100 * (len(args[0]) if args and isinstance(args[0], (str, list, tuple, range, dict)) else 0)
            )
        elif isinstance(owner, str) and name == "replace":
            _pay_replace(budget, owner, *args, **kwargs)
        elif isinstance(owner, str) and name == "join":
            args = (_pay_join(budget, owner, *args),)
        elif f" {name} " in DEEP or name == "<lambda>":
            budget.spend_for(owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend_for(result, deep=False)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, (str, bytes, list, tuple)):
                    budget.spend(len(many) * max(times, 0))
        elif operator == "**" and not (abs(left) <= MAX_NUMBER and abs(right) <= 16):
            raise ChatTemplateError("chat template: computes a power that is too large")
        elif operator == "%" and isinstance(left, str):
            budget.spend_for(left, right)
            values = right if isinstance(right, tuple) else (right,)
            if re.search(r"\d{4}|\*", left):
                raise ChatTemplateError(f"chat template: the format {left[:40]!r} has a width that is too large")
            sizes = [len(value) for value in values if isinstance(value, str)]
            budget.spend(1000 * left.count("%") + sum(sizes) + left.count("%(") * max(sizes, default=0))
        if any(isinstance(number, int) and number.bit_length() > 256 for number in (left, right)):
            raise ChatTemplateError("chat template: computes with numbers over 2^256")
        result = super().call_binop(context, operator, left, right)
        budget.spend_for(result, deep=False)
        return result


def _make_pay(node: Any) -> None:
    """Put paying filters around loops' lists, comparisons, and what makes values without a call."""
    for name in node.fields:
        value = getattr(node, name)
        setattr(node, name, [_around(item) for item in value] if isinstance(value, list) else _around(value))
    if isinstance(node, nodes.For):
        cost = 10 + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter(" step", node.iter, nodes.Const(cost))
    elif isinstance(node, nodes.Compare):
        node.expr = _filter(" paid", node.expr)
        for operand in node.ops:
            operand.expr = _filter(" paid", operand.expr)


def _around(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _make_pay(value)
    if isinstance(value, nodes.Concat):
        return _filter(" joined", nodes.List(value.nodes).set_lineno(value.lineno))
    makes = isinstance(value, (nodes.List, nodes.Dict)) or (isinstance(value, nodes.Tuple) and value.ctx == "load")
    slices = isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice)
    return _filter(" paid", value) if makes or slices else value


def _filter(name: str, node: Any, *args: nodes.Expr) -> Any:
    return nodes.Filter(node, name, list(args), [], None, None).set_lineno(node.lineno)


@jinja2.pass_context
def _step(context: Context, items: Any, cost: int) -> Iterator[Any]:
    budget = budget_of(context)
    for item in items:
        budget.spend(cost)
        yield item


@jinja2.pass_context
def _joined(context: Context, pieces: list[Any]) -> str:
    budget_of(context).spend_for(pieces)
    return "".join(map(str, pieces))


@jinja2.pass_context
def _paid(context: Context, value: Any) -> Any:
    budget_of(context).spend_for(value, deep=not isinstance(value, str))
    return value


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that pays for what it is given, and for what it makes."""
    passes = getattr(function, "jinja_pass_arg", None)
    first = {
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }
    extra = first[passes.name] if passes is not None else lambda context: ()

    @jinja2.pass_context
    def paying(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        for number in (*args, *kwargs.values()):
            if isinstance(number, (int, float)) and abs(number) > MAX_NUMBER and name not in ("d", "default"):
                raise ChatTemplateError(f"chat template: {name} with {number!r:.20}; expected {MAX_NUMBER} at most")
        if name == "replace":
            value = str(value)
            _pay_replace(budget, value, *args, **kwargs)
        elif name == "join":
            value = _pay_join(budget, str(args[0] if args else kwargs.get("d", "")), value)
        elif name == "indent":
            width = args[0] if args else kwargs.get("width", 4)
            budget.spend((str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else width))
        elif name == "sum" and not all(isinstance(n, (int, float)) for n in (*args[1:2], kwargs.get("start", 0))):
            raise ChatTemplateError("chat template: sum begins with something that is no number")
        elif name == "tojson":
            if any(isinstance(n, int) and n > 16 for n in (*args, *kwargs.values())):
                raise ChatTemplateError("chat template: tojson with an indent over 16")
            budget.spend_for(value, args, list(kwargs.values()))
        else:
            budget.spend_for(value, args, deep=f" {name} " in DEEP)
        result = function(*extra(context), value, *args, **kwargs)
        budget.spend_for(result, deep=False)
        return result

    return paying


def _pay_replace(budget: Budget, text: str, old: Any = "", new: Any = "", *rest: Any, **kwargs: Any) -> None:
    budget.spend(len(text) + text.count(str(old)) * len(str(new)))


def _pay_join(budget: Budget, separator: str, items: Any) -> list[Any]:
    listed = []
    for item in items:
        budget.spend_for(item)
        budget.spend(len(separator))
        listed.append(item)
    return listed


def _range(*args: Any) -> range:
    numbers = range(*args)
    if numbers[MAX_NUMBER:]:
        raise ChatTemplateError(f"chat template: range{args!r:.60}; expected {MAX_NUMBER} numbers at most")
    return numbers


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: Any) -> None:
    raise ChatTemplateError(f"chat template: {message!s:.1000}")


def _plain_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ChatTemplateError(f"chat template: the name {name[:40]!r} is not allowed on a namespace")
