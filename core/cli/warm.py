"""`engine tune` and `engine warm-cache`: what a model needs measured or compiled on this machine, done beforehand."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hookline.cli.options import adapt_options, engine_options
from hookline.cli.render import tell
from hookline.cli.source import read_subject, source_options, subject_config
from hookline.cli.starting import find_model, start_engine
from hookline.config import EngineConfig, PluginOptions
from hookline.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

    from hookline.benchmark.setup import Subject
    from hookline.engine import Engine

# Lengths of the prompts that are run, short of what the model takes: one token, less than a block, several chunks.
_LENGTHS = (1, 5, 40, 300, 1100)
_NEW_TOKENS = 4


@click.command("tune")
@source_options
@click.option(
    "--seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=240.0,
    show_default=True,
    help="For all products together; what the time does not reach keeps its choice.",
)
@engine_options
@click.pass_obj
def tune(plugins: PluginOptions | None, /, seconds: float, **values: Any) -> None:
    """Measure how a model's products of few tokens are computed fastest on this GPU.

    Each matrix of the model is multiplied with 1 to 64 tokens, by the engine's own kernel in many configurations and by
    the vendor's library. The fastest is kept in Triton's cache folder and used from then on. Reads no weight.

    \b
      engine tune --shape NAME
      engine tune ./my-model --seconds 600
    """
    plugins = plugins or PluginOptions()
    subject = read_subject(values, plugins)
    config = subject_config(subject, values, plugins)
    from hookline.loading import choose_device

    device = choose_device(config.device)
    if device.type != "cuda":
        raise DeviceError(
            f"engine tune measures kernels on a GPU, and the device is {device}",
            hint="Run it on the machine that will serve the model; engine doctor lists its GPUs.",
        )
    _tune(subject, config, device, seconds)


def _tune(subject: Subject, config: EngineConfig, device: torch.device, seconds: float) -> None:
    from hookline.benchmark.products import model_products
    from hookline.loading import open_model
    from hookline_kernels import tuning
    from hookline_kernels.tune_linear import line, sweep

    if subject.hf_config is None:
        find_model(config)
    opened = open_model(config, subject.reader())
    if opened.model.dtype.itemsize != 2:
        raise UsageError(
            f"the model's type is {opened.engine_config.dtype}, and the kernel for few tokens is for 16 bits",
            hint="Use --dtype bfloat16 or --dtype float16.",
        )
    products = model_products(opened)
    found: list[tuning.TunedChoice] = []
    path = None
    for choice in sweep(products, dtype=opened.model.dtype, device=device, seconds=seconds, report=tell):
        path = tuning.store([choice])  # at each: an interrupt loses nothing
        found.append(choice)
    for choice in sorted(found, key=lambda choice: choice.key):
        click.echo(line(choice))
    click.echo(f"{len(found)} choices for {len(products)} products kept in {path}" if path else "No time for any.")


@click.command("warm-cache")
@source_options
@engine_options
@click.pass_obj
def warm_cache(plugins: PluginOptions | None, /, **values: Any) -> None:
    """Compile what a model needs on this machine, so that its first start does not have to.

    On a GPU the engine starts with random weights of the model's shapes, captures its CUDA graphs once and answers some
    requests: all kernels are then in Triton's cache. Give the options that the model will run with, since kernels and
    graphs depend on them. On a CPU the native kernels are built. Of a checkpoint only the config is read.

    \b
      engine warm-cache --shape NAME --max-running 256
      engine warm-cache ./my-model --dtype bfloat16
    """
    plugins = plugins or PluginOptions()
    subject = read_subject(values, plugins)
    config = subject_config(subject, {**values, "load_format": "random"}, plugins)
    from hookline.loading import choose_device

    if subject.hf_config is None:
        find_model(config)
    if choose_device(config.device).type == "cpu":
        _build_native(subject, config)
    else:
        _warm_engine(subject, config)


adapt_options(
    tune,
    leave_out=(
        *("load_format", "max_model_len", "max_batch_tokens", "max_running", "block_size"),
        *("memory", "kv_cache_memory", "prefix_caching"),
    ),
)
adapt_options(warm_cache, leave_out=("load_format", "prefix_caching"))


def _build_native(subject: Subject, config: EngineConfig) -> None:
    """The native kernels for the model's type, and for float32, in which some of any type are computed."""
    import torch

    from hookline.loading import open_model
    from hookline_kernels.native import load

    dtype = open_model(config, subject.reader()).model.dtype
    for each in dict.fromkeys((torch.float32, dtype)):
        begin = time.perf_counter()
        reason = load(each).reason
        name = str(each).removeprefix("torch.")
        state = f"ready after {time.perf_counter() - begin:.1f} s" if reason is None else f"none, {reason}"
        click.echo(f"native kernels for {name}: {state}")


def _warm_engine(subject: Subject, config: EngineConfig) -> None:
    begin = time.perf_counter()
    with _compiled() as (new, known), start_engine(config, subject.reader()) as engine:
        ready = time.perf_counter()
        requests = _run_requests(engine)
    end = time.perf_counter()
    click.echo(f"start     {ready - begin:.1f} s")
    click.echo(f"requests  {requests} in {end - ready:.1f} s")
    click.echo(f"kernels   {new.total()} compiled, {known.total()} were in the cache")
    for name, count in sorted(new.items()):
        click.echo(f"  {name}" + (f", {count} variants" if count > 1 else ""))


@contextmanager
def _compiled() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """How often each Triton kernel is compiled meanwhile, and how often found in the cache."""
    import triton

    new, known = Counter[str](), Counter[str]()

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (known if cache_hit else new)[src.name] += 1

    compilation = triton.knobs.compilation
    before = compilation.listener
    compilation.listener = listen
    try:
        yield new, known
    finally:
        compilation.listener = before


def _run_requests(engine: Engine) -> int:
    """Prompts of all lengths, alone and together, with each way to choose tokens. How many there were."""
    from hookline.sampling_params import SamplingParams

    ways: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"logprobs": 1},
    )
    lengths = [length for length in _LENGTHS if length + _NEW_TOKENS <= engine.max_model_len]
    prompts = [[place % engine.vocab_size for place in range(length)] for length in lengths]
    count = 0
    for group in (*([prompt] for prompt in prompts), *([prompts] if prompts else [])):
        for way in ways:
            engine.generate(group, SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, **way))
            count += len(group)
    return count
