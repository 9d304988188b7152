"""The engine as a user of Python sees it: results, options, and what a fault of one request does to the others."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hookline import Engine, EngineConfig, SamplingParams
from hookline.checkpoint.module import ModuleReader
from hookline.errors import (
    CheckpointError,
    HooklineError,
    InvalidRequestError,
    ModelNotFoundError,
    NoPluginError,
    NotEnoughMemoryError,
    UsageError,
)

OPTIONS: dict[str, Any] = {"device": "cpu", "block_size": 8, "kv_cache_memory": 64 * 8 * 512, "max_model_len": 200}
PROMPT = [10, 200, 30, 40, 5, 77, 60, 70, 81, 90, 99, 3]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(str(tiny_llama), **OPTIONS)) as run:
        yield run
        run.abort_all()
        run.scheduler.check()
        assert run.pool.num_referenced == 0
        assert run._states == {}


def tokens(engine: Engine, prompt: Any = PROMPT, **params: Any) -> list[int]:
    defaults = {"max_tokens": 16, "ignore_eos": True}
    output = engine.generate(prompt, SamplingParams(**{**defaults, **params}))[0]
    return list(output.outputs[0].token_ids)


class TestResults:
    def test_text_and_messages_and_ids_are_prompts(self, engine: Engine) -> None:
        text = engine.generate("hello", GREEDY)[0]
        ids = engine.generate(engine.encode("hello"), GREEDY)[0]
        assert text.outputs[0].token_ids == ids.outputs[0].token_ids
        assert (text.prompt, ids.prompt) == ("hello", None)
        chat = engine.generate([{"role": "user", "content": "hello"}], GREEDY)[0]
        rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        want = engine.tokenizer.encode(rendered, allow_special=True)  # type: ignore[union-attr]
        assert list(chat.prompt_token_ids) == want

    def test_several_prompts_come_back_in_order(self, engine: Engine) -> None:
        outputs = engine.generate([PROMPT[:n] for n in (3, 12, 1)], [GREEDY] * 3)
        assert [len(o.prompt_token_ids) for o in outputs] == [3, 12, 1]
        assert all(o.finished and o.usage.completion_tokens == 16 for o in outputs)

    def test_streaming_adds_up_to_the_whole(self, engine: Engine) -> None:
        seen = list(engine.stream(PROMPT, GREEDY))
        texts = [o.outputs[0].text for o in seen]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
        assert len(seen) >= 16
        whole = engine.generate(PROMPT, GREEDY)[0]
        assert texts[-1] == whole.outputs[0].text
        assert seen[-1].timing.time_to_first_token is not None

    def test_a_dropped_stream_frees_everything(self, engine: Engine) -> None:
        stream = engine.stream(PROMPT, GREEDY)
        next(stream)
        assert engine.pool.num_referenced > 0
        stream.close()  # type: ignore[attr-defined]
        assert engine.pool.num_referenced == 0
        assert not engine.has_work

    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    def test_abort_at_any_moment(self, engine: Engine, steps: int) -> None:
        want = tokens(engine)
        doomed = engine.add_request(list(range(100)), GREEDY)
        kept = engine.add_request(PROMPT, GREEDY)
        for _ in range(steps):
            engine.step()
        assert engine.abort(doomed)
        assert not engine.abort(doomed)
        assert not engine.abort("request-none")
        done = {}
        while engine.has_work:
            done.update({o.request_id: o for o in engine.step() if o.finished})
        assert done[doomed].outputs[0].finish_reason == "abort"
        assert list(done[kept].outputs[0].token_ids) == want

    def test_in_memory_module(self, tiny_llama: Path, engine: Engine) -> None:
        module = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        with Engine(EngineConfig("module", **OPTIONS), reader=ModuleReader(module)) as run:
            assert tokens(run) == tokens(engine)
            with pytest.raises(InvalidRequestError, match="no tokenizer"):
                run.generate("text")

    def test_random_weights_follow_the_seed(self, tiny_llama: Path) -> None:
        found = []
        for seed in (1, 1, 2):
            with Engine(EngineConfig(str(tiny_llama), load_format="random", seed=seed, **OPTIONS)) as run:
                found.append(run.put(["a"], [PROMPT]))
        assert torch.equal(found[0], found[1])
        assert not torch.allclose(found[0], found[2])

    @pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
    def test_snapshot_gives_the_same(self, checkpoint: Callable[..., Path], tmp_path: Path, fields: Any) -> None:
        folder = checkpoint("llama", **fields)
        with Engine(EngineConfig(str(folder), **OPTIONS)) as run:
            want, weights = tokens(run), run.memory_plan.weights
            run.serialize(tmp_path / "snapshot")
        with Engine(EngineConfig(str(tmp_path / "snapshot"), **OPTIONS)) as run:
            assert tokens(run) == want
            assert abs(run.memory_plan.weights - weights) < 64 * 256
            assert "<|im_end|>" in run.tokenizer.decode([257], skip_special_tokens=False)  # type: ignore[union-attr]
        with pytest.raises(CheckpointError, match="bfloat16"):
            Engine(EngineConfig(str(tmp_path / "snapshot"), **{**OPTIONS, "dtype": "bfloat16"}))


class TestOptions:
    def test_max_tokens_and_the_context_end_a_request(self, engine: Engine) -> None:
        short = engine.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert (len(short.outputs[0].token_ids), short.outputs[0].finish_reason) == (3, "length")
        full = engine.generate([1] * 190, SamplingParams(ignore_eos=True))[0]
        assert (len(full.outputs[0].token_ids), full.outputs[0].finish_reason) == (10, "length")

    def test_stop_token_ends_it_and_is_no_text(self, engine: Engine) -> None:
        free = tokens(engine)
        place = next(i for i in range(3, 16) if free[i] not in free[:i])
        output = engine.generate(PROMPT, SamplingParams(max_tokens=16, stop_token_ids=(free[place],)))[0].outputs[0]
        assert list(output.token_ids) == free[: place + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", free[place])
        assert output.text == engine.tokenizer.decode(free[:place])  # type: ignore[union-attr]

    def test_min_tokens_keeps_a_stop_token_away(self, engine: Engine) -> None:
        free = tokens(engine)
        found = tokens(engine, stop_token_ids=(free[0],), min_tokens=5, ignore_eos=False)
        assert len(found) >= 5
        assert free[0] not in found[:5]

    def test_stop_string_over_token_borders(self, engine: Engine) -> None:
        whole = engine.generate(PROMPT, GREEDY)[0].outputs[0].text
        stop = whole[3:6]
        params = dataclasses.replace(GREEDY, stop=(stop,))
        output = engine.generate(PROMPT, params)[0].outputs[0]
        assert output.text == whole[: whole.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        for part in engine.stream(PROMPT, params):
            assert output.text.startswith(part.outputs[0].text)

    def test_n_gives_different_but_repeatable_continuations(self, engine: Engine) -> None:
        params = SamplingParams(max_tokens=8, temperature=1.5, n=3, seed=7, ignore_eos=True)
        first, second = (engine.generate(PROMPT, params)[0] for _ in range(2))
        ids = [o.token_ids for o in first.outputs]
        assert len(set(ids)) == 3
        assert ids == [o.token_ids for o in second.outputs]
        assert first.usage.completion_tokens == 24

    def test_a_seeded_request_does_not_see_its_neighbours(self, engine: Engine) -> None:
        params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
        alone = tokens(engine, temperature=1.0, top_p=0.95, seed=11, max_tokens=12)
        others = [
            SamplingParams(max_tokens=9, temperature=2.0, ignore_eos=True),
            GREEDY,
            dataclasses.replace(params, seed=12),
        ]
        outputs = engine.generate([PROMPT[:5], PROMPT[:9], PROMPT, PROMPT], [*others, params])
        assert list(outputs[3].outputs[0].token_ids) == alone
        assert list(outputs[2].outputs[0].token_ids) != alone

    def test_preemption_does_not_change_a_seeded_request(self, tiny_llama: Path, engine: Engine) -> None:
        options = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
        want = tokens(engine, **options)
        with Engine(EngineConfig(str(tiny_llama), **OPTIONS), preempt_every=3) as run:
            assert tokens(run, **options) == want

    @pytest.mark.parametrize(
        "option",
        [
            {"repetition_penalty": 1.8},
            {"presence_penalty": 1.9},
            {"frequency_penalty": 1.9},
            {"logit_bias": {65: 100.0}},
            {"allowed_token_ids": (65, 66)},
            {"temperature": 1.0, "seed": 1},
        ],
    )
    def test_an_option_changes_its_request_and_no_other(self, engine: Engine, option: dict[str, Any]) -> None:
        plain = tokens(engine)
        params = dataclasses.replace(GREEDY, **option)
        outputs = engine.generate([PROMPT, PROMPT, PROMPT], [GREEDY, params, GREEDY])
        found = [list(o.outputs[0].token_ids) for o in outputs]
        assert found[0] == found[2] == plain
        assert found[1] != plain

    def test_bad_words_do_not_appear(self, engine: Engine) -> None:
        plain = engine.generate(PROMPT, GREEDY)[0].outputs[0].text
        word = next(char for char in plain if char.isascii() and char.isprintable() and char != " ")
        found = engine.generate(PROMPT, dataclasses.replace(GREEDY, bad_words=(word,)))[0].outputs[0].text
        assert word in plain
        assert word not in found

    def test_logprobs_equal_transformers(self, tiny_llama: Path, engine: Engine) -> None:
        output = engine.generate(PROMPT, dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2))[0]
        ids = PROMPT + list(output.outputs[0].token_ids)
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        with torch.inference_mode():
            want = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        assert found[0] is None
        assert len(found) == len(ids)
        for place, entry in enumerate(found[1:], start=1):
            assert entry.token_id == ids[place]
            assert abs(entry.logprob - float(want[place - 1, ids[place]])) < 1e-4
        total = sum(entry.logprob for entry in output.outputs[0].logprobs)
        assert math.isclose(output.outputs[0].cumulative_logprob, total, rel_tol=1e-12)

    def test_prompt_logprobs_in_chunks_are_the_same(self, tiny_llama: Path, engine: Engine) -> None:
        params = dataclasses.replace(GREEDY, prompt_logprobs=0, max_tokens=2)
        want = engine.generate(PROMPT, params)[0].prompt_logprobs
        with Engine(EngineConfig(str(tiny_llama), **OPTIONS), max_chunk_tokens=5) as run:
            found = run.generate(PROMPT, params)[0].prompt_logprobs
        pairs = list(zip(want or (), found or (), strict=True))[1:]
        assert len(pairs) == len(PROMPT) - 1
        assert all(abs(a.logprob - b.logprob) < 1e-4 and a.token_id == b.token_id for a, b in pairs)


class TestFaults:
    @pytest.mark.parametrize(
        ("prompt", "named"),
        [
            ("", "empty"),
            ([], "empty"),
            ([-1], "token ids"),
            ([320], "token ids"),
            ([True], "token ids"),
            ([1] * 200, "200"),
        ],
    )
    def test_bad_prompts_are_refused(self, engine: Engine, prompt: Any, named: str) -> None:
        with pytest.raises(InvalidRequestError, match=named):
            engine.add_request(prompt, GREEDY)
        assert not engine.has_work

    @pytest.mark.parametrize(
        "option",
        [{"stop_token_ids": (320,)}, {"logit_bias": {320: 1.0}}, {"allowed_token_ids": (999,)}, {"min_tokens": 190}],
    )
    def test_params_beyond_the_model_are_refused(self, engine: Engine, option: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError):
            engine.add_request(PROMPT, SamplingParams(**option))
        assert not engine.has_work

    def test_what_never_fits_the_cache_is_refused_at_once(self, tiny_llama: Path) -> None:
        small = {**OPTIONS, "kv_cache_memory": 4 * 8 * 512, "max_model_len": 32}
        with Engine(EngineConfig(str(tiny_llama), **small)) as run:
            with pytest.raises(InvalidRequestError, match="32"):
                run.add_request([1] * 32, GREEDY)
            assert len(run.generate([1] * 31, GREEDY)[0].outputs[0].token_ids) == 1

    def test_one_bad_prompt_among_many_leaves_nothing_behind(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequestError):
            engine.generate([PROMPT, [], PROMPT], GREEDY)
        assert engine.pool.num_referenced == 0
        assert not engine.has_work or engine.step()

    def test_a_lost_step_fails_its_requests_and_no_later_one(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        want = tokens(engine)
        model = engine.loaded.opened.model

        def broken(batch: object) -> torch.Tensor:
            raise RuntimeError("no forward")

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", broken)
            output = engine.generate(PROMPT, GREEDY)[0]
        assert output.outputs[0].finish_reason == "error"
        assert "no forward" in str(output.error)
        assert tokens(engine) == want

    def test_three_lost_steps_in_a_row_are_raised(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(batch: object) -> torch.Tensor:
            raise RuntimeError("no forward")

        monkeypatch.setattr(engine.loaded.opened.model, "forward", broken)
        engine.generate(PROMPT, GREEDY)
        engine.generate(PROMPT, GREEDY)
        with pytest.raises(RuntimeError, match="no forward"):
            engine.generate(PROMPT, GREEDY)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_row_without_numbers_fails_alone(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, value: float
    ) -> None:
        want = tokens(engine)
        compute = engine.loaded.opened.model.compute_logits
        calls = []

        def poisoned(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            calls.append(len(logits))
            if len(calls) == 4:
                logits[1] = value
            return logits

        monkeypatch.setattr(engine.loaded.opened.model, "compute_logits", poisoned)
        outputs = engine.generate([PROMPT, PROMPT[:4], PROMPT], GREEDY)
        reasons = [o.outputs[0].finish_reason for o in outputs]
        assert sorted(reasons) == ["error", "length", "length"]
        assert "no numbers" in str(next(o for o in outputs if o.outputs[0].finish_reason == "error").error)
        assert all(list(o.outputs[0].token_ids) == want for o in (outputs[0], outputs[2]) if o.error is None)

    def test_options_that_leave_no_token_fail_alone(self, engine: Engine) -> None:
        impossible = SamplingParams(max_tokens=4, allowed_token_ids=(258,), min_tokens=2)
        outputs = engine.generate([PROMPT, PROMPT], [impossible, GREEDY])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert list(outputs[1].outputs[0].token_ids) == tokens(engine)


class TestLoadingFaults:
    def write(self, source: Path, folder: Path, **fields: Any) -> Path:
        """A copy of a checkpoint with other config fields; None takes a field out."""
        import json
        import shutil

        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    @pytest.mark.parametrize(
        ("fields", "error", "named"),
        [
            ({"architectures": ["LlamaForCausalLMs"]}, NoPluginError, "LlamaForCausalLM"),
            ({"architectures": []}, HooklineError, "architectures"),
            ({"rope_parameters": {"rope_type": "spiral"}}, HooklineError, "spiral"),
            ({"hidden_act": "os.system"}, HooklineError, "os.system"),
            ({"num_hidden_layers": 10**9}, HooklineError, "num_hidden_layers"),
            ({"num_hidden_layers": 3}, HooklineError, "layers.2"),
            ({"num_key_value_heads": 0}, HooklineError, "num_key_value_heads"),
            ({"num_key_value_heads": 3}, HooklineError, "num_key_value_heads"),
            ({"intermediate_size": 113}, HooklineError, "113"),
            ({"vocab_size": 640}, HooklineError, "640"),
            ({"rms_norm_eps": "small"}, HooklineError, "rms_norm_eps"),
            ({"attention_bias": True}, HooklineError, "bias"),
            ({"max_position_embeddings": None}, HooklineError, "max_position_embeddings"),
        ],
    )
    def test_configs_are_refused_by_name(
        self, tiny_llama: Path, tmp_path: Path, fields: dict[str, Any], error: type[Exception], named: str
    ) -> None:
        folder = self.write(tiny_llama, tmp_path / "model", **fields)
        with pytest.raises(error, match=named):
            Engine(EngineConfig(str(folder), **OPTIONS))

    def test_remote_code_is_never_run(self, tiny_llama: Path, tmp_path: Path) -> None:
        folder = self.write(tiny_llama, tmp_path / "model", auto_map={"AutoModelForCausalLM": "canary.Model"})
        (folder / "canary.py").write_text("raise SystemExit('this code was run')")
        with Engine(EngineConfig(str(folder), **OPTIONS)) as run:
            assert len(tokens(run)) == 16

    def test_no_such_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError):
            Engine(EngineConfig(str(tmp_path / "nothing"), offline=True))

    def test_too_little_memory_prints_the_plan(self, tiny_llama: Path) -> None:
        with pytest.raises(NotEnoughMemoryError, match="Memory on cpu"):
            Engine(EngineConfig(str(tiny_llama), **{**OPTIONS, "kv_cache_memory": 2**60}))

    @pytest.mark.parametrize(
        "options",
        [
            *({"memory": "101%"}, {"kv_cache_memory": 0}, {"block_size": None}),
            *({"dtype": "int8"}, {"dtype": 1}, {"device": "abacus"}, {"device": None}, {"device": "cuda:-1"}),
            *({"max_running": 0}, {"max_running": "9"}, {"block_size": -1}, {"block_size": True}, {"seed": -1}),
        ],
    )
    def test_options_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(options))):
            EngineConfig("model", **options)

    def test_model_is_a_text_or_a_path(self) -> None:
        assert EngineConfig(Path("a") / "b").model == "a/b"  # type: ignore[arg-type]
        for model in (None, b"model", 5):
            with pytest.raises(UsageError, match="model is"):
                EngineConfig(model)  # type: ignore[arg-type]


def test_a_name_in_place_of_options_is_told_what_to_write() -> None:
    name: Any = "smollm2-135m-instruct"
    with pytest.raises(UsageError, match="takes an EngineConfig, not 'smollm2-135m-instruct'"):
        Engine(name)
