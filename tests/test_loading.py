"""What loading decides before it reads a weight: the architecture, the type, and which tokens end a text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline import Engine, EngineConfig, SamplingParams
from hookline.checkpoint.random import RandomReader
from hookline.errors import CheckpointError, ContainerError, ModelConfigError, NotEnoughMemoryError, UsageError
from hookline.loading import _check_format, _dtype, architecture_name, eos_token_ids, open_model
from tests.conftest import TINY

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**20}
PROMPT = list(range(40, 60))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "found"),
    [
        ([3, 4, 5], 6, {7}, {3, 4, 5}),
        (3, [6], {7}, {3}),
        (0, 6, {7}, {0}),
        (None, [6, 8], {7}, {6, 8}),
        (None, 6, {7}, {6}),
        ([], None, {7}, {7}),
        ([None, True, -1, "3"], None, {7}, {7}),
        (None, None, None, set()),
    ],
)
def test_end_tokens_come_from_the_first_place_that_names_any(
    generation: Any, config: Any, tokenizer: set[int] | None, found: set[int]
) -> None:
    reader = RandomReader({"eos_token_id": config}, generation_config={"eos_token_id": generation})
    known: Any = None if tokenizer is None else SimpleNamespace(eos_token_ids=frozenset(tokenizer))
    assert eos_token_ids(reader, known) == found


def test_each_end_token_of_the_generation_config_ends_a_text(tiny_llama: Path, tmp_path: Path) -> None:
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine(EngineConfig(str(tiny_llama), **OPTIONS)) as run:
        want = list(run.generate(PROMPT, free)[0].outputs[0].token_ids)
    first, second = want[3], next(token for token in want[4:] if token not in want[:4])
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    for ends, last in (([second, first], first), ([300, second], second), ([second, 10**6], second)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        with Engine(EngineConfig(str(folder), **OPTIONS)) as run:
            output = run.generate(PROMPT, dataclasses.replace(free, ignore_eos=False))[0].outputs[0]
            assert list(output.token_ids) == want[: want.index(last) + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", last)
            assert list(run.generate(PROMPT, free)[0].outputs[0].token_ids) == want
            late = run.generate(PROMPT, SamplingParams(max_tokens=12, min_tokens=12))[0].outputs[0]
            assert len(late.token_ids) == 12
            assert not {*ends} & {*late.token_ids}


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [5], {}])
def test_a_config_without_an_architecture(architectures: Any) -> None:
    with pytest.raises(ModelConfigError, match="architectures is"):
        architecture_name({"architectures": architectures})


def test_types_and_formats_that_the_plugin_does_not_have() -> None:
    reader = RandomReader(TINY | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5})
    opened = open_model(EngineConfig("m", device="cpu"), reader)
    assert (opened.engine_config.dtype, opened.engine_config.device) == ("float32", "cpu")
    record = dataclasses.replace(
        opened.architecture.record,
        encodings=("bfloat16",),
        default_encoding="bfloat16",
        weight_formats=("safetensors",),
    )
    limited, cpu = dataclasses.replace(opened.architecture, record=record), torch.device("cpu")
    assert _dtype("auto", "float32", cpu, limited) == "bfloat16"
    with pytest.raises(UsageError, match=r"float16.*Llama(?s:.*)bfloat16"):
        _dtype("float16", "float32", cpu, limited)
    with pytest.raises(CheckpointError, match=r"format gguf, which hookline-llama(?s:.*)It reads safetensors"):
        _check_format("gguf", limited)


def test_weights_beyond_the_memory_are_refused_before_any_is_made() -> None:
    fields = TINY | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "vocab_size": 2**31}
    with pytest.raises(NotEnoughMemoryError, match="The weights take"):
        Engine(EngineConfig("m", load_format="random", **OPTIONS), reader=RandomReader(fields))


def test_a_context_beyond_the_models_own_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"513.*512"):
        open_model(EngineConfig(str(checkpoint("llama")), device="cpu", max_model_len=513))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    stretched = checkpoint("llama", max_position_embeddings=64, rope_parameters=rope)
    assert open_model(EngineConfig(str(stretched), device="cpu", max_model_len=256)).engine_config.max_model_len == 256
    with pytest.raises(UsageError, match=r"257.*256"):
        open_model(EngineConfig(str(stretched), device="cpu", max_model_len=257))


def test_a_snapshot_of_another_shape_is_refused_by_name(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with Engine(EngineConfig(str(checkpoint("llama")), **OPTIONS)) as run:
        run.serialize(tmp_path / "snapshot")
    manifest = tmp_path / "snapshot" / "hookline-snapshot.json"
    manifest.write_text(manifest.read_text().replace('"layers.1"', '"layers.7"', 1))
    with pytest.raises(ContainerError, match="layers\\.7"):
        Engine(EngineConfig(str(tmp_path / "snapshot"), **OPTIONS))
