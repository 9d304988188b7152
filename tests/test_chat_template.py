"""Chat templates: what the hub's templates use works as in transformers, and what they must not do is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hookline.chat_template import MAX_TEMPLATE_BYTES, MAX_TEXT, ChatTemplate
from hookline.errors import InvalidRequestError, ModelConfigError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "  Where is Oslo?\n"},
    {"role": "assistant", "content": "<think>map</think>Norway", "tool_calls": [{"name": "f", "args": {"q": "é"}}]},
    {"role": "user", "content": "北京?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": 'say "hi" <b>', "parameters": {}}}]
TEMPLATES = {
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content }}\n    {% endif %}\n"
    "{% endfor %}\nend",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index0 }}{{ m.role }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }}",
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=4) }}",
    "macro": "{% macro turn(m, mark='>') %}{{ mark ~ m.role ~ ':' ~ m.content | trim }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{{ turn(m, mark=loop.index) }}{% endfor %}",
    "call": "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}{{ messages[0].role }}{% endcall %}",
    "think": "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}|{% endfor %}",
    "recursive": "{% for m in [[1, [2, 3]], 4] recursive %}{{ loop(m) if m is iterable else m }},{% endfor %}",
    "generation": "{% set a = 1 %}{% for m in messages %}{% generation %}{% set a = 2 %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}{{ a }}",
    "defined": "{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ thinking is defined }}{{ x }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}{{ 'a b' | replace(' ', '_') | upper }}"
    "{{ 3.7 | int }}{{ messages | selectattr('role', '==', 'user') | list | length }}{{ 'x\ny' | indent(2) }}"
    "{{ 'é<' | e }}{{ '%s-%d' | format('a', 3) }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort | first }}",
    "operators": "{{ 'a' * 3 + 'b' }}{{ 'n: %s' % 5 }}{{ 2 ** 8 }}{{ 7 // 2 }}{{ [1] + [2] }}{{ 'x' ~ 1 ~ none }}"
    "{{ '{} {a}'.format(1, a=2) }}{{ ', '.join(['a', 'b']) }}",
    "set block": "{% set x %}{{ messages[1].content }}!{% endset %}{{ x }}{{ bos_token }}{{ eos_token }}",
    "prompt": "{% if add_generation_prompt %}go{% else %}stay{% endif %}{{ enable_thinking | default(true) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name: str) -> None:
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **specials)
    template = ChatTemplate(TEMPLATES[name], specials)
    for generation in (True, False):
        for variables in ({}, {"tools": TOOLS}):
            given: dict[str, Any] = {"add_generation_prompt": generation, **variables}
            expected = theirs.apply_chat_template(
                MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=generation, **variables
            )
            assert template.render(MESSAGES, **given) == expected


def test_variables_that_the_template_reads_may_be_given() -> None:
    template = ChatTemplate(TEMPLATES["prompt"])
    assert template.variables == {"enable_thinking"}
    assert template.render(MESSAGES, enable_thinking=False) == "goFalse"
    with pytest.raises(InvalidRequestError, match="Did you mean enable_thinking") as caught:
        template.render(MESSAGES, enable_thinkin=False)
    assert caught.value.field == "enable_thinkin"
    for name in ("chat_template", "bos_token", "raise_exception", "range"):
        with pytest.raises(InvalidRequestError, match="reads no"):
            ChatTemplate("{{ bos_token }}{% for i in range(2) %}{% endfor %}", {"bos_token": "<s>"}).render(
                MESSAGES, **{name: "{{ 1 }}"}
            )


def test_strftime_now_gives_the_date() -> None:
    before = datetime.now()
    found = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(MESSAGES)
    assert found in {moment.strftime("%d %b %Y") for moment in (before, datetime.now())}


def test_raise_exception_gives_the_templates_words() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate!') }}{% endif %}"
    template = ChatTemplate(source)
    assert template.render(MESSAGES[1:]) == ""
    with pytest.raises(InvalidRequestError, match="Roles must alternate!") as caught:
        template.render(MESSAGES)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("messages", [[], "hello", None, [1], [{}], [{"content": "x"}], [{"role": 1}], {"role": "x"}])
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert caught.value.field == "messages"


def test_messages_are_not_changed() -> None:
    before = json.dumps(MESSAGES)
    for attempt in ("{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}", "{{ messages.clear() }}"):
        with pytest.raises(ModelConfigError, match=r"is not safely callable|unsafe"):
            ChatTemplate(attempt).render(MESSAGES)
    assert json.dumps(MESSAGES) == before


GROW = "{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{}{{% endfor %}}{{{{ ns.x }}}}"
ABUSE = {
    "long range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "fibonacci": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 10**9 }}",
    "times reversed": "{{ 10**9 * 'a' }}",
    "list times": "{{ ([0] * 10**9) | length }}",
    "tuple times": "{{ ((1, 2) * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "grow by ~": GROW.format("{% set ns.x = ns.x ~ ns.x %}"),
    "grow by +": GROW.format("{% set ns.x = ns.x + ns.x %}"),
    "grow by %": GROW.format("{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "grow by format": GROW.format("{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "grow by format filter": GROW.format("{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
    "grow by block": GROW.format("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "grow by join": GROW.format("{% set ns.x = [ns.x, ns.x] | join %}"),
    "grow by join method": GROW.format("{% set ns.x = ''.join([ns.x, ns.x]) %}"),
    "grow by lists": GROW.format("{% set ns.x = [ns.x, ns.x] %}"),
    "grow by dicts": GROW.format("{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    "grow by lists, as json": GROW.format("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x | tojson }}",
    "grow by lists, joined": GROW.format("{% set ns.x = [ns.x, ns.x] %}").replace("{{ ns.x }}", "{{ '' ~ ns.x }}"),
    "grow by lists, trimmed": GROW.format("{% set ns.x = [ns.x, ns.x] %}").replace("{{ ns.x }}", "{{ ns.x | trim }}"),
    "grow by namespaces": GROW.format("{% set ns.x = namespace(a=ns.x, b=ns.x) %}"),
    "grow by replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "grow by replace filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "map": "{% set x = 'a' * 8000000 %}{{ ([x] * 100000) | map('upper') | list | length }}",
    "sum": "{{ ([[0]] * 100000) | sum(start=[]) | length }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "json indent": "{{ [1] | tojson(indent=10**9) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width filter": "{{ '%1000000000d' | format(1) }}",
    "width in format": "{{ '{:1000000000}'.format(1) }}",
    "width as argument": "{{ '%*d' % (10**9, 1) }}",
    "width as argument of format": "{{ '{:{}}'.format(1, 10**9) }}",
    "to_bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 8000000}) }}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class walk by item": "{{ ''['__class__']['__mro__'] }}",
    "class walk by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "class walk by map": "{{ [''] | map(attribute='__class__.__mro__') | list }}",
    "globals": "{{ cycler.__init__.__globals__.os }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__func__.__globals__ }}",
    "generator frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "self": "{{ self.__init__.__globals__ }}",
    "undefined": "{{ foo.bar.baz }}",
    "undefined function": "{{ foo() }}",
    "lipsum": "{{ lipsum(100000) }}",
    "unknown filter by name": "{{ messages | map('pprint') | list }}",
}  # fmt: skip
UNSOUND = {
    "include": "{% include '/etc/passwd' %}",
    "include in a branch": "{% if false %}{% include 'x' ignore missing %}{% endif %}",
    "import": "{% import 'x' as y %}",
    "from": "{% from 'x' import y %}",
    "extends": "{% extends 'x' %}",
    "syntax": "{% for %}",
    "not closed": "{% if a %}",
    "unknown filter": "{{ 'a' | pprint }}",
    "unknown tag": "{% do x %}",
    "deep blocks": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "large": "a" * (MAX_TEMPLATE_BYTES + 1),
}


@pytest.mark.parametrize("name", ABUSE)
def test_abuse_is_stopped_in_time(name: str) -> None:
    template = ChatTemplate(ABUSE[name])
    start = time.thread_time()
    with pytest.raises((ModelConfigError, InvalidRequestError)) as caught:
        template.render(MESSAGES)
    assert time.thread_time() - start < 2.0
    assert len(str(caught.value)) < 1500
    assert "0x7f" not in str(caught.value)
    assert ChatTemplate("{{ messages[0].role }}").render(MESSAGES) == "system"


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_templates_are_refused_when_read(name: str) -> None:
    with pytest.raises(ModelConfigError, match=r"^chat_template "):
        ChatTemplate(UNSOUND[name])


def test_walks_that_only_print_show_nothing() -> None:
    for walk in ("{{ ''.__class__ }}", "{{ '' | attr('__class__') }}", "{{ raise_exception.__globals__ }}"):
        assert ChatTemplate(walk).render(MESSAGES) == ""


def test_memory_stays_bounded_under_abuse() -> None:
    script = (
        "import resource, sys, json\nfrom hookline.chat_template import ChatTemplate\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for source in json.load(sys.stdin):\n"
        "    try:\n        ChatTemplate(source).render([{'role': 'user', 'content': 'x'}])\n"
        "    except Exception as error:\n        assert type(error).__module__ == 'hookline.errors', error\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    slow = ("nested loops", "filtered loops", "fibonacci", "grow by lists, as json", "grow by lists, joined")
    sources = json.dumps([source for name, source in ABUSE.items() if name not in slow])
    done = subprocess.run([sys.executable, "-c", script], input=sources, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 700 * 2**20


def test_text_limit_holds_for_long_conversations() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    half = {"role": "user", "content": "x" * (MAX_TEXT // 2)}
    assert len(template.render([half, half])) == MAX_TEXT
    with pytest.raises(InvalidRequestError, match="more than 8,388,608 characters") as caught:
        template.render([half, half, {"role": "user", "content": "y"}])
    assert caught.value.field == "messages"


def test_long_conversations_are_fast() -> None:
    template = ChatTemplate(TEMPLATES["macro"])
    messages = [{"role": "user", "content": "word " * 20}] * 5000
    start = time.thread_time()
    assert len(template.render(messages)) > 10**6
    assert time.thread_time() - start < 0.9


def test_one_template_in_many_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    found: dict[int, str] = {}

    def render(number: int) -> None:
        found[number] = template.render([{"role": "user", "content": str(number)}] * 200)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) * 200 for number in range(8)}


def test_needs_no_torch() -> None:
    script = "import sys, hookline.chat_template\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
