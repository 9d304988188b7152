"""Who may import whom.

    cli -> benchmark | serving -> engine
    engine -> scheduling | execution | checkpoint | plugins -> the five nouns -> layers -> kernels
    a plugin -> hookspecs, the five, layers, parallel, errors, kernels

Every rule is a function from modules to faults, and is tried on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.source_tree import Module, read_modules, write_tree

# Part of the engine: its modules, by name after `hookline.`. A package stands for all of its modules.
PARTS: Mapping[str, frozenset[str]] = {
    "cli": frozenset({"cli"}),
    "serving": frozenset({"serving"}),
    "benchmark": frozenset({"benchmark"}),
    "engine": frozenset(
        {
            *("engine", "loading", "manual", "output_processor", "prompt_encoder", "request_intake"),
            *("structured_output", "schema_support", "model_store", "tokenizer", "chat_template"),
        }
    ),
    "scheduling": frozenset({"scheduling"}),
    "execution": frozenset({"execution"}),
    "checkpoint": frozenset({"checkpoint"}),
    "plugins": frozenset({"plugins", "plugin_loading", "plugin_metadata"}),
    "nouns": frozenset(
        {
            *("container", "layer_container", "parameter_base", "declarations", "parameters"),
            *("model", "weight_adapter", "memory_planner", "batch_processor"),
        }
    ),
    "layers": frozenset({"layers"}),
    "basics": frozenset({"errors", "config", "parallel", "sampling_params", "hookspecs", "grammar", "parsers"}),
}
_RUNTIME = frozenset({"scheduling", "execution", "checkpoint", "plugins"})
_BELOW = frozenset({"nouns", "layers", "kernels", "basics"})
ARROWS: Mapping[str, frozenset[str]] = {
    "cli": frozenset({"benchmark", "serving", "engine"}) | _RUNTIME | _BELOW,
    "serving": frozenset({"engine", "scheduling", "plugins", "basics"}),
    "benchmark": frozenset({"engine"}) | _RUNTIME | _BELOW,
    "engine": _RUNTIME | _BELOW,
    "scheduling": frozenset({"basics"}),
    "execution": frozenset({"scheduling"}) | _BELOW,
    "checkpoint": _BELOW,
    "plugins": _BELOW,
    "nouns": frozenset({"layers", "kernels", "basics"}),
    "layers": frozenset({"kernels", "basics"}),
    "basics": frozenset(),
}
# Names of types that annotations need; the modules are not imported when the engine runs.
TYPE_ARROWS: Mapping[str, frozenset[str]] = {
    "nouns": frozenset({"scheduling"}),  # a batch processor takes the scheduler's batch
    "layers": frozenset({"nouns"}),  # attention takes the model's batch
    "basics": frozenset({"nouns"}),  # the hooks answer with them
}
# What a plugin may import beside its own modules and the kernels.
OPEN_TO_PLUGINS = frozenset(
    {
        *("hookspecs", "errors", "parallel"),
        *("container", "model", "weight_adapter", "memory_planner", "batch_processor"),
        "parameters",  # templates of parameters: part of `container`, in a file of their own
        *("grammar", "parsers.contract"),  # what parsers of tool calls and reasoning are
        *("parsers.constraint", "parsers.scanning", "parsers.think"),  # what they may be made of
        "config",  # the type of `engine_config`, which the hooks hand to a plugin
    }
)
# Imported before anything is decided: they must stay light, whatever they import in turn.
LIGHT = ("hookline.scheduling", "hookline.hookspecs", "hookline.plugins", "hookline.cli.main")
HEAVY = frozenset({"torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "gguf"})
# Words that look like an architecture's name and are none: tools, and names of tokenizers in the GGUF format.
TOOLS = re.compile(r"llama\.cpp|llama-gguf-split|AutoModelForCausalLM")
TOKENIZER_NAMES = "core/checkpoint/gguf_tokenizer.py"

MUTABLE_TYPES = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
MUTABLE_TYPES |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
MUTATING = {"append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard"}
MUTATING |= {"sort", "reverse", "appendleft", "popleft", "extendleft"}

Modules = Mapping[str, Module]
Rule = Callable[[Modules], Iterator[str]]


def part_of(name: str) -> str | None:
    """The part of a module: one of `PARTS`, `kernels`, `public` for the package itself, or `plugin <package>`."""
    package, _, rest = name.partition(".")
    if package == "hookline_kernels":
        return "kernels"
    if package.startswith("hookline_"):
        return f"plugin {package}"
    if not rest:
        return "public"
    first = rest.partition(".")[0]
    return next((part for part, members in PARTS.items() if first in members), None)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "hookline" or name.startswith("hookline_")


def arrow_faults(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        part = part_of(module.name)
        if part is None:
            yield f"{module.path}: give the module a place in PARTS of {Path(__file__).name}"
            continue
        for target in module.imports:
            if is_ours(target.target):
                reason = _forbidden(module.name, part, target.target, type_only=target.type_only)
                if reason:
                    yield f"{module.path}:{target.line} imports {target.target}: {reason}"


def _forbidden(name: str, part: str, target: str, *, type_only: bool) -> str:
    """Why module `name` of `part` may not import `target`; "" if it may."""
    other = part_of(target)
    if other is None:
        return f"it has no place in PARTS of {Path(__file__).name}"
    if part.startswith("plugin "):
        if other == "kernels" or other == part or other == "layers":
            return ""
        if other.startswith("plugin "):
            return "a plugin imports no other plugin"
        return "" if target.removeprefix("hookline.") in OPEN_TO_PLUGINS else "it is not open to plugins"
    if other.startswith("plugin "):
        return "the engine knows no plugin by name"
    if part == "kernels":
        return "" if other == "kernels" else "kernels import nothing of the engine"
    if part == "public":
        return ""
    if other == "public":
        return "" if name == "hookline.cli.main" else "import the module that has it, not the package"
    if other == part or other in ARROWS[part] or (type_only and other in TYPE_ARROWS.get(part, frozenset())):
        return ""
    return f"{part} may not import {other}" + (
        "" if type_only or other not in TYPE_ARROWS.get(part, ()) else " but for types"
    )


def foreign_faults(modules: Modules) -> Iterator[str]:
    """Kernels use torch and triton, scheduling the standard library alone."""
    allowed = {"kernels": {"torch", "triton"}, "scheduling": set[str]()}
    for module in modules.values():
        part = part_of(module.name) or ""
        for target in module.imports:
            top = target.target.partition(".")[0]
            if part in allowed and not is_ours(top) and top not in sys.stdlib_module_names | allowed[part]:
                yield f"{module.path}:{target.line} imports {top}: {part} may not"


def weight_faults(modules: Modules) -> Iterator[str]:
    """What must be imported quickly reaches nothing heavy, not even through others."""
    arch = [name for name in modules if name.endswith(".arch") and name.startswith("hookline_")]
    light = [name for name in modules if any(name == root or name.startswith(f"{root}.") for root in LIGHT)]
    for start in [*light, *arch]:
        for path in _paths_to_heavy(modules, start):
            yield f"{modules[start].path} must import nothing heavy, but: {' -> '.join(path)}"


def _paths_to_heavy(modules: Modules, start: str) -> Iterator[list[str]]:
    paths, pending = {start: [start]}, [start]
    while pending:
        name = pending.pop()
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        targets = [item.target for item in modules[name].imports if not item.type_only and not item.lazy]
        for target in [*targets, *parents]:
            if target.partition(".")[0] in HEAVY:
                yield [*paths[name], target]
            elif target in modules and target not in paths:
                paths[target] = [*paths[name], target]
                pending.append(target)


def circle_faults(modules: Modules) -> Iterator[str]:
    """Imports inside functions count, those for types do not: a circle that is only put off is one still."""
    edges = {
        name: sorted({item.target for item in module.imports if not item.type_only and item.target in modules})
        for name, module in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in edges[name]:
                yield from visit(target, [*path, name])
            done.add(name)

    for name in edges:
        yield from visit(name, [])


def architecture_faults(modules: Modules) -> Iterator[str]:
    """No name of a model family in core's code: only docstrings may give one as an example."""
    families = {
        part.split()[1].removeprefix("hookline_")
        for name in modules
        if (part := part_of(name) or "").startswith("plugin ")
    }
    families |= {"llama", "mistral"}
    pattern = re.compile(rf"\b({'|'.join(sorted(families))})\b|\w+ForCausalLM", re.IGNORECASE)
    for module in modules.values():
        if module.name.partition(".")[0] != "hookline" or module.path == TOKENIZER_NAMES:
            continue
        docstrings = {id(text) for text in _docstrings(module.tree)}
        for node in ast.walk(module.tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in docstrings and pattern.search(TOOLS.sub("", text)):
                yield f"{module.path}:{getattr(node, 'lineno', 0)} names an architecture: {text!r:.80}"


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def state_faults(modules: Modules) -> Iterator[str]:
    """A mutable value of a module is a constant: named as one, and changed by nobody; `global` is banned.

    Ruff's RUF012 says the same of classes.
    """
    constants: set[tuple[str, str]] = set()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                yield f"{module.path}:{node.lineno} global {', '.join(node.names)}: no mutable module state"
        for name, line, is_final in _mutable_values(module.tree.body):
            if not (is_final or re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__\w+__", name)):
                yield f"{module.path}:{line} {name} is mutable: make it a constant, or pass it"
            constants.add((module.name, name))
    for module in modules.values():
        yield from _mutations(module, constants)


def _mutable_values(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int, bool]]:
    """Name, line and whether it is `Final`, of each mutable value that `body` assigns."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _mutable_values([node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)])
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            final = isinstance(statement, ast.AnnAssign) and "Final" in ast.unparse(statement.annotation)
            if _is_mutable(statement.value):
                yield from ((t.id, statement.lineno, final) for t in targets if isinstance(t, ast.Name))


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        return ast.unparse(called).rpartition(".")[2] in MUTABLE_TYPES
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _mutations(module: Module, constants: set[tuple[str, str]]) -> Iterator[str]:
    local = {name for owner, name in constants if owner == module.name}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            local |= {a.asname or a.name for a in node.names if (node.module or "", a.name) in constants}
    for node in ast.walk(module.tree):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.AugAssign):
            changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
            if node in module.tree.body:  # a constant that is put together in two lines
                changed = []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            changed = [node.func.value]
        for value in changed:
            if isinstance(value, ast.Name) and value.id in local and not _is_shadowed(module.tree, value):
                yield f"{module.path}:{value.lineno} changes {value.id}, a value of a module"


def _is_shadowed(tree: ast.Module, use: ast.Name) -> bool:
    """Whether the function around `use` has a variable of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(child is use for child in ast.walk(node)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if use.id in stored | {argument.arg for argument in arguments}:
                return True
    return False


def environment_faults(modules: Modules) -> Iterator[str]:
    """The environment is read in core/config.py alone."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for module in modules.values():
        if module.name == "hookline.config":
            continue
        for node in ast.walk(module.tree):
            read = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            taken = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
            if read or taken:
                yield f"{module.path}:{getattr(node, 'lineno', 0)} reads the environment; take it from core/config.py"


RULES: tuple[Rule, ...] = (
    arrow_faults,
    foreign_faults,
    weight_faults,
    circle_faults,
    architecture_faults,
    state_faults,
    environment_faults,
)


@cache
def real_modules() -> Modules:
    return read_modules()


def test_the_walk_finds_the_source() -> None:
    parts = {part_of(name) for name in real_modules()}
    assert {"engine", "scheduling", "nouns", "layers", "basics", "kernels", "plugin hookline_llama"} <= parts
    assert sum(len(module.imports) for module in real_modules().values()) > 200


def test_the_parts_name_what_is_there() -> None:
    there = {name.split(".")[1] for name in real_modules() if name.startswith("hookline.")}
    named = {member for members in PARTS.values() for member in members}
    assert named - there <= {"serving"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    faults = list(rule(real_modules()))
    assert not faults, "\n".join(faults)


# A tree in which every rule holds; each case adds or replaces files, and must be found out.
SOUND = {
    "core/__init__.py": "",
    "core/errors.py": "",
    "core/config.py": "import os\nfrom hookline.errors import E\nCACHE = os.environ.get('X')\n",
    "core/hookspecs.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hookline.model import Model\n",
    "core/model.py": "import torch\nfrom hookline.errors import E\nfrom hookline_kernels.norm import norm\n",
    "core/layers/__init__.py": "",
    "core/layers/mlp.py": "from hookline_kernels.norm import norm\n",
    "core/scheduling/__init__.py": "",
    "core/scheduling/scheduler.py": "from collections import deque\nfrom hookline.errors import E\n",
    "core/execution/runner.py": "from hookline.scheduling.scheduler import S\nfrom hookline.model import Model\n",
    "core/plugins.py": "from hookline.config import CACHE\n",
    "core/engine.py": "from hookline.execution.runner import Runner\nTABLE = {'a': 1}\n",
    "core/cli/main.py": "def run() -> None:\n    from hookline.engine import Engine\n",
    "kernels/__init__.py": "",
    "kernels/norm.py": "import torch\nimport triton\nimport math\n",
    "plugins/alpha/hookline_alpha/arch.py": (
        "from hookline.hookspecs import hookimpl\ndef build() -> None:\n    import hookline_alpha.model\n"
    ),
    "plugins/alpha/hookline_alpha/model.py": "from hookline.layers.mlp import mlp\nfrom hookline.model import Model\n",
    "plugins/beta/hookline_beta/arch.py": "from hookline.hookspecs import hookimpl\n",
}
UPWARD = "layers may not import nouns"
BROKEN = [
    ("arrow", "core/layers/mlp.py", "from hookline.model import Model\n", UPWARD),
    ("arrow", "core/layers/mlp.py", "def f() -> None:\n    import hookline.model\n", UPWARD),
    ("arrow", "core/layers/mlp.py", "from hookline import model\n", UPWARD),
    ("arrow", "core/layers/mlp.py", "from ..model import Model\n", UPWARD),
    ("arrow", "core/model.py", "from hookline.engine import Engine\n", "nouns may not import engine"),
    ("arrow", "core/plugins.py", "import hookline.execution.runner\n", "plugins may not import execution"),
    ("arrow", "core/scheduling/scheduler.py", "from hookline.model import M\n", "scheduling may not import nouns"),
    ("arrow", "core/serving/app.py", "from hookline.execution.runner import R\n", "serving may not import execution"),
    ("arrow", "core/engine.py", "from hookline.cli.main import run\n", "engine may not import cli"),
    ("arrow", "core/engine.py", "from hookline_alpha.model import A\n", "knows no plugin by name"),
    ("arrow", "core/errors.py", "from hookline import Engine\n", "not the package"),
    ("arrow", "core/helpers.py", "", "place in PARTS"),
    ("arrow", "kernels/norm.py", "from hookline.errors import E\n", "kernels import nothing of the engine"),
    ("arrow", "plugins/alpha/hookline_alpha/model.py", "import hookline_beta.arch\n", "no other plugin"),
    ("arrow", "plugins/alpha/hookline_alpha/model.py", "from hookline.engine import Engine\n", "not open to plugins"),
    ("arrow", "plugins/alpha/hookline_alpha/model.py", "from hookline.cli.main import run\n", "not open to plugins"),
    ("foreign", "kernels/norm.py", "import numpy\n", "imports numpy"),
    ("foreign", "core/scheduling/scheduler.py", "from torch import Tensor\n", "imports torch"),
    (
        "foreign",
        "core/scheduling/scheduler.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "imports torch",
    ),
    ("weight", "core/errors.py", "import torch\n", "core/scheduling/scheduler.py must import nothing heavy"),
    ("weight", "core/__init__.py", "from hookline.engine import Engine\n", "core/plugins.py must import nothing heavy"),
    (
        "weight",
        "plugins/alpha/hookline_alpha/arch.py",
        "import hookline_alpha.model\n",
        "hookline_alpha.arch -> hookline_alpha.model -> hookline.model -> torch",
    ),
    ("circle", "core/errors.py", "from hookline.config import CACHE\nfrom hookline.plugins import P\n", "->"),
    ("circle", "core/errors.py", "def f() -> None:\n    import hookline.model\n", "hookline.model -> hookline.errors"),
    ("architecture", "core/engine.py", "if name == 'LlamaForCausalLM':\n    pass\n", "names an architecture"),
    ("architecture", "core/engine.py", "KIND = 'for mistral only'\n", "names an architecture"),
    ("state", "core/engine.py", "registry = {}\n", "registry is mutable"),
    ("state", "core/engine.py", "if True:\n    seen: list[int] = []\n", "seen is mutable"),
    ("state", "core/engine.py", "from collections import defaultdict\nseen = defaultdict(list)\n", "seen is mutable"),
    ("state", "core/engine.py", "TABLE = {}\ndef f() -> None:\n    TABLE['a'] = 1\n", "changes TABLE"),
    ("state", "core/engine.py", "TABLE = []\ndef f() -> None:\n    TABLE.append(1)\n", "changes TABLE"),
    ("state", "core/cli/main.py", "from hookline.engine import TABLE as T\nT.update(b=1)\n", "changes T"),
    ("state", "core/engine.py", "x = 0\ndef f() -> None:\n    global x\n    x = 1\n", "global x"),
    ("environment", "core/engine.py", "import os\nx = os.environ['A']\n", "reads the environment"),
    ("environment", "kernels/norm.py", "import os\nx = os.getenv('A')\n", "reads the environment"),
    ("environment", "plugins/alpha/hookline_alpha/model.py", "from os import environ\n", "reads the environment"),
]


def rule_named(name: str) -> Rule:
    return next(rule for rule in RULES if rule.__name__ == f"{name}_faults")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_passes_a_sound_tree(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(read_modules(write_tree(tmp_path, SOUND)))) == []


@pytest.mark.parametrize(("rule", "path", "source", "message"), BROKEN)
def test_rule_finds_a_fault(rule: str, path: str, source: str, message: str, tmp_path: Path) -> None:
    faults = list(rule_named(rule)(read_modules(write_tree(tmp_path, SOUND | {path: source}))))
    assert any(message in fault for fault in faults), faults


def test_a_type_is_imported_upward_where_the_table_says_so(tmp_path: Path) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hookline.{} import X\n"
    sound = SOUND | {"core/layers/mlp.py": source.format("model")}
    assert list(arrow_faults(read_modules(write_tree(tmp_path, sound)))) == []
    broken = SOUND | {"core/layers/mlp.py": source.format("engine")}
    assert list(arrow_faults(read_modules(write_tree(tmp_path, broken))))


def test_a_local_variable_may_have_the_name_of_a_constant(tmp_path: Path) -> None:
    sound = SOUND | {"core/engine.py": "TABLE = {}\ndef f(TABLE: dict) -> None:\n    TABLE['a'] = 1\n"}
    assert list(state_faults(read_modules(write_tree(tmp_path, sound)))) == []
