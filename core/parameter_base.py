"""`Parameter` and `ParamList`: what a final weight is made from, and how. Import both from `hookline.container`."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, overload

import torch

from hookline.declarations import Target, read_annotations, take_default
from hookline.errors import ContainerError, HooklineError
from hookline_kernels.quantized import QuantizedTensor


class ParamList:
    """A dependency that is a list of tensors: `experts = ParamList("n_experts")`, or `experts: ParamList("n_experts")`.

    Args:
        count_attr: the attribute of the model, or else of `model.config`, that holds the length.
    """

    def __init__(self, count_attr: str) -> None:
        self.count_attr = count_attr

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type) -> tuple[torch.Tensor, ...]: ...
        def __get__(self, instance: object, owner: type) -> Self | tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Dependency:
    """One dependency of a parameter: a tensor, or a list of as many as `count_attr` says."""

    optional: bool = False
    count_attr: str | None = None


class Parameter(ABC):
    """One final tensor, made by `finalize` once its dependencies are there; a child declares more or overrides.

    Args:
        model: held weakly; `finalize` reaches it as `self.model`. A subclass may annotate `model` with its own type.
        label: what errors call the parameter.
    """

    DEPENDENCIES: ClassVar[Mapping[str, Dependency]] = MappingProxyType({})
    _declared: ClassVar[Mapping[str, Dependency | None]] = MappingProxyType({})

    if TYPE_CHECKING:
        model: Any

        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type) -> torch.Tensor: ...
        def __get__(self, instance: object, owner: type) -> Self | torch.Tensor: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared: dict[str, Dependency | None] = {}
        for name, annotation in read_annotations(cls).items():
            if isinstance(annotation.kind, ParamList):
                declared[name] = Dependency(annotation.optional, annotation.kind.count_attr)
            else:
                is_tensor = isinstance(annotation.kind, type) and issubclass(annotation.kind, torch.Tensor)
                declared[name] = Dependency(annotation.optional) if is_tensor else None
        lists = {name: value for name, value in cls.__dict__.items() if isinstance(value, ParamList)}
        declared |= {name: Dependency(count_attr=value.count_attr) for name, value in lists.items()}
        for name in [name for name, dependency in declared.items() if dependency is not None]:
            take_default(cls, name)
            if hasattr(Parameter, name) or name in ("label", "is_final"):
                raise ContainerError(f"{cls.__qualname__}.{name}: Parameter uses the name", hint="Choose another.")
        cls._declared = declared
        merged = {
            name: kind for base in reversed(cls.__mro__) for name, kind in vars(base).get("_declared", {}).items()
        }
        cls.DEPENDENCIES = MappingProxyType({name: kind for name, kind in merged.items() if kind is not None})

    def __init__(self, model: object, label: str = "") -> None:
        self.label = label or type(self).__qualname__
        self.is_final = False
        self._model = weakref.ref(model)
        self._lengths = {
            name: _length(model, dependency.count_attr, f"{self.label}.{name}")
            for name, dependency in self.DEPENDENCIES.items()
            if dependency.count_attr is not None
        }
        self._size = len(self.slots())
        self._values: dict[tuple[str, int | None], torch.Tensor] = {}
        self._sources: dict[tuple[str, int | None], str] = {}

    if not TYPE_CHECKING:

        @property
        def model(self) -> Any:
            """The model whose weights these are."""
            model = self._model()
            if model is None:
                raise ContainerError(f"{self.label}: its model is gone", hint="Keep the model alive while it loads.")
            return model

        def __getattr__(self, name: str) -> Any:
            state = "is read inside finalize only" if name in type(self).DEPENDENCIES else "does not exist"
            raise AttributeError(f"{type(self).__qualname__}.{name} {state}", name=name, obj=self)

    @abstractmethod
    def finalize(self) -> torch.Tensor | None:
        """The final tensor, or None where this rank holds none; dependencies are attributes, a missing one is None."""

    def slots(self, *, required: bool = False) -> list[tuple[str, int | None]]:
        """Every place that takes a tensor, as dependency and index; only those that must be filled if `required`."""
        return [
            (name, index)
            for name, dependency in self.DEPENDENCIES.items()
            if not (required and dependency.optional)
            for index in ([None] if dependency.count_attr is None else range(self._lengths[name]))
        ]

    def takes(self, dependency: str, index: int | None) -> bool:
        """Whether there is such a place."""
        length = self._lengths.get(dependency)
        if length is None or index is None:
            return dependency in self.DEPENDENCIES and length is None and index is None
        return 0 <= index < length

    @property
    def filled(self) -> Set[tuple[str, int | None]]:
        """The places that have been given a tensor."""
        return self._sources.keys()

    def set(self, dependency: str, tensor: torch.Tensor, index: int | None = None, *, source: str = "") -> None:
        """Fill a dependency, or the place `index` of one that is a list; `source` is what errors call the tensor."""
        slot, where = (dependency, index), f"{self.label}.{dependency}" + ("" if index is None else f"[{index}]")
        source = source or where
        if dependency not in self.DEPENDENCIES:
            known = ", ".join(self.DEPENDENCIES) or "none"
            raise ContainerError(f"{where} does not exist", hint=f"Dependencies of {self.label}: {known}.")
        if not isinstance(tensor, torch.Tensor):
            raise ContainerError(f"{source} is a {type(tensor).__name__}, not a tensor")
        length = self._lengths.get(dependency)
        if (length is None) != (index is None):
            needs = "one tensor, and takes no index" if length is None else "a list, and takes an index"
            raise ContainerError(f"{self.label}.{dependency} is {needs}")
        if length is not None and index is not None and not 0 <= index < length:
            count_attr = self.DEPENDENCIES[dependency].count_attr
            raise ContainerError(f"{source}: index {index} is out of range, as {count_attr} is {length}")
        if slot in self._sources:
            raise ContainerError(f"{where} is filled twice: by {self._sources[slot]} and by {source}")
        if self.is_final:
            raise ContainerError(f"{source} comes too late: {self.label} is final already")
        self._values[slot], self._sources[slot] = tensor, source

    def is_complete(self) -> bool:
        """Whether every dependency is there, optional ones too."""
        return not self.is_final and len(self._sources) == self._size

    def complete(self) -> torch.Tensor | None:
        """Run `finalize` with what is filled and let go of the sources; a missing optional dependency is None."""
        missing = [str(Target(self.label, *slot)) for slot in self.slots(required=True) if slot not in self._sources]
        if missing or self.is_final:
            raise ContainerError(f"{self.label} " + (f"lacks {', '.join(missing)}" if missing else "is final already"))
        for name in self.DEPENDENCIES:
            length = self._lengths.get(name)
            if length is None:
                self.__dict__[name] = self._values.get((name, None))
            else:
                filled = tuple(self._values[name, i] for i in range(length) if (name, i) in self._values)
                self.__dict__[name] = filled if len(filled) == length else None
        self._values.clear()
        try:
            result = self.finalize()
        except Exception as error:
            _raise_from(error, f"{self.label}, made from {', '.join(self._sources.values()) or 'nothing'}")
        finally:
            for name in self.DEPENDENCIES:
                del self.__dict__[name]
        if not isinstance(result, torch.Tensor | None):
            raise ContainerError(f"{self.label}: finalize returned a {type(result).__name__}, not a tensor or None")
        self.is_final = True
        return result.values() if isinstance(result, QuantizedTensor) else result


def model_fact(model: object, name: str, where: str) -> Any:
    """The attribute `name` of the model, or else of its config; `where` is what errors call the one who asks."""
    config = getattr(model, "config", None)
    for holder in (model, config):
        if hasattr(holder, name):
            return getattr(holder, name)
    raise ContainerError(
        f"{where} needs {name!r}, which neither {type(model).__name__} nor its config ({type(config).__name__}) has",
        hint=f"Add {name} to the config, or name the attribute that holds it.",
    )


def _length(model: object, count_attr: str, where: str) -> int:
    length = model_fact(model, count_attr, where)
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise ContainerError(f"{where} needs a length, but {count_attr} is {length!r}")
    return length


def _raise_from(error: Exception, place: str) -> NoReturn:
    """Name the tensors and keep the cause; what others handle by its type (memory, our other errors) keeps its type."""
    if isinstance(error, ContainerError):
        raise ContainerError(f"{place}: {error.message}", hint=error.hint) from error
    if isinstance(error, HooklineError | MemoryError | torch.OutOfMemoryError):
        error.add_note(f"while making {place}")
        raise error
    raise ContainerError(f"{place}: finalize failed with {type(error).__name__}: {error}") from error
