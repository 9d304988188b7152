"""What the class bodies of parameters and containers declare, read and checked: annotations and mapping rows.

Rows match whole names. `*` in a row whose targets are lists stands for a list index; in any other row it stands for
any text. Everything else is literal. An exact row goes before a list row, a list row before a wildcard.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hookline.errors import ContainerError

MappingRows = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A resolved annotation: what it names, and whether None is allowed beside it."""

    kind: object
    optional: bool


def read_annotations(cls: type) -> dict[str, Annotation]:
    """The annotations of the class body itself, written as text or not; private names and `model` are left out.

    Raises:
        ContainerError: an annotation names something that does not exist at run time.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        raw = annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    else:
        raw = inspect.get_annotations(cls)
    module_names, local_names = _names_where_defined(cls)
    return {
        name: _resolve(cls, name, value, module_names, local_names)
        for name, value in raw.items()
        if not name.startswith("_") and name != "model"
    }


def _names_where_defined(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Global and local names where the class statement runs, so that classes made in functions resolve too."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == cls.__module__:
            return frame.f_globals, dict(frame.f_locals)
        frame = frame.f_back
    return vars(sys.modules[cls.__module__]), {}


def _resolve(cls: type, name: str, value: Any, module_names: dict[str, Any], local_names: dict[str, Any]) -> Annotation:
    holder = type(cls.__name__, (), {"__annotations__": {name: value}, "__module__": cls.__module__})
    try:
        hint = typing.get_type_hints(holder, module_names, local_names)[name]
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise ContainerError(
            f"{cls.__qualname__}.{name} is annotated {value!r}, which cannot be resolved: {error}",
            hint="Import what it names at run time, not under TYPE_CHECKING, or begin the attribute's name with `_`.",
        ) from error
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return Annotation(kinds[0] if len(kinds) == 1 else hint, optional=len(kinds) < len(typing.get_args(hint)))
    return Annotation(hint, optional=False)


def take_default(cls: type, name: str) -> object:
    """Remove and return the class body's value for a declared name, which would hide what instances hold."""
    if name not in cls.__dict__:
        return None
    value = cls.__dict__[name]
    delattr(cls, name)
    return value


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes: a parameter's dependency, and the place in it where that is a list."""

    parameter: str
    dependency: str
    index: int | None = None

    def __str__(self) -> str:
        place = "" if self.index is None else f"[{self.index}]"
        return f"{self.parameter}.{self.dependency}{place}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a mapping; `pattern` is None where the source is matched exactly."""

    source: str
    targets: tuple[Target, ...]
    pattern: re.Pattern[str] | None = None
    is_list: bool = False

    def match(self, name: str) -> tuple[Target, ...] | None:
        """The targets of `name`, with its index filled in; None where the row does not match."""
        found = self.pattern.fullmatch(name) if self.pattern is not None else None
        if found is None:
            return None
        return tuple(replace(target, index=int(found[1])) for target in self.targets) if self.is_list else self.targets

    def source_of(self, target: Target) -> str:
        """The name under which a checkpoint holds `target`; a wildcard stays as it was written."""
        return self.source.replace("*", str(target.index)) if self.is_list else self.source


@dataclass(frozen=True, slots=True)
class Rows:
    """A checked mapping."""

    exact: Mapping[str, Row] = field(default_factory=dict)
    lists: tuple[Row, ...] = ()
    wildcards: tuple[Row, ...] = ()
    by_target: Mapping[Target, Row] = field(default_factory=dict)

    def match(self, name: str) -> tuple[Target, ...] | None:
        """The targets of a checkpoint's name; None where no row matches."""
        if name in self.exact:
            return self.exact[name].targets
        for row in (*self.lists, *self.wildcards):
            targets = row.match(name)
            if targets is not None:
                return targets
        return None

    def sources(self) -> list[str]:
        """Every row's source as written."""
        return [*self.exact, *(row.source for row in (*self.lists, *self.wildcards))]


def merge_rows(owner: str, bodies: Iterable[tuple[MappingRows, Iterable[str]]]) -> dict[str, tuple[str, ...]]:
    """One mapping out of those of a class and its bases, base first.

    Each body brings its rows and the parameters that it declares. A child's row replaces base rows of the same source
    or the same target; declaring a parameter again drops the base's rows for it.
    """
    merged: dict[str, tuple[str, ...]] = {}
    for rows, declared in bodies:
        own = {source: _target_names(owner, source, targets) for source, targets in rows.items()}
        replaced = {target for targets in own.values() for target in targets}
        again = set(declared)
        kept = {
            source: tuple(t for t in targets if t not in replaced and t.partition(".")[0] not in again)
            for source, targets in merged.items()
            if source not in own
        }
        merged = {source: targets for source, targets in kept.items() if targets} | own
    return merged


def _target_names(owner: str, source: object, targets: object) -> tuple[str, ...]:
    names = (targets,) if isinstance(targets, str) else tuple(targets) if isinstance(targets, list | tuple) else None
    if not isinstance(source, str) or names is None or not all(isinstance(name, str) for name in names):
        raise ContainerError(
            f"{owner}: mapping row {source!r}: {targets!r} is not a source name with a target or a list of targets",
            hint='Write "source.name": "parameter.dependency", or a list of such targets.',
        )
    if not names:
        raise ContainerError(
            f"{owner}: mapping row {source!r} has an empty list of targets",
            hint="Name a target, or drop the tensor with ContainerMap.set_unmapped_params.",
        )
    return names


def compile_rows(owner: str, rows: Mapping[str, Sequence[str]], dependencies: Mapping[str, Mapping[str, bool]]) -> Rows:
    """Check every row and make it ready to match.

    Args:
        owner: what errors call the container.
        rows: source to targets.
        dependencies: of each parameter, the dependencies, and whether each is a list.
    """
    by_target: dict[Target, Row] = {}
    exact: dict[str, Row] = {}
    lists: list[Row] = []
    wildcards: list[Row] = []
    for source, names in rows.items():
        row = _compile_row(f"{owner}: mapping row {source!r}", source, names, dependencies)
        for target in row.targets:
            other = by_target.setdefault(target, row)
            if other is not row or row.targets.count(target) > 1:
                raise ContainerError(
                    f"{owner}: {target} is the target of {other.source!r} and again of {source!r}",
                    hint="A dependency is filled by one row only.",
                )
        if row.pattern is None:
            exact[source] = row
        else:
            (lists if row.is_list else wildcards).append(row)
    for group in (lists, wildcards):
        _check_overlaps(owner, group)
    return Rows(exact, tuple(lists), tuple(wildcards), by_target)


def _compile_row(where: str, source: str, names: Sequence[str], dependencies: Mapping[str, Mapping[str, bool]]) -> Row:
    targets = tuple(parse_target(where, name, dependencies) for name in names)
    kinds = {dependencies[target.parameter][target.dependency] for target in targets}
    if len(kinds) > 1:
        raise ContainerError(f"{where}: targets {', '.join(names)} mix lists and tensors", hint="Split the row in two.")
    is_list, stars = kinds.pop(), source.count("*")
    if is_list and stars != 1:
        raise ContainerError(
            f"{where}: {', '.join(names)} is a list, so the source needs one `*` for its index, not {stars}",
            hint="Write for instance experts.*.w1.weight.",
        )
    if not stars:
        return Row(source, targets)
    text = "([0-9]+)" if is_list else ".*"
    return Row(source, targets, re.compile(text.join(map(re.escape, source.split("*"))), re.DOTALL), is_list)


def parse_target(where: str, name: str, dependencies: Mapping[str, Mapping[str, bool]]) -> Target:
    """`parameter.dependency` as a target that exists."""
    if name.count(".") != 1:
        raise ContainerError(f"{where}: target {name!r} is not of the form parameter.dependency")
    parameter, dependency = name.split(".")
    if parameter not in dependencies:
        raise ContainerError(
            f"{where}: target {name!r} names no parameter", hint=f"Parameters: {_listed(dependencies)}."
        )
    if dependency not in dependencies[parameter]:
        raise ContainerError(
            f"{where}: target {name!r} names no dependency of {parameter}",
            hint=f"Dependencies of {parameter}: {_listed(dependencies[parameter])}.",
        )
    return Target(parameter, dependency)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _check_overlaps(owner: str, rows: Sequence[Row]) -> None:
    for place, first in enumerate(rows):
        for second in rows[place + 1 :]:
            name = common_name(first, second)
            if name is not None:
                raise ContainerError(
                    f"{owner}: mapping rows {first.source!r} and {second.source!r} both match {name!r}",
                    hint="Make one of the patterns narrower.",
                )


def common_name(first: Row, second: Row) -> str | None:
    """A name that both patterns match, found by walking both at once; None where there is none."""
    left, right = _steps(first), _steps(second)
    seen = {(0, 0)}
    waiting = [(0, 0, "")]
    while waiting:
        i, j, name = waiting.pop()
        if i == len(left) and j == len(right):
            return name
        ways = []
        if i < len(left) and left[i].repeats:
            ways.append((i + 1, j, name))
        if j < len(right) and right[j].repeats:
            ways.append((i, j + 1, name))
        if i < len(left) and j < len(right):
            shared = left[i].shared(right[j])
            if shared:
                ways.append((i + (not left[i].repeats), j + (not right[j].repeats), name + shared))
        for way in ways:
            if way[:2] not in seen:
                seen.add(way[:2])
                waiting.append(way)
    return None


class _Step(NamedTuple):
    """One character of a pattern: itself, any digit where `digit` is set, or an empty text for anything."""

    character: str
    digit: bool = False
    repeats: bool = False

    def shared(self, other: _Step) -> str:
        """A character that both can be, or an empty text."""
        if self.digit or other.digit:
            digits = [step.character or "0" for step in (self, other) if not step.digit]
            return (digits[0] if "0" <= digits[0] <= "9" else "") if digits else "0"
        if self.character and other.character:
            return self.character if self.character == other.character else ""
        return self.character or other.character or "x"


def _steps(row: Row) -> list[_Step]:
    star = [_Step("0", digit=True), _Step("0", digit=True, repeats=True)] if row.is_list else [_Step("", repeats=True)]
    return [step for character in row.source for step in (star if character == "*" else [_Step(character)])]
