"""Which model is built, what of the checkpoint it holds, and how much memory that is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hookline import Engine, EngineConfig, SamplingParams
from hookline.benchmark.shapes import find_shape
from hookline.checkpoint.random import RandomReader
from hookline.config import PluginOptions, SpeculativeConfig, resolve
from hookline.errors import CheckpointError, UsageError
from hookline.loading import load_model, open_model, parameters
from hookline_glm5_2_mtp.memory_planner import GlmMemoryPlanner
from hookline_glm5_2_mtp.model import GlmMoeDsaModel
from hookline_glm5_2_mtp.mtp import UnifiedMTPGlmMoeDsaModel
from tests.glm5_2.drafting import FIELDS, Drafting, Reader, prompt
from tests.glm5_2.models import GOLDEN_FP8, GOLDEN_MODEL

MTP, NGRAM = SpeculativeConfig(num_speculative_tokens=3), SpeculativeConfig(method="ngram")


def config_of(source: Path | str, speculative: SpeculativeConfig | None, **options: Any) -> EngineConfig:
    known: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "kv_cache_memory": 2**22}
    return EngineConfig(str(source), speculative=speculative, **known | options)


def random_config(speculative: SpeculativeConfig | None) -> EngineConfig:
    return config_of("random", speculative, load_format="random")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def write(folder: Path, tensors: dict[str, torch.Tensor], source: Path = GOLDEN_MODEL) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def weights_of(config: EngineConfig) -> dict[str, torch.Tensor]:
    containers = load_model(config).opened.containers
    return {
        f"{container}.{name}": tensor
        for container, held in parameters(containers)
        for name, tensor in held.items()
        if tensor is not None
    }


@pytest.fixture(scope="module")
def with_draft() -> Iterator[dict[str, torch.Tensor]]:
    yield weights_of(config_of(GOLDEN_MODEL, MTP))


@pytest.mark.parametrize("name", ["GlmMoeDsaForCausalLM", "UnifiedMTPGlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"])
def test_the_unified_model_is_chosen_when_its_draft_proposes(name: str) -> None:
    reader = Reader(FIELDS | {"architectures": [name]})
    for speculative in (None, NGRAM):
        model = open_model(random_config(speculative), reader).model
        assert type(model) is GlmMoeDsaModel
        assert model.proposer is None
        assert [spec.name for spec in model.cache_specs()] == ["target_latent", "target_index"]
        assert not any(".layers.4." in shape for shape, _ in model.checkpoint_shapes())
    unified = open_model(random_config(MTP), reader).model
    assert type(unified) is UnifiedMTPGlmMoeDsaModel
    assert unified.proposer is not None
    groups = {spec.name: spec for spec in unified.cache_specs()}
    assert list(groups) == ["target_latent", "target_index", "draft_latent", "draft_index"]
    for kind in ("latent", "index"):
        draft, target = groups[f"draft_{kind}"], groups[f"target_{kind}"]
        assert draft == dataclasses.replace(target, name=draft.name, num_layers=1)


def test_a_checkpoint_without_a_draft_is_refused() -> None:
    reader = Reader(FIELDS | {"num_nextn_predict_layers": 0})
    with pytest.raises(UsageError, match="num_nextn_predict_layers is 0"):
        open_model(random_config(MTP), reader)
    assert open_model(random_config(NGRAM), reader).model.proposer is None


def test_embedding_and_head_are_the_targets_and_held_once(with_draft: dict[str, torch.Tensor]) -> None:
    plain = weights_of(config_of(GOLDEN_MODEL, None))
    extra = {name for name in with_draft if name not in plain}
    assert extra and all(name.startswith("layers.8.") for name in extra)
    assert not any(8192 in with_draft[name].shape for name in extra)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in with_draft.values()]
    assert len(set(pointers)) == len(pointers)
    held = sum(with_draft[name].numel() for name in extra)
    source = tensors_of(GOLDEN_MODEL)
    assert held == sum(tensor.numel() for name, tensor in source.items() if name.startswith("model.layers.8."))


def test_the_draft_reads_the_targets_embedding_and_head() -> None:
    """Doubling the head doubles the draft's logits; another embedding gives other ones."""
    found = []
    for changed in (None, "word_unembed", "word_emb"):
        run = Drafting(2)
        held = run.model.weights
        run.model.weights = weights = type(held)(run.model)
        for name in ("word_emb", "final_norm", "word_unembed"):
            tensor = getattr(held, name)
            weights.direct_injection(name, tensor * 2 if name == changed else tensor)
        found.append(run.step([run.add(prompt(9))], following=[5]).draft_logits)
    plain, head, embedded = found
    assert torch.allclose(head[0], 2 * plain[0], rtol=1e-5)
    assert not torch.allclose(embedded, plain, rtol=1e-2)


def test_the_drafts_own_copies_of_embedding_and_head_are_dropped(
    with_draft: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """As DeepSeek's checkpoints have them."""
    tensors = tensors_of(GOLDEN_MODEL)
    tensors["model.layers.8.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.8.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    found = weights_of(config_of(write(tmp_path, tensors), MTP))
    assert found.keys() == with_draft.keys()
    assert all(torch.equal(tensor, with_draft[name]) for name, tensor in found.items())


def test_without_shared_head_norm_the_targets_last_norm_stands_in(tmp_path: Path) -> None:
    tensors = tensors_of(GOLDEN_MODEL)
    steps = []
    for name, kept in (("absent", None), ("copy", tensors["model.norm.weight"].clone())):
        own = dict(tensors)
        own.pop("model.layers.8.shared_head.norm.weight")
        if kept is not None:
            own["model.layers.8.shared_head.norm.weight"] = kept
        (tmp_path / name).mkdir()
        run = Drafting(3, source=write(tmp_path / name, own))
        assert run.model.draft is not None and (run.model.draft.final_norm is None) == (kept is None)
        steps.append(run.step([run.add(prompt(20))]).draft_logits)
    assert torch.equal(*steps)


def test_a_quantised_target_goes_with_a_draft_that_is_not(with_draft: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Pitfall: the draft is taken for quantised because the target is."""
    quantised = tensors_of(GOLDEN_FP8)
    mixed = {name: tensor for name, tensor in quantised.items() if not name.startswith("model.layers.8.")}
    mixed |= {name: t for name, t in tensors_of(GOLDEN_MODEL).items() if name.startswith("model.layers.8.")}
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in mixed.values())
    folder = write(tmp_path, mixed, GOLDEN_FP8)
    found = weights_of(config_of(folder, MTP))
    whole = weights_of(config_of(GOLDEN_FP8, MTP))
    for name, tensor in found.items():
        assert torch.equal(tensor, (with_draft if name.startswith("layers.8.") else whole)[name]), name


def test_the_quantised_checkpoint_proposes_as_well_as_the_other() -> None:
    cases = json.loads((GOLDEN_MODEL / "golden.json").read_text())["cases"][:5]
    accepted = []
    for folder in (GOLDEN_MODEL, GOLDEN_FP8):
        engine = Engine(config_of(folder, MTP, max_model_len=512))
        results = engine.generate([case["prompt"] for case in cases], SamplingParams(max_tokens=40, ignore_eos=True))
        steps = [step for result in results for step in (result.outputs[0].speculative or ())[1:]]
        accepted.append(sum(step.num_accepted for step in steps) / len(steps))
    assert accepted[1] > 0.85 * accepted[0] > 1.5


def test_a_snapshot_with_the_draft_serves_without_it(tmp_path: Path) -> None:
    params, text = SamplingParams(max_tokens=12, ignore_eos=True), "Tell me a short story."
    wanted = []
    for speculative, folder in ((MTP, "with"), (None, "without")):
        with Engine(config_of(GOLDEN_MODEL, speculative, max_model_len=128)) as engine:
            engine.serialize(tmp_path / folder)
            wanted.append(engine.generate(text, params)[0].outputs[0].token_ids)
    for speculative in (None, NGRAM, MTP):
        with Engine(config_of(tmp_path / "with", speculative, max_model_len=128)) as engine:
            assert engine.generate(text, params)[0].outputs[0].token_ids == wanted[0] == wanted[1]
            assert (engine.loaded.opened.model.proposer is not None) == (speculative is MTP)
    with pytest.raises(CheckpointError, match=r"has nothing for layers\.8\n.*with the options of speculation"):
        load_model(config_of(tmp_path / "without", MTP))


def test_the_plan_counts_all_cache_groups_and_the_rows_that_are_verified() -> None:
    shape = find_shape("glm-5.2", PluginOptions())
    bytes_of = []
    for speculative in (None, MTP):
        options = EngineConfig("x", load_format="random", device="cpu", dtype="bfloat16", speculative=speculative)
        opened = open_model(options, RandomReader(shape))
        config: Any = opened.config
        resolved = dataclasses.replace(
            resolve(options, "cpu", "bfloat16"), max_running=8, max_batch_tokens=256, dtype="bfloat16"
        )
        bytes_of.append(GlmMemoryPlanner(config, resolved).activation_bytes(2))
        # Latents of 576 values in all layers, index keys of 128 in 21 of them, and one more of each for the draft.
        found = sum(spec.bytes_per_token() for spec in opened.model.cache_specs())
        assert found == 78 * 1152 + 21 * 256 + (1152 + 256 if speculative else 0)
    assert bytes_of[1] - bytes_of[0] == 8 * 3 * 154880 * 6
