"""README's tree is the real one, its steps are ten, and no link in the documents leads nowhere.

`python -m tests.test_readme` prints the tree as it should be: lines that README has are kept, a new file gets
the first line of its docstring. Paste it into README, and say it better.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.source_tree import ROOT, project_files

# Their folder's line speaks for them.
UNLISTED = {"__init__.py", "py.typed", ".gitignore"}
# Folders that have one line for all that is in them; tests/ has one for each folder.
CLOSED = {".ci", "src"}
INDENT = 2


def tree_lines(readme: str) -> dict[str, str]:
    """Path to description of every line of the tree: the fenced block under the heading `## The tree`."""
    block = re.search(r"^## The tree\n.*?^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        raise ValueError("README has no fenced tree under the heading '## The tree'")
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in block[1].splitlines():
        match = re.fullmatch(r"( *)(\S+)(?: +(\S.*))? *", line)
        if match is None or len(match[1]) % INDENT:
            raise ValueError(f"README's tree has an unsound line: {line!r}")
        depth = len(match[1]) // INDENT
        path = "".join([*parents[:depth], match[2]])
        if path in found:
            raise ValueError(f"README's tree has {path} twice")
        found[path] = match[3] or ""
        parents = [*parents[:depth], match[2] if match[2].endswith("/") else ""]
    return found


def expected_paths(files: Iterable[str]) -> list[str]:
    """The lines that the tree must have for these files: folders end with a slash and stand before what they hold."""
    paths: set[str] = set()
    for file in files:
        folders, name = file.split("/")[:-1], file.rpartition("/")[2]
        listed = folders[:1] if folders and folders[0] in CLOSED else folders
        paths |= {"/".join(listed[: depth + 1]) + "/" for depth in range(len(listed))}
        if name not in UNLISTED and not (folders and (folders[0] in CLOSED or folders[0] == "tests")):
            paths.add(file)
    return sorted(paths, key=_order)


def _order(path: str) -> list[tuple[bool, str]]:
    """Files before folders, each by name."""
    parts = path.rstrip("/").split("/")
    return [(depth < len(parts) - 1 or path.endswith("/"), part) for depth, part in enumerate(parts)]


def tree_faults(readme: str, files: Iterable[str]) -> list[str]:
    """What to do to README's tree: missing, extra and silent lines."""
    lines, expected = tree_lines(readme), expected_paths(files)
    faults = [f"missing: {path}" for path in expected if path not in lines]
    faults += [f"extra: {path}" for path in lines if path not in set(expected)]
    return faults + [f"says nothing: {path}" for path, text in lines.items() if not text]


def drawn_tree(known: Mapping[str, str], files: Iterable[str]) -> str:
    """The tree's text, with the descriptions of `known` and of docstrings."""
    rows = []
    for path in expected_paths(files):
        depth = path.rstrip("/").count("/")
        name = path.rstrip("/").rpartition("/")[2] + ("/" if path.endswith("/") else "")
        rows.append((" " * (INDENT * depth) + name, known.get(path) or _first_line(ROOT / path)))
    width = max(len(left) for left, _ in rows) + 2
    return "\n".join(f"{left:{width}}{right}".rstrip() for left, right in rows)


def _first_line(path: Path) -> str:
    source = path / "__init__.py" if path.is_dir() else path
    if source.suffix != ".py" or not source.exists():
        return ""
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def source_files() -> list[str]:
    """Every file of the project, and the links of src/, which git lists and the walk leaves out."""
    return [*project_files(), "src/hookline"]


def documents() -> list[str]:
    return [path for path in project_files() if path.endswith(".md")]


def link_faults(document: str, text: str, root: Path = ROOT) -> Iterator[str]:
    """Links to files, links to headings, and paths in code spans: what they name must be there."""
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    folder = (root / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = folder / path if path else root / document
        if not file.exists():
            yield f"{document} links to {target}, which is not there"
        elif anchor and anchor not in _anchors(file.read_text(encoding="utf-8")):
            yield f"{document} links to {target}, which has no such heading"
    for span in re.findall(r"`((?:core|kernels|plugins|tests|docs|benchmarks)/[\w./-]+)`", prose):
        if not (root / span).exists():
            yield f"{document} speaks of {span}, which is not there"


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def readme_text() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_tree_is_the_real_one() -> None:
    faults = tree_faults(readme_text(), source_files())
    assert not faults, "README's tree differs; `python -m tests.test_readme` prints it.\n" + "\n".join(faults)


def test_the_two_commands_come_first() -> None:
    readme = readme_text()
    first = re.search(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]
    assert "##" not in readme[: first.start()]


def test_a_request_has_ten_steps_with_links() -> None:
    section = readme_text().partition("## The ten steps of a request")[2].partition("\n## ")[0]
    steps = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    assert [number for number, text in steps if not re.search(r"\]\((core|plugins)/", text)] == []


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document: str) -> None:
    faults = list(link_faults(document, (ROOT / document).read_text(encoding="utf-8")))
    assert not faults, "\n".join(faults)


TREE = "# A\n## The tree\nWhat is where.\n```text\na.md   a page\ncore/  the core\n  x.py   an x\ntests/ tests\n```\n"
FILES = ["a.md", "core/__init__.py", "core/x.py", "tests/test_x.py"]


def test_an_equal_tree_passes() -> None:
    assert tree_faults(TREE, FILES) == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ([*FILES, "core/y.py"], "missing: core/y.py"),
        ([*FILES, "core/z/y.py"], "missing: core/z/"),
        ([*FILES, "tests/core/test_y.py"], "missing: tests/core/"),
        ([*FILES, "src/link"], "missing: src/"),
        (FILES[:2] + FILES[3:], "extra: core/x.py"),
    ],
)
def test_another_tree_is_found(files: list[str], fault: str) -> None:
    assert fault in tree_faults(TREE, files)


def test_a_line_that_says_nothing_is_found() -> None:
    assert tree_faults(TREE.replace("an x", ""), FILES) == ["says nothing: core/x.py"]


def test_the_drawn_tree_is_right() -> None:
    drawn = drawn_tree({"core/": "kept"}, source_files())
    lines = tree_lines(f"## The tree\n```text\n{drawn}\n```\n")
    assert list(lines) == expected_paths(source_files())
    assert lines["core/"] == "kept"
    assert lines["core/errors.py"].startswith("Errors a user can mend")


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Big `title`, here\n")
    sound = "[b](b.md) [t](b.md#big-title-here) [w](https://x.y/z) [s](#own)\n## Own\n```\n[no](link.md)\n```\n"
    (tmp_path / "a.md").write_text(sound)
    assert list(link_faults("a.md", sound, tmp_path)) == []
    for broken in ("[c](c.md)", "[t](b.md#small)", "`core/x.py`"):
        assert len(list(link_faults("a.md", broken, tmp_path))) == 1


def main() -> None:
    """Prints the tree for README."""
    print(drawn_tree(tree_lines(readme_text()), source_files()))


if __name__ == "__main__":
    main()
