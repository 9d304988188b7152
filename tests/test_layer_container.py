"""Layer containers. Annotations are text here; tests/test_parameter_base.py has them as objects."""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hookline.container
from hookline.container import LayerContainer, Parameter, ParamList
from hookline.errors import ContainerError


class Model(SimpleNamespace):
    """Attributes of a model; transforms leave tensors as they are."""


class One(Parameter):
    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.params.clone()


class Two(Parameter):
    a: torch.Tensor
    b: torch.Tensor | None

    def finalize(self) -> torch.Tensor | None:
        return self.a if self.b is None else self.a + self.b


class Many(Parameter):
    experts: ParamList("n_experts")  # type: ignore[valid-type]
    others = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        return torch.stack([*self.experts, *self.others]) if self.others else torch.zeros(0)


class Layer(LayerContainer):
    norm: One
    w: Two
    moe: Many

    PARAM_MAPPING = {
        "norm.weight": "norm.params",
        "w.a": "w.a",
        "w.b": "w.b",
        "experts.*.x": "moe.experts",
        "others.*": "moe.others",
    }


@pytest.fixture
def model() -> Model:
    return Model(n_experts=2)


def ones(count: int = 1) -> torch.Tensor:
    return torch.ones(count)


def test_layer_fills_and_reads_as_tensors(model: Model) -> None:
    layer = Layer(model)
    assert layer.missing() == [
        "norm.params", "w.a", "moe.experts[0]", "moe.experts[1]", "moe.others[0]", "moe.others[1]",
    ]  # fmt: skip
    for name in ("norm.weight", "w.a", "w.b", "experts.1.x", "experts.0.x", "others.0", "others.1"):
        assert not layer.is_populated
        layer.set_dependency(name, ones())
    assert layer.is_populated and not layer.missing()
    assert torch.equal(layer.w, torch.full((1,), 2.0)) and layer.moe.shape == (4, 1)
    assert layer.parameter_names == ("norm", "w", "moe")


def test_reading_early_says_what_is_lacking(model: Model) -> None:
    layer = Layer(model)
    with pytest.raises(AttributeError, match=r"Layer\.w is not final yet: it lacks w\.a"):
        _ = layer.w
    layer.set_dependency("w.a", ones())
    with pytest.raises(AttributeError, match="call finish or validate"):
        _ = layer.w
    with pytest.raises(AttributeError, match=r"Layer\.bias does not exist"):
        _ = layer.bias  # type: ignore[attr-defined]


def test_finish_gives_none_to_what_may_be_missing(model: Model) -> None:
    layer = Layer(model)
    for name in ("norm.weight", "w.a", "experts.1.x", "experts.0.x", "others.0"):
        layer.set_dependency(name, ones())
    with pytest.raises(ContainerError, match=r"Layer lacks others\.1$"):
        layer.finish()
    layer.set_dependency("others.1", ones())
    layer.finish()
    layer.finish()
    assert layer.is_populated and torch.equal(layer.w, ones())
    with pytest.raises(ContainerError, match=r"w\.b comes too late"):
        layer.set_dependency("w.b", ones())


def test_empty_lists_complete_when_the_container_is_made() -> None:
    """Upstream such a container is never populated."""
    layer = Layer(Model(n_experts=0))
    assert layer.moe.shape == (0,)
    assert layer.missing() == ["norm.params", "w.a"]
    layer.direct_injection("moe", ones())
    assert torch.equal(layer.moe, ones())


def test_sources_are_freed_at_once(model: Model) -> None:
    layer, source = Layer(model), ones()
    alive = weakref.ref(source)
    layer.set_dependency("norm.weight", source)
    del source
    assert alive() is None


def test_model_is_held_weakly() -> None:
    model = Model(n_experts=2)
    layer, alive = Layer(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and layer.missing()


@pytest.mark.parametrize("name", ["norm.weight_scale", "norm_weight", "xnorm.weight", "norm.weigh", "experts.x", "*"])
def test_names_match_whole_and_literally(model: Model, name: str) -> None:
    """Upstream `norm.weight_scale` of a quantised checkpoint is put into the weight, as is any character for a dot."""
    layer = Layer(model)
    assert layer.accepts(name) == ()
    with pytest.raises(ContainerError, match=r"is unexpected: Layer has no row for it\nThe nearest known name is "):
        layer.set_dependency(name, ones())


@pytest.mark.parametrize("name", ["experts.-1.x", "experts.one.x", "experts..x", "others.1.0", "others.٣"])
def test_what_is_no_index_is_unexpected(model: Model, name: str) -> None:
    """Upstream a word for a number is a bare ValueError, and a negative number counts from the end."""
    assert Layer(model).match(name) is None


def test_index_past_the_end_is_unexpected_and_explained(model: Model) -> None:
    with pytest.raises(ContainerError, match=r"experts\.2\.x is unexpected: moe\.experts\[2\] is past the end"):
        Layer(model).set_dependency("experts.2.x", ones())


def test_indices_have_any_number_of_digits() -> None:
    layer = Layer(Model(n_experts=120))
    assert layer.accepts("experts.107.x") == ("moe.experts[107]",)
    assert layer.accepts("others.12") == ("moe.others[12]",), "a `*` may stand at the end"


def test_double_and_late_assignment_name_both_tensors(model: Model) -> None:
    """Upstream a second assignment counts twice before, and is swallowed after finalisation."""
    layer = Layer(model)
    layer.set_dependency("w.b", ones(), label="model.w.b")
    for _ in range(2):
        with pytest.raises(ContainerError, match=r"Layer\.w\.b is filled twice: by model\.w\.b and by other\.w\.b"):
            layer.set_dependency("w.b", ones(), label="other.w.b")
        if not layer._parameters["w"].is_final:
            layer.set_dependency("w.a", ones())


def test_one_source_for_several_targets(model: Model) -> None:
    class Shared(LayerContainer):
        emb: One
        unemb: One

        PARAM_MAPPING = {"embed.weight": ["emb.params", "unemb.params"]}

    layer = Shared(model)
    assert layer.accepts("embed.weight") == ("emb.params", "unemb.params")
    layer.set_dependency("embed.weight", ones())
    assert layer.is_populated


def test_exact_goes_before_list_before_wildcard(model: Model) -> None:
    class Ordered(LayerContainer):
        any: One
        exact: One
        moe: Many

        PARAM_MAPPING = {
            "e.*": "any.params",
            "e.*.x": "moe.experts",
            "o.*": "moe.others",
            "e.0.x": "exact.params",
        }

    layer = Ordered(model)
    assert layer.accepts("e.0.x") == ("exact.params",)
    assert layer.accepts("e.1.x") == ("moe.experts[1]",)
    assert layer.accepts("e.x") == layer.accepts("e.") == ("any.params",)


def test_two_names_of_one_wildcard_row_are_a_double(model: Model) -> None:
    class Wild(LayerContainer):
        emb: One

        PARAM_MAPPING = {"*embed.weight": "emb.params"}

    layer = Wild(model)
    layer.set_dependency("embed.weight", ones())
    with pytest.raises(ContainerError, match=r"filled twice: by embed\.weight and by decoder\.embed\.weight"):
        layer.set_dependency("decoder.embed.weight", ones())
    assert Wild(model).missing_sources() == ["*embed.weight"]


def test_child_overrides_annotations_and_rows(model: Model) -> None:
    """Upstream the base overrides the child, and the base's rows are written into the child's own dictionary."""
    rows: dict[str, str | Sequence[str]] = {
        "w.all": "w.params",
        "layer_norm.weight": "norm.params",
        "extra": "extra.params",
    }

    class Child(Layer):
        w: One
        extra: One

        PARAM_MAPPING = rows

    child = Child(model)
    assert child.parameter_names == ("norm", "w", "moe", "extra")
    assert set(child.sources()) == {*rows, "experts.*.x", "others.*"}, "base rows of w and norm are replaced"
    assert rows == {"w.all": "w.params", "layer_norm.weight": "norm.params", "extra": "extra.params"}
    assert set(Layer(model).sources()) == set(Layer.PARAM_MAPPING)


def test_child_without_a_table_inherits_it(model: Model) -> None:
    class Same(Layer):
        pass

    assert Same(model).sources() == Layer(model).sources()
    with pytest.raises(ContainerError, match=r"no row of PARAM_MAPPING fills extra\.params"):

        class Incomplete(Layer):
            extra: One


def test_diamond(model: Model) -> None:
    class Base(LayerContainer):
        a: One

        PARAM_MAPPING = {"a": "a.params"}

    class Left(Base):
        b: One

        PARAM_MAPPING = {"b": "b.params"}

    class Right(Base):
        c: One

        PARAM_MAPPING = {"c": "c.params", "A": "a.params"}

    class Both(Left, Right):
        pass

    assert set(Both(model).sources()) == {"A", "b", "c"}


def test_containers_without_a_table_take_final_tensors_only(model: Model) -> None:
    class Bare(LayerContainer):
        a: One

    bare = Bare(model)
    with pytest.raises(ContainerError, match="Bare has no row for it"):
        bare.set_dependency("a", ones())
    bare.direct_injection("a", ones())
    assert bare.is_populated


def test_direct_injection(model: Model) -> None:
    """Upstream two injections make the container unpopulated for ever, and types are checked too late."""
    layer = Layer(model)
    with pytest.raises(ContainerError, match=r"Layer\.nurm does not exist\nParameters: norm, w, moe"):
        layer.direct_injection("nurm", ones())
    with pytest.raises(ContainerError, match="must be a tensor or None, not a list"):
        layer.direct_injection("norm", [1.0])  # type: ignore[arg-type]
    layer.direct_injection("norm", None)
    layer.direct_injection("w", ones())
    with pytest.raises(ContainerError, match="cannot be set twice"):
        layer.direct_injection("norm", ones())
    layer.set_dependency("others.0", ones())
    with pytest.raises(ContainerError, match="has tensors of a checkpoint already"):
        layer.direct_injection("moe", ones())
    with pytest.raises(ContainerError, match="comes too late"):
        layer.set_dependency("w.a", ones())


class Head(LayerContainer):
    emb: One
    unemb: One

    PARAM_MAPPING = {"embed": "emb.params", "head": "unemb.params"}
    TIED = {"unemb.params": "emb.params"}


def test_tied_dependency_takes_the_source_of_the_other(model: Model) -> None:
    head, source = Head(model), torch.rand(3)
    expected, alive = source.clone(), weakref.ref(source)
    head.set_dependency("embed", source)
    del source
    assert head.missing() == [] and not head.is_populated
    head.finish()
    assert torch.equal(head.unemb, expected) and head.unemb is not head.emb
    assert alive() is None


def test_tied_dependency_yields_to_its_own_tensor(model: Model) -> None:
    for order in (("embed", "head"), ("head", "embed")):
        head = Head(model)
        alive = []
        for name in order:
            tensor = torch.full((1,), float(len(name)))
            alive.append(weakref.ref(tensor))
            head.set_dependency(name, tensor)
        del tensor
        assert head.is_populated and [ref() for ref in alive] == [None, None]
        assert head.emb.item() == 5 and head.unemb.item() == 4


def test_tied_parameter_shares_the_final_tensor(model: Model) -> None:
    class Shares(Head):
        TIED = {"unemb": "emb"}

    head = Shares(model)
    head.set_dependency("embed", ones())
    head.finish()
    assert head.unemb is head.emb
    assert Shares(model).missing_sources() == ["embed"]


class Biased(LayerContainer):
    w: One
    b: One | None
    head: One

    PARAM_MAPPING = {"w": "w.params", "b": "b.params", "head": "head.params"}
    TIED = {"head": "w"}
    PRESENT_IF = {"b": "bias", "head": "not tied"}


def test_conditions_decide_what_is_required() -> None:
    present = Biased(Model(config=SimpleNamespace(bias=True, tied=False)))
    assert present.missing() == ["w.params", "b.params", "head.params"]
    absent = Biased(Model(config=SimpleNamespace(bias=False, tied=True)))
    assert absent.missing() == ["w.params"]
    for name in ("w", "b", "head"):
        absent.set_dependency(name, ones())
    assert absent.match("b") == () and absent.match("c") is None
    absent.finish()
    assert absent.b is None and absent.head is absent.w
    with pytest.raises(ContainerError, match=r"Biased\.b needs 'bias'"):
        Biased(Model(tied=True))


def test_optional_parameter_without_a_condition_may_be_missing_whole_but_not_in_part(model: Model) -> None:
    class Pair(Parameter):
        a: torch.Tensor
        b: torch.Tensor

        def finalize(self) -> torch.Tensor | None:
            return self.a + self.b

    class Layer(LayerContainer):
        bias: Pair | None

        PARAM_MAPPING = {"a": "bias.a", "b": "bias.b"}

    layer = Layer(model)
    layer.finish()
    assert layer.bias is None and layer.is_populated
    layer = Layer(model)
    layer.set_dependency("a", ones())
    assert layer.missing() == ["bias.b"]


def test_no_guard_is_an_assert() -> None:
    """Guards must hold under `python -O`; upstream several of these are assertions."""
    folder = Path(hookline.container.__file__).parent
    for name in ("container", "layer_container", "parameter_base", "parameters", "declarations", "parallel"):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], name
