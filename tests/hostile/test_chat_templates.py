"""Chat templates that attack who renders them: stopped in time, in little memory, and named as the row's error."""

# ruff: noqa: E501

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from tests.support.machine import business
from tests.support.toy_tokenizers import byte_tokenizer
from weft.config.schema import DataConfig
from weft.data import template_bounds
from weft.data.chat_template import ChatTemplate, RenderError, chosen_template
from weft.data.encode import Encoder, Encoding
from weft.data.records import Record
from weft.data.template_bounds import RenderLimitError
from weft.errors import UserError

ROW = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
NS = "{% set ns = namespace(a='ab', b=[1, 2], c={}) %}"
LOOP = "{% for i in range(99999) %}"

UNBOUNDED = {
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "a loop that writes": (LOOP + "x" * 2000) * 2 + "{% endfor %}" * 2,
    "a loop in a macro": "{% macro m() %}" + LOOP * 3 + "{% endfor %}" * 3 + "{% endmacro %}{{ m() }}",
    "a captured loop": "{% set x %}" + (LOOP + "x" * 2000) * 2 + "{% endfor %}" * 2 + "{% endset %}",
    "a macro that calls itself": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"),
    "a loop that calls itself": (
        "{% for x in [[[]]] recursive %}" + "{{ loop([x, x]) if loop.depth < 60 }}" * 2 + "{% endfor %}"),
    "filters that loop": "{{ range(99999) | map('batch', 999999, 0) | map('list') | list | length }}",
    "filters in filters": LOOP + "{{ range(99999) | sum }}{% endfor %}",
    "a text times a number": "{{ 'a' * 10 ** 10 }}",
    "a text times a large number": "{{ 'a' * 10 ** 9 }}",
    "a list times a number": "{{ ([1] * 10 ** 9) | length }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "powers": NS + "{% set ns.a = 9 %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "text doubled by +": NS + "{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "text doubled by ~": NS + "{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "text doubled by a block": NS + "{% for i in range(60) %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}",
    "text doubled by join": NS + "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] | join %}{% endfor %}",
    "text doubled by replace": NS + "{% for i in range(60) %}{% set ns.a = ns.a.replace('a', ns.a) %}{% endfor %}",
    "text doubled by format": NS + "{% for i in range(60) %}{% set ns.a = '%s%s' | format(ns.a, ns.a) %}{% endfor %}",
    "text doubled by .format": NS + "{% for i in range(60) %}{% set ns.a = '{0}{0}'.format(ns.a) %}{% endfor %}",
    "a list doubled": NS + "{% for i in range(60) %}{% set ns.b = ns.b + ns.b %}{% endfor %}",
    "a list of itself twice": NS + "{% for i in range(60) %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.b }}",
    "a mapping of itself twice": (
        NS + "{% for i in range(60) %}{% set ns.c = {1: ns.c, 2: ns.c} %}{% endfor %}{{ ns.c | tojson }}"),
    "lists compared": (
        NS + "{% set m = namespace(b=[1, 2]) %}{% for i in range(60) %}{% set ns.b = [ns.b, ns.b] %}"
        "{% set m.b = [m.b, m.b] %}{% endfor %}{{ ns.b == m.b }}"),
    "lists summed": "{{ (range(99999) | batch(1) | list | sum(start=[])) | length }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ '1'.zfill(10 ** 10) }}",
    "indent": "{{ ('\\n' * 99999) | indent(99999) }}",
    "expandtabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width from elsewhere": "{{ '%*d' % (10 ** 10, 1) }}",
    "a width in braces": "{{ '{:>{w}}'.format('a', w=10 ** 10) }}",
    "round": "{{ 1.5 | round(10 ** 10, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "lipsum": "{{ lipsum(n=10 ** 7) }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "split": "{% set x = ('a ' * 9999999).split() %}" * 9,
    "the time": "{{ strftime_now('%9999999999Y') }}",
    "json": "{{ messages | tojson(indent=10 ** 8) }}",
}  # fmt: skip

REFUSED = {
    "division": "{{ 1 / 0 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "an index": "{{ messages.index(3) }}",
    "a digit too many": "{{ 10 ** 9999 }}",
    "assertion": "{{ raise_exception('a' * 9999) }}",
    "Python's internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a name that is not there": "{{ nobody.knows.it }}",
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_template_that_takes_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert template_bounds.SECONDS <= 2.0
    monkeypatch.setattr(template_bounds, "SECONDS", 0.2)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises((RenderLimitError, RenderError)) as caught:
        ChatTemplate(UNBOUNDED[name], {}).render(ROW, {})
    assert time.thread_time() - began < 4.0 * business()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
    assert "MemoryError" not in str(caught.value)


def test_a_rendering_may_be_long_where_its_conversation_is() -> None:
    """What is much longer than all that it is made of would be tokenised: some hundred times its memory."""
    repeats = (
        "{% for m in messages %}{{ m['content'] }}{% for i in range(40) %}{{ m['content'] }}{% endfor %}{% endfor %}"
    )
    short, long = ([{"role": "user", "content": "a" * n}] for n in (2000, 100_000))
    assert len(ChatTemplate(repeats, {}).render(short, {}).text) == 41 * 2000
    with pytest.raises(RenderLimitError, match="it makes 4,100,000 characters from 100,1"):
        ChatTemplate(repeats, {}).render(long, {})
    template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
    assert len(ChatTemplate(template, {}).render([{"role": "user", "content": "a" * 3_000_000}], {}).text) == 6_000_000


@pytest.mark.parametrize("source", [UNBOUNDED["nested loops"], UNBOUNDED["a text times a number"], *REFUSED.values()])
def test_whatever_a_template_raises_is_the_rows_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "SECONDS", 0.2)
    encoder = Encoder(byte_tokenizer(source), Encoding())
    with pytest.raises(
        UserError, match=r"^a.jsonl:3: (weft stopped the chat template|the chat template refused)"
    ) as caught:
        encoder.encode([Record("a.jsonl:3", "messages", {"messages": ROW})])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000, "{% if a %}" * 300 + "{% endif %}" * 300, "{{ " + "-" * 5000 + "1 }}"]
)
def test_a_template_that_is_nested(source: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    path.write_text(source)
    with pytest.raises(UserError, match=r"a.jinja:\d+ is not valid Jinja"):
        chosen_template(DataConfig(path="x", chat_template=str(path)))
    with pytest.raises(UserError, match="chat template is not valid Jinja"):
        Encoder(byte_tokenizer(source), Encoding()).encode([Record("a.jsonl:3", "messages", {"messages": ROW})])


def test_templates_do_what_they_did() -> None:
    """All that is put around loops, operators, filters and calls changes nothing."""
    source = (
        "{%- macro m(x, y=2) -%}<{{ x }}{{ y }}>{%- endmacro -%}"
        "{% for k, v in {'a': 1, 'b': [2, 3]}.items() %}{{ loop.index0 }}/{{ loop.length }}{{ k ~ v ~ loop.last }}{% endfor %}"
        "{% for x in [3, 1, 2] | sort if x > 1 %}{{ m(x) }}{{ m(x, y=x * 2 + 1 - 4 % 3) }}{% else %}none{% endfor %}"
        "{% set ns = namespace(n=0) %}{% for x in 'abc' %}{% set ns.n = ns.n + 1 %}{% if ns.n == 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ ns.n }}{{ [1, [2]] + [(3,)] }}{{ 'a' * 3 }}{{ '%s-%02d' % ('x', 7) }}{{ '{:>4}'.format('y') }}"
        "{{ {'k': [1, {'z': none}]} | tojson(indent=2) }}{{ 'a,b'.split(',') | join('; ') }}{{ 'abc' | replace('b', 'XX') }}"
        "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% for t in [[1, [2, []]]] recursive %}{{ t if t is number else loop(t) }}{% endfor %}"
        "{% filter upper %}up{{ 'x' }}{% endfilter %}{% set b %}in{{ 1 }}{% endset %}{{ b }}{{ undefined_name }}{{ 1 if false }}"
    )
    from transformers.utils.chat_template_utils import _compile_jinja_template

    expected = _compile_jinja_template(source).render(messages=ROW)
    assert ChatTemplate(source, {}).render(ROW, {}).text == expected


def test_a_long_conversation_is_within_bounds() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim ~ '\\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "words " * 2000}] * 1000
    assert len(ChatTemplate(source, {}).render(messages, {}).text) > 10_000_000


def test_only_filters_that_may_be_slow_have_a_largest_input() -> None:
    row = [{"role": "user", "content": "a b " * 300_000}]
    assert len(ChatTemplate("{{ messages[0]['content'] | trim }}", {}).render(row, {}).text) == 1_199_999
    with pytest.raises(RenderLimitError, match="with wordcount"):
        ChatTemplate("{{ messages[0]['content'] | wordcount }}", {}).render(row, {})
