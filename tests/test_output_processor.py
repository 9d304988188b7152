"""What becomes of a request's tokens, fed by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from hookline.output_processor import OutputProcessor
from hookline.sampling_params import SamplingParams
from hookline.scheduling.request import FinishReason, Request, RequestStatus
from hookline.tokenizer import Tokenizer
from tests.conftest import write_tokenizer

END = 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), None, {})


def text_of(tokenizer: Tokenizer, tokens: list[int], stop: int | None, *, stream: bool, params: SamplingParams) -> str:
    outputs = OutputProcessor(tokenizer)
    request = Request("a/0", [1], params, 4096)
    outputs.add("a", None, [request], stream=stream)
    for place, token in enumerate(tokens):
        request.output_token_ids.append(token)
        if place == len(tokens) - 1:
            request.status, request.finish_reason, request.stop_token_id = (
                *(RequestStatus.FINISHED, FinishReason.STOP if stop else FinishReason.LENGTH),
                stop,
            )
        outputs.take_tokens(request, [token], ())
    outputs.finish(request)
    return outputs.take_news()[-1].outputs[0].text


@pytest.mark.parametrize("skip", (True, False))
@pytest.mark.parametrize("stop", (None, END))
def test_text_made_at_the_end_is_the_streamed_one(tokenizer: Tokenizer, skip: bool, stop: int | None) -> None:
    rng = random.Random(0)
    text = list("é → 你好 🙂 ".encode() * 3)
    for tokens in ([rng.randrange(320) for _ in range(200)], text, text[:-2], [256, *text, END, 300], [END], [7]):
        given = [*tokens, stop] if stop else tokens
        params = SamplingParams(max_tokens=4000, skip_special_tokens=skip)
        late, streamed = (text_of(tokenizer, given, stop, stream=stream, params=params) for stream in (False, True))
        assert late == streamed
        assert late == tokenizer.decode(tokens, skip)


def test_first_token_is_timed_though_nobody_streams(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer)
    request = Request("a/0", [1], SamplingParams(), 64)
    outputs.add("a", None, [request], stream=False)
    for token in (5, 6):
        request.output_token_ids.append(token)
        assert not outputs.take_tokens(request, [token], ())
        assert not outputs.has_news
    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.LENGTH
    outputs.finish(request)
    (report,) = outputs.take_news()
    first, total = report.timing.time_to_first_token, report.timing.total
    assert first is not None and total is not None and 0 < first < total
