"""`engine bench`: latency, throughput and serving under load, with what the hardware allows beside each figure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hookline.benchmark.http_load import Target, send_load
from hookline.benchmark.load_report import LoadReport, load_figures
from hookline.benchmark.measure import Choice, measure_latency, measure_throughput
from hookline.benchmark.open_loop import Objectives, make_traces, measure_serving, summarise
from hookline.benchmark.report import Figure
from hookline.benchmark.workload import Lengths, fixed_lengths, lognormal_lengths
from hookline.cli.options import adapt_options, engine_options
from hookline.cli.output_file import check_output
from hookline.cli.remote import PORTS, RemoteServer, check_local_options, read_key, split_url, url_options
from hookline.cli.render import tell
from hookline.cli.source import read_subject, source_options, subject_config
from hookline.cli.speculation import speculative_config, speculative_options
from hookline.cli.starting import start_engine
from hookline.config import EXPERT_ROUTINGS, PluginOptions, SpeculativeConfig
from hookline.errors import UsageError

if TYPE_CHECKING:
    from hookline.benchmark.report import Report
    from hookline.benchmark.setup import Bench

F = TypeVar("F", bound=Callable[..., Any])

_COUNT = click.IntRange(min=1)
_CHOICE = ("temperature", "top_k", "top_p")
_REMOTE_OPTIONS = frozenset(
    {
        *("model", "rate", "concurrency", "warmup", "slo_ttft", "slo_itl", "vocab_size", "json_file", *_CHOICE),
        *("requests", "lengths", "input_len", "output_len", "seed"),
    }
)


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _number(name: str, default: Any, text: str, kind: Any = _COUNT, metavar: str = "COUNT") -> Callable[[F], F]:
    return click.option(name, metavar=metavar, type=kind, default=default, show_default=True, help=text)


def _check_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    return None if value is None else check_output(value, param.opts[0])


_lengths_options = _all(
    _number("--input-len", 1024, "Tokens of each prompt.", metavar="TOKENS"),
    _number("--output-len", 128, "Tokens of each output.", metavar="TOKENS"),
)
_work_options = _all(
    _number("--requests", 1000, "How many requests."),
    click.option(
        "--lengths",
        type=click.Choice(["fixed", "lognormal"]),
        default="fixed",
        show_default=True,
        help="lognormal draws them as chats have them: 4 to 1,024 tokens, on average about 206 in and 182 out.",
    ),
    _lengths_options,
    _number("--seed", 0, "Of lengths, prompts and arrivals.", click.IntRange(min=0), "NUMBER"),
)
_report_options = _all(
    click.option("--json", "json_file", metavar="FILE", callback=_check_file, help="Write the results there as JSON."),
    click.option(
        "--measure-roofline",
        is_flag=True,
        help="Measure bandwidth and peak of the device first, in place of what is known by its name.",
    ),
    click.option(
        "--routing",
        "expert_routing",
        type=click.Choice(EXPERT_ROUTINGS),
        default="natural",
        show_default=True,
        help="Which experts tokens go to: the router's choice; or forced, for random weights may make it a poor one: "
        "uniform for each token, or correlated within a request.",
    ),
    _number("--temperature", 0.0, "0 is greedy, 1 draws as the model says.", float, "NUMBER"),
    _number("--top-k", 0, "Draw from the COUNT likeliest; 0 is all.", int),
    _number("--top-p", 1.0, "Draw from the smallest set of this probability, up to 1.", float, "NUMBER"),
)


@click.group("bench")
def bench() -> None:
    """Measure a model on this machine: latency, throughput, or serving under load.

    Each figure stands beside its floor: the least time, or the highest rate, that bandwidth and peak of the device
    allow. MODEL is a checkpoint; --shape and --config take the shape of a model and give it seeded random weights.

    \b
      engine bench latency --shape NAME --batch 32 --input-len 1024 --output-len 128
      engine bench throughput --shape NAME --requests 2000 --lengths lognormal --json result.json
      engine bench serve ./my-model --rate 20 --lengths lognormal
    """


@bench.command("latency")
@source_options
@_number("--batch", 1, "Requests that start together.")
@_lengths_options
@_number("--repeats", 2, "Runs, of which the best counts; a short one comes first and does not.")
@_report_options
@click.option(
    "--profile",
    "profile_file",
    metavar="FILE",
    callback=_check_file,
    help="Trace some decode steps too: the trace goes to FILE, a table by kernel to stdout.",
)
@_number("--profile-steps", 8, "Decode steps in the trace.")
@engine_options
@speculative_options
@click.pass_obj
def latency(
    plugins: PluginOptions | None,
    /,
    batch: int,
    input_len: int,
    output_len: int,
    repeats: int,
    profile_file: Path | None,
    profile_steps: int,
    **values: Any,
) -> None:
    """Time requests that start together: prefill, and time per output token (TPOT).

    TPOT is (time for all tokens - time for one token) / (output tokens - 1), of the best of the repeats; the time for
    one token is that of the whole batch's prefill. Outputs do not end early, prefix caching is off, and as many
    requests run at a time as --batch says, if that is more than --max-running.

    With speculation decode steps in which all requests run are timed too: a step, its tokens, the drafts that it
    accepts of each request, and what a token takes.

    \b
      engine bench latency --shape NAME --batch 32 --input-len 1024 --output-len 128
      engine bench latency ./my-model --profile trace.json
      engine bench latency --shape NAME --num-speculative-tokens 3 --synthetic-acceptance-rate 0.6
    """
    length, choice = Lengths(input_len, output_len), _choice(values)
    values["max_running"] = max(values["max_running"], batch)  # or they would not start together
    with _start(values, plugins) as found:
        from hookline.benchmark.experts import count_experts
        from hookline.benchmark.figures import acceptance_note, expert_figures, latency_figures, step_figures
        from hookline.benchmark.step_profile import profile_decode

        engine, routing, steps = found.engine, values["expert_routing"], None
        found.check_fits([length])
        result = measure_latency(engine, engine.vocab_size, batch, length, repeats, choice, say=tell)
        if engine.config.speculative is not None:
            steps = found.time_steps(batch, input_len, repeats, choice)
        workload = {"batch": batch, "input_len": input_len, "output_len": output_len, "repeats": repeats}
        profile = None
        if profile_file is not None:
            profile = profile_decode(engine, batch, length, choice, profile_steps, profile_file)
        experts, notes = count_experts(engine, batch, length), list[str]()
        figures = latency_figures(result, input_len, found.costs, found.limits, steps, routing)
        if engine.config.speculative is not None and steps is not None:
            figures += step_figures(steps, found.costs, found.limits, experts, routing)
            notes.append(acceptance_note(engine.config.speculative))
        if experts is not None:
            figures += expert_figures(experts)
            notes.append(experts.line(routing, found.costs))
        _print(found.report("latency", workload | _settings(values), figures, notes, profile), values)


@bench.command("throughput")
@source_options
@_work_options
@_report_options
@engine_options
@speculative_options
@click.pass_obj
def throughput(plugins: PluginOptions | None, /, **values: Any) -> None:
    """Time many requests that are all there at the start: output tokens and requests a second.

    Outputs do not end early, and prefix caching is off.

    \b
      engine bench throughput --shape NAME --requests 1000 --input-len 1000 --output-len 1000
      engine bench throughput --shape NAME --requests 2000 --lengths lognormal
    """
    choice, work = _choice(values), _work(values, values["requests"])
    with _start(values, plugins) as found:
        from hookline.benchmark.figures import concurrent_requests, throughput_figures

        engine, seed = found.engine, values["seed"]
        found.check_fits(work)
        result = measure_throughput(engine, engine.vocab_size, work, choice, seed=seed)
        running = concurrent_requests(work, engine.config.max_running, found.cache_tokens)
        figures = throughput_figures(result, work, running, found.costs, found.limits)
        _print(found.report("throughput", _described(values, work), figures, _plain_floors(found)), values)


@bench.command("serve")
@source_options
@url_options
@_number("--rate", None, "Requests that come a second, at Poisson arrivals.", float, "NUMBER")
@_number("--concurrency", None, "In place of --rate: so many at a time, each followed by another.")
@_work_options
@_number("--warmup", 50, "Requests before those that count.", click.IntRange(min=0))
@_number("--slo-ttft", 2000.0, "A good request has its first token within this.", float, "MS")
@_number("--slo-itl", 100.0, "A good request keeps 99 % of the gaps between its tokens within this.", float, "MS")
@_number("--vocab-size", 256, "With --url: prompts are of random token ids below this.")
@_report_options
@engine_options
@speculative_options
@click.pass_context
def serve(
    ctx: click.Context, /, rate: float | None, concurrency: int | None, slo_ttft: float, slo_itl: float, **values: Any
) -> None:
    """Send requests under load: TTFT, TPOT, ITL, E2EL, throughput and goodput.

    With --rate requests come at Poisson arrivals, whether the engine keeps up or not; with --concurrency so many run at
    a time. The first --warmup requests are sent and not counted. Time to the first token (TTFT) counts from the moment
    a request was due; time per output token (TPOT) is that of a request's tokens after the first; inter-token latency
    (ITL) is the gap between two reports of new tokens; E2EL is the time to the last. Goodput is the requests a second
    that kept both objectives.

    Without --url the engine runs in this process, step by step, and HTTP is not part of what is measured. With --url
    the server there is asked over HTTP, and MODEL is the name that it serves; by default its first.

    \b
      engine bench serve --shape NAME --rate 20 --lengths lognormal --requests 1000
      engine bench serve ./my-model --rate 2 --slo-ttft 500 --slo-itl 30
      engine bench serve --url http://127.0.0.1:8000 --concurrency 64 --input-len 128
    """
    make_traces([], rate, concurrency)  # what is wrong with them is found before a weight is made
    choice, work = _choice(values), _work(values, values["warmup"] + values["requests"])
    counted = work[values["warmup"] :]
    workload = {"concurrency": concurrency} if rate is None else {"rate": rate}
    workload |= {"warmup": values["warmup"], "slo_ttft_ms": slo_ttft, "slo_itl_ms": slo_itl}
    workload |= _described(values, counted)
    objectives = Objectives(slo_ttft / 1e3, slo_itl / 1e3)
    if values["url"] is not None:
        check_local_options(ctx, _REMOTE_OPTIONS)
        _print(_bench_server(values, work, workload, choice, objectives), values)
        return
    with _start(values, ctx.obj) as found:
        from hookline.benchmark.figures import serving_figures

        engine = found.engine
        found.check_fits(work)
        result = measure_serving(
            engine, engine.vocab_size, work, rate, values["warmup"], objectives, choice,
            concurrency=concurrency, seed=values["seed"],
        )  # fmt: skip
        notes = ["The floors are those of one mean request alone. HTTP is not part of what was measured."]
        notes += _plain_floors(found)
        figures = serving_figures(result, counted, found.costs, found.limits)
        _print(found.report("serve", workload, figures, notes), values)


def _bench_server(
    values: Mapping[str, Any], work: list[Lengths], workload: dict[str, Any], choice: Choice, objectives: Objectives
) -> LoadReport:
    """The measure `serve` of a server.

    Raises:
        UsageError: if a request is longer than its context.
        ServerError: if it cannot be reached, or answers no request in full.
    """
    parts, key = split_url(values["url"]), read_key(values["api_key_file"])
    server = RemoteServer(values["url"], values["model"], key)
    longest = max(length.total for length in work)
    if server.max_model_len is not None and longest > server.max_model_len:
        raise UsageError(
            f"a request has {longest} tokens, and the context of {server.model} {server.max_model_len}",
            hint="Give shorter --input-len and --output-len.",
        )
    port, is_tls = parts.port or PORTS[parts.scheme], parts.scheme == "https"
    target = Target(str(parts.hostname), port, parts.path, server.model, key, is_tls)
    outcome = send_load(
        target, work, choice, vocab_size=values["vocab_size"], rate=workload.get("rate"),
        concurrency=workload.get("concurrency"), warmup=values["warmup"], seed=values["seed"],
    )  # fmt: skip
    figures = load_figures(summarise(outcome.traces, objectives))
    figures += [
        Figure("failed", outcome.failures.total(), "requests"),
        Figure("chunks", outcome.chunks, "chunks"),
        Figure("client_us_per_chunk", outcome.client_us_per_chunk, "us"),
    ]
    return LoadReport(
        server={"url": parts.geturl(), "model": server.model},
        workload=workload | {"vocab_size": values["vocab_size"]},
        figures=figures,
        failures=outcome.failures,
        notes=[
            "ITL is the gap between two chunks, each of which may have several tokens; TPOT counts tokens.",
            *["TLS is part of what was measured: its handshakes, too, count to first tokens."] * is_tls,
        ],
    )


# The token budget and the running requests that the peers' own benchmarks have, and prefix caching always off.
for _command, _running in ((latency, 64), (throughput, 512), (serve, 512)):
    adapt_options(_command, leave_out=("prefix_caching",), max_batch_tokens=8192, max_running=_running)


@contextmanager
def _start(values: Mapping[str, Any], plugins: PluginOptions | None) -> Iterator[Bench]:
    """An engine that is ready to be measured. What is wrong with the options is found before a weight is made."""
    plugins = plugins or PluginOptions()
    subject = read_subject(values, plugins)
    config = subject_config(subject, {**values, "prefix_caching": False}, plugins)
    from hookline.benchmark.setup import early_limits, make_bench

    limits = early_limits(config, values["measure_roofline"])
    with start_engine(config, subject.reader()) as engine:
        yield make_bench(subject, engine, limits)


def _choice(values: Mapping[str, Any]) -> Choice:
    """How tokens are chosen; checked now, as a request would be later."""
    choice = Choice(**_drawn(values))
    choice.params(1)
    return choice


def _drawn(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in _CHOICE}


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """How tokens are chosen and proposed, as reports show it."""
    speculative = speculative_config(values)
    if speculative is None:
        return _drawn(values)
    usual = dataclasses.asdict(SpeculativeConfig())
    own = {name: value for name, value in dataclasses.asdict(speculative).items() if value != usual[name]}
    always = {"method": speculative.method, "num_speculative_tokens": speculative.num_speculative_tokens}
    return _drawn(values) | always | own


def _work(values: Mapping[str, Any], count: int) -> list[Lengths]:
    if values["lengths"] == "lognormal":
        return lognormal_lengths(count, values["seed"])
    return fixed_lengths(count, values["input_len"], values["output_len"])


def _described(values: Mapping[str, Any], work: list[Lengths]) -> dict[str, Any]:
    """The workload's settings, with the means of what was drawn."""
    means = {
        "mean_input": round(sum(length.prompt for length in work) / len(work), 1),
        "mean_output": round(sum(length.output for length in work) / len(work), 1),
    }
    return {"requests": len(work), "lengths": values["lengths"], **means, "seed": values["seed"], **_settings(values)}


def _plain_floors(found: Bench) -> list[str]:
    """A note where the floors do not know what was measured."""
    return ["The floors are those of steps without drafts."] if found.drafts else []


def _print(report: Report | LoadReport, values: Mapping[str, Any]) -> None:
    """The table on stdout, and the JSON file where one was asked for."""
    file: Path | None = values["json_file"]
    if file is not None:
        file.write_text(json.dumps(report.to_dict(), indent=1, default=str) + "\n", encoding="utf-8")
    click.echo("\n".join(report.lines()))
