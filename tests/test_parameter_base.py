"""Parameters. This file keeps its annotations as objects; tests/test_layer_container.py has them as text."""

import gc
import weakref
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Optional

import pytest
import torch

from hookline.container import Parameter, ParamList
from hookline.errors import ContainerError, UsageError


class Model:
    n_experts = 2
    n_shared = 0
    config = SimpleNamespace(n_layers=3)


class Facts(SimpleNamespace):
    """Attributes, on an object that can be held weakly."""


class Pair(Parameter):
    left: torch.Tensor
    right: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return torch.cat([self.left, self.right])


class Experts(Parameter):
    experts = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        return torch.stack(self.experts)


@pytest.fixture
def model() -> Model:
    return Model()


def test_final_tensor_is_what_finalize_makes(model: Model) -> None:
    pair = Pair(model)
    pair.set("left", torch.zeros(1))
    assert not pair.is_complete()
    pair.set("right", torch.ones(1))
    assert pair.is_complete()
    assert torch.equal(pair.complete(), torch.tensor([0.0, 1.0]))  # type: ignore[arg-type]
    assert pair.is_final and not pair.is_complete()


def test_inherited_dependencies_are_kept_and_a_child_overrides(model: Model) -> None:
    """Upstream a subclass loses every dependency of its base, and is then never finalised."""

    class Child(Pair):
        right: torch.Tensor | None  # type: ignore[assignment]
        scale: torch.Tensor

        def finalize(self) -> torch.Tensor | None:
            return self.left * self.scale if self.right is None else None

    assert list(Child.DEPENDENCIES) == ["left", "right", "scale"]
    assert Child.DEPENDENCIES["right"].optional and not Pair.DEPENDENCIES["right"].optional
    child = Child(model)
    child.set("left", torch.ones(1))
    child.set("scale", torch.full((1,), 3.0))
    assert torch.equal(child.complete(), torch.full((1,), 3.0))  # type: ignore[arg-type]


def test_diamond_inheritance(model: Model) -> None:
    class Base(Parameter):
        a: torch.Tensor

    class Left(Base):
        b: torch.Tensor

    class Right(Base):
        c: torch.Tensor

    class Both(Left, Right):
        def finalize(self) -> torch.Tensor | None:
            return None

    assert set(Both.DEPENDENCIES) == {"a", "b", "c"}
    assert Both(model).slots() == [(name, None) for name in Both.DEPENDENCIES]


def test_optional_text_annotated_and_class_variables_are_understood() -> None:
    """Upstream any annotation that is not a plain class is a TypeError when the class is made."""

    class Many(Parameter):
        a: "torch.Tensor"
        b: Optional[torch.Tensor]  # noqa: UP045
        c: "torch.Tensor | None"
        d: Annotated[torch.Tensor, "kept in fp32"]
        e: torch.nn.Parameter
        count: ClassVar[int] = 3
        note: str = "no dependency"
        _private: torch.Tensor

        def finalize(self) -> torch.Tensor | None:
            return None

    assert {name: kind.optional for name, kind in Many.DEPENDENCIES.items()} == {
        "a": False,
        "b": True,
        "c": True,
        "d": False,
        "e": False,
    }
    assert Many.count == 3 and Many.note == "no dependency"


def test_annotation_that_does_not_resolve_is_named() -> None:
    with pytest.raises(ContainerError, match=r"Lost\.weight is annotated 'tensors\.Tensor'.*cannot be resolved"):

        class Lost(Parameter):
            weight: "tensors.Tensor"  # type: ignore[name-defined]  # noqa: F821


def test_dependency_may_not_take_a_name_of_the_base_class() -> None:
    with pytest.raises(ContainerError, match=r"Taken\.filled: Parameter uses the name"):

        class Taken(Parameter):
            filled: torch.Tensor  # type: ignore[assignment]


def test_finalize_is_enforced(model: Model) -> None:
    """Upstream a forgotten finalize silently makes None."""

    class Forgotten(Parameter):
        weight: torch.Tensor

    with pytest.raises(TypeError, match="finalize"):
        Forgotten(model)  # type: ignore[abstract]


def test_init_runs_once(model: Model) -> None:
    """Upstream it runs twice."""
    calls = []

    class Counted(Pair):
        def __init__(self, model: object, label: str = "") -> None:
            calls.append(label)
            super().__init__(model, label)

    Counted(model, "once")
    assert calls == ["once"]


def test_model_is_held_weakly() -> None:
    """Upstream each parameter keeps its model alive."""
    model = Model()
    pair, alive = Pair(model), weakref.ref(model)
    assert pair.model is model
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(ContainerError, match="its model is gone"):
        _ = pair.model


def test_setting_twice_is_refused_and_not_counted_twice(model: Model) -> None:
    """Upstream the second one counts too, and the parameter is finalised with a dependency missing."""
    pair = Pair(model)
    pair.set("left", torch.zeros(1), source="a.weight")
    with pytest.raises(ContainerError, match=r"Pair\.left is filled twice: by a\.weight and by b\.weight"):
        pair.set("left", torch.zeros(1), source="b.weight")
    assert not pair.is_complete()
    with pytest.raises(ContainerError, match=r"lacks Pair\.right"):
        pair.complete()


def test_setting_after_it_is_final_is_refused(model: Model) -> None:
    """Upstream the late tensor is hung onto the final one as a stray attribute."""

    class MayLack(Parameter):
        weight: torch.Tensor
        scale: torch.Tensor | None

        def finalize(self) -> torch.Tensor | None:
            return self.weight

    parameter = MayLack(model)
    parameter.set("weight", torch.zeros(1))
    parameter.complete()
    with pytest.raises(ContainerError, match=r"w\.scale comes too late"):
        parameter.set("scale", torch.zeros(1), source="w.scale")
    with pytest.raises(ContainerError, match="is final already"):
        parameter.complete()


def test_sources_are_freed_with_finalize(model: Model) -> None:
    pair = Pair(model)
    sources = {"left": torch.zeros(1), "right": torch.zeros(1)}
    alive = [weakref.ref(tensor) for tensor in sources.values()]
    for name in list(sources):
        pair.set(name, sources.pop(name))
    result = pair.complete()
    assert [ref() for ref in alive] == [None, None]
    assert result is not None
    with pytest.raises(AttributeError, match="read inside finalize only"):
        _ = pair.left


def test_finalize_may_return_none_and_nothing_but_tensors(model: Model) -> None:
    """Upstream a wrong type is found much later, or never."""

    class Odd(Parameter):
        weight: torch.Tensor
        answer: ClassVar[Any] = None

        def finalize(self) -> torch.Tensor | None:
            return self.answer  # type: ignore[no-any-return]

    odd = Odd(model)
    odd.set("weight", torch.zeros(1))
    assert odd.complete() is None

    class Wrong(Odd):
        answer = 1.0

    wrong = Wrong(model)
    wrong.set("weight", torch.zeros(1))
    with pytest.raises(ContainerError, match="finalize returned a float"):
        wrong.complete()


def test_errors_in_finalize_name_the_tensors_and_keep_their_cause(model: Model) -> None:
    """Upstream they come out as "cannot find container"."""
    pair = Pair(model, "Layer.pair")
    pair.set("left", torch.zeros(1), source="model.l.weight")
    pair.set("right", torch.zeros(1, 1, 1), source="model.r.weight")
    with pytest.raises(ContainerError, match=r"Layer\.pair, made from model\.l\.weight, model\.r\.weight") as caught:
        pair.complete()
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [MemoryError("full"), UsageError("TP size 3 is not possible")])
def test_errors_that_others_handle_by_type_keep_it(model: Model, error: Exception) -> None:
    class Failing(Parameter):
        weight: torch.Tensor

        def finalize(self) -> torch.Tensor | None:
            raise error

    failing = Failing(model)
    failing.set("weight", torch.zeros(1), source="big.weight")
    with pytest.raises(type(error)) as caught:
        failing.complete()
    assert caught.value is error and "big.weight" in caught.value.__notes__[0]


def test_lists_fill_in_any_order(model: Model) -> None:
    experts = Experts(model)
    experts.set("experts", torch.ones(1), 1)
    experts.set("experts", torch.zeros(1), 0)
    assert torch.equal(experts.complete(), torch.tensor([[0.0], [1.0]]))  # type: ignore[arg-type]


def test_list_lengths_come_from_the_model_or_its_config(model: Model) -> None:
    class Mixed(Parameter):
        experts: ParamList("n_experts")  # type: ignore[valid-type]
        layers: "ParamList('n_layers')"  # type: ignore[valid-type]
        shared = ParamList("n_shared")
        bias: torch.Tensor

        def finalize(self) -> torch.Tensor | None:
            return torch.tensor([len(self.experts), len(self.layers), len(self.shared)])

    mixed = Mixed(model)
    assert len(mixed.slots()) == 2 + 3 + 0 + 1
    for dependency, index in mixed.slots():
        mixed.set(dependency, torch.zeros(1), index)
    assert mixed.complete().tolist() == [2, 3, 0]  # type: ignore[union-attr]


def test_unknown_length_names_class_field_and_attribute() -> None:
    with pytest.raises(ContainerError, match=r"Experts\.experts needs 'n_experts'.*Facts"):
        Experts(Facts())


@pytest.mark.parametrize("length", [-1, 2.0, None, True])
def test_unsound_length_is_refused(length: object) -> None:
    with pytest.raises(ContainerError, match="needs a length, but n_experts is"):
        Experts(Facts(n_experts=length))


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_the_list_is_refused(model: Model, index: int) -> None:
    """Upstream a negative index fills the list from its end."""
    with pytest.raises(ContainerError, match=f"index {index} is out of range, as n_experts is 2"):
        Experts(model).set("experts", torch.zeros(1), index)


def test_list_place_set_twice_is_refused(model: Model) -> None:
    experts = Experts(model)
    experts.set("experts", torch.zeros(1), 0)
    with pytest.raises(ContainerError, match=r"Experts\.experts\[0\] is filled twice"):
        experts.set("experts", torch.zeros(1), 0)


def test_empty_list_is_complete_at_once() -> None:
    """Upstream it never completes."""

    class NoExperts(Parameter):
        experts = ParamList("n_shared")

        def finalize(self) -> torch.Tensor | None:
            return torch.zeros(len(self.experts))

    parameter = NoExperts(model := Model())
    assert parameter.model is model and parameter.is_complete()
    assert parameter.complete().shape == (0,)  # type: ignore[union-attr]


def test_wrong_uses_of_set_are_refused(model: Model) -> None:
    with pytest.raises(ContainerError, match=r"Pair\.middle does not exist\nDependencies of Pair: left, right"):
        Pair(model).set("middle", torch.zeros(1))
    with pytest.raises(ContainerError, match="w is a list, not a tensor"):
        Pair(model).set("left", [1.0], source="w")  # type: ignore[arg-type]
    with pytest.raises(ContainerError, match="takes no index"):
        Pair(model).set("left", torch.zeros(1), 0)
    with pytest.raises(ContainerError, match="takes an index"):
        Experts(model).set("experts", torch.zeros(1))
