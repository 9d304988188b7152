"""The engine: requests in, steps, outputs out.

A step is three verbs: the scheduler decides, the runner executes, the outputs are updated. Everything else in this
file puts requests in at the one end and takes results out at the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Self

import torch

from hookline.checkpoint.reader import CheckpointReader, Progress
from hookline.config import EngineConfig
from hookline.errors import InvalidRequestError, NotEnoughMemoryError, UsageError
from hookline.execution.kv_cache import allocate_cache
from hookline.execution.runner import Flight, StepResult
from hookline.execution.sampling_state import SamplingState
from hookline.execution.starting import measure_steps, start_runner
from hookline.loading import LoadedModel, load_model, save_snapshot
from hookline.manual import ManualDriver, SchedulingResult
from hookline.output_processor import OutputProcessor
from hookline.prompt_encoder import Prompt, as_prompts
from hookline.request_intake import Grammar, RequestIntake
from hookline.sampling_params import SamplingParams, check_params
from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.output import NO_TOKEN, Load, OutputDelta, RequestOutput
from hookline.scheduling.request import FinishReason, Request, ScheduledBatch
from hookline.scheduling.scheduler import Scheduler
from hookline.scheduling.speculative import SpeculativeScheduler
from hookline.structured_output import CompiledGrammar, GrammarVocabulary

_FAULTS_IN_A_ROW = 3


class Engine:
    """One model, ready to serve.

    Args:
        config: how to load and run it.
        reader: weights from somewhere else than `config.model`, such as a `ModuleReader`.
        progress: is told how far loading has come.
        starting: is told how far the capture of CUDA graphs has come, as done and of how many.
        max_chunk_tokens, preempt_every: fault switches for tests, passed to the scheduler.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        reader: CheckpointReader | None = None,
        progress: Progress | None = None,
        starting: Callable[[int, int], None] | None = None,
        max_chunk_tokens: int | None = None,
        preempt_every: int | None = None,
    ) -> None:
        given: object = config
        if not isinstance(given, EngineConfig):
            raise UsageError(f"Engine takes an EngineConfig, not {given!r}", hint="Engine(EngineConfig(model=...))")
        self._loaded = load_model(config, reader, progress)
        opened = self._loaded.opened
        self.config = opened.engine_config
        self.tokenizer = self._loaded.tokenizer
        model, architecture = opened.model, opened.architecture
        planner = architecture.memory_planner(opened.config, self.config)
        specs = model.cache_specs()
        weights, available = self._loaded.weights_bytes, self._loaded.available_bytes
        self.memory_plan = planner.plan(specs, weights, available, measure_steps(model, self.config))
        self.max_model_len = self.memory_plan.max_model_len
        self.vocab_size = opened.config.vocab_size
        cache = allocate_cache(specs, self.memory_plan.num_blocks, self.config.block_size, model.device)
        processor = architecture.batch_processor(opened.config, self.config)
        self._runner = start_runner(model, processor, cache, self.config, self.max_model_len, starting)
        lookahead = self._runner.lookahead
        room = self.memory_plan.num_blocks * self.config.block_size - lookahead
        self.max_model_len = min(self.max_model_len, max(room, 1))
        self.pool = BlockPool(self.memory_plan.num_blocks, self.config.block_size, self.config.prefix_caching)
        limits = {"max_batch_tokens": self.config.max_batch_tokens, "max_model_len": self.max_model_len}
        speculative = self.config.speculative
        drafting = {} if speculative is None else {"num_drafts": speculative.num_speculative_tokens}
        self.scheduler = (Scheduler if speculative is None else SpeculativeScheduler)(
            self.pool,
            lookahead=lookahead,
            max_running=self.config.max_running,
            max_in_flight=self._runner.max_in_flight,
            admit_together=max(1, self.config.max_running // 32) if self._runner.max_in_flight > 1 else 1,
            max_chunk_tokens=max_chunk_tokens,
            preempt_every=preempt_every,
            **limits,
            **drafting,
        )
        self._manual = ManualDriver(self._runner, self.pool, max_requests=self.config.max_running, **limits)
        self._intake = RequestIntake(self._loaded, self.vocab_size, self.max_model_len, self.config.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self._states: dict[str, SamplingState] = {}
        self._limited: dict[Request, SamplingState] = {}  # those of them that have a matcher
        self._flights: deque[Flight] = deque()
        self._takes_turns = False
        self._faults = 0
        self._computed_tokens = 0
        self._preemptions = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort_all()
        self._manual.flush_all()

    @property
    def loaded(self) -> LoadedModel:
        """The model, its plugin and its checkpoint."""
        return self._loaded

    @property
    def has_work(self) -> bool:
        """Whether any request has not been reported as finished yet."""
        return self.scheduler.has_work or self._outputs.has_news

    @property
    def load(self) -> Load:
        """What there is to do now, and counts so far."""
        counters, outputs = self.pool.counters, self._outputs
        return Load(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            used_blocks=self.pool.num_referenced,
            computed_tokens=self._computed_tokens,
            preemptions=self._preemptions,
            queried_tokens=counters.queried_tokens,
            hit_tokens=counters.hit_tokens,
            evicted_blocks=counters.evicted_blocks,
            drafted_tokens=outputs.drafted_tokens,
            accepted_tokens=outputs.accepted_tokens,
        )

    # -- requests in ---------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        grammar_after: int | None = None,
    ) -> str:
        """Checks a request and puts it in line.

        Args:
            prompt: text, token ids, or chat messages, which the checkpoint's chat template turns into text.
            params: how to choose tokens; greedy by default.
            stream: report the request at each of its tokens, not only at its end.
            cache_salt: only requests of the same salt share cached prefixes.
            grammar: what the output must look like. The request ends where it leaves nothing to add.
            grammar_after: the token id behind which `grammar` begins to hold; None for the output's start.

        Returns:
            the id under which `step` reports it.

        Raises:
            InvalidRequestError: if it can never be served as it stands; nothing has changed then.
            NotEnoughMemoryError: if the device has no room for what its options need; nothing has changed then either.
        """
        request_id, children = self._intake.make(prompt, params, cache_salt, grammar, grammar_after)
        for child, state in children:
            self._runner.reserve(state)  # this and the next refuse the first of them, or none: they are all alike
            self.scheduler.add(child)
            self._states[child.request_id] = state
            if state.matcher is not None:
                self._limited[child] = state
        requests, text = [child for child, _ in children], prompt if isinstance(prompt, str) else None
        self._outputs.add(request_id, text, requests, stream=stream)
        return request_id

    def encode(self, prompt: Prompt) -> list[int]:
        """See `PromptEncoder.encode`."""
        return self._intake.encode(prompt)

    def compile_grammar(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar made ready for any number of requests; see `structured_output.compile_grammar`."""
        return self._intake.compiled(grammar)

    @property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """What grammars are compiled for; made at the first need, which takes seconds."""
        return self._intake.vocabulary

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, wherever it stands; false if it is not known or has ended."""
        children = self._outputs.unfinished(request_id)
        for child in children:
            self.scheduler.abort(child.request_id)
            self._end(child)
        return bool(children)

    def _drop(self, request_id: str) -> None:
        """Aborts a request whose caller has gone, and its report with it."""
        self.abort(request_id)
        self._outputs.forget(request_id)

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in self._outputs.request_ids():
            self.abort(request_id)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One step over all requests: schedule, execute, update. Gives the requests that have news.

        Raises:
            NotEnoughMemoryError: if uids that are driven by hand hold the cache that every request waits for.
            Exception: of the model, once it has failed several steps in a row.
        """
        self._step()
        return self._outputs.take_news()

    def step_deltas(self) -> tuple[list[str], list[OutputDelta]]:
        """`step` for those who pass on what is new: requests that have begun to run, and what each has given since.

        One that does not stream is reported at its end. Raises as `step`, with which it does not mix.
        """
        self._step()
        return self._outputs.take_deltas()

    def _step(self) -> None:
        self._agree()
        if self._runner.max_in_flight > 1:
            self._overlapped_step()
        else:
            self._plain_step()

    def _plain_step(self) -> None:
        """Schedule, execute, update; an interrupt may have left a step to update."""
        if not self._flights:
            batch = self._schedule()
            if not batch.requests:
                self._check_moves()
            elif self._launch(batch):
                self._collect()
        else:
            self._collect()

    def _overlapped_step(self) -> None:
        """The same verbs, but a step is launched before the one before it is collected, so that the device never waits.

        Its decode rows take their tokens from the device. Where an interrupt has left tokens that the device does not
        have, steps take turns with the host.
        """
        self._takes_turns = self._takes_turns and bool(self._flights)
        while len(self._flights) < (1 if self._takes_turns else self._runner.steps_ahead):
            batch = self._schedule()
            if not batch.requests or not self._launch(batch):
                break
        if self._flights:
            self._collect()
        elif not batch.requests:
            self._check_moves()

    def _schedule(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self._preemptions += len(batch.preempted)
        for request in batch.preempted:  # also of a batch that has nothing to run
            self._runner.release(request)
        return batch

    def _launch(self, batch: ScheduledBatch) -> bool:
        self._outputs.note_scheduled(batch)
        self._computed_tokens += batch.num_tokens
        try:
            self._flights.append(self._runner.launch(batch, self._states))
        except Exception as error:
            self._fail((batch,), error)
            return False
        except BaseException:
            self._agree()  # the user's interrupt is no fault: who goes on loses nothing
            raise
        return True

    def _agree(self) -> None:
        """After an interrupt: makes the steps in flight those that were launched and not taken.

        One that was decided alone is decided anew. What the device has of its requests may be too new.
        """
        decided = self.scheduler.in_flight
        while len(decided) > len(self._flights):
            batch = decided[-1]
            self.scheduler.retract(batch)
            for part in batch.requests:
                self._runner.release(part.request)
            self._takes_turns = True
        while len(self._flights) > len(decided):
            self._flights.popleft()

    def settle(self) -> None:
        """Takes the steps in flight where nobody waits for them, so that those who ended let their blocks go."""
        self._agree()
        while self._flights and not self.scheduler.has_work:
            self._collect()

    def _collect(self) -> None:
        """Takes the oldest step's result; an interrupt leaves it for the next call."""
        flight = self._flights[0]
        try:
            result = self._runner.collect(flight)
        except Exception as error:
            lost = [flight.batch for flight in reversed(self._flights)]  # the newest first: each builds on those before
            self._flights.clear()
            self._fail(lost, error)
            return
        self._faults = 0
        self._update(flight.batch, result)

    def _check_moves(self) -> None:
        """The scheduler always finds something to run, unless others hold the cache."""
        if self.scheduler.has_work and not self._outputs.has_news:
            raise NotEnoughMemoryError(
                f"No request can run: {self._manual.num_tracked} uids driven by hand hold "
                f"{self.pool.num_referenced} of {self.pool.num_blocks} cache blocks",
                hint="Flush some of them, or give the cache more memory (kv_cache_memory).",
            )

    def _update(self, batch: ScheduledBatch, result: StepResult) -> None:
        self._outputs.take_prompt_logprobs(result.prompt_logprobs)
        for request in result.failed:
            self.scheduler.finish(request, FinishReason.ERROR)
            self._end(request, NO_TOKEN)
        results, watched = self.scheduler.update(batch, result.token_ids), self._outputs.watched
        self._flights.popleft()  # not before the scheduler has let it go: see `_agree`
        if isinstance(self.scheduler, SpeculativeScheduler):
            self.scheduler.take_drafts(batch, [step.drafts for step in result.speculative])
            for (request, _), step in zip(results, result.speculative, strict=True):
                self._outputs.take_step(request, step)
        if watched:
            for request, tokens in results:
                name = request.request_id
                if name in watched and self._outputs.take_tokens(request, tokens, result.logprobs.get(name, ())):
                    self.scheduler.finish(request, FinishReason.STOP)
        for request in [each for each, state in self._limited.items() if state.is_complete(each.output_token_ids)]:
            self.scheduler.finish(request, FinishReason.STOP)
            request.finish_reason = FinishReason.STOP  # also of one whose last token is its limit's
        for request in [request for request, _ in results if request.finish_reason is not None]:
            self._end(request)

    def _fail(self, lost: Sequence[ScheduledBatch], error: Exception) -> None:
        """One fault lost these steps: their requests end with an error, the others go on. Several are no accident."""
        for batch in lost:
            for request in self.scheduler.fail(batch):
                self._end(request, f"{type(error).__name__}: {error}")
        self._faults += 1
        if self._faults >= _FAULTS_IN_A_ROW:
            raise error

    def _end(self, request: Request, error: str | None = None) -> None:
        self._states.pop(request.request_id, None)
        self._limited.pop(request, None)
        self._runner.release(request)
        self._outputs.finish(request, error)

    # -- results out ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammar | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Serves all prompts in one continuous batch; results come in the prompts' order.

        Args:
            prompts: one prompt (see `add_request`) or several.
            params: one for all, or one each.
            grammar: what all outputs must look like; see `add_request`.
            progress: is told how many of how many are done.
        """
        many = as_prompts(prompts)
        given: object = params
        each = list(params) if isinstance(params, list | tuple) else [check_params(given)] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(many)} prompts and {len(each)} sampling params", field="params")
        ids: list[str] = []
        try:
            compiled = None if grammar is None else self.compile_grammar(grammar)
            ids.extend(self.add_request(prompt, one, grammar=compiled) for prompt, one in zip(many, each, strict=True))
            done = self._run_to_end(ids, progress)
        except BaseException:
            for request_id in ids:
                self._drop(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def _run_to_end(self, ids: Iterable[str], progress: Callable[[int, int], None] | None) -> dict[str, RequestOutput]:
        pending, done = set(ids), dict[str, RequestOutput]()
        total = len(pending)
        while pending:
            self._step()
            for output in self._outputs.take_news(pending):
                pending.discard(output.request_id)
                done[output.request_id] = output
                if progress is not None:
                    progress(len(done), total)
        return done

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """One prompt, reported at each of its tokens; the last report is finished. Closing it aborts the request."""
        request_id = self.add_request(prompt, params, stream=True)
        finished = False
        try:
            while not finished:
                self._step()
                for output in self._outputs.take_news((request_id,)):
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._drop(request_id)

    # -- driving by hand -----------------------------------------------------------------------------------------------

    def put(self, uids: Sequence[Hashable], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `ManualDriver.put`."""
        self.settle()
        return self._manual.put(uids, tokens)

    def query(self, uid: Hashable, max_tokens: int, max_blocks: int) -> tuple[int, int]:
        """See `ManualDriver.query`."""
        self.settle()
        return self._manual.query(uid, max_tokens, max_blocks)

    def can_schedule(self, uids: Sequence[Hashable], lengths: Sequence[int]) -> SchedulingResult:
        """See `ManualDriver.can_schedule`."""
        self.settle()
        return self._manual.can_schedule(uids, lengths)

    def flush(self, uid: Hashable) -> None:
        """See `ManualDriver.flush`."""
        self._manual.flush(uid)

    def serialize(self, folder: str | Path) -> None:
        """Writes the loaded weights, config and tokenizer as a snapshot that loads as a model."""
        save_snapshot(self._loaded, Path(folder))
