"""Renders a checkpoint's chat template, which is a program by a stranger, in a sandbox with limits.

The sandbox is Jinja's immutable one, with what the hub's templates use: loop controls, `raise_exception`,
`strftime_now`, a `tojson` that does not escape HTML, and `{% generation %}`, which does nothing here. No loader, and no
way to another file. Every loop pass, call, filter and text operation is counted against a budget of steps, processor
time and characters, and what an operation would grow to is known before it runs.
"""

from __future__ import annotations

import difflib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, Undefined, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from hookline.errors import InvalidRequestError, ModelConfigError

MAX_TEMPLATE_BYTES = 512 * 1024
MAX_TEXT = 8 * 2**20
_MAX_TOTAL_TEXT = 16 * MAX_TEXT
_MAX_STEPS = 1_000_000
_MAX_SECONDS = 0.8
_MAX_INT_BITS = 4096
_MAX_INDENT = 64
_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_LEFT_OUT = ("pprint", "urlize", "xmlattr", "random", "wordwrap", "filesizeformat")
_NO_TEXT = frozenset(
    {
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
        *("last", "length", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr"),
        *("slice", "sort", "sum", "unique"),
    }
)


class _LimitError(TemplateError):
    """The template ran into a limit on time, steps or numbers."""


class _TextLimitError(TemplateError):
    """The template made too much text."""


class _Budget:
    """What one rendering may still use. Processor time, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self._steps = _MAX_STEPS
        self._text = _MAX_TOTAL_TEXT
        self._deadline = time.thread_time() + _MAX_SECONDS

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0 or time.thread_time() > self._deadline:
            raise _LimitError(f"it takes more than {_MAX_STEPS:,} steps or {_MAX_SECONDS:g} s")

    def text(self, size: int) -> None:
        """Takes `size` characters that are about to be made."""
        self._text -= size
        if size > MAX_TEXT or self._text < 0:
            raise _TextLimitError(f"it makes a text of more than {MAX_TEXT:,} characters")


class _Hooks(Extension):
    """Targets of the calls that `_Watch` writes into the template, and the `generation` tag."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def count(self) -> None:
        """Nothing: the sandbox counts the call."""

    def concat(self, *parts: object) -> str:
        size = sum(_printed(part) for part in parts)
        budget: _Budget = self.environment.budget  # type: ignore[attr-defined]
        budget.text(size)
        return "".join(map(str, parts))


class _Watch(NodeTransformer):
    """Makes every loop pass and every `~` a call, which the sandbox then counts."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks = hooks

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        count = self._hooks.call_method("count", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._hooks.call_method("concat", node.nodes, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        extensions = (_Hooks, LoopControlExtension)
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self._renderings = threading.local()
        self.budget = _Budget()
        self.finalize = self._finalize
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        kept = {name: run for name, run in self.filters.items() if name not in _LEFT_OUT}
        kept["tojson"] = _to_json
        self.filters = {name: self._watched(name, run) for name, run in kept.items()}

    @property
    def budget(self) -> _Budget:
        """Of the rendering that this thread is at; others go on beside it."""
        budget: _Budget = self._renderings.budget
        return budget

    @budget.setter
    def budget(self, budget: _Budget) -> None:
        self._renderings.budget = budget

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, int | float) or (isinstance(obj, str) and attr in ("translate", "maketrans", "encode")):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.step()
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]),)
            __self.budget.text(_grown(method.__name__, owner, [*args, *kwargs.values()]))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        if operator == "%" and isinstance(left, str):
            self.budget.text(_grown("format", left, list(right) if isinstance(right, tuple) else [right]))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise _LimitError(f"it makes a number of more than {_MAX_INT_BITS} bits")
        elif operator == "*":
            sizes = [value if isinstance(value, int) else _length(value) for value in (left, right)]
            self.budget.text(max(sizes[0] * sizes[1], 0))
        elif operator == "+":
            self.budget.text(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a macro, a block or the template puts out."""
        kept, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_TEXT:
                break
            kept.append(part)
        self.budget.text(size)
        return "".join(kept)

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.budget.text(_printed(value))
        return value

    def _watched(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, counted. Its value is the first argument that is no part of Jinja's own state."""
        own = 1 if hasattr(run, "jinja_pass_arg") else 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            value, options = args[own], [*args[own + 1 :], *kwargs.values()]
            if any(isinstance(option, int) and abs(option) > MAX_TEXT for option in options):
                raise _LimitError(f"the filter {name} has a number above {MAX_TEXT:,}")
            if name == "sum" and any(isinstance(option, list | tuple) for option in options):
                raise _LimitError("the filter sum adds lists")
            if name == "join":
                value = list(value)
                args = (*args[:own], value, *args[own + 1 :])
                self.budget.text(_printed(value) + len(value) * sum(map(_length, options)))
            elif name == "list":
                self.budget.text(_length(value))
            elif name not in _NO_TEXT:
                self.budget.text(_printed(value))
                if isinstance(value, str):
                    self.budget.text(_grown(name, value, options))
            return run(*args, **kwargs)

        if own:
            watched.jinja_pass_arg = run.jinja_pass_arg  # type: ignore[attr-defined]
        return watched


class ChatTemplate:
    """A chat template, ready to render.

    Args:
        source: Jinja source, from the checkpoint.
        special_tokens: `bos_token`, `eos_token` and so on to their texts.

    Raises:
        ModelConfigError: if the source is too large, is no template, or asks for another file.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise ModelConfigError(f"chat_template has {size:,} bytes; at most {MAX_TEMPLATE_BYTES:,} are allowed")
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = _Sandbox()
        try:
            tree = self._sandbox.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - {
                *("messages", "add_generation_prompt", "continue_final_message"),
                *(*self._sandbox.globals, *self._special_tokens),
            }
            if next(tree.find_all(_FILES), None) is not None:
                raise TemplateError("it asks for another file, and there is none")
            hooks = self._sandbox.extensions[_Hooks.identifier]
            code = self._sandbox.compile(_Watch(hooks).visit(tree))  # type: ignore[arg-type]
            self._template = Template.from_code(self._sandbox, code, self._sandbox.make_globals(None))
        except Exception as error:
            raise ModelConfigError(f"chat_template is no sound template: {_say(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of the conversation.

        Args:
            messages: each with a `role`, and what else the template reads.
            add_generation_prompt: end with what opens the assistant's turn.
            continue_final_message: end with the text of the last message's content, as `apply_chat_template` of
                transformers does, with `add_generation_prompt` false.
            variables: what else the template reads, such as `tools` or `enable_thinking`.

        Raises:
            InvalidRequestError: if the template refuses the messages or has no such variable, or if the last message
                cannot be continued: it has no text, or not as the template shows it.
            ModelConfigError: if the template does what it must not, or does not come to an end.
        """
        _check_messages(messages)
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables)
        opened, text, mark = _marked(messages)
        return _cut_at(mark, self._render(opened, add_generation_prompt, variables), text)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        for name in variables:
            if name not in self.variables and name not in ("tools", "documents"):
                raise _unknown_variable(name, self.variables)
        given = {"tools": None, "documents": None, **variables, **self._special_tokens}
        given.update(messages=messages, add_generation_prompt=add_generation_prompt)
        self._sandbox.budget = _Budget()
        try:
            return self._sandbox.concat(self._template.root_render_func(self._template.new_context(given)))
        except (SecurityError, _LimitError, OverflowError, RecursionError, MemoryError) as error:
            raise ModelConfigError(
                f"the chat template was stopped: {_say(error)}",
                hint="Use a checkpoint whose template is sound, or a raw prompt.",
            ) from error
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template does not take these messages: {_say(error)}", field="messages"
            ) from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message", field="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            hint = 'Write it as {"role": "user", "content": "..."}.'
            raise InvalidRequestError(f"message {number} has no role", field="messages", hint=hint)


def _marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str, str]:
    """The messages with a mark behind the last one's text; that text; and the mark, which no request can hold."""
    last, mark = messages[-1], f"END-{secrets.token_hex(10).upper()}"
    text = last.get("content")
    if not isinstance(text, str):
        hint = "Give its content as text, or leave continue_final_message out."
        raise InvalidRequestError("the last message has no text to continue", field="messages", hint=hint)
    # The space tells whether the template trims what it shows.
    return [*messages[:-1], {**last, "content": f"{text}{mark} "}], text, mark


def _cut_at(mark: str, rendered: str, text: str) -> str:
    """The conversation up to the mark; `text` is what stands before it as it came."""
    if mark not in rendered or text.strip() not in rendered:
        raise InvalidRequestError(
            "the last message cannot be continued: the chat template does not show its text as it is",
            field="messages",
            hint="Give text that the template leaves alone, such as none with markers of reasoning.",
        )
    before, _, after = rendered.rpartition(mark)
    before = before if after.startswith(" ") else before.rstrip()
    return before.replace(f"{mark} ", "").replace(mark, "")  # a template may show the text more than once


def _unknown_variable(name: str, known: frozenset[str]) -> InvalidRequestError:
    near = difflib.get_close_matches(name, known, n=3)
    names = " or ".join(near) if near else ", ".join(sorted(known)) or "nothing"
    hint = f"Did you mean {names}?" if near else f"It reads {names}."
    return InvalidRequestError(f"the chat template reads no {name[:80]!r}", field=name[:80], hint=hint)


def _say(error: Exception) -> str:
    text = str(error)[:1000]
    return text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}"


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(str(pattern)[:256])


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= _MAX_INDENT):
        raise _LimitError(f"tojson has an indent of {str(indent)[:20]}; at most {_MAX_INDENT} is allowed")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _printed(value: object) -> int:
    """About how many characters `str(value)` has, some more for each part; stops counting above MAX_TEXT."""
    size, rest = 0, [value]
    while rest and size <= MAX_TEXT:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item) + 8
        elif isinstance(item, Mapping):
            size += 8 + 4 * len(item)
            rest.extend(item.keys())
            rest.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            size += 8 + 2 * len(item)
            rest.extend(item)
        elif item is None or isinstance(item, bool | int | float | Undefined):
            size += 32 if not isinstance(item, int) else 2 + item.bit_length() // 3
        elif type(item).__module__.startswith("jinja2") and type(item).__name__ in ("Namespace", "Cycler"):
            raise _LimitError(f"it prints a {type(item).__name__}")
        else:
            size += 64
    return size


def _grown(operation: str, text: str, options: Sequence[Any]) -> int:
    """At most how many characters a text operation with these options makes."""
    numbers = [abs(option) for option in options if isinstance(option, int)]
    most = max(numbers, default=0)
    if operation in ("center", "ljust", "rjust", "zfill"):
        return len(text) + most
    if operation == "expandtabs":
        return len(text) + text.count("\t") * max(most, 8)
    if operation == "indent":
        widths = [most or 4, *(len(option) for option in options if isinstance(option, str))]
        return len(text) + (text.count("\n") + 1) * max(widths)
    if operation == "replace":
        old, new = (str(options[0]), str(options[1])) if len(options) > 1 else ("", "")
        return len(text) + text.count(old) * len(new)
    if operation == "join":
        return _printed(options[0]) + len(options[0]) * len(text) if options else 0
    if operation in ("format", "format_map"):
        widths = [int(digits[:12]) for digits in re.findall(r"\d{3,}", text)]
        if re.search(r"\*|:[^{}]*\{", text):
            widths.append(10**12 if most > MAX_TEXT else most)
        return len(text) + (text.count("{") + text.count("%")) * (_printed(list(options)) + max(widths, default=0))
    return len(text)
