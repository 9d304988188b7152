"""The target in one forward pass: logits equal transformers', and what each token attends to is what it should be.

The caches are full of NaN before each pass (`logits_of`), so an entry that is read and was not written shows. Tests
that begin with `pitfall` are named after faults of other implementations.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline_glm5_2_mtp.attention as attention
from hookline import Engine
from hookline.checkpoint.module import ModuleReader
from tests.glm5_2.models import VARIANTS, config_of, logits_of, make_model, save_model

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(256) for _ in range(length)] for length in (1, 15, 16, 17, 110, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(name: str, **fields: Any) -> Path:
        key = json.dumps([name, fields])
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp("glm") / "model", name, **fields)
        return made[key]

    return make


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Every list that an indexer makes."""
    made: list[torch.Tensor] = []
    own = attention.index_topk

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        made.append(own(*args, **options))
        return made[-1]

    monkeypatch.setattr(attention, "index_topk", spy)
    yield made


def theirs(name: str, **fields: Any) -> list[torch.Tensor]:
    model = make_model(name, **fields)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert all(torch.isfinite(one).all() for one in found)
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, folder: Any, selections: list[torch.Tensor]) -> None:
    with Engine(config_of(folder(name))) as engine:
        assert worst(logits_of(engine, PROMPTS), theirs(name)) < 1e-4
        full = sum(engine.loaded.opened.config.full_index)  # type: ignore[attr-defined]
    assert len(selections) == (0 if name == "glm short" else full)


@pytest.mark.parametrize(
    "fields", [{"index_n_heads": 1, "index_topk": 300}, {"v_head_dim": 32, "num_hidden_layers": 2}]
)
def test_logits_of_other_sizes(fields: dict[str, Any], folder: Any) -> None:
    fields = {"indexer_types": None} | fields
    with Engine(config_of(folder("glm all full", **fields))) as engine:
        assert worst(logits_of(engine, PROMPTS), theirs("glm all full", **fields)) < 1e-4


def test_a_module_in_memory_gives_the_same() -> None:
    with Engine(config_of("x"), reader=ModuleReader(make_model("glm"))) as engine:
        assert worst(logits_of(engine, PROMPTS), theirs("glm")) < 1e-4


def test_pitfall_indexer_rope_layout(folder: Any) -> None:
    """Halves in place of neighbours choose other positions, and only contexts longer than the list show it."""
    want = theirs("glm")
    path = folder("glm")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"indexer_rope_interleave": False}))
    try:
        with Engine(config_of(path)) as engine:
            found = logits_of(engine, PROMPTS)
    finally:
        (path / "config.json").write_text(json.dumps(fields))
    assert worst(found[:3], want[:3]) < 1e-4
    assert worst(found[4:5], want[4:5]) > 1e-2


def test_pitfall_list_entries_of_minus_one(folder: Any, selections: list[torch.Tensor]) -> None:
    """They stand for nothing: where all is visible, lists give what dense attention gives."""
    with Engine(config_of(folder("glm short"))) as engine:
        dense = logits_of(engine, PROMPTS)
        assert not selections
        model: Any = engine.loaded.opened.model
        model.attention = dataclasses.replace(model.attention, needs_list=True)
        listed = logits_of(engine, PROMPTS)
    assert len(selections) == 2
    rows = selections[0].long().sort(descending=True).values
    assert rows[0].tolist() == [0] + [-1] * 255
    assert rows[1 + 14].tolist() == [*range(14, -1, -1)] + [-1] * 241
    assert worst(listed, dense) < 1e-5


def test_pitfall_shared_layers_without_weights(folder: Any, selections: list[torch.Tensor]) -> None:
    """Layers 2 and 3 have no indexer, no index keys in the cache, and take the list of layer 1, not of layer 0."""
    taken: list[torch.Tensor | None] = []
    own = attention.latent_attention

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        taken.append(options["positions"])
        return own(*args, **options)

    with Engine(config_of(folder("glm"))) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "latent_attention", spy)
        logits_of(engine, PROMPTS)
        specs = {spec.name: spec for spec in engine.loaded.opened.model.cache_specs()}
        model: Any = engine.loaded.opened.model
    assert len(selections) == 2
    assert taken[0] is selections[0]
    assert all(taken[layer] is selections[1] for layer in (1, 2, 3))
    assert not torch.equal(selections[0], selections[1])
    assert (specs["target_latent"].num_layers, specs["target_index"].num_layers) == (4, 2)
    assert "index_norm_w" in model.layers[1].parameter_names and "index_norm_w" not in model.layers[2].parameter_names


def test_a_shared_layer_attends_as_a_full_one_with_the_same_list(folder: Any) -> None:
    """All positions but those of its list are out of reach: with them gone from the cache nothing changes."""
    with Engine(config_of(folder("glm"))) as engine:
        model: Any = engine.loaded.opened.model
        layer, tokens = model.layers[2], 40
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1))
        batch = _batch(model, tokens)
        rotary = model.rotary(batch.positions, None)
        listed = torch.full((tokens, 16), -1, dtype=torch.int32)
        for row in range(tokens):
            seen = torch.randperm(row + 1, generator=torch.Generator().manual_seed(row))[:16]
            listed[row, : len(seen)] = seen.int()
        places = {"latent_place": 2, "index_place": None}
        with torch.inference_mode():
            found, same = model.attention(layer, x, rotary, batch, listed, **places)
            assert same is listed
            masked = _dense_with_mask(model, layer, x, rotary, batch, listed, places)
    assert torch.allclose(found, masked, atol=1e-5)


def test_pitfall_padded_rows_and_zero_lengths(folder: Any) -> None:
    """Rows of padding, as captured steps have: context 0, no slot. They change nothing and are finite."""
    with Engine(config_of(folder("glm"))) as engine:
        model: Any = engine.loaded.opened.model
        with torch.inference_mode():
            alone = _batch(model, 30)
            want = model.forward(alone)
            padded = _batch(model, 30, padding=2)
            found = model.forward(padded)
    assert torch.isfinite(found).all()
    assert torch.allclose(found[:30], want, atol=1e-5)


def test_pitfall_nothing_but_the_list_is_read(folder: Any, selections: list[torch.Tensor]) -> None:
    """A latent that no list of the last row names may hold anything."""
    with Engine(config_of(folder("glm"))) as engine:
        model: Any = engine.loaded.opened.model
        with torch.inference_mode():
            batch = _batch(model, 60)
            want = model.forward(batch)[-1]
            last = dataclasses.replace(
                batch,
                token_ids=batch.token_ids[-1:],
                positions=batch.positions[-1:],
                slots=batch.slots[-1:],
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
                logits_rows=torch.arange(1),
                num_decodes=1,
                max_query_len=1,
            )
            for layer, made in ((0, selections[0]), (1, selections[1]), (2, selections[1]), (3, selections[1])):
                unseen = torch.ones(60, dtype=torch.bool)
                unseen[made[-1].long()] = False
                assert unseen.sum() == 60 - 16
                batch.cache["target_latent"][layer]["latent"].flatten(0, 1)[8:68][unseen] = torch.nan
            found = model.forward(last)[0]
    assert torch.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_the_norms_of_the_latents_have_an_eps_of_their_own(eps: float, folder: Any) -> None:
    """Not `rms_norm_eps`, whatever it is; and it can be set."""
    with Engine(config_of(folder("glm", rms_norm_eps=0.05))) as engine:
        want = theirs("glm", rms_norm_eps=0.05)
        model: Any = engine.loaded.opened.model
        changed = dataclasses.replace(model.config, latent_norm_eps=eps)
        model.attention = dataclasses.replace(model.attention, config=changed)
        difference = worst(logits_of(engine, PROMPTS[:3]), want[:3])
    assert (difference < 1e-4) == (eps == 1e-6)


def _batch(model: Any, tokens: int, padding: int = 0) -> Any:
    from hookline.execution.kv_cache import allocate_cache
    from hookline.model import ForwardBatch

    blocks = -(-tokens // 8)
    cache = allocate_cache(model.cache_specs(), blocks + 1, 8, torch.device("cpu"))
    for group in cache.values():
        for layer in group:
            for tensor in layer.values():
                tensor.fill_(torch.nan)
    pad = [0] * padding
    rows = tokens + padding
    return ForwardBatch(
        token_ids=torch.tensor([*((7 * i) % 256 for i in range(tokens)), *pad]),
        positions=torch.tensor([*range(tokens), *pad]),
        slots=torch.tensor([*range(8, 8 + tokens), *(-1 for _ in pad)]),
        block_tables=torch.tensor([list(range(1, blocks + 1)), *([0] * blocks for _ in pad)], dtype=torch.int32),
        query_starts=torch.tensor([0, *range(tokens, rows + 1)], dtype=torch.int32),
        context_lens=torch.tensor([tokens, *pad], dtype=torch.int32),
        logits_rows=torch.arange(rows),
        num_decodes=0,
        max_query_len=tokens,
        max_context_len=tokens,
        rope_lengths=None,
        cache=cache,
    )


def _dense_with_mask(
    model: Any, layer: Any, x: torch.Tensor, rotary: Any, batch: Any, listed: torch.Tensor, places: dict[str, Any]
) -> torch.Tensor:
    """The unabsorbed form in plain torch, over the entries that the layer has written."""
    c = model.config
    entries = batch.cache["target_latent"][2]["latent"].flatten(0, 1)[8 : 8 + len(x)]
    latent, rope_key = entries[:, : c.kv_lora_rank], entries[:, c.kv_lora_rank :]
    keys = torch.einsum("hnl,sl->shn", layer.key_w, latent)
    values = torch.einsum("hvl,sl->shv", layer.value_w, latent)
    a = x @ layer.latent_w[: c.q_lora_rank].T
    a = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * layer.q_norm
    q = (a @ layer.query_w.T).view(len(x), c.num_heads, c.head_dim)
    nope, rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=2)
    cos, sin = (one[:, None] for one in rotary)
    first, second = rope[..., ::2], rope[..., 1::2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(2)
    scores = torch.einsum("thn,shn->ths", nope, keys) + torch.einsum("thr,sr->ths", turned, rope_key)
    mask = torch.zeros(len(x), len(x) + 1, dtype=torch.bool)
    mask.scatter_(1, listed.long().where(listed >= 0, len(x)), True)
    weights = (c.softmax_scale * scores).masked_fill(~mask[:, None, :-1], -torch.inf).softmax(-1)
    return torch.einsum("ths,shv->thv", weights, values).flatten(1) @ layer.attn_out_w.T
