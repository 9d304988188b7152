"""What the source may not contain, whatever it does: each rule is a function from a file to faults.

Every rule is tried on a piece of source that breaks it and on one that does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_tree import ROOT, project_files

Rule = Callable[[str, ast.Module], Iterator[str]]

SERIALISERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# What passes objects between processes pickles them.
SERIALISERS |= {"multiprocessing", "torch.multiprocessing"}
# What unpickles, or runs text as code; `yaml.safe_load` is another name.
DANGEROUS = {"torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}
DANGEROUS |= {"torch.serialization.load", "torch.serialization.save", "torch.jit.load", "torch.hub.load"}
IMPORTERS = {"__import__", "import_module", "importlib.import_module"}
DANGEROUS_NAMES = {"ProcessPoolExecutor"}
DANGEROUS_NAMES |= {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
DANGEROUS_NAMES |= {"send_object_list", "recv_object_list", "recv_pyobj", "send_pyobj"}
DANGEROUS_OPTIONS = {"trust_remote_code", "allow_pickle"}

# One word a thing: these have another name here.
VOCABULARY = {
    "request": ("sequence", "sequences", "seq", "seqs", "job", "jobs"),
    "prefill": ("extend", "extends"),
    "block": ("page", "pages"),
    "step": ("iteration", "iterations", "tick", "ticks"),
    "draft or propose": ("guess", "guesses"),
    "rank or group": ("world",),
    "reference": ("naive", "golden"),
    "encoding": ("quant",),
    "the thing that it is about": ("util", "utils", "helper", "helpers", "misc"),
}
# A type of Python's, and the verb of its lists.
OTHER_MEANINGS = {"Sequence", "extend"}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150

# Put together from parts, so that this file does not hold what it looks for.
PLACES = re.compile(r"(?<![\w.~$}])/(?:" + "|".join(("work", "root", "tmp", "home", "Users")) + r")/")
REGISTRIES = re.compile(
    "|".join(
        re.escape(".".join(parts))
        for parts in (("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org"), ("npmjs", "org"))
    )
)


def serialiser_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """No format that can run code when it is read."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            names = [str(given.value) for given in node.args if isinstance(given, ast.Constant)]
        for name in names:
            if name.partition(".")[0] in SERIALISERS or name in SERIALISERS:
                yield f"{path}:{line_of(node)} imports {name}: use JSON, safetensors or raw bytes"


def dangerous_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """Nothing that unpickles or runs text is named, called or not, under whatever name it is imported."""
    imported = _imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            head, *rest = _dotted(node)
            name = ".".join([imported.get(head, head), *rest]).removeprefix("builtins.")
            if name in DANGEROUS:
                yield f"{path}:{node.lineno} uses {name}"
        if isinstance(node, ast.Call):
            for option in node.keywords:
                is_off = isinstance(option.value, ast.Constant) and option.value.value is False
                if option.arg in DANGEROUS_OPTIONS and not is_off:
                    yield f"{path}:{node.lineno} passes {option.arg}: a checkpoint's own code is never run"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in DANGEROUS or alias.name in DANGEROUS_NAMES:
                    yield f"{path}:{node.lineno} imports {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in DANGEROUS_NAMES:
            yield f"{path}:{node.lineno} uses {node.attr}, which pickles"


def _dotted(node: ast.expr) -> list[str]:
    """The parts of `a.b.c`; "" stands for what is no name, such as a call."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What a name that is imported stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            found.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    return found


def assert_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """Guards must hold under `python -O`, so they raise; jitted kernels may assert."""
    jitted = {id(node) for kernel in ast.walk(tree) if is_jitted(kernel) for node in ast.walk(kernel)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and id(node) not in jitted:
            yield f"{path}:{node.lineno} asserts: raise an error that says what to do"


def swallowed_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """What is caught is handled; a bare `except` would also catch an interrupt."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{path}:{node.lineno} catches everything: name the errors"
            if all(_does_nothing(statement) for statement in node.body):
                yield f"{path}:{node.lineno} swallows an error: handle it, or let it go"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            broad = [name for name in map(ast.unparse, node.args) if name in ("Exception", "BaseException")]
            if broad:
                yield f"{path}:{node.lineno} suppresses every {broad[0]}: name the errors"


def stderr_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """Commands tell by the one function for which a stderr that cannot be written is no error."""
    own = path == "core/cli/render.py"
    for node in [] if own else ast.walk(tree):
        if isinstance(node, ast.Call) and any(option.arg == "err" for option in node.keywords):
            yield f"{path}:{node.lineno} writes on stderr by itself: use hookline.cli.render.tell"


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def vocabulary_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """No name of ours has a word that stands for something else; names of other libraries may be used."""
    names = [(part.removesuffix(".py"), 1) for part in path.split("/")[1:]]
    names += [(name, line) for name, line in _defined_names(tree) if name not in OTHER_MEANINGS]
    for name, line in sorted(set(names), key=lambda found: found[1]):
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        for right, banned in VOCABULARY.items():
            for word in sorted(words & set(banned)):
                yield f"{path}:{line} calls something {name}: {word!r} is {right} here"


def _defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def length_faults(path: str, tree: ast.Module) -> Iterator[str]:
    """Short files and functions; a function's docstring counts, its decorators do not."""
    last = max((node.end_lineno or 0 for node in tree.body), default=0)
    if last > MAX_FILE_LINES:
        yield f"{path} has {last} lines, more than {MAX_FILE_LINES}: what in it is a thing of its own?"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = MAX_KERNEL_LINES if is_jitted(node) else MAX_FUNCTION_LINES
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > limit:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines, more than {limit}"


def is_jitted(node: ast.AST) -> bool:
    """Whether a function is a Triton kernel."""
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)


def line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def text_faults(path: str, text: str) -> Iterator[str]:
    """No place of one machine, and no registry that the ordinary tools do not choose themselves."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := PLACES.search(line):
            yield f"{path}:{number} names a folder of one machine: {found[0]}"
        if found := REGISTRIES.search(line):
            yield f"{path}:{number} names a package registry, which the user's pip settings choose: {found[0]}"


SOURCE_RULES: tuple[Rule, ...] = (
    serialiser_faults,
    dangerous_faults,
    assert_faults,
    swallowed_faults,
    stderr_faults,
    vocabulary_faults,
)


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def python_files(*folders: str) -> tuple[str, ...]:
    return tuple(path for path in project_files() if path.endswith(".py") and path.split("/")[0] in folders)


@pytest.mark.parametrize("rule", SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: Rule) -> None:
    files = python_files("core", "kernels", "plugins")
    assert len(files) > 40
    faults = [fault for path in files for fault in rule(path, parsed(path))]
    assert not faults, "\n".join(faults)


def test_files_and_functions_are_short() -> None:
    files = python_files("core", "kernels", "plugins", "benchmarks", "tests")
    faults = [fault for path in files for fault in length_faults(path, parsed(path))]
    assert not faults, "\n".join(faults)


def test_no_file_names_a_machine_or_a_registry() -> None:
    faults: list[str] = []
    for path in project_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # no text
        faults += text_faults(path, text)
    assert not faults, "\n".join(faults)


BROKEN = [
    (serialiser_faults, "import pickle"),
    (serialiser_faults, "def f():\n    from dill import loads"),
    (serialiser_faults, "import marshal as m"),
    (serialiser_faults, "__import__('pickle')"),
    (serialiser_faults, "importlib.import_module('dill.source')"),
    (serialiser_faults, "from torch.multiprocessing import Queue"),
    (dangerous_faults, "run = eval"),
    (dangerous_faults, "import torch as t\nt.load('a.bin')"),
    (dangerous_faults, "from torch.serialization import load"),
    (dangerous_faults, "from yaml import load as read\nread(text)"),
    (dangerous_faults, "torch.hub.load(x)"),
    (dangerous_faults, "concurrent.futures.ProcessPoolExecutor()"),
    (dangerous_faults, "torch.load('a.bin')"),
    (dangerous_faults, "from torch import load"),
    (dangerous_faults, "eval('1')"),
    (dangerous_faults, "builtins.exec('1')"),
    (dangerous_faults, "yaml.load(text)"),
    (dangerous_faults, "torch.distributed.broadcast_object_list(x)"),
    (dangerous_faults, "from torch.distributed import all_gather_object"),
    (dangerous_faults, "socket.recv_pyobj()"),
    (dangerous_faults, "AutoConfig.from_pretrained(x, trust_remote_code=True)"),
    (dangerous_faults, "AutoConfig.from_pretrained(x, trust_remote_code=flag)"),
    (dangerous_faults, "np.load(x, allow_pickle=True)"),
    (assert_faults, "def f(x):\n    assert x > 0"),
    (swallowed_faults, "try:\n    f()\nexcept ValueError:\n    pass"),
    (swallowed_faults, "try:\n    f()\nexcept ValueError:\n    ..."),
    (swallowed_faults, "try:\n    f()\nexcept:\n    g()"),
    (swallowed_faults, "with suppress(Exception):\n    f()"),
    (stderr_faults, "click.echo(x, err=True)"),
    (vocabulary_faults, "page_table = 1"),
    (vocabulary_faults, "class SequenceGroup: ..."),
    (vocabulary_faults, "def f(max_seqs): ..."),
    (vocabulary_faults, "def attention_naive(): ..."),
    (vocabulary_faults, "self.world_size = 1"),
    (length_faults, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (length_faults, "@triton.jit\ndef f():\n" + "    x = 1\n" * MAX_KERNEL_LINES),
    (length_faults, "x = 1\n" * (MAX_FILE_LINES + 1)),
]
SOUND = [
    (serialiser_faults, "import json\nfrom safetensors import safe_open"),
    (dangerous_faults, "model.eval()\nyaml.safe_load(x)\njson.load(x)\nf(trust_remote_code=False)"),
    (assert_faults, "@triton.jit\ndef kernel(x):\n    assert x > 0"),
    (swallowed_faults, "try:\n    f()\nexcept ValueError:\n    x = None\nwith suppress(FileNotFoundError):\n    g()"),
    (stderr_faults, "click.echo(x)\ntell(y)"),
    (vocabulary_faults, "from collections.abc import Sequence\nx: Sequence[int] = paged(y)\nz.extend(x)"),
    (length_faults, "@triton.jit\ndef f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)),
]


@pytest.mark.parametrize(("rule", "source"), BROKEN)
def test_rule_finds_a_fault(rule: Rule, source: str) -> None:
    assert list(rule("core/a.py", ast.parse(source)))


@pytest.mark.parametrize(("rule", "source"), SOUND)
def test_rule_passes_sound_source(rule: Rule, source: str) -> None:
    assert list(rule("core/a.py", ast.parse(source))) == []


def test_a_file_is_named_in_our_words_too() -> None:
    assert list(vocabulary_faults("core/page_pool.py", ast.parse("")))
    assert list(vocabulary_faults("core/utils/text.py", ast.parse("")))


@pytest.mark.parametrize("folder", ["work", "root", "tmp", "home"])
def test_a_place_of_one_machine_is_found(folder: str) -> None:
    assert list(text_faults("a.md", f"see /{folder}/me/model"))
    assert list(text_faults("a.py", f'open("/{folder}/me")'))
    assert not list(text_faults("a.md", f"a link to docs/{folder}/me, and $HOME/{folder}/me"))


@pytest.mark.parametrize("host", ["pypi", "files.pythonhosted", "conda.anaconda"])
def test_a_registry_is_found(host: str) -> None:
    assert list(text_faults("Makefile", f"pip install -i https://{host}.org/simple x"))


def test_the_walk_sees_new_files_but_no_rubbish(tmp_path: Path) -> None:
    for name in ("core/a.py", "core/__pycache__/a.pyc", "hookline.egg-info/PKG-INFO", ".venv/x.py", ".ci/run"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert project_files(tmp_path) == (".ci/run", "core/a.py")
