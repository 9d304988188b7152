"""The repository as the tests of its source see it: which files there are, and who imports whom."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Not of the project: made by tools, and named in .gitignore as well.
_MADE = {"__pycache__", "build", "dist"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module.

    Attributes:
        target: its dotted name; of `from package import name` it is `package.name` where that is a module of ours.
        line: where.
        type_only: under `if TYPE_CHECKING`.
        lazy: inside a function, so that importing the module does not import the target.
    """

    target: str
    line: int
    type_only: bool
    lazy: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file of ours: `name` as it is imported, `path` from the root."""

    name: str
    path: str
    tree: ast.Module
    imports: tuple[Import, ...]


def read_modules(root: Path = ROOT) -> dict[str, Module]:
    """Every module of core/, kernels/ and plugins/ under `root`, by name."""
    packages = [(root / "core", "hookline"), (root / "kernels", "hookline_kernels")]
    packages += [(folder, folder.name) for folder in sorted(root.glob("plugins/*/hookline_*")) if folder.is_dir()]
    files: dict[str, Path] = {}
    for folder, package in packages:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join([package, *(part for part in parts if part != "__init__")])] = path
    modules = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imports = tuple(_imports(tree, package, files, type_only=False, lazy=False))
        modules[name] = Module(name, path.relative_to(root).as_posix(), tree, imports)
    return modules


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes a small tree for a rule to be tried on."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def project_files(root: Path = ROOT) -> tuple[str, ...]:
    """Every file that is, or would be, in the repository, from the root; links are followed by nobody."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and (root / ".git").exists():
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    return tuple(sorted(name for name in names if (root / name).is_file() and not _is_made(name)))


def _is_made(name: str) -> bool:
    parts = name.split("/")
    hidden = parts[0].startswith(".") and parts[0] not in (".ci", ".gitignore")
    return hidden or any(part in _MADE or part.endswith(".egg-info") for part in parts)


def is_type_checking(test: ast.expr) -> bool:
    """Whether an `if` is the one that only type checkers enter."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(
    node: ast.AST, package: str, known: Mapping[str, Path], *, type_only: bool, lazy: bool
) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, type_only, lazy)
    elif isinstance(node, ast.ImportFrom):
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        base = ".".join(part for part in (above, node.module) if part)
        targets = {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
        for target in sorted(targets):
            yield Import(target, node.lineno, type_only, lazy)
    elif isinstance(node, ast.If) and is_type_checking(node.test):
        for guarded in node.body:
            yield from _imports(guarded, package, known, type_only=True, lazy=lazy)
        for other in node.orelse:
            yield from _imports(other, package, known, type_only=type_only, lazy=lazy)
    else:
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, known, type_only=type_only, lazy=inside)
