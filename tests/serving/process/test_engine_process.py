"""The engine's side of the pair: commands in, reports out, with a real tiny engine and a channel of lists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import zmq

from hookline.config import EngineConfig
from hookline.engine import Engine
from hookline.errors import HooklineError
from hookline.grammar import GrammarSpec
from hookline.sampling_params import SamplingParams
from hookline.scheduling.output import OutputDelta
from hookline.serving.process import engine_process, messages
from hookline.serving.process.engine_process import Channel, EngineLoop, facts


class Wire:
    """A channel whose other end is the test."""

    def __init__(self) -> None:
        self.commands: deque[messages.ToEngine] = deque()
        self.said: list[Any] = []

    def receive(self, seconds: float) -> list[messages.ToEngine]:
        found = list(self.commands)
        self.commands.clear()
        return found

    def send(self, message: messages.FromEngine) -> None:
        self.said.append(message)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return Engine(EngineConfig(model=str(tiny_llama), block_size=8, kv_cache_memory="200KiB", max_batch_tokens=32))


def serve(engine: Engine, *commands: messages.ToEngine, turns: int = 200) -> list[Any]:
    """What the loop says to `commands`, until it has no more work."""
    wire = Wire()
    loop = EngineLoop(engine, wire)  # type: ignore[arg-type]
    wire.commands.extend(commands)
    for _ in range(turns):
        loop.turn()
        if not engine.has_work:
            break
    return wire.said


def deltas_of(said: list[Any], number: int) -> list[OutputDelta]:
    reports = [message for message in said if isinstance(message, messages.Report)]
    return [d for report in reports for n, d in zip(report.numbers, report.deltas, strict=True) if n == number]


def submit(number: int, ids: list[int], **fields: Any) -> messages.Submit:
    stream = fields.pop("stream", True)
    return messages.Submit(number, ids, {"max_tokens": 12, "ignore_eos": True} | fields, stream=stream)


def test_deltas_joined_are_what_generate_gives(engine: Engine) -> None:
    prompts = {number: [3 * number + place for place in range(5 + number)] for number in range(1, 7)}
    said = serve(engine, *(submit(number, ids) for number, ids in prompts.items()))
    for number, ids in prompts.items():
        (expected,) = engine.generate([ids], SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs
        found = deltas_of(said, number)
        assert [token for delta in found for token in delta.token_ids] == list(expected.token_ids)
        assert "".join(delta.text for delta in found) == expected.text
        assert [delta.finish_reason for delta in found][-1] == "length"
        assert all(delta.finish_reason is None and delta.timing is None for delta in found[:-1])
        timing = found[-1].timing
        assert timing is not None and timing.queued is not None and timing.time_to_first_token is not None
        assert len(found) == 12


def test_one_that_does_not_stream_is_reported_once(engine: Engine) -> None:
    said = serve(engine, submit(1, [1, 2, 3], stream=False, n=3, temperature=1.0, seed=5))
    found = deltas_of(said, 1)
    expected = engine.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True, n=3, temperature=1.0, seed=5)
    )
    assert [(d.index, d.text, tuple(d.token_ids)) for d in found] == [
        (output.index, output.text, output.token_ids) for output in expected[0].outputs
    ]
    assert [delta.timing is None for delta in found] == [True, True, False]


def test_stop_strings_and_logprobs_stay_with_their_tokens(engine: Engine) -> None:
    plain = engine.generate([[7, 8, 9]], SamplingParams(max_tokens=12, ignore_eos=True))[0].outputs[0]
    stop = plain.text[4:6]
    options = {"stop": [stop], "logprobs": 2, "prompt_logprobs": 1}
    found = deltas_of(serve(engine, submit(1, [7, 8, 9], **options)), 1)
    params = SamplingParams.from_dict({"max_tokens": 12, "ignore_eos": True, **options})
    (whole,) = engine.generate([[7, 8, 9]], params)
    (output,) = whole.outputs
    assert "".join(delta.text for delta in found) == output.text == plain.text[: plain.text.index(stop)]
    assert found[-1].stop_reason == stop and found[-1].finish_reason == "stop"
    assert output.logprobs is not None
    assert [entry for delta in found for entry in delta.logprobs or []] == list(output.logprobs)
    assert sum(len(delta.token_ids) for delta in found) == len(output.logprobs)
    assert [tuple(delta.prompt_logprobs or ()) for delta in found if delta.prompt_logprobs] == [whole.prompt_logprobs]


def test_an_abort_ends_one_and_no_other(engine: Engine) -> None:
    wire = Wire()
    loop = EngineLoop(engine, wire)  # type: ignore[arg-type]
    wire.commands.extend([submit(1, [1, 2, 3], max_tokens=200), submit(2, [4, 5, 6], max_tokens=20)])
    for _ in range(4):
        loop.turn()
    wire.commands.append(messages.Abort(1))
    wire.commands.append(messages.Abort(99))
    before = len(deltas_of(wire.said, 1))
    while engine.has_work or wire.commands:
        loop.turn()
    assert len(deltas_of(wire.said, 1)) == before
    assert sum(len(delta.token_ids) for delta in deltas_of(wire.said, 2)) == 20
    assert engine.load.used_blocks == 0 and engine.load.running == 0
    engine.pool.check()


def test_a_refusal_says_why_and_takes_nothing(engine: Engine) -> None:
    long = list(range(200)) * 10
    said = serve(engine, submit(1, [10**6]), submit(2, long), submit(3, [1], temperature=-1), submit(4, [1], odd=1))
    refused = {message.number: message for message in said if isinstance(message, messages.Refused)}
    assert {number: message.kind for number, message in refused.items()} == dict.fromkeys((1, 2, 3, 4), "invalid")
    assert refused[3].field == "temperature" and "temperature" in refused[3].message
    assert engine.load.waiting == 0


def test_a_fault_while_taking_a_request_ends_it_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Engine.add_request

    def add(self: Engine, prompt: Any, *args: Any, **options: Any) -> str:
        if prompt == [13]:
            raise ZeroDivisionError("thirteen")
        return taken(self, prompt, *args, **options)

    monkeypatch.setattr(Engine, "add_request", add)
    said = serve(engine, submit(1, [13]), submit(2, [12]))
    assert [message.kind for message in said if isinstance(message, messages.Refused)] == ["fault"]
    assert deltas_of(said, 2)[-1].finish_reason == "length"


def test_the_first_grammar_holds_up_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What grammars are read with is made in a thread: the others' steps go on, and one that is aborted never runs."""
    grammar = engine.compile_grammar(GrammarSpec("choice", '["yes", "no"]')).to_bytes()
    vocabulary, gate = engine.grammar_vocabulary, threading.Event()

    def wait(self: Engine) -> Any:
        gate.wait(30)
        return vocabulary

    monkeypatch.setattr(Engine, "grammar_vocabulary", property(wait))
    wire = Wire()
    loop = EngineLoop(engine, wire)  # type: ignore[arg-type]
    limited = [messages.Submit(number, [1, 2], {"max_tokens": 9}, grammar=grammar) for number in (1, 2)]
    wire.commands.extend([*limited, submit(3, [5, 6])])
    loop.turn()
    while engine.has_work:
        loop.turn()
    assert deltas_of(wire.said, 3)[-1].finish_reason == "length" and not deltas_of(wire.said, 1)
    wire.commands.append(messages.Abort(2))
    loop.turn()
    gate.set()
    deadline = time.monotonic() + 30
    while not any(delta.timing for delta in deltas_of(wire.said, 1)) and time.monotonic() < deadline:
        loop.turn()
    assert "".join(delta.text for delta in deltas_of(wire.said, 1)) in ("yes", "no")
    assert not deltas_of(wire.said, 2)


def test_reports_tell_who_has_begun_and_what_a_step_took(engine: Engine) -> None:
    said = serve(engine, submit(1, list(range(40))), submit(2, [1, 2]))
    reports = [message for message in said if isinstance(message, messages.Report)]
    assert sorted(number for report in reports for number in report.started) == [1, 2]
    tokens = [count for report in reports for count in report.step_tokens]
    assert max(tokens) <= 32 and sum(tokens) >= 42 + 2 * 11
    assert [report.steps for report in reports] == sorted(report.steps for report in reports)


def test_requests_that_take_long_leave_time_for_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have come, a turn takes only so many; the others are there for the next ones, in their order."""
    now = 0.0
    monkeypatch.setattr("hookline.serving.process.engine_process.time.monotonic", lambda: now)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(f"ipc://{tmp_path}/s")
    channel = Channel(f"{tmp_path}/s")
    try:
        for number in range(5):
            socket.send(messages.encoder().encode(messages.Abort(number)))
        taken = list[list[messages.ToEngine]]()
        while sum(map(len, taken)) < 5:
            taken.append([])
            for command in channel.receive(10):
                taken[-1].append(command)
                now += 0.03  # what it took
        assert all(len(turn) <= 2 for turn in taken)
        assert [command for turn in taken for command in turn] == [messages.Abort(number) for number in range(5)]
    finally:
        channel.close()
        socket.close(0)
        context.term()


def test_messages_survive_the_wire(engine: Engine) -> None:
    encode, decode = messages.encoder().encode, messages.decoder(messages.FromEngine).decode
    told = facts(engine)
    assert decode(encode(told)) == told
    for report in serve(engine, submit(1, [1, 2, 3], logprobs=1, stop=["zz"])):
        assert decode(encode(report)) == report


@pytest.mark.parametrize("stopped", [False, True])
def test_the_process_ends_with_its_parent(stopped: bool, tmp_path: Path) -> None:
    """A parent that is killed leaves neither engine nor socket behind, not even while it waits to hear what to load, or
    has been stopped."""
    folder = tmp_path / "hookline-"
    folder.mkdir()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(f"ipc://{folder}/s")
    code = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'hookline.serving.process.engine_process', sys.argv[1], str(os.getpid())]\n"
        "p = subprocess.Popen(command)\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, f"{folder}/s"], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert socket.poll(30_000), "the engine process did not connect"
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while _is_there(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_there(pid)
        assert not folder.exists()
    finally:
        parent.kill()
        socket.close(0)
        context.term()


def test_a_process_whose_parent_went_before_it_began_ends(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "hookline.serving.process.engine_process", f"{tmp_path}/s", str(gone.pid)]
    assert subprocess.run(command, timeout=30).returncode == 1


def test_it_takes_its_parents_temporary_folder_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tries one by writing a file, which would stay if the process ended meanwhile."""

    class Silent(Wire):
        def close(self) -> None: ...

    def fail(channel: object) -> None:
        raise HooklineError("no engine")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, stand_in in (("watch_parent", lambda *_: None), ("Channel", lambda path: Silent()), ("start", fail)):
        monkeypatch.setattr(engine_process, name, stand_in)
    assert engine_process.main(str(tmp_path / "hookline-1" / "engine"), os.getpid()) == HooklineError.exit_code
    assert tempfile.gettempdir() == str(tmp_path)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
