"""Greedy ids in fp32 equal transformers', for every option of the plugins, and whatever else the engine does.

Requests alone and in batches, prefills whole and in chunks, requests preempted, prefixes cold, partly and fully warm:
the ids are the same. A test whose forced event did not happen fails.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hookline import Engine, EngineConfig, SamplingParams
from hookline.config import SpeculativeConfig
from hookline_kernels import native

NEW_TOKENS = 18
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
BLOCK = 8

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.4 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("llama", {"head_dim": 32}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "gelu": ("llama", {"hidden_act": "gelu"}),
    "large eps": ("llama", {"rms_norm_eps": 0.01}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 12}),
    "mistral head_dim": ("mistral", {"sliding_window": 20, "head_dim": 32}),
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"sliding_window": 12, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": True}),
    # Layer by layer: experts and a window, an MLP alone, experts, an MLP that its place in the list makes one.
    "qwen2_moe mixed": (
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 12,
            "mlp_only_layers": [1, 3],
        },
    ),
    "qwen2_moe sparse step": ("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False}),
}


def prompts() -> list[list[int]]:
    """16 prompts of 1 to 90 tokens, with the block's borders among them.

    The longest are longer than the largest chunk, and lie beyond the positions where rotary types change.
    """
    rng = random.Random(0)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 90, 89, *(rng.randint(1, 90) for _ in range(9))]
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def reference(folder: Path, many: list[list[int]], **extra: Any) -> list[list[int]]:
    """What transformers generates, each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    with torch.inference_mode():
        for ids in many:
            row = torch.tensor([ids])
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | extra
            # A copy: dynamic rotary angles of a long prompt stay in the model, and the next one would get them.
            out = copy.deepcopy(model).generate(row, attention_mask=torch.ones_like(row), **options)
            found.append(out[0, len(ids) :].tolist())
    return found


@torch.inference_mode()
def likeliest(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """In one pass, a model's likeliest token at each place of `output`, after the prompt and what stands before it.

    Where that is `output` again, it is the model's whole greedy output. Not for models whose angles depend on the
    length: they see all places with those of the last.
    """
    logits = model(torch.tensor([prompt + output]), logits_to_keep=len(output) + 1).logits[0]
    found: list[int] = logits[:-1].argmax(dim=-1).tolist()
    return found


def are_greedy(model: Any, many: list[list[int]], outputs: list[list[int]]) -> bool:
    """Whether all outputs are the model's own."""
    return all(likeliest(model, ids, output) == output for ids, output in zip(many, outputs, strict=True))


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Path, list[list[int]], list[list[int]]]]:
    """Folder, prompts and transformers' ids of a variant, computed once.

    To judge what the engine wrote takes transformers a tenth of the time to write it, which it does where it differs.
    """
    known: dict[str, tuple[Path, list[list[int]], list[list[int]]]] = {}

    def compute(name: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        if name not in known:
            kind, fields = VARIANTS[name]
            folder = checkpoint(kind, **fields)
            many = prompts()
            with engine(folder) as run:
                found = ids_of(run.generate(many, GREEDY))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            judged = name not in ("longrope", "dynamic rope") and are_greedy(model, many, found)
            known[name] = folder, many, found if judged else reference(folder, many)
        return known[name]

    return compute


def engine(folder: Path, blocks: int = 256, **options: Any) -> Engine:
    """An engine with a pool of so many blocks of 8 tokens."""
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    probe = {"block_size": BLOCK, "dtype": "float32", "device": "cpu", "max_model_len": 128} | options
    config = transformers.AutoConfig.from_pretrained(folder)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_key_value_heads * head_dim * 4 * config.num_hidden_layers
    memory = blocks * BLOCK * token_bytes
    return Engine(EngineConfig(str(folder), kv_cache_memory=memory, **probe), **switches)


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_equals_transformers_alone_and_in_batches(name: str, batch: int, expected: Any) -> None:
    """Alone those with the borders of blocks and the longest; in batches all."""
    folder, many, want = expected(name)
    count = 6 if batch == 1 else 16
    with engine(folder, prefix_caching=False) as run:
        batches = spy_on_batches(run)
        found = [ids for at in range(0, count, batch) for ids in ids_of(run.generate(many[at : at + batch], GREEDY))]
    assert found == want[:count]
    assert max(len(step) for step in batches) == batch


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_do_not_matter(name: str, chunk: int, expected: Any) -> None:
    folder, many, want = expected(name)
    with engine(folder, max_chunk_tokens=chunk, max_batch_tokens=70) as run:
        batches = spy_on_batches(run)
        assert ids_of(run.generate(many, GREEDY)) == want
    counts = [count for step in batches for count in step]
    assert max(counts) == chunk
    # Neither prompts that ran whole nor steps that held one request's chunk alone.
    assert sum(counts) == sum(len(ids) + NEW_TOKENS - 1 for ids in many)
    assert any(max(step) == chunk and len(step) > 1 for step in batches)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_loses_nothing(name: str, prefix_caching: bool, expected: Any) -> None:
    """A pool that holds the longest request and little more."""
    folder, many, want = expected(name)
    with engine(folder, blocks=20, prefix_caching=prefix_caching) as run:
        requests = spy_on_requests(run)
        assert ids_of(run.generate(many, GREEDY)) == want
    assert sum(request.preemptions for request in requests) > 0


@pytest.mark.parametrize(("name", "every"), [("plain", 3), ("plain", 7), ("mixtral window", 3), ("qwen2_moe mixed", 7)])
def test_forced_preemption_loses_nothing(name: str, every: int, expected: Any) -> None:
    folder, many, want = expected(name)
    with engine(folder, preempt_every=every, max_chunk_tokens=5) as run:
        requests = spy_on_requests(run)
        assert ids_of(run.generate(many, GREEDY)) == want
    assert sum(request.preemptions for request in requests) > 3


@pytest.mark.parametrize("name", VARIANTS)
def test_cold_and_warm_prefixes_agree(name: str, expected: Any) -> None:
    folder, many, want = expected(name)
    with engine(folder) as run:
        cold, warm = run.generate(many, GREEDY), run.generate(many, GREEDY)
    assert ids_of(cold) == ids_of(warm) == want
    assert [output.usage.cached_tokens for output in cold] == [0] * 16
    # All full blocks, but never the last token, which has to run.
    assert [output.usage.cached_tokens for output in warm] == [(len(ids) - 1) // BLOCK * BLOCK for ids in many]
    with engine(folder) as run:
        run.generate([ids[: len(ids) // 2] for ids in many if len(ids) >= 4 * BLOCK], GREEDY)
        partly = run.generate(many, GREEDY)
    assert ids_of(partly) == want
    counts = [(output.usage.cached_tokens, output.usage.prompt_tokens) for output in partly]
    assert sum(0 < cached < prompt - BLOCK for cached, prompt in counts) > 1


def drafting_engine(folder: Path, **switches: Any) -> Engine:
    return engine(
        folder, speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=4, ngram_min=1), **switches
    )


def accepted_in(outputs: list[Any]) -> int:
    return sum(step.num_accepted for output in outputs for step in output.outputs[0].speculative)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_do_not_matter(name: str, expected: Any) -> None:
    folder, many, want = expected(name)
    with drafting_engine(folder) as run:
        outputs = run.generate(many, GREEDY)
    assert ids_of(outputs) == want
    assert accepted_in(outputs) > 0


@pytest.mark.parametrize("name", ["plain", "mistral window", "mixtral", "dynamic rope"])
@pytest.mark.parametrize("switches", [{"max_chunk_tokens": 3}, {"preempt_every": 3}, {"blocks": 16}])
def test_drafts_in_chunks_and_preempted(name: str, switches: dict[str, Any], expected: Any) -> None:
    folder, many, want = expected(name)
    with drafting_engine(folder, **switches) as run:
        requests = spy_on_requests(run)
        for _ in range(2):  # cold, and with prefixes that were cached while drafting
            outputs = run.generate(many, GREEDY)
            assert ids_of(outputs) == want
            assert accepted_in(outputs) > 0
        assert ids_of([run.generate([ids], GREEDY)[0] for ids in many[:4]]) == want[:4]
    if "max_chunk_tokens" not in switches:
        assert sum(request.preemptions for request in requests) > 0


@pytest.mark.parametrize("name", ["plain", "mistral window", "mixtral", "qwen2_moe mixed"])
def test_kernels_do_not_matter(name: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no C compiler the torch implementations give the same."""
    monkeypatch.setattr(native, "load", lambda dtype: native.Native(None, "left out by the test"))
    folder, many, want = expected(name)
    with engine(folder, max_model_len=128) as run:
        assert ids_of(run.generate(many, GREEDY)) == want


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True}, {"overlap": True, "preempt_every": 5}])
def test_options_that_change_logits_equal_transformers(options: dict[str, Any], expected: Any) -> None:
    """Where the host chooses, and on the device ahead of the host; beside requests without such options."""
    folder, many, free = expected("plain")
    own = many[:6]
    want = reference(folder, own, repetition_penalty=1.4, sequence_bias={(7,): 3.0, (200,): -9.0})
    edited = dataclasses.replace(GREEDY, repetition_penalty=1.4, logit_bias={7: 3.0, 200: -9.0})
    with engine(folder, **options) as run:
        for _ in range(2):
            found = ids_of(run.generate([*own, *many], [edited] * 6 + [GREEDY] * 16))
            assert found == want + free
        assert run._runner.max_in_flight == 1 + options["overlap"]
    assert all(one != other for one, other in zip(want, free[:6], strict=True))


def test_old_spellings_of_the_config_mean_the_same(expected: Any, tmp_path: Path) -> None:
    """`torch_dtype`, `rope_theta` and `rope_scaling`, as files from before transformers 5 have them."""
    folder, many, want = expected("llama3 rope")
    old = shutil.copytree(folder, tmp_path / "old")
    fields = json.loads((old / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"torch_dtype": fields.pop("dtype"), "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (old / "config.json").write_text(json.dumps(fields))
    with engine(folder) as run:
        config = run.loaded.opened.config
    with engine(old) as run:
        assert run.loaded.opened.config == config
        assert ids_of(run.generate(many, GREEDY)) == want


def spy_on_batches(run: Engine) -> list[list[int]]:
    """How many tokens of each request ran, for every step from now on."""
    steps: list[list[int]] = []
    schedule = run.scheduler.schedule

    def spy() -> Any:
        batch = schedule()
        if batch.requests:
            steps.append([part.count for part in batch.requests])
        return batch

    run.scheduler.schedule = spy  # type: ignore[method-assign]
    return steps


def spy_on_requests(run: Engine) -> list[Any]:
    """Every request that the scheduler takes from now on."""
    taken: list[Any] = []
    add = run.scheduler.add

    def spy(request: Any) -> None:
        add(request)
        taken.append(request)

    run.scheduler.add = spy  # type: ignore[method-assign]
    return taken
