"""The unabsorbed form of latent attention: what the absorbed one gives, where it is chosen, and what it holds."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hookline_glm5_2_mtp.attention as attention
import hookline_glm5_2_mtp.unabsorbed as unabsorbed
from hookline import Engine, SamplingParams
from hookline.layers.rotary import Rotary
from hookline.model import ForwardBatch
from hookline_glm5_2_mtp.attention import LatentAttention
from hookline_glm5_2_mtp.config import GlmMoeDsaConfig, read_config
from hookline_glm5_2_mtp.shapes import DEEPSEEK_V32, GLM_5_2
from tests.glm5_2.models import GLM, SIZES, YARN, config_of, logits_of, make_model, save_model

S = 4
MODELS: dict[str, dict[str, Any]] = {
    "glm": GLM | {"architectures": ["GlmMoeDsaForCausalLM"]},
    "deepseek yarn": {"rope_parameters": YARN, "architectures": ["DeepseekV32ForCausalLM"]},
}
# Computed tokens and new ones of each request; those with one new token come first.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(0, 33)],
    "one token": [(0, 1)],
    "a chunk": [(37, 26)],
    "prompts": [(0, 5), (0, 32), (0, 17)],
    "decodes, chunks and a prompt": [(8, 1), (0, 1), (31, 1), (5, 20), (0, 9), (16, 16)],
}
# Latents that are wider than heads, as in the large models; else the absorbed form holds less.
WIDE = {"kv_lora_rank": 96}
CASES = [(model, batch, seed) for model in MODELS for batch in BATCHES for seed in range(2)]


def make_config(model: str, seed: int) -> GlmMoeDsaConfig:
    """Sizes of all kinds; values are never wider than keys."""
    rng = random.Random(seed)
    nope, rope = rng.choice([8, 24, 48]), rng.choice([8, 16])
    sizes = {
        "num_attention_heads": rng.choice([1, 3, 4]),
        "hidden_size": 32,
        "q_lora_rank": 40,
        "kv_lora_rank": rng.choice([16, 48, 64]),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": rng.choice([4, 20, nope + rope]) if nope > 8 else 8,
        "index_topk": 256,
    }
    return read_config(SIZES | MODELS[model] | sizes)


def make_layer(c: GlmMoeDsaConfig) -> SimpleNamespace:
    """A layer without an indexer."""

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * shape[-1] ** -0.5

    heads = c.num_heads
    return SimpleNamespace(
        latent_w=matrix(c.q_lora_rank + c.latent_width, c.hidden_size),
        q_norm=torch.rand(c.q_lora_rank) + 0.5,
        kv_norm=torch.rand(c.kv_lora_rank) + 0.5,
        query_w=matrix(heads * c.head_dim, c.q_lora_rank) * 4,
        key_w=matrix(heads, c.qk_nope_head_dim, c.kv_lora_rank),
        value_w=matrix(heads, c.v_head_dim, c.kv_lora_rank),
        attn_out_w=matrix(c.hidden_size, heads * c.v_head_dim),
    )


def make_batch(c: GlmMoeDsaConfig, requests: list[tuple[int, int]]) -> ForwardBatch:
    """Blocks in no order, the computed tokens' entries filled, all else NaN, and tables that are wider than needed."""
    contexts = [computed + new for computed, new in requests]
    blocks = [-(-context // S) for context in contexts]
    order = (torch.randperm(sum(blocks)) + 1).split(blocks)
    tables = torch.zeros((len(requests), max(blocks) + 2), dtype=torch.int32)
    cache = torch.full((sum(blocks) + 1, S, c.latent_width), torch.nan)
    slots, positions = [], []
    for row, ((computed, new), own) in enumerate(zip(requests, order, strict=True)):
        tables[row, : len(own)] = own.int()
        place = torch.arange(computed + new)
        slot = own[place // S] * S + place % S
        cache.flatten(0, 1)[slot[:computed]] = torch.randn(computed, c.latent_width)
        slots.append(slot[computed:])
        positions.append(place[computed:])
    counts = [new for _, new in requests]
    return ForwardBatch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        block_tables=tables,
        query_starts=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        logits_rows=torch.arange(0),
        num_decodes=next((row for row, count in enumerate(counts) if count > 1), len(counts)),
        max_query_len=max(counts),
        max_context_len=max(contexts),
        rope_lengths=None,
        cache={"target_latent": [{"latent": cache}]},
    )


@pytest.mark.parametrize(("model", "batch_name", "seed"), CASES)
def test_both_forms_give_the_same(model: str, batch_name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    c = make_config(model, seed)
    layer: Any = make_layer(c)
    batch = make_batch(c, BATCHES[batch_name])
    x = torch.randn(len(batch.token_ids), c.hidden_size)
    rotary = Rotary(c.rope, torch.device("cpu"))(batch.positions, None)
    attend = LatentAttention(config=c, num_heads=c.num_heads, latent_group="target_latent", index_group="")
    found = []
    for taken in (False, True):
        monkeypatch.setattr(attention, "prefers_unabsorbed", lambda *_, taken=taken: taken)
        answer, positions = attend(layer, x, rotary, batch, None, latent_place=0, index_place=None)
        assert positions is None and torch.isfinite(answer).all()
        found.append(answer)
    assert found[0].std() > 0.1
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_yarn_scales_the_scores() -> None:
    """The case above is one where the scale is not that of the head's size alone."""
    c = make_config("deepseek yarn", 0)
    assert c.softmax_scale > 1.4 * c.head_dim**-0.5


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the form was taken for, of each layer and step, from chunks of 8 rows on."""
    rows: list[int] = []
    own = attention.unabsorbed_attention

    def spy(*args: Any) -> torch.Tensor:
        out = own(*args)
        rows.append(len(out))
        return out

    monkeypatch.setattr(attention, "unabsorbed_attention", spy)
    monkeypatch.setattr(unabsorbed, "LEAST_ROWS", 8)
    return rows


@pytest.mark.parametrize("name", ["glm short", "deepseek yarn groups"])
def test_logits_equal_transformers(name: str, tmp_path: Path, taken: list[int]) -> None:
    fields = {"index_topk": 256} | WIDE
    prompts = [[(7 * i + 3 * length) % 256 for i in range(length)] for length in (90, 110, 70)]
    model = make_model(name, **fields)
    with torch.inference_mode():
        wanted = [model(torch.tensor([ids])).logits[0] for ids in prompts]
    with Engine(config_of(save_model(tmp_path / "model", name, **fields))) as engine:
        found = logits_of(engine, prompts)
    assert taken == [270] * 4
    assert all((one - other).abs().max() < 1e-4 for one, other in zip(found, wanted, strict=True))


def test_a_served_model_chooses_the_same_tokens(
    tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, decodes beside them; the steps of one token and the contexts past the list are not concerned."""
    folder = save_model(tmp_path / "model", "glm short", index_topk=64, **WIDE)
    prompts = [[(5 * i + length) % 256 for i in range(length)] for length in (60, 9, 40, 100)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = []
    for budget in (256, 30):
        with Engine(config_of(folder, max_batch_tokens=budget)) as engine:
            answers.append([result.outputs[0].token_ids for result in engine.generate(prompts, params)])
    assert taken and min(taken) >= 8
    taken.clear()
    monkeypatch.setattr(unabsorbed, "LEAST_ROWS", 1000)
    with Engine(config_of(folder)) as engine:
        answers.append([result.outputs[0].token_ids for result in engine.generate(prompts, params)])
    assert not taken
    assert answers[0] == answers[1] == answers[2]


def batch_of(rows: int, requests: int, context: int, decodes: int = 0) -> Any:
    """What the choice looks at."""
    return SimpleNamespace(
        token_ids=range(rows + decodes),
        num_decodes=decodes,
        num_requests=requests + decodes,
        max_query_len=rows // requests if requests else 1,
        max_context_len=context,
    )


@pytest.mark.parametrize("fields", [GLM_5_2, DEEPSEEK_V32], ids=["glm", "deepseek"])
def test_the_choice_at_full_size(fields: dict[str, Any]) -> None:
    """Whole prompts take it, beside any number of decodes; decodes, drafts and short last chunks do not."""
    c = read_config(fields)

    def chosen(*args: int) -> bool:
        return unabsorbed.prefers_unabsorbed(c, c.num_heads, batch_of(*args), 64)

    assert chosen(2048, 1, 2048) and chosen(1024, 1, 1024) and chosen(8192, 4, 2048)
    assert chosen(2048, 1, 2048, 64) and chosen(1024, 1, 2048)
    assert not chosen(512, 1, 2048) and not chosen(127, 1, 127) and not chosen(2048, 16, 2048)
    assert not chosen(0, 0, 2048, 64) and not chosen(4 * 32, 32, 2048) and not chosen(4, 1, 4)


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_takes_fewer_multiply_adds_and_no_more_memory(seed: int) -> None:
    rng = random.Random(seed)
    c = [read_config(GLM_5_2), read_config(DEEPSEEK_V32), read_config(SIZES | MODELS["glm"] | WIDE)][seed]
    answers = set()
    for _ in range(300):
        requests, each = rng.randint(1, 8), rng.randint(128, 1024)
        context = (each + rng.choice([0, rng.randrange(2048)]) + 63) // 64 * 64
        counts = requests * each, requests, context
        absorbed, other = unabsorbed.multiply_adds(c, *counts)
        held, would_hold = unabsorbed.most_held(c, c.num_heads, *counts)
        chosen = unabsorbed.prefers_unabsorbed(c, c.num_heads, batch_of(*counts), 64)
        assert chosen == (other < absorbed and would_hold <= held)
        answers.add(chosen)
    assert True in answers


def test_multiply_adds_count_pairs() -> None:
    """Of three chunks of 5 rows, the last of 12 positions: counted one by one."""
    c = make_config("glm", 0)
    pairs = 3 * sum(range(8, 13))
    expanded = (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    absorbed, other = unabsorbed.multiply_adds(c, 15, 3, 12)
    assert absorbed == 15 * expanded + pairs * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    assert other == 36 * expanded + pairs * 2 * c.head_dim
