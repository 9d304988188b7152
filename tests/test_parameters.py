"""The common parameters: what layout each hands to the model."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hookline import parameters
from hookline.container import Parameter
from hookline.errors import ContainerError

H, K, D, M, F, E = 6, 2, 4, 10, 14, 3


class Model:
    """Records which transform was asked for."""

    def __init__(self, n_experts: int = E) -> None:
        self.n_experts = n_experts
        self.config = SimpleNamespace(num_heads=H, num_kv_heads=K)
        self.called = ""

    def __getattr__(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def transform(param: torch.Tensor) -> torch.Tensor:
            self.called = name
            return param

        if not name.startswith("transform_"):
            raise AttributeError(name)
        return transform


def make(kind: type[Parameter], model: Model, **tensors: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    parameter = kind(model)
    for name, tensor in tensors.items():
        if isinstance(tensor, list):
            for index, item in enumerate(tensor):
                parameter.set(name, item, index)
        else:
            parameter.set(name, tensor)
    assert parameter.is_complete()
    result = parameter.complete()
    assert result is not None
    return result


def refused(kind: type[Parameter], match: str, **tensors: torch.Tensor | list[torch.Tensor]) -> None:
    with pytest.raises(ContainerError, match=match) as caught:
        make(kind, Model(), **tensors)
    assert f"{kind.__name__}, made from" in caught.value.message


# Weights have columns of width M, biases have none.
WIDTHS = pytest.mark.parametrize("width", [(M,), (1,), ()], ids=["weight", "one column", "bias"])


def qkv(width: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.rand(H, D, *width), torch.rand(K, D, *width), torch.rand(K, D, *width)


def canonical(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten(0, 1) for part in parts])


@WIDTHS
def test_qkv_fused_and_unfused(width: tuple[int, ...]) -> None:
    model = Model()
    expected = canonical(*(parts := qkv(width)))
    q, k, v = (part.flatten(0, 1) for part in parts)
    assert torch.equal(make(parameters.UnfusedQKVParameter, model, q_params=q, k_params=k, v_params=v), expected)
    assert torch.equal(make(parameters.FusedQKVParameter, model, params=expected), expected)
    assert model.called == "transform_qkv_param"


@WIDTHS
def test_qkv_by_head(width: tuple[int, ...]) -> None:
    """Upstream this is a TypeError."""
    parts = [torch.rand(H, D, *width) for _ in range(3)]
    source = torch.stack(parts, dim=1).reshape(H * 3 * D, *width)
    assert torch.equal(make(parameters.MegatronQKVParameter, Model(), params=source), canonical(*parts))


@WIDTHS
def test_qkv_by_group(width: tuple[int, ...]) -> None:
    """Upstream a final squeeze drops every dimension of size one."""
    q, k, v = qkv(width)
    groups = [torch.cat([q[i * H // K : (i + 1) * H // K], k[i : i + 1], v[i : i + 1]]) for i in range(K)]
    source = canonical(*groups)
    assert torch.equal(make(parameters.GQAMegatronQKVParameter, Model(), params=source), canonical(q, k, v))


@WIDTHS
def test_gated_mlp_is_blocked_halves(width: tuple[int, ...]) -> None:
    """Upstream rows are interleaved, and biases come out with a wrong shape."""
    model = Model()
    gate, up = torch.rand(F, *width), torch.rand(F, *width)
    expected = torch.cat([gate, up])
    assert torch.equal(make(parameters.GatedMLPParameter, model, gate_params=gate, up_params=up), expected)
    assert torch.equal(make(parameters.FusedGatedMLPParameter, model, params=expected), expected)
    assert model.called == "transform_mlp_1_param"


@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        (parameters.AttentionOutputParameter, "transform_attn_out_param"),
        (parameters.MLP1Parameter, "transform_mlp_1_param"),
        (parameters.MLP2Parameter, "transform_mlp_2_param"),
        (parameters.NormParameter, "transform_norm_param"),
        (parameters.EmbeddingParameter, "transform_embedding_param"),
        (parameters.UnembedParameter, "transform_unembed_param"),
        (parameters.MoEGatingWeightParameter, "transform_moe_gate_param"),
        (parameters.FusedMoEMLP2Parameter, "transform_moe_mlp_2_param"),
    ],
)
def test_plain_ones_go_to_their_transform(kind: type[Parameter], transform: str) -> None:
    model, source = Model(), torch.rand(4, 6)
    assert make(kind, model, params=source) is source, "nothing is copied on the way"
    assert model.called == transform


def test_inverse_frequencies_are_kept_in_fp32() -> None:
    """Upstream the result is of a kind that no container accepts."""
    model = Model()
    assert make(parameters.InvFreqParameter, model, params=torch.rand(4).half()).dtype == torch.float32
    assert not model.called


@WIDTHS
def test_lists_of_experts_are_stacked(width: tuple[int, ...]) -> None:
    model = Model()
    gates, ups, plain = ([torch.rand(F, *width) for _ in range(E)] for _ in range(3))
    gated = make(parameters.UnfusedMoEGatedMLPParameter, model, gating_experts=gates, up_experts=ups)
    assert model.called == "transform_moe_mlp_1_param"
    assert gated.shape == (E, 2 * F, *width)
    for expert in range(E):
        assert torch.equal(gated[expert], torch.cat([gates[expert], ups[expert]]))
    assert torch.equal(make(parameters.UnfusedMoEMLP1Parameter, model, experts=plain), torch.stack(plain))
    assert model.called == "transform_moe_mlp_1_param"
    assert torch.equal(make(parameters.UnfusedMoEMLP2Parameter, model, experts=plain), torch.stack(plain))
    assert model.called == "transform_moe_mlp_2_param"


@pytest.mark.parametrize("name", ["UnfusedMoEGatedMLPParameter", "UnfusedMoEMLP1Parameter", "UnfusedMoEMLP2Parameter"])
def test_no_experts_make_no_tensor(name: str) -> None:
    model = Model(n_experts=0)
    parameter = getattr(parameters, name)(model)
    assert parameter.is_complete() and parameter.complete() is None


def test_fused_experts_in_both_orders() -> None:
    model = Model()
    gate_up, down = torch.rand(E, 2 * F, M), torch.rand(E, M, F)
    assert make(parameters.FusedMoEGatedMLPParameter, model, params=gate_up) is gate_up
    turned = make(parameters.TransposedFusedMoEGatedMLPParameter, model, params=gate_up.transpose(1, 2).contiguous())
    assert torch.equal(turned, gate_up) and turned.is_contiguous()
    assert model.called == "transform_moe_mlp_1_param"
    turned = make(parameters.TransposedFusedMoEMLP2Parameter, model, params=down.transpose(1, 2).contiguous())
    assert torch.equal(turned, down) and turned.is_contiguous()
    assert model.called == "transform_moe_mlp_2_param"
    bias = torch.rand(E, 2 * F)
    assert make(parameters.TransposedFusedMoEGatedMLPParameter, model, params=bias) is bias


def test_shapes_that_disagree_are_refused() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape)

    refused(
        parameters.UnfusedQKVParameter, "shapes are", q_params=zeros(8, 4), k_params=zeros(4, 4), v_params=zeros(2, 4)
    )
    refused(
        parameters.UnfusedQKVParameter, "shapes are", q_params=zeros(8, 4), k_params=zeros(4, 5), v_params=zeros(4, 5)
    )
    refused(parameters.MegatronQKVParameter, "17 rows do not hold q, k and v of 6 heads", params=zeros(17, 4))
    refused(parameters.GQAMegatronQKVParameter, "41 rows do not hold 6 query heads in 2", params=zeros(41, 4))
    refused(parameters.GatedMLPParameter, "shapes must be equal", gate_params=zeros(3, 4), up_params=zeros(4, 4))
    refused(parameters.FusedGatedMLPParameter, "7 rows cannot be halved", params=zeros(7, 4))
    refused(parameters.FusedMoEGatedMLPParameter, "7 rows of each expert", params=zeros(2, 7, 4))
    refused(parameters.TransposedFusedMoEGatedMLPParameter, "7 columns of each expert", params=zeros(2, 4, 7))
    uneven = [zeros(3, 4), zeros(3, 4), zeros(3, 5)]
    refused(parameters.UnfusedMoEMLP1Parameter, r"'experts\[2\]': \(3, 5\)", experts=uneven)
    even = [zeros(3, 4)] * 3
    refused(parameters.UnfusedMoEGatedMLPParameter, "shapes must be", gating_experts=even, up_experts=[zeros(2, 4)] * 3)


def test_head_counts_come_from_the_config() -> None:
    class Bare:
        config = None

    model = Bare()
    parameter = parameters.MegatronQKVParameter(model)
    parameter.set("params", torch.zeros(3, 1))
    with pytest.raises(ContainerError, match="needs 'num_heads', which neither Bare nor its config"):
        parameter.complete()
