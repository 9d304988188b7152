"""The container map: routing, validation and the audit of a header."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from hookline.container import ContainerMap, LayerContainer, Parameter, ParamList
from hookline.errors import ContainerError
from hookline.weight_adapter import LazyTensor


class Model(SimpleNamespace):
    """Attributes of a model, on an object that can be held weakly."""


class One(Parameter):
    params: torch.Tensor

    def finalize(self) -> torch.Tensor | None:
        return self.params.clone()


class Experts(Parameter):
    experts = ParamList("n_experts")

    def finalize(self) -> torch.Tensor | None:
        return torch.stack(self.experts)


class Layer(LayerContainer):
    w: One
    b: One | None
    moe: Experts

    PARAM_MAPPING = {"w.weight": "w.params", "w.bias": "b.params", "experts.*.w": "moe.experts"}
    PRESENT_IF = {"b": "bias"}


class Rest(LayerContainer):
    emb: One
    head: One

    PARAM_MAPPING = {"model.embed.weight": "emb.params", "lm_head.weight": "head.params"}
    TIED = {"head": "emb"}
    PRESENT_IF = {"head": "not tied"}


MODEL = Model(n_experts=2, bias=False, tied=True)
NAMES = [
    *(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("w.weight", "experts.0.w", "experts.1.w")),
    "model.embed.weight",
]


@pytest.fixture
def weights() -> ContainerMap:
    weights = ContainerMap()
    weights.set_transformer_params("model.layers", [Layer(MODEL), Layer(MODEL)])
    weights.set_non_transformer_params(Rest(MODEL))
    return weights


def fill(weights: ContainerMap, names: Iterable[str]) -> None:
    for name in names:
        weights.map_param(name, torch.ones(1))


def header(names: Iterable[str]) -> list[LazyTensor]:
    def load() -> torch.Tensor:
        raise AssertionError("an audit reads nothing")

    return [LazyTensor(name, (1,), "float32", 4, load) for name in names]


def test_whole_checkpoint_fills_everything(weights: ContainerMap) -> None:
    """Upstream set_unmapped_params must have been called, or the first tensor is an AttributeError."""
    fill(weights, NAMES)
    weights.validate()
    names = [name for name, _ in weights.containers()]
    assert names == ["layers.0", "layers.1", "non_transformer"]
    assert all(container.is_populated for _, container in weights.containers())
    rest = dict(weights.containers())["non_transformer"]
    assert isinstance(rest, Rest) and rest.head is rest.emb


def test_prefixes_match_whole_components(weights: ContainerMap) -> None:
    """Upstream `model.layers_norm` is taken for a layer."""
    for name in ("model.layers_norm.0.w.weight", "model.layers2.0.w.weight", "xmodel.layers.0.w.weight"):
        with pytest.raises(ContainerError, match=f"{name} is unexpected: no container has a row for it"):
            weights.map_param(name, torch.ones(1))


def test_what_no_number_follows_is_outside_the_layers() -> None:
    """Upstream this is an AssertionError."""

    class Norm(LayerContainer):
        norm: One

        PARAM_MAPPING = {"model.layers.norm.weight": "norm.params"}

    weights = ContainerMap()
    weights.set_transformer_params("model.layers", [Layer(MODEL)])
    weights.set_non_transformer_params(norm := Norm(MODEL))
    assert weights.route("model.layers.norm.weight") == (norm, "model.layers.norm.weight")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.w.wieght", r"Layer has no row for it\nThe nearest known name is model\.layers\.0\.w\.weight"),
        ("model.layers.1.experts.2.w", r"moe\.experts\[2\] is past the end"),
        ("model.layers.2.w.weight", "model.layers has 2 layers, numbered from 0"),
        ("lm_haed.weight", r"The nearest known name is lm_head\.weight"),
        ("layers.0.w.weight", r"The nearest known name is model\.layers\.0\.w\.weight"),
        ("", "is unexpected"),
        (".", "is unexpected"),
    ],
)
def test_unexpected_names_are_refused_at_once(weights: ContainerMap, name: str, message: str) -> None:
    with pytest.raises(ContainerError, match=message) as caught:
        weights.route(name)
    assert name in str(caught.value)


def test_missing_tensors_are_all_named_as_the_checkpoint_names_them(weights: ContainerMap) -> None:
    """Upstream says which layer is not complete, and no more."""
    fill(weights, [NAMES[0], NAMES[2], NAMES[4]])
    expected = [
        "model.layers.0.experts.0.w",
        "model.layers.1.w.weight",
        "model.layers.1.experts.1.w",
        "model.embed.weight",
    ]
    assert sorted(weights.missing()) == sorted(expected)
    with pytest.raises(ContainerError, match="4 tensors are missing") as caught:
        weights.validate()
    assert all(name in caught.value.message for name in expected)


def test_double_tensor_is_named(weights: ContainerMap) -> None:
    fill(weights, NAMES[:1])
    with pytest.raises(ContainerError, match=r"filled twice: by model\.layers\.0\.w\.weight and by model\.layers\.0"):
        fill(weights, NAMES[:1])


def test_errors_inside_finalize_are_not_disguised() -> None:
    """Upstream they become "cannot find container"."""

    class Bad(One):
        def finalize(self) -> torch.Tensor | None:
            return self.params.reshape(7, 7)

    class BadLayer(LayerContainer):
        w: Bad

        PARAM_MAPPING = {"w": "w.params"}

    weights = ContainerMap()
    weights.set_transformer_params("h", [BadLayer(MODEL)])
    with pytest.raises(
        ContainerError, match=r"BadLayer\.w, made from h\.0\.w: finalize failed with RuntimeError"
    ) as caught:
        weights.map_param("h.0.w", torch.ones(1))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_dropped_on_purpose(weights: ContainerMap) -> None:
    """Upstream a bare string is taken letter by letter, and swallows nearly every name."""
    weights.set_unmapped_params("model.vision")
    weights.set_unmapped_params(("model.layers.*.rotary", "model.layers.2"))
    for name in ("model.vision", "model.vision.x", "model.layers.1.rotary.inv_freq", "model.layers.2.w.weight"):
        assert weights.route(name) is None
        weights.map_param(name, torch.ones(1))
    for name in ("model.visions.x", "model.layers.1.rotary2", "m", "model"):
        with pytest.raises(ContainerError, match="is unexpected"):
            weights.route(name)
    assert weights.route(NAMES[0]) is not None


def test_conditions_of_the_config_drop(weights: ContainerMap) -> None:
    assert weights.route("model.layers.0.w.bias") is None and weights.route("lm_head.weight") is None


def test_several_stacks_prefixes_and_names() -> None:
    weights = ContainerMap()
    encoder, decoder, draft = [Layer(MODEL)], (Layer(MODEL), Layer(MODEL)), [Layer(MODEL)]
    weights.set_transformer_params(("encoder.block", "enc"), encoder)
    weights.set_transformer_params(["encoder.block.0.decoder"], decoder)
    weights.set_transformer_params("mtp", draft, name="draft")
    assert [name for name, _ in weights.containers()] == ["layers.0", "layers_1.0", "layers_1.1", "draft.0"]
    assert weights.route("enc.0.w.weight") == (encoder[0], "w.weight")
    assert weights.route("encoder.block.0.decoder.1.w.weight") == (decoder[1], "w.weight"), (
        "the longest prefix goes first"
    )
    assert weights.route("mtp.0.w.weight") == (draft[0], "w.weight")
    assert weights.missing()[0] == "encoder.block.0.w.weight"
    weights.map_param("enc.0.w.weight", torch.ones(1))
    assert weights.missing()[0] == "enc.0.experts.0.w", "names follow the prefix that the checkpoint uses"
    assert weights.audit(header(["encoder.block.0.w.weight"])).missing[0] == "encoder.block.0.experts.0.w"


def test_wrong_uses_are_refused(weights: ContainerMap) -> None:
    layer = Layer(MODEL)
    for containers in (layer, [layer, None], "ab"):
        with pytest.raises(ContainerError, match="a list of LayerContainers is needed"):
            weights.set_transformer_params("h", containers)  # type: ignore[arg-type]
    for prefix in ("", "h.", ".h", "a..b", None, [3]):
        with pytest.raises(ContainerError, match="is not made of whole dotted components"):
            weights.set_transformer_params(prefix, [layer])  # type: ignore[arg-type]
    for unmapped in ("", [""]):
        with pytest.raises(ContainerError, match="is not made of whole dotted components"):
            weights.set_unmapped_params(unmapped)
    with pytest.raises(ContainerError, match="needs a prefix"):
        weights.set_transformer_params([], [layer])
    with pytest.raises(ContainerError, match=r"'model\.layers' names a stack of layers already"):
        weights.set_transformer_params("model.layers", [layer])
    with pytest.raises(ContainerError, match="one container is set for two places"):
        weights.set_transformer_params("h", [layer, layer])
    with pytest.raises(ContainerError, match="is set already"):
        weights.set_non_transformer_params(Rest(MODEL))


def test_snapshots_set_final_tensors(weights: ContainerMap) -> None:
    for name, container in list(weights.containers()):
        for parameter in container.parameter_names:
            weights.direct_injection(name, parameter, None if parameter == "b" else torch.ones(1))
    weights.validate()
    with pytest.raises(
        ContainerError, match=r"there is no container 'layers\.2'\nContainers: layers\.0, layers\.1, non_"
    ):
        weights.direct_injection("layers.2", "w", None)


def test_snapshots_may_have_layers_that_are_dropped(weights: ContainerMap) -> None:
    weights.set_unmapped_params("model.layers.2")
    before = weights.missing()
    weights.direct_injection("layers.2", "w", torch.ones(1))
    assert weights.missing() == before
    for name in ("layers.3", "layers.20", "model.layers.2", "non_transformer.2"):
        with pytest.raises(ContainerError, match="there is no container"):
            weights.direct_injection(name, "w", torch.ones(1))


def test_sources_do_not_outlive_their_parameter(weights: ContainerMap) -> None:
    source = torch.ones(1)
    alive = weakref.ref(source)
    weights.map_param(NAMES[0], source)
    del source
    assert alive() is None


def test_audit_of_a_sound_header(weights: ContainerMap) -> None:
    audit = weights.audit(header([*NAMES, "lm_head.weight", "model.layers.1.w.bias"]))
    assert audit.ok and audit.matched == len(NAMES)
    assert audit.dropped == ("lm_head.weight", "model.layers.1.w.bias")
    assert weights.missing(), "an audit changes nothing"
    fill(weights, NAMES)
    assert weights.audit(header(NAMES)).ok, "nor does what is loaded change an audit"


def test_audit_names_everything_that_is_wrong(weights: ContainerMap) -> None:
    weights.set_unmapped_params("model.vision")
    names = ["model.layers.0.w.weight", "model.layers.0.w.weight", "model.layers.0.experts.00.w", "model.vision.x"]
    names += [
        "model.layers.0.experts.0.w",
        "model.layers.0.w.weight_scale",
        "model.layers.9.w.weight",
        "model.embed.weight",
    ]
    audit = weights.audit(header(names))
    assert not audit.ok and audit.matched == 3
    assert audit.duplicate == ("model.layers.0.w.weight", "model.layers.0.experts.0.w")
    assert audit.unexpected == ("model.layers.0.w.weight_scale", "model.layers.9.w.weight")
    assert audit.dropped == ("model.vision.x",)
    assert audit.missing == ("model.layers.0.experts.1.w", *NAMES[3:6])
    assert audit.report(limit=2).splitlines() == [
        "3 tensors match the mapping",
        "4 missing: model.layers.0.experts.1.w, model.layers.1.w.weight and 2 more",
        "2 unexpected: model.layers.0.w.weight_scale, model.layers.9.w.weight",
        "2 duplicate: model.layers.0.w.weight, model.layers.0.experts.0.w",
    ]


def test_audit_requires_what_the_config_says() -> None:
    model = Model(n_experts=0, bias=True, tied=False)
    weights = ContainerMap()
    weights.set_transformer_params("h", [NoExperts(model)])
    weights.set_non_transformer_params(Rest(model))
    assert weights.audit([]).missing == ("h.0.w.weight", "h.0.w.bias", "model.embed.weight", "lm_head.weight")


class NoExperts(LayerContainer):
    w: One
    b: One | None

    PARAM_MAPPING = {"w.weight": "w.params", "w.bias": "b.params"}
    PRESENT_IF = {"b": "bias"}
