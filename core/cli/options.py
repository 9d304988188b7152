"""Options that several commands share, and the frozen records that they become. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import click

from hookline.cli.speculation import speculative_config
from hookline.config import BY_DEVICE, DTYPES, EngineConfig, PluginOptions, parse_memory
from hookline.model_store import DEFAULT_MODEL
from hookline.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_ENGINE_DEFAULTS = MappingProxyType({entry.name: entry.default for entry in dataclasses.fields(EngineConfig)})
_ENGINE_FIELDS = (
    *("dtype", "device", "load_format", "max_model_len", "max_batch_tokens", "max_running"),
    *("block_size", "memory", "kv_cache_memory", "prefix_caching", "expert_routing", "tensor_parallel_size", "offline"),
)
_SAMPLING_FIELDS = tuple(entry.name for entry in dataclasses.fields(SamplingParams))


def _option(*names: str, default: Any = None, show_default: str = "", **settings: Any) -> Callable[[F], F]:
    return click.option(*names, default=default, show_default=show_default or default is not None, **settings)


def _engine_option(name: str, **settings: Any) -> Callable[[F], F]:
    return _option(f"--{name.replace('_', '-')}", default=_ENGINE_DEFAULTS[name], **settings)


def _by_device(name: str) -> str:
    """What help says of a default that depends on the device."""
    on_cpu, on_gpu = BY_DEVICE[name]
    return f"{on_gpu} on a GPU, {on_cpu} on a CPU"


_COUNT = click.IntRange(min=1)

model_option = _option(
    *("-m", "--model", "--model-path", "model"),
    default=DEFAULT_MODEL,
    metavar="MODEL",
    help="A folder, a GGUF file, a snapshot, a pulled model's name, or a hub id (org/name or org/name@revision).",
)

_ENGINE_OPTIONS = (
    _engine_option(
        "dtype",
        type=click.Choice(DTYPES),
        help="Type of weights and activations; auto is float32 on a CPU and the checkpoint's own elsewhere. An "
        "encoding of 8 or 4 bits says what the checkpoint must hold.",
    ),
    _engine_option("device", metavar="auto|cpu|cuda[:N]", help="Where to run; auto takes a CUDA device."),
    _engine_option(
        "load_format",
        type=click.Choice(["auto", "safetensors", "gguf", "snapshot", "random"]),
        help="Format of the weights; auto looks at the files, random makes seeded weights from the config alone.",
    ),
    _engine_option(
        "max_model_len",
        metavar="TOKENS",
        type=_COUNT,
        help="Longest prompt plus output.  [default: the model's own context, cut to what the cache holds]",
    ),
    _engine_option(
        "max_batch_tokens",
        metavar="TOKENS",
        type=_COUNT,
        show_default=_by_device("max_batch_tokens"),
        help="Token budget of one step.",
    ),
    _engine_option(
        "max_running",
        metavar="REQUESTS",
        type=_COUNT,
        show_default=_by_device("max_running"),
        help="Most requests that hold cache at a time.",
    ),
    _engine_option("block_size", metavar="TOKENS", type=_COUNT, help="Tokens a cache block."),
    _engine_option(
        "memory",
        metavar="SIZE",
        help="The most memory that the engine may use: percent of the GPU's, such as 80%, or a size such as 100GiB; on "
        "a CPU a bound on what is free.  [default: 90% of a GPU]",
    ),
    _engine_option(
        "kv_cache_memory",
        metavar="SIZE",
        help="Memory of the cache: a size such as 512MiB or 2GiB, or percent of what the engine may use, such as 40%.  "
        "[default: the memory planner chooses]",
    ),
    click.option(
        "--no-prefix-caching",
        "prefix_caching",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Do not reuse the cache of earlier requests with the same beginning.",
    ),
    _engine_option(
        "tensor_parallel_size",
        metavar="COUNT",
        type=_COUNT,
        help="Devices that share each layer; 1 is all that there is so far.",
    ),
    click.option("--offline", is_flag=True, help="Never reach the network; a model that is not there is refused."),
)

_PENALTY_OPTIONS = (
    _option("--repetition-penalty", type=float, default=1.0, help="Over 1 discourages tokens of prompt and output."),
    _option("--presence-penalty", type=float, default=0.0, help="-2 to 2, once for each token in the output."),
    _option("--frequency-penalty", type=float, default=0.0, help="-2 to 2, for each time a token is in the output."),
    click.option(
        "--logit-bias",
        metavar="ID=VALUE",
        multiple=True,
        help="Add VALUE, -100 to 100, to the logit of token ID. May be given several times.",
    ),
    click.option(
        "--allowed-token-id",
        "allowed_token_ids",
        metavar="ID",
        type=int,
        multiple=True,
        help="Choose among these token IDs alone. May be given several times.  [default: all]",
    ),
    click.option(
        "--bad-word", "bad_words", metavar="TEXT", multiple=True, help="Never write TEXT. May be given several times."
    ),
)

_STOP_OPTIONS = (
    click.option("--stop", metavar="TEXT", multiple=True, help="End before TEXT. May be given several times."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        metavar="ID",
        type=int,
        multiple=True,
        help="End at token ID. May be given several times.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end tokens."),
)

_REPORT_OPTIONS = (
    _option("-n", "n", type=int, default=1, help=f"Continuations of each prompt, at most {MAX_N}."),
    _option(
        "--logprobs",
        metavar="COUNT",
        type=int,
        help=f"With --json: each token's log probability and the COUNT likeliest, 0 to {MAX_LOGPROBS}.",
    ),
    _option("--prompt-logprobs", metavar="COUNT", type=int, help="The same for the tokens of the prompt."),
)


def _choice_options(max_tokens: int) -> Sequence[Callable[[F], F]]:
    return (
        _option("--max-tokens", metavar="TOKENS", type=int, default=max_tokens, help="Most new tokens."),
        _option("--min-tokens", metavar="TOKENS", type=int, default=0, help="New tokens before an end token may come."),
        _option(
            "--temperature", type=float, default=0.0, help="0 takes the likeliest token, 1 draws as the model says."
        ),
        _option("--top-k", metavar="COUNT", type=int, default=0, help="Draw from the COUNT likeliest; 0 is all."),
        _option("--top-p", type=float, default=1.0, help="Draw from the smallest set of this probability, up to 1."),
        _option("--min-p", type=float, default=0.0, help="Leave out what is below this times the likeliest, 0 to 1."),
        _option("--seed", type=int, help="Repeat a draw.  [default: from the place of the request in the run]"),
    )


def _all(options: Iterable[Callable[[F], F]], command: F) -> F:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def engine_options(command: F) -> F:
    """Adds the options that `engine_config` reads."""
    return _all(_ENGINE_OPTIONS, command)


def adapt_options(command: click.Command, leave_out: Iterable[str] = (), **defaults: Any) -> None:
    """Takes options away from a command, by the names of their values, and gives others a default of its own."""
    command.params = [param for param in command.params if param.name not in set(leave_out)]
    for param in command.params:
        if param.name in defaults:
            param.default = defaults[param.name]
            if isinstance(param, click.Option):
                param.show_default = True


def sampling_options(max_tokens: int) -> Callable[[F], F]:
    """Adds the options that `sampling_params` reads, with the command's own default of `--max-tokens`."""
    return lambda command: _all((*_choice_options(max_tokens), *_STOP_OPTIONS, *_PENALTY_OPTIONS), command)


def report_options(command: F) -> F:
    """Adds the sampling options that change what is reported: `-n` and the log probabilities."""
    return _all(_REPORT_OPTIONS, command)


def engine_config(model: str, values: Mapping[str, Any], plugins: PluginOptions | None) -> EngineConfig:
    """The engine's options.

    Args:
        model: what `--model` says.
        values: of the options that `engine_options` and `speculative_options` add, those that the command has; others
            are left alone.
        plugins: what the options before the command say.

    Raises:
        UsageError: naming the option whose value is not allowed.
    """
    fields = {name: values[name] for name in _ENGINE_FIELDS if name in values}
    for name in ("memory", "kv_cache_memory"):
        if fields.get(name) is not None:
            fields[name] = parse_memory(fields[name], f"--{name.replace('_', '-')}")
    speculative = speculative_config(values)
    return EngineConfig(model=model, plugins=plugins or PluginOptions(), speculative=speculative, **fields)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """The sampling options among `values`.

    Raises:
        InvalidRequestError: naming the option whose value is not allowed.
        click.BadParameter: if a `--logit-bias` is not of the form ID=VALUE.
    """
    fields = {name: values[name] for name in _SAMPLING_FIELDS if name in values}
    fields["logit_bias"] = dict(map(_read_bias, fields["logit_bias"]))
    fields["allowed_token_ids"] = fields["allowed_token_ids"] or None
    return SamplingParams(**fields)


def _read_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r}; expected ID=VALUE, such as 11=-100", param_hint="--logit-bias") from None
