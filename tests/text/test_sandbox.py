"""A template is a stranger's program: it sees what it is given, touches nothing, and ends."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.templates import sandbox
from penstock.templates.template import Template


def render(source: str, **given: Any) -> str:
    return Template(source).render({"messages": [{"role": "user", "content": "hi"}], **given})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__}' | string).format_map({}) }}",
        "{{ raise_exception.__globals__.jinja2 }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% set _ = messages.pop() %}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd').read() }}",
    ],
)
def test_nothing_around_it_is_reached(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        render(source, messages=messages)
    assert messages == [{"role": "user", "content": "hi"}]


LONG = "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = {} %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 200 }}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%(n)-999999999d' % {'n': 1} }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(width=10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x\ny' | indent(10**9) }}",
        "{{ '1'.replace('1', 'x' * 4000000).replace('x', 'y' * 4000000) }}",
        "{{ ('x' * 4000000) | replace('x', 'y' * 4000000) }}",
        "{{ (['x' * 4000000] * 100000) | join }}",
        "{{ ''.join(['x' * 4000000] * 100000) }}",
        LONG.replace("{}", "ns.x + ns.x"),
        LONG.replace("{}", "ns.x ~ ns.x"),
        LONG.replace("{}", "[ns.x, ns.x] | join"),
        LONG.replace("{}", "ns.x | replace('0', ns.x)"),
    ],
)
def test_it_ends_and_stays_small(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)


TELEPHONE = "*12345678* Tel: 1234567, 100% {}**1 1234567 2"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role ~ ':' ~ 1 }}{% endfor %}", "1/1 user:1"),
        ("{% for x in 'abc' if x != 'b' %}{{ x }}{% else %}none{% endfor %}", "ac"),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in [3, 1] | sort %}{{ x }}{{ ',' if not loop.last }}{% endfor %}", "1,3"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% macro f(a, b=2) %}{{ a + b }}{{ caller() }}{% endmacro %}{% call f(1) %}!{% endcall %}", "3!"),
        ("{{ '-' * 3 + '%03d' % 7 + '{:>4}'.format('x') + (2 ** 10) | string }}", "---007   x1024"),
        ("{{ [1, 2] | join('-') }}{{ 'aba' | replace('a', 'c', 1) }}{{ 'a,b'.split(',') | join }}", "1-2cbaab"),
        ("{{ [1, 2] | join(d='-') }}{{ 'aba' | replace(old='a', new='c', count=1) }}", "1-2cba"),
        (
            "{% macro f(context, function) %}{{ context }}{{ function }}{% endmacro %}{{ f(function=1, context=2) }}",
            "21",
        ),
        ("{{ ''.join(['a', 'b']) }}{{ 'x'.replace('x', 'y') }}{{ 'x' | center(3) }}|", "aby x |"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(1000) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "499500",
        ),
    ],
)
def test_what_templates_do_they_do_as_ever(source: str, text: str) -> None:
    assert render(source) == text
