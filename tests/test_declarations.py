"""What a container class may not declare, and the mapping language."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline.container import LayerContainer, Parameter, ParamList
from hookline.declarations import common_name, compile_rows
from hookline.errors import ContainerError


class One(Parameter):
    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.params


class Pair(Parameter):
    left: torch.Tensor
    right: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return None


class Experts(Parameter):
    experts = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        return None


class NoFinalize(Parameter):
    params: torch.Tensor


ALL = {"w": "w.params", "l": "pair.left", "r": "pair.right", "e.*": "moe.experts"}


def define(rows: Any, **tables: Any) -> type[LayerContainer]:
    body = {"__annotations__": {"w": One, "pair": Pair, "moe": Experts}, "PARAM_MAPPING": rows, "__module__": __name__}
    return type("Layer", (LayerContainer,), body | tables)


def refuse(message: str, rows: Any, **tables: Any) -> None:
    with pytest.raises(ContainerError, match=message) as caught:
        define(rows, **tables)
    assert "Layer" in str(caught.value)


def test_sound_mapping_passes() -> None:
    define(ALL)


@pytest.mark.parametrize("target", ["w", "w.params.x", "", "wparams"])
def test_target_that_is_no_parameter_and_dependency(target: str) -> None:
    """Upstream this is a failed tuple unpacking."""
    refuse(r"row 'w': target '.*' is not of the form parameter\.dependency", ALL | {"w": target})


def test_unknown_parameter_lists_the_known() -> None:
    refuse(r"row 'w': target 'v\.params' names no parameter\nParameters: w, pair, moe", ALL | {"w": "v.params"})


def test_unknown_dependency_lists_the_known() -> None:
    refuse(r"'pair\.middle' names no dependency of pair\nDependencies of pair: left, right", ALL | {"l": "pair.middle"})


@pytest.mark.parametrize("rows", [{"l": "w.params"}, {"w": ["w.params", "w.params"]}, {"x": ["pair.left"]}])
def test_dependency_with_two_rows(rows: dict[str, Any]) -> None:
    refuse(r"Layer: \S+ is the target of '\w' and again of '\w'", ALL | rows)


def test_dependencies_left_over_are_named() -> None:
    refuse(r"no row of PARAM_MAPPING fills pair\.left, moe\.experts", {"w": "w.params", "r": "pair.right"})


def test_empty_mapping_is_incomplete() -> None:
    refuse(r"fills w\.params, pair\.left, pair\.right, moe\.experts", {})


@pytest.mark.parametrize(("source", "stars"), [("e.x", 0), ("e.*.*", 2), ("*.e.*.x", 2)])
def test_list_row_needs_one_star(source: str, stars: int) -> None:
    rows = {name: target for name, target in ALL.items() if name != "e.*"}
    refuse(
        rf"moe\.experts is a list, so the source needs one `\*` for its index, not {stars}",
        rows | {source: "moe.experts"},
    )


def test_row_that_mixes_lists_and_tensors() -> None:
    refuse(
        r"row 'e\.\*': targets moe\.experts, w\.params mix lists and tensors",
        ALL | {"e.*": ["moe.experts", "w.params"]},
    )


def test_empty_list_of_targets_is_called_so() -> None:
    """Upstream it is reported as a missing wildcard."""
    refuse(r"row 'x' has an empty list of targets", ALL | {"x": []})


@pytest.mark.parametrize("rows", [{"x": 3}, {"x": None}, {"x": [3]}, {3: "w.params"}])
def test_rows_of_wrong_types(rows: dict[Any, Any]) -> None:
    refuse("is not a source name with a target or a list of targets", ALL | rows)


def test_parameter_without_finalize_is_refused() -> None:
    with pytest.raises(ContainerError, match=r"Layer\.w: NoFinalize defines no finalize"):

        class Layer(LayerContainer):
            w: NoFinalize


def test_names_of_the_base_class_are_refused() -> None:
    with pytest.raises(ContainerError, match=r"Layer\.missing: LayerContainer uses the name"):

        class Layer(LayerContainer):
            missing: One  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ({"v": "w"}, "'v' is no parameter"),
        ({"w": "v"}, "'v' is no parameter"),
        ({"w.params": "pair.top"}, "names no dependency of pair"),
        ({"w": "pair.left"}, "ties a parameter to a dependency"),
        ({"moe.experts": "w.params"}, "'moe.experts' is a list"),
        ({"w": "w"}, "'w' is tied itself"),
        ({"w": "pair", "pair": "moe"}, "'pair' is tied itself"),
    ],
)
def test_unsound_ties(tied: dict[str, str], message: str) -> None:
    refuse(message, ALL, TIED=tied)


def test_unsound_conditions() -> None:
    refuse("PRESENT_IF: 'v' is no parameter", ALL, PRESENT_IF={"v": "flag"})
    refuse(r"w is there if 'flag' only.*\nAnnotate it One \| None", ALL, PRESENT_IF={"w": "flag"})


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("*embed.weight", "*decoder.embed.weight", True),
        ("a*", "*b", True),
        ("*", "x", True),
        ("*.a.*", "*.b.*", True),
        ("*decoder.embed.weight", "*decoder.positions.weight", False),
        ("a.*", "b.*", False),
        ("*.weight", "*.bias", False),
    ],
)
def test_wildcards_that_overlap(first: str, second: str, shared: bool) -> None:
    """Upstream only a tensor that is really named so brings this to light, while loading."""
    dependencies = {"w": {"params": False}, "v": {"params": False}}
    rows = {first: ("w.params",), second + "*": ("v.params",)}
    if not shared:
        rows = {first: ("w.params",), second: ("v.params",)}
        compiled = compile_rows("Layer", rows, dependencies)
        assert common_name(*compiled.wildcards) is None
        return
    with pytest.raises(ContainerError, match="both match") as caught:
        compile_rows("Layer", rows, dependencies)
    name = caught.value.message.rsplit("'", 2)[1]
    for source, targets in rows.items():
        (row,) = compile_rows("Layer", {source: targets}, dependencies).wildcards
        assert row.match(name), f"{name!r} is an example of both"


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("e.*.x", "e.*.x.y", False),
        ("e.*", "e.1*", True),
        ("e*0", "e*", True),
        ("e.*", "f.*", False),
        ("*a", "b*", False),
    ],
)
def test_lists_that_overlap(first: str, second: str, shared: bool) -> None:
    dependencies = {"m": {"a": True, "b": True}}
    rows = {first: ("m.a",), second: ("m.b",)}
    if shared:
        with pytest.raises(ContainerError, match="both match"):
            compile_rows("Layer", rows, dependencies)
    else:
        assert len(compile_rows("Layer", rows, dependencies).lists) == 2


@pytest.mark.parametrize("character", list(".^$+?()[]{}|\\"))
def test_other_characters_are_literal(character: str) -> None:
    rows = compile_rows("Layer", {f"a{character}*": ("m.a",)}, {"m": {"a": True}})
    assert rows.match(f"a{character}7") is not None
    assert rows.match("ab7") is None and rows.match(f"xa{character}7") is None and rows.match(f"a{character}7x") is None
