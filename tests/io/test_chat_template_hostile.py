"""Templates that try to run for ever, fill the memory or reach Python: each is refused, at once and by name."""

from __future__ import annotations

import re
import time

import pytest

from nn.io.chat_template import ChatTemplate, ChatTemplateError

resource = pytest.importorskip("resource")  # memory in use; not on Windows

WORK = "more work than|not done after"
ATTRIBUTE = "unsafe|not allowed"
MESSAGES = [{"role": "user", "content": "x", "name": "n"}]

TEMPLATES = [
    ("{% for i in range(10**11) %}{% endfor %}", "100000 numbers at most"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", WORK),
    ("{% set l = range(99999) | list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}", WORK),
    ("{% set l = range(99999) | list %}{% for i in range(99999) %}{% if -1 in l %}{% endif %}{% endfor %}", WORK),
    ("{% set l = range(99999) | list %}{{ l | select('in', l) | list }}", WORK),
    ("{% for a in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}", "without end|more work"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    ("{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", WORK),
    ("{% filter upper %}{% for i in range(99999) %}" + "a" * 999 + "{% endfor %}{% endfilter %}", WORK),
    ("{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}{{ x }}", WORK),
    ("{{ 'a' * 10**10 }}", WORK),
    ("{{ [0] * 10**10 }}", WORK),
    ("{{ 10**10 * 'a' }}", WORK),
    ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", WORK),
    ("{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", WORK),
    ("{% set n = namespace(s=[]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}", WORK),
    ("{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}", WORK),
    ("{% set n = namespace(s=7) %}{% for i in range(9999) %}{% set n.s = n.s * n.s %}{% endfor %}", r"over 2\^256"),
    ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", WORK),
    ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", WORK),
    ("{{ range(99999) | join('b' * 99999) }}", WORK),
    ("{{ ('b' * 99999).join(range(99999) | map('string')) }}", WORK),
    ("{{ ([('x' * 9999)] * 99999) | join }}", WORK),
    ("{{ ('x\n' * 9999) | indent(99999, true) }}", WORK),
    ("{{ ('%s' * 9999) % (['x' * 9999] * 9999) }}", WORK),
    ("{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}", WORK),
    ("{{ '%1000000000d' % 1 }}", "width"),
    ("{{ '%*d' % (10**9, 1) }}", "width"),
    ("{{ '{:1000000000}'.format(1) }}", "'format'.*unsafe"),
    ("{{ messages | tojson(indent=10**9) }}", "tojson"),
    ("{{ messages | tojson(true, 99999) }}", "indent over 16"),
    ("{{ 10**10**10 }}", "power"),
    ("{{ 'a' | center(10**10) }}", "No filter named 'center'"),
    ("{{ 'a'.ljust(10**9) }}", ATTRIBUTE),
    ("{{ ''.__class__.__mro__ }}", ATTRIBUTE),
    ("{{ messages.append(1) }}", ATTRIBUTE),
    ("{{ namespace(__class__=1) }}", ATTRIBUTE),
    ("{% set n = namespace() %}{% set n.__class__ = 1 %}", ATTRIBUTE),
    ("{{ raise_exception.__globals__.x }}", ATTRIBUTE),
    ("{{ range.__init__.__globals__ }}", ATTRIBUTE),
    ("{{ dict(a=1) | attr('__class__') }}", "No filter named 'attr'"),
    ("{{ cycler.next }}", "undefined"),
    ("{{ lipsum(5) }}", "undefined"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{% import 'os' as os %}", "no loader"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
    ("{{ 1 +", "cannot be compiled: line 1"),
    ("x" * 70_000, "70000 characters; expected at most 65536"),
    ("{{ raise_exception('roles must alternate') }}", "^chat template: roles must alternate$"),
]


@pytest.mark.parametrize("source, words", TEMPLATES, ids=[source[:40] for source, _ in TEMPLATES])
def test_refused_within_two_seconds_and_without_memory(source, words):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert time.perf_counter() - start < 4  # 1.5 s alone; other work may share the machine
    assert re.search(words, str(caught.value))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    "source, text",
    [
        ("{{ [messages] | map(attribute='__class__') | list }}", "[Undefined]"),
        ("{{ raise_exception.__globals__ }}", ""),
        ("{{ self._TemplateReference__context }}", ""),
        ("{{ namespace(a=1) }}", "<namespace>"),
        ("{{ messages[0].copy().name }}", "n"),
    ],
)
def test_what_is_not_refused_shows_nothing(source, text):
    assert ChatTemplate(source).render(MESSAGES) == text


def test_long_conversations_fit_the_budget():
    source = (
        "{% for m in messages %}{% if m.content is string and '</think>' not in m.content %}"
        "{{ '<' + m.role + '>' + m.content | trim + m.content.split('x')[0] }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 2000}] * 500  # 5 million characters
    assert len(ChatTemplate(source).render(messages)) > 9_000_000
