"""How requests come and go: what is refused at the door, and that an end of any kind leaves the others alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hookline import Engine, EngineConfig, SamplingParams
from hookline.errors import DeviceError, InvalidRequestError, NotEnoughMemoryError
from hookline.scheduling.output import RequestOutput
from hookline.scheduling.request import Request

BLOCK = 8
TOKEN_BYTES = 512  # k and v, 2 heads of 16, fp32, 2 layers
PROMPT = [10, 200, 30, 40, 5, 77, 60, 70, 81, 90, 99, 3]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def make_engine(folder: Path, blocks: int = 64, **options: Any) -> Engine:
    switches = {name: options.pop(name) for name in ("max_chunk_tokens", "preempt_every") if name in options}
    defaults = {"device": "cpu", "block_size": BLOCK, "max_model_len": min(200, blocks * BLOCK)}
    config = EngineConfig(str(folder), kv_cache_memory=blocks * BLOCK * TOKEN_BYTES, **(defaults | options))
    return Engine(config, **switches)


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with make_engine(tiny_llama) as run:
        yield run
        assert_idle(run)


def assert_idle(run: Engine) -> None:
    """Nothing runs, and everything is given back."""
    run.scheduler.check()
    assert not run.has_work
    assert (run.pool.num_referenced, run._states) == (0, {})


def tokens(run: Engine, prompt: Any = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return list(run.generate(prompt, params)[0].outputs[0].token_ids)


def finish_all(run: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; no request is reported as finished twice."""
    done: dict[str, RequestOutput] = {}
    while run.has_work:
        for output in run.step():
            assert output.request_id not in done
            if output.finished:
                done[output.request_id] = output
    return done


def say(run: Engine, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Makes the model say `text`, one byte a token, to a single request."""
    assert run.tokenizer is not None
    script = iter(run.tokenizer.encode(text))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        row = torch.zeros(len(hidden), run.vocab_size)
        row[:, next(script)] = 9.0
        return row

    monkeypatch.setattr(run.loaded.opened.model, "compute_logits", logits)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_tokens": 189}, "min_tokens"),
        ({"logit_bias": {320: 5.0}}, "logit_bias"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias"),
        ({"logit_bias": {1: 1e308}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(10_000), 1.0)}, "logit_bias"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids"),
        ({"logprobs": 513}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_a_refused_request_leaves_its_neighbour_alone(engine: Engine, params: dict[str, Any], field: str) -> None:
    want = tokens(engine)
    running = engine.add_request(PROMPT, GREEDY)
    engine.step()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(PROMPT, SamplingParams.from_dict(params))
    assert caught.value.field == field
    done = finish_all(engine)
    assert list(done) == [running]
    assert list(done[running].outputs[0].token_ids) == want


def test_tiny_temperature_is_greedy(engine: Engine) -> None:
    assert tokens(engine, params=SamplingParams(max_tokens=16, ignore_eos=True, temperature=1e-30)) == tokens(engine)


def abort_waiting(run: Engine, doomed: str) -> None:
    assert run.scheduler.num_waiting > 0


def abort_in_a_prompt(run: Engine, doomed: str) -> None:
    run.step()
    (child,) = run._outputs.unfinished(doomed)
    assert 0 < child.computed_tokens < len(child.prompt_token_ids)


def abort_decoding(run: Engine, doomed: str) -> None:
    while not (child := run._outputs.unfinished(doomed)[0]).output_token_ids:
        run.step()
    assert child.computed_tokens > 0


def abort_preempted(run: Engine, doomed: str) -> None:
    while not ((child := run._outputs.unfinished(doomed)[0]).preemptions and not child.block_table):
        run.step()
    assert child.output_token_ids


@pytest.mark.parametrize("moment", [abort_waiting, abort_in_a_prompt, abort_decoding, abort_preempted])
def test_abort_at_any_moment(tiny_llama: Path, moment: Callable[[Engine, str], None]) -> None:
    want = None
    for doom in (False, True):
        with make_engine(tiny_llama, blocks=8, max_chunk_tokens=5, prefix_caching=False) as run:
            kept = run.add_request(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
            if doom:
                gone = run.add_request(list(range(20)), SamplingParams(max_tokens=40, ignore_eos=True))
                moment(run, gone)
                assert run.abort(gone)
                assert not run.abort(gone)
            done = finish_all(run)
            assert_idle(run)
            want = want or list(done[kept].outputs[0].token_ids)
            assert list(done[kept].outputs[0].token_ids) == want
            if doom:
                output = done[gone].outputs[0]
                assert output.finish_reason == "abort"
                assert output.text == run.tokenizer.decode(output.token_ids)  # type: ignore[union-attr]


def test_abort_of_several_continuations_ends_all_that_run(engine: Engine) -> None:
    doomed = engine.add_request(PROMPT, SamplingParams(n=3, max_tokens=16, temperature=1.0, ignore_eos=True))
    engine.step()
    assert engine.abort(doomed)
    assert [output.finish_reason for output in finish_all(engine)[doomed].outputs] == ["abort"] * 3


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    want = [tokens(engine), tokens(engine, PROMPT[:4])]
    model = engine.loaded.opened.model
    forward, calls = model.forward, [0]

    def interrupted(batch: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return forward(batch)

    monkeypatch.setattr(model, "forward", interrupted)
    ids = [engine.add_request(PROMPT, GREEDY), engine.add_request(PROMPT[:4], GREEDY)]
    with pytest.raises(KeyboardInterrupt):
        finish_all(engine)
    done = finish_all(engine)
    assert [list(done[request_id].outputs[0].token_ids) for request_id in ids] == want


def test_an_interrupted_stream_frees_everything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.loaded.opened.model, "forward", lambda batch: (_ for _ in ()).throw(KeyboardInterrupt))
        next(stream)
    assert_idle(engine)
    assert len(tokens(engine)) == 16


def test_reports_of_other_requests_wait_for_who_asks(engine: Engine) -> None:
    """`generate` and `stream` step all requests and take only their own reports."""
    short = engine.add_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    streamed = engine.add_request(PROMPT[:5], SamplingParams(max_tokens=3, ignore_eos=True), stream=True)
    engine.generate(PROMPT[:3], GREEDY)
    list(engine.stream(PROMPT[:2], GREEDY))
    done = finish_all(engine)
    assert {name: len(output.outputs[0].token_ids) for name, output in done.items()} == {short: 2, streamed: 3}


def test_requests_that_wait_for_uids_driven_by_hand_are_told(tiny_llama: Path) -> None:
    with make_engine(tiny_llama, blocks=8) as run:
        run.put(["by hand"], [[1] * 60])
        waiting = run.add_request(PROMPT, GREEDY)
        with pytest.raises(NotEnoughMemoryError, match="1 uids driven by hand hold 8 of 8"):
            run.step()
        run.flush("by hand")
        assert len(finish_all(run)[waiting].outputs[0].token_ids) == 16
        run.put(["left behind"], [[1]])
    assert run.pool.num_referenced == 0


def test_a_lost_step_ends_the_continuations_that_ran_in_it(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tiny_llama, max_running=1) as run:
        want = tokens(run)
        model = run.loaded.opened.model
        forward, calls = model.forward, [0]

        def broken_once(batch: Any) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 3:
                raise RuntimeError("no forward")
            return forward(batch)

        monkeypatch.setattr(model, "forward", broken_once)
        output = run.generate(PROMPT, SamplingParams(n=2, max_tokens=16, ignore_eos=True))[0]
        assert [one.finish_reason for one in output.outputs] == ["error", "length"]
        assert list(output.outputs[1].token_ids) == want
        assert list(output.outputs[0].token_ids) == want[:2]
        assert "no forward" in str(output.error)
        assert_idle(run)


def test_a_stop_string_at_the_last_token_is_a_stop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    say(engine, monkeypatch, "abcdef")
    output = engine.generate("x", SamplingParams(max_tokens=4, stop="cd"))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("abc DEFGHIJ k", "DEFGHIJ", "abc "),
        ("ab🙂cd", "🙂c", "ab"),
        ("ab🙂🙃cd", "🙃", "ab🙂"),
        ("a👩‍👩‍👧", "‍👧", "a👩‍👩"),
    ],
)
def test_nothing_of_a_stop_string_is_streamed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, said: str, stop: str, shown: str
) -> None:
    say(engine, monkeypatch, said)
    texts = [report.outputs[0].text for report in engine.stream("x", SamplingParams(max_tokens=60, stop=stop))]
    assert texts[-1] == shown
    assert len(texts) > 3
    assert all(shown.startswith(text) for text in texts)
    assert "�" not in "".join(texts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_err_no_more_than_transformers_does(tiny_llama: Path, engine: Engine, dtype: str) -> None:
    ids = [PROMPT, list(range(100))]
    exact, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=getattr(torch, name))
        for name in ("float64", dtype)
    )
    with make_engine(tiny_llama, dtype=dtype) as run, torch.inference_mode():
        assert run.config.dtype == dtype
        ours = run.put(["a", "b"], ids).double()
        want, found = (
            torch.cat([m(torch.tensor([row])).logits[0, -1:].double() for row in ids]) for m in (exact, theirs)
        )
    assert 0 < float((ours - want).norm()) < 1.5 * float((found - want).norm())


def test_no_request_outlives_its_end(engine: Engine) -> None:
    engine.generate([PROMPT, PROMPT[:3]], GREEDY)
    list(engine.stream(PROMPT, SamplingParams(max_tokens=2, n=2, logprobs=1, prompt_logprobs=1)))
    engine.abort(engine.add_request(PROMPT, GREEDY))
    engine.step()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Request]


def test_devices_that_are_not_there(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device"):
        make_engine(tiny_llama, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="cuda:0 to cuda:1"):
        make_engine(tiny_llama, device="cuda:2")
