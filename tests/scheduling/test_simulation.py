"""Random scripts for the scheduler, a ledger check after each event, and a cache that tells whose tokens it holds.

The model here chooses each token from all tokens before it, as read from its cache. So a request's output is known
beforehand, and a block that is shared, used again or given away wrongly shows at once. In some of the scripts requests
have drafts, right and wrong ones: what rejected drafts and looking ahead leave in the cache is rubbish. With two steps
in flight the model alone knows where a request stands, and its drafts.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from hookline.errors import InvalidRequestError
from hookline.sampling_params import SamplingParams
from hookline.scheduling.block_pool import BlockPool
from hookline.scheduling.request import FinishReason, Request, RequestStatus, ScheduledBatch, ScheduledRequest
from hookline.scheduling.scheduler import Scheduler
from hookline.scheduling.speculative import SpeculativeScheduler

SCRIPTS, EVENTS, GROUPS = 1_000, 100, 10
VOCABULARY, EOS = 5, 4
RUBBISH = -3
EXPECTED_EVENTS = (
    *("accepted all", "accepted none", "accepted some", "draft past the end", "drafts cut", "drafts in a mixed batch"),
    *("preempted with drafts", "prefix hit of drafts", "retracted drafts", "drafts in flight"),
    "abort computed in flight",
    "abort decoding",
    "abort in flight",
    "abort prefilling",
    "abort preempted",
    "abort waiting",
    "chunk",
    "evicted",
    "failed step",
    "finish",
    "forced preemption",
    "length",
    "mixed batch",
    "prefix hit",
    "preempted twice",
    "preemption",
    "refused",
    "retracted step",
    "shared block",
    "several tokens",
    "stop",
    "surplus token",
    "update after preemption",
)


def digest(before: int, token: int) -> int:
    """Stands for what attention reads at a place: the token there and all before it."""
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def choose(context: int, seed: int) -> int:
    """The model's next token after `context`; the end token is rarer than the others."""
    value = digest(context, seed) >> 7
    return EOS if value % 13 == 0 else value % EOS


class Followed:
    """A request, what its cache has to hold, and what it has to answer."""

    def __init__(self, request: Request, seed: int) -> None:
        self.request = request
        self.seed = seed
        self.digests: list[int] = []
        self.tokens: list[int] = []
        for token in request.prompt_token_ids:
            self.append(token)
        params = request.params
        limit = min(request.max_total_tokens - len(self.tokens), params.max_tokens or request.max_total_tokens)
        self.answer: list[int] = []
        self.reason = FinishReason.LENGTH
        while len(self.answer) < limit:
            token = choose(self.digests[-1], seed)
            self.answer.append(token)
            self.append(token)
            if token in request.end_token_ids and len(self.answer) > params.min_tokens:
                self.reason = FinishReason.STOP
                break
        self.ended_with: FinishReason | None = None

    def continued(self, start: int, count: int) -> list[int]:
        """`count` tokens of the answer from `start` on; past its end the model goes on with zeros."""
        return [*self.answer[start : start + count], *[0] * count][:count]

    def digest_at(self, position: int) -> int:
        """What the cache holds there; past the answer's end one for all, for those tokens are dropped."""
        return self.digests[position] if position < len(self.digests) else -2

    def append(self, token: int) -> None:
        self.tokens.append(token)
        before = self.digests[-1] if self.digests else len(self.request.cache_salt)
        self.digests.append(digest(before, token))


class Simulation:
    """One script."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self.block_size = rng.choice((1, 2, 3, 4, 8))
        self.pool = BlockPool(rng.randint(2, 24), self.block_size, prefix_caching=rng.random() < 0.85)
        self.natural = rng.random() < 0.7
        self.max_drafts = rng.choice((0, 0, 0, 1, 2, 5))
        self.lookahead = rng.choice((0, self.max_drafts))
        self.max_model_len = rng.randint(2, 60)
        if rng.random() < 0.8:
            room = self.pool.num_blocks * self.block_size - self.lookahead
            self.max_model_len = max(2, min(self.max_model_len, room))
        self.max_batch_tokens = rng.randint(1, 40)
        self.depth = rng.choice((1, 2) if self.max_drafts else (1, 1, 2, 3))
        self.flights: deque[tuple[ScheduledBatch, list[list[int]], list[list[int]]]] = deque()
        # By request, its output tokens and drafts as the model knows them, steps in flight included.
        self.known: dict[Request, tuple[int, list[int]]] = {}
        drafting = {"num_drafts": self.max_drafts} if self.max_drafts else {}
        self.scheduler = (SpeculativeScheduler if self.max_drafts else Scheduler)(
            self.pool,
            **drafting,
            lookahead=self.lookahead,
            max_in_flight=self.depth,
            max_batch_tokens=self.max_batch_tokens,
            max_running=rng.randint(1, 8),
            max_model_len=self.max_model_len,
            max_chunk_tokens=rng.choice((None, None, 1, 2, 5)),
            preempt_every=None if self.natural else rng.randint(1, 7),
        )
        self.cache = [-1] * (self.pool.num_blocks * self.block_size)
        self.stems = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(2)]
        self.followed: dict[str, Followed] = {}
        self.steps = 0
        self.quiet = False

    def run(self, events: int) -> None:
        actions = [self.add, self.step, self.abort, self.finish]
        for _ in range(events):
            self.rng.choices(actions, (30, 60, 5, 2))[0]()
            self.check()
        self.quiet = True
        live = [len(followed.tokens) for followed in self.live()]
        bound = self.steps + self.depth * sum(live if self.natural else (length * length for length in live))
        while self.scheduler.has_work:
            self.step()
            self.check()
            assert self.steps <= bound, "too many steps to the end"
        while self.flights:
            self.land()
        assert self.pool.num_referenced == self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.seen["evicted"] += self.pool.counters.evicted_blocks
        self.seen["prefix hit"] += self.pool.counters.hit_tokens

    def live(self) -> list[Followed]:
        """In the order in which they came."""
        return [f for f in self.followed.values() if f.request.status is not RequestStatus.FINISHED]

    def add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.choice((0, 4, 8, 16, 24, 40))]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 5))]
        if rng.random() < 0.9:
            prompt = prompt[: rng.randint(1, self.max_model_len)]
        params = SamplingParams(
            max_tokens=rng.choice((None, 1, 2, 5, 20)),
            min_tokens=rng.choice((0, 0, 1)),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=rng.choice(((), (), (0,))),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        request = Request(
            str(len(self.followed)),
            prompt,
            params,
            max_total_tokens=rng.choice((rng.randint(1, self.max_model_len), self.max_model_len)),
            eos_token_ids=frozenset((EOS,)),
            cache_salt=rng.choice((b"", b"", b"other")),
        )
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            self.seen["refused"] += 1
        else:
            self.followed[request.request_id] = Followed(request, rng.randrange(2))

    def step(self) -> None:
        if len(self.flights) == self.depth or (self.flights and self.rng.random() < 0.2):
            self.land()
            return
        before = self.live()
        batch = self.scheduler.schedule()
        if self.flights and not batch.requests:
            self.land()
            return
        assert bool(batch.requests) == bool(before), "a step without work, or work without a step"
        if not before:
            return
        self.steps += 1
        self.look_at(batch, before[0])
        self.seen["abort in flight"] += self.abort_rarely()
        self.check()
        before_it = dict(self.known)
        sampled, drafts = self.compute(batch)
        self.seen["abort computed in flight"] += self.abort_rarely()
        if not self.quiet and self.rng.random() < 0.01:
            lost = [part.request for part in batch.requests if part.request.status is RequestStatus.RUNNING]
            ended = self.scheduler.fail(batch)
            assert ended == lost and all(request.finish_reason is FinishReason.ERROR for request in lost)
            self.seen["failed step"] += 1
            return
        if not self.quiet and self.rng.random() < 0.01:
            self.scheduler.retract(batch)
            self.known = before_it
            self.seen["retracted step"] += 1
            self.seen["retracted drafts"] += any(part.drafts for part in batch.requests)
            return
        self.flights.append((batch, sampled, drafts))
        if self.depth == 1:
            self.land()

    def land(self) -> None:
        """The oldest step's results arrive."""
        batch, sampled, drafts = self.flights.popleft()
        waiting = [part.request.status is RequestStatus.WAITING for part in batch.requests]
        self.seen["update after preemption"] += any(waiting)
        results = self.scheduler.update(batch, sampled)
        assert [request for request, _ in results] == [part.request for part in batch.requests if part.samples]
        if isinstance(self.scheduler, SpeculativeScheduler):
            self.scheduler.take_drafts(batch, drafts)
            assert all(not f.request.draft_token_ids for f in self.live() if not f.request.block_table)

    def propose(self, request: Request, done: int) -> list[int]:
        """Some of the tokens that come next after `done` output tokens, and from some place on others."""
        followed, count = self.followed[request.request_id], self.max_drafts
        count = count if self.depth > 1 else self.rng.randint(0, count)
        drafts = followed.continued(done, count)
        wrong = self.rng.randint(0, count) if self.rng.random() < 0.6 else count
        return drafts[:wrong] + [(token + 1) % VOCABULARY for token in drafts[wrong:]]

    def look_at(self, batch: ScheduledBatch, oldest: Followed) -> None:
        parts = batch.requests
        assert [part.count == 1 for part in parts] == sorted((part.count == 1 for part in parts), reverse=True)
        assert batch.num_decodes == sum(part.count == 1 for part in parts)
        assert batch.num_tokens == sum(part.count for part in parts) <= self.max_batch_tokens
        assert all(part.count >= 1 and part.start + part.count == part.request.computed_tokens for part in parts)
        for part in parts:
            end, held = part.start + part.count + self.lookahead, len(part.request.block_table)
            ahead = self.max_drafts + self.lookahead + (self.depth - 1) * (self.max_drafts + 1)
            most = max(end, part.request.num_tokens + ahead) if self.max_drafts else end
            assert self.pool.blocks_for(end) <= held <= self.pool.blocks_for(most), "too few blocks, or hoarding"
        assert len({part.request for part in parts}) == len(parts)
        if self.natural and not self.flights:
            assert oldest.request in [part.request for part in parts], "the oldest request does not move"
        self.seen["preemption" if self.natural else "forced preemption"] += len(batch.preempted)
        self.seen["preempted twice"] += any(request.preemptions > 1 for request in batch.preempted)
        self.seen["mixed batch"] += 0 < batch.num_decodes < len(parts)
        self.seen["chunk"] += any(not part.samples for part in parts)
        drafting = [part for part in parts if part.drafts]
        assert all(part.samples for part in drafting)
        self.seen["drafts in a mixed batch"] += any(not part.samples for part in parts) and bool(drafting)
        self.seen["drafts cut"] += any(len(p.drafts) < len(p.request.draft_token_ids) for p in parts)
        if self.max_drafts:
            self.seen["preempted with drafts"] += any(request.output_token_ids for request in batch.preempted)

    def compute(self, batch: ScheduledBatch) -> tuple[list[list[int]], list[list[int]]]:
        """All parts write their places, then all read their context.

        Returns:
            the tokens of the parts that sample, and what is proposed behind them.
        """
        size = self.block_size
        places = [self.place(part) for part in batch.requests]
        for part, (start, drafts) in zip(batch.requests, places, strict=True):
            followed = self.followed[part.request.request_id]
            assert start <= part.start and (start == part.start or self.flights), "less room than tokens"
            right = start + part.count - len(drafts) + self.accepted(part, drafts)
            for position in range(start, start + part.count + self.lookahead):
                block_id = part.request.block_table[position // size]
                assert self.pool.references(block_id) == 1 and not self.pool.is_reusable(block_id), "shared and written"
                value = followed.digest_at(position) if position < right else RUBBISH
                self.cache[block_id * size + position % size] = value
        sampled, proposed = [], []
        for part, (start, drafts) in zip(batch.requests, places, strict=True):
            request, followed = part.request, self.followed[part.request.request_id]
            accepted = self.accepted(part, drafts)
            context = start + part.count - len(drafts)
            read = [value for i in request.block_table for value in self.cache[i * size : (i + 1) * size]]
            expected = [followed.digest_at(position) for position in range(context + accepted)]
            assert read[: context + accepted] == expected, f"{request.request_id} reads another's cache"
            own = part.samples + len(drafts)
            assert part.samples == (part.start + part.count - len(drafts) == request.num_tokens - own)
            if part.samples:
                done = context - len(request.prompt_token_ids)
                self.seen["surplus token"] += done >= len(followed.answer)
                count = self.rng.choice((1, 1, 1, 2, 3)) if self.depth == 1 and not self.max_drafts else 1 + accepted
                self.seen["several tokens"] += count > 1 and not self.max_drafts
                beyond = followed.continued(done, count)
                if not self.max_drafts:
                    beyond = [*followed.answer[done : done + count], 0][:count]
                sampled.append([] if request.status is RequestStatus.FINISHED else beyond)
                proposed.append(self.propose(request, done + count))
                self.known[request] = done + count, proposed[-1]
                self.note_accepted(part, accepted, done + 1 + accepted > len(followed.answer))
        return sampled, proposed

    def place(self, part: ScheduledRequest) -> tuple[int, list[int]]:
        """Where a part begins, and its drafts, as the model knows them."""
        if not part.drafts:
            return part.start, []
        done, drafts = self.known[part.request]
        if not self.flights:
            assert list(part.drafts) == drafts[: len(part.drafts)]
        return len(part.request.prompt_token_ids) + done - 1, drafts[: len(part.drafts)]

    def accepted(self, part: ScheduledRequest, drafts: list[int]) -> int:
        """How many of its drafts the model chooses itself."""
        if not drafts:
            return 0
        right = self.followed[part.request.request_id].continued(self.known[part.request][0], len(drafts))
        equal = [draft == token for draft, token in zip(drafts, right, strict=True)]
        return equal.index(False) if False in equal else len(equal)

    def note_accepted(self, part: ScheduledRequest, accepted: int, beyond: bool) -> None:
        if part.drafts:
            self.seen["drafts in flight"] += bool(self.flights)
            which = "all" if accepted == len(part.drafts) else "some" if accepted else "none"
            self.seen[f"accepted {which}"] += 1
            self.seen["draft past the end"] += accepted > 0 and beyond
            self.seen["prefix hit of drafts"] += part.request.cached_tokens > 0

    def abort_rarely(self) -> int:
        return self.abort() if not self.quiet and self.rng.random() < 0.05 else 0

    def abort(self) -> int:
        live = self.live()
        if not live:
            assert self.scheduler.abort("unknown") is None
            return 0
        request = self.rng.choice(live).request
        state = "decoding" if request.num_tokens - request.computed_tokens == 1 else "prefilling"
        if request.status is RequestStatus.WAITING:
            state = "preempted" if request.preemptions else "waiting"
        self.seen["abort " + state] += 1
        answers = [self.scheduler.abort(request.request_id) for _ in range(2)]
        assert answers == [request, None]
        assert request.finish_reason is FinishReason.ABORT
        return 1

    def finish(self) -> None:
        if live := self.live():
            request = self.rng.choice(live).request
            self.scheduler.finish(request, FinishReason.ERROR)
            self.scheduler.finish(request, FinishReason.STOP)
            assert request.finish_reason is FinishReason.ERROR
            self.seen["finish"] += 1

    def check(self) -> None:
        self.scheduler.check()
        tables = [followed.request.block_table for followed in self.followed.values()]
        self.seen["shared block"] += len(set().union(*tables)) < sum(map(len, tables))
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live())
        for followed in self.followed.values():
            request = followed.request
            if followed.ended_with is not None:
                assert request.finish_reason is followed.ended_with, "ended twice"
                continue
            assert request.output_token_ids == followed.answer[: len(request.output_token_ids)], "a token was lost"
            if request.status is RequestStatus.FINISHED:
                followed.ended_with = request.finish_reason
                if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert (request.output_token_ids, request.finish_reason) == (followed.answer, followed.reason)
                    self.seen[request.finish_reason.value] += 1
            else:
                assert request.finish_reason is None
                assert request.status is RequestStatus.RUNNING or not (request.block_table or request.computed_tokens)


def run_script(seed: int, seen: Counter[str], events: int = EVENTS) -> None:
    simulation = Simulation(seed, seen)
    try:
        simulation.run(events)
    except Exception as error:
        raise AssertionError(f"script {seed}, step {simulation.steps}: {error}") from error


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What happened in all scripts together."""
    return Counter()


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_scripts(group: int, seen: Counter[str]) -> None:
    for seed in range(group, SCRIPTS, GROUPS):
        run_script(seed, seen)


def test_everything_happened(seen: Counter[str]) -> None:
    if not seen:
        test_random_scripts(0, seen)
    assert [name for name in EXPECTED_EVENTS if seen[name] < 5] == []
