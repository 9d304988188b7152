"""Chat templates: what the hub's templates use works as in transformers. Suite G3 abuses them."""

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

from hookline.chat_template import MAX_TEXT, ChatTemplate
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


LAST_TEXTS = (
    *("Oslo is", "Oslo is  ", "  Oslo\n", "", "\n", "北京 é", "<think>wait", "<think>map</think>Oslo", "Oslo</think>"),
    *("<|im_end|>", "END-", "</s>"),
)


def continued(template: str, messages: list[dict[str, Any]]) -> str | None:
    """What transformers makes of a last message that goes on; None where it refuses to."""
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **specials)
    try:
        found = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, continue_final_message=True, add_generation_prompt=False
        )
    except ValueError:
        return None
    return str(found).replace("CONTINUE_FINAL_MESSAGE_TAG", "")  # which it leaves where a text is shown twice


@pytest.mark.parametrize("name", [name for name, source in TEMPLATES.items() if "content" in source])
def test_continues_a_last_message_as_transformers_does(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for text in LAST_TEXTS:
        messages = [*MESSAGES, {"role": "assistant", "content": text}]
        expected = continued(TEMPLATES[name], messages)
        if expected is not None:
            assert template.render(messages, continue_final_message=True) == expected
            continue
        with pytest.raises(InvalidRequestError, match="cannot be continued") as caught:
            template.render(messages, continue_final_message=True)
        assert caught.value.field == "messages"


def test_what_is_continued_is_text() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    for content in (None, 5, [{"type": "text", "text": "a"}]):
        with pytest.raises(InvalidRequestError, match="no text to continue"):
            template.render([{"role": "assistant", "content": content}], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="no text to continue"):
        template.render([{"role": "assistant"}], continue_final_message=True)
    last = {"role": "assistant", "content": "a"}
    assert template.render([last], continue_final_message=True) == "a" == last["content"]
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ChatTemplate("{% for m in messages %}a{% endfor %}").render([last], continue_final_message=True)


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


def test_no_rendering_waits_for_another() -> None:
    class Slow:
        def __str__(self) -> str:
            at_work.set()
            return str(go_on.wait(10))

    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    at_work, go_on, found = threading.Event(), threading.Event(), list[str]()
    slow = threading.Thread(target=lambda: found.append(template.render([{"role": "user", "content": Slow()}])))
    slow.start()
    assert at_work.wait(10)
    other = threading.Thread(target=lambda: found.append(template.render([{"role": "user", "content": "a"}])))
    other.start()
    other.join(5)
    assert found == ["a"]
    go_on.set()
    slow.join()
    other.join()
    assert found == ["a", "True"]


def test_needs_no_torch() -> None:
    script = "import sys, hookline.chat_template\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
