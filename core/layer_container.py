"""`LayerContainer`: a layer's parameters and the names that fill them. Import it from `hookline.container`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hookline.declarations import (
    MappingRows,
    Rows,
    Target,
    compile_rows,
    merge_rows,
    parse_target,
    read_annotations,
    take_default,
)
from hookline.errors import ContainerError
from hookline.parameter_base import Parameter, model_fact

WAYS_OUT = "Map it in PARAM_MAPPING, rename it in the weight adapter, or drop it with set_unmapped_params."


@dataclass(frozen=True, slots=True)
class _Declared:
    kind: type[Parameter]
    optional: bool


class LayerContainer:
    """The parameters of one layer, and the checkpoint names that fill them; checked when the class is defined.

    A parameter is an attribute: before it is final, reading it is an `AttributeError`; then it is the final tensor.
    A child class adds to its bases' parameters and tables and overrides them. Without any `PARAM_MAPPING` the
    container takes final tensors through `direct_injection` only.

    Attributes:
        PARAM_MAPPING: checkpoint name or pattern to `parameter.dependency`, or to a list of them.
        TIED: `a.x` to `b.y`: if no tensor comes for dependency `a.x`, it gets the one of `b.y`; or `a` to `b`: if none
            comes for parameter `a`, its final tensor is that of `b`.
        PRESENT_IF: parameter to a flag of the model or its config, or to `not` and a flag. Where it holds, the
            parameter is required; where it does not, its tensors are dropped, and it is tied or None.
    """

    PARAM_MAPPING: ClassVar[MappingRows] = MappingProxyType({})
    TIED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    PRESENT_IF: ClassVar[Mapping[str, str]] = MappingProxyType({})

    _own: ClassVar[Mapping[str, _Declared | None]] = MappingProxyType({})
    _declared: ClassVar[Mapping[str, _Declared]] = MappingProxyType({})
    _rows: ClassVar[Rows] = Rows()
    _ties: ClassVar[Mapping[str, str]] = MappingProxyType({})
    _conditions: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: dict[str, _Declared | None] = {}
        for name, annotation in read_annotations(cls).items():
            kind = annotation.kind
            own[name] = None
            if isinstance(kind, type) and issubclass(kind, Parameter):
                own[name] = _Declared(kind, annotation.optional)
                take_default(cls, name)
                if inspect.isabstract(kind):
                    raise ContainerError(f"{cls.__qualname__}.{name}: {kind.__qualname__} defines no finalize")
        cls._own = own
        bodies = [base for base in reversed(cls.__mro__) if issubclass(base, LayerContainer)]
        merged = {name: entry for body in bodies for name, entry in vars(body)["_own"].items()}
        cls._declared = {name: entry for name, entry in merged.items() if entry is not None}
        cls._ties = _merged_ties(bodies)
        cls._conditions = {name: flag for body in bodies for name, flag in vars(body).get("PRESENT_IF", {}).items()}
        cls._check_tables()
        if any("PARAM_MAPPING" in vars(body) for body in bodies[1:]):
            cls._check_mapping(bodies)

    @classmethod
    def _check_tables(cls) -> None:
        where = cls.__qualname__
        for name in cls._declared:
            if hasattr(LayerContainer, name) or name == "path":
                raise ContainerError(f"{where}.{name}: LayerContainer uses the name", hint="Choose another.")
        _check_ties(where, cls._ties, cls._dependencies())
        for name, flag in cls._conditions.items():
            if name not in cls._declared:
                known = ", ".join(cls._declared) or "none"
                raise ContainerError(f"{where}: PRESENT_IF: {name!r} is no parameter", hint=f"Parameters: {known}.")
            if not cls._declared[name].optional and name not in {tied.partition(".")[0] for tied in cls._ties}:
                raise ContainerError(
                    f"{where}: {name} is there if {flag!r} only, and must be declared so",
                    hint=f"Annotate it {cls._declared[name].kind.__name__} | None, or tie it to another.",
                )

    @classmethod
    def _dependencies(cls) -> dict[str, dict[str, bool]]:
        """Of each parameter the dependencies, and whether each is a list."""
        return {
            name: {dep: kind.count_attr is not None for dep, kind in entry.kind.DEPENDENCIES.items()}
            for name, entry in cls._declared.items()
        }

    @classmethod
    def _check_mapping(cls, bodies: Sequence[type[LayerContainer]]) -> None:
        where = cls.__qualname__
        rows = merge_rows(where, [(vars(body).get("PARAM_MAPPING", {}), vars(body)["_own"]) for body in bodies])
        cls._rows = compile_rows(where, rows, cls._dependencies())
        unmapped = [
            f"{name}.{dep}"
            for name, entry in cls._declared.items()
            for dep, kind in entry.kind.DEPENDENCIES.items()
            if not kind.optional and not {name, f"{name}.{dep}"} & cls._ties.keys()
            if Target(name, dep) not in cls._rows.by_target
        ]
        if unmapped:
            raise ContainerError(
                f"{where}: no row of PARAM_MAPPING fills {', '.join(unmapped)}",
                hint="Add a row for each, mark the dependency optional, or tie it.",
            )

    def __init__(self, model: object) -> None:
        self.path = ""
        self._held: dict[str, torch.Tensor] = {}
        self._injected: set[str] = set()
        self._parameters = {
            name: entry.kind(model, f"{type(self).__qualname__}.{name}") for name, entry in self._declared.items()
        }
        self._present = {name: _holds(model, flag, f"{self}.{name}") for name, flag in self._conditions.items()}
        for name, parameter in self._parameters.items():
            if parameter.DEPENDENCIES and not parameter.slots() and self._present.get(name, True):
                self._settle(name, parameter.complete())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            state = "does not exist"
            if name in type(self)._declared:
                lacking = ", ".join(str(target) for target in self._lacking() if target.parameter == name)
                state = f"is not final yet: {f'it lacks {lacking}' if lacking else 'call finish or validate'}"
            raise AttributeError(f"{type(self).__qualname__}.{name} {state}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self.path})" if self.path else type(self).__qualname__

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Every declared parameter, bases' first."""
        return tuple(self._declared)

    @property
    def parameter_kinds(self) -> Mapping[str, type[Parameter]]:
        """The class of every declared parameter, which says what it is for."""
        return {name: entry.kind for name, entry in self._declared.items()}

    def match(self, name: str) -> tuple[Target, ...] | None:
        """Where the tensor `name` goes: empty if the config drops it, None if the mapping does not know it."""
        targets = self._rows.match(name)
        if targets is None or not all(self._parameters[t.parameter].takes(t.dependency, t.index) for t in targets):
            return None
        return tuple(target for target in targets if self._present.get(target.parameter, True))

    def accepts(self, name: str) -> tuple[str, ...]:
        """The targets of the tensor `name` as text, such as `qkv_w.q_params` or `moe.experts[3]`; none if not taken."""
        return tuple(map(str, self.match(name) or ()))

    def sources(self) -> list[str]:
        """Every checkpoint name or pattern of the mapping."""
        return self._rows.sources()

    def set_dependency(self, name: str, tensor: torch.Tensor, *, label: str = "") -> None:
        """Hand over the checkpoint's tensor `name`; parameters that are complete with it become final at once.

        Args:
            name: as in `PARAM_MAPPING`.
            label: the tensor's full name for errors.

        Raises:
            ContainerError: unknown name, dependency filled twice or too late, or an error while making a parameter.
        """
        label = label or self.path + name
        targets = self.match(name)
        if targets is None:
            raise self.refusal(name, label)
        for target in targets:
            parameter = self._parameters[target.parameter]
            parameter.set(target.dependency, tensor, target.index, source=label)
            self._hold_for_ties(target, tensor)
            if parameter.is_complete():
                self._settle(target.parameter, parameter.complete())

    def refusal(self, name: str, label: str) -> ContainerError:
        """The error that says why no row takes the tensor `name`; `label` is its full name."""
        targets = self._rows.match(name)
        if targets is not None:
            return ContainerError(
                f"{label} is unexpected: {', '.join(map(str, targets))} is past the end of the list",
                hint="The config's number of experts, or whatever the list counts, is wrong.",
            )
        near = difflib.get_close_matches(name, self.sources(), n=1, cutoff=0.0)
        return ContainerError(
            f"{label} is unexpected: {type(self).__qualname__} has no row for it",
            hint=(f"The nearest known name is {label.removesuffix(name)}{near[0]}. " if near else "") + WAYS_OUT,
        )

    def direct_injection(self, name: str, tensor: torch.Tensor | None) -> None:
        """Set the final tensor of parameter `name`, as a snapshot does."""
        where = f"{self}.{name}"
        if name not in self._parameters:
            known = ", ".join(self._parameters) or "none"
            raise ContainerError(f"{where} does not exist", hint=f"Parameters: {known}.")
        if not isinstance(tensor, torch.Tensor | None):
            raise ContainerError(f"{where} must be a tensor or None, not a {type(tensor).__name__}")
        if name in self.__dict__ and (name in self._injected or self._parameters[name].slots()):
            raise ContainerError(f"{where} is final already, and cannot be set twice")
        if self._parameters[name].filled:
            raise ContainerError(f"{where} has tensors of a checkpoint already; a final tensor would hide them")
        self._injected.add(name)
        self._settle(name, tensor)

    @property
    def is_populated(self) -> bool:
        """Whether every parameter is final."""
        return all(name in self.__dict__ for name in self._parameters)

    def missing(self) -> list[str]:
        """Every dependency that must still be filled, as `parameter.dependency`."""
        return [str(target) for target in self._lacking()]

    def missing_sources(self, filled: Set[Target] | None = None) -> list[str]:
        """The same as checkpoint names; a wildcard as written. `filled` stands in for what really is (for audits)."""
        return [self.source_of(target) for target in self._lacking(filled)]

    def source_of(self, target: Target) -> str:
        """The checkpoint name of a target, or the target itself where no row fills it."""
        row = self._rows.by_target.get(replace(target, index=None))
        return str(target) if row is None else row.source_of(target)

    def finish(self) -> None:
        """Give what is missing and may be its tie or None, and make everything final; raises naming what lacks."""
        lacking = self.missing_sources()
        if lacking:
            raise ContainerError(f"{self} lacks {', '.join(self.path + name for name in lacking)}")
        for tied, tensor in self._held.items():
            name, dependency = tied.split(".")
            if (dependency, None) not in self._parameters[name].filled:
                self._parameters[name].set(dependency, tensor, source=f"{self.path}{tied}, which is tied")
        self._held.clear()
        last = [name for name in self._parameters if name in self._ties]
        for name in [*(name for name in self._parameters if name not in last), *last]:
            if name in self.__dict__:
                continue
            parameter = self._parameters[name]
            if not parameter.filled and name in self._ties and not self._is_required(name):
                self._settle(name, self.__dict__[self._ties[name]])
            elif not parameter.filled and self._declared[name].optional and not self._is_required(name):
                self._settle(name, None)
            else:
                self._settle(name, parameter.complete())

    def _settle(self, name: str, tensor: torch.Tensor | None) -> None:
        self.__dict__[name] = tensor
        self._parameters[name].is_final = True

    def _is_required(self, name: str) -> bool:
        return self._present.get(name, False)

    def _hold_for_ties(self, target: Target, tensor: torch.Tensor) -> None:
        """Keep a source that a tie may need when its own parameter is final, and drop one no longer needed."""
        self._held.pop(str(target), None)
        for tied, origin in self._ties.items():
            parameter, _, dependency = tied.partition(".")
            wanted = origin == str(target) and not self._is_required(parameter)
            if wanted and (dependency, None) not in self._parameters[parameter].filled:
                self._held[tied] = tensor

    def _lacking(self, filled: Set[Target] | None = None) -> list[Target]:
        settled: Set[str] = self.__dict__.keys() if filled is None else set()
        if filled is None:
            filled = {Target(name, *slot) for name, parameter in self._parameters.items() for slot in parameter.filled}
        lacking = []
        for name, parameter in self._parameters.items():
            touched = any(target.parameter == name for target in filled)
            if name in settled or (not touched and self._is_optional(name)):
                continue
            wanted = (Target(name, *slot) for slot in parameter.slots(required=True))
            lacking += [target for target in wanted if target not in filled and not self._is_tied(target)]
        return lacking

    def _is_optional(self, name: str) -> bool:
        return not self._is_required(name) and (self._declared[name].optional or name in self._ties)

    def _is_tied(self, target: Target) -> bool:
        return str(target) in self._ties and not self._is_required(target.parameter)


def _merged_ties(bodies: Sequence[type[LayerContainer]]) -> dict[str, str]:
    """The rows of all; those for one parameter replace its rows in the bases."""
    merged: dict[str, str] = {}
    for body in bodies:
        own: Mapping[str, str] = vars(body).get("TIED", {})
        replaced = {tied.partition(".")[0] for tied in own}
        merged = {tied: origin for tied, origin in merged.items() if tied.partition(".")[0] not in replaced} | {**own}
    return merged


def _check_ties(where: str, ties: Mapping[str, str], dependencies: Mapping[str, Mapping[str, bool]]) -> None:
    for tied, origin in ties.items():
        row = f"{where}: TIED row {tied!r}: {origin!r}"
        if ("." in tied) != ("." in origin):
            raise ContainerError(f"{row} ties a parameter to a dependency", hint="Name two of one kind.")
        for name in (tied, origin):
            if "." not in name and name not in dependencies:
                known = ", ".join(dependencies) or "none"
                raise ContainerError(f"{row}: {name!r} is no parameter", hint=f"Parameters: {known}.")
            if "." in name:
                target = parse_target(row, name, dependencies)
                if dependencies[target.parameter][target.dependency]:
                    raise ContainerError(f"{row}: {name!r} is a list", hint="Tie the whole parameter.")
        if origin in ties or origin == tied:
            raise ContainerError(f"{row}: {origin!r} is tied itself", hint="Tie both to the one that a file holds.")


def _holds(model: object, condition: str, where: str) -> bool:
    """Whether a condition of `PRESENT_IF` is true of the model."""
    negated = condition.startswith("not ")
    return bool(model_fact(model, condition.removeprefix("not ").strip(), where)) != negated
