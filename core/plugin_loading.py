"""Imports one plugin, checks it, and wraps its untyped hook answers in one typed object."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from hookline import hookspecs
from hookline.errors import HooklineError, PluginError, UsageError
from hookline.hookspecs import ENTRY_POINT_GROUP, PROJECT, Architecture, hookimpl
from hookline.plugin_metadata import GGUF_PREFIX, Claim

if TYPE_CHECKING:
    from hookline.batch_processor import BatchProcessor
    from hookline.config import ResolvedConfig
    from hookline.container import ContainerMap
    from hookline.memory_planner import MemoryPlanner
    from hookline.model import ModelConfig, TransformerModel
    from hookline.parallel import Parallel
    from hookline.parsers.contract import ReasoningFormat, ToolFormat
    from hookline.weight_adapter import WeightAdapter

T = TypeVar("T")

# The formats of the core.
_TOOL_FORMAT = "hermes"
_REASONING_FORMAT = "think"


@dataclass(frozen=True, slots=True)
class LoadedArchitecture:
    """One architecture of one imported plugin: the hooks as typed methods.

    Every method raises PluginError, naming plugin and hook, where the plugin fails, does not answer or answers with
    something of another type; our own errors, such as ModelConfigError, pass as they are.

    Attributes:
        claim: which plugin, and under which name it was asked for.
        record: what the plugin says the architecture can do.
    """

    claim: Claim
    record: Architecture
    _manager: pluggy.PluginManager = field(repr=False, compare=False)

    def read_config(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """The architecture's frozen config, from the fields of `config.json`."""
        from hookline.model import ModelConfig

        return self._ask("hookline_read_config", ModelConfig, hf_config=hf_config)

    def build_model(self, config: ModelConfig, engine_config: ResolvedConfig, parallel: Parallel) -> TransformerModel:
        """A model without weights."""
        from hookline.model import TransformerModel

        arguments = {"config": config, "engine_config": engine_config, "parallel": parallel}
        # An abstract class serves as well: answers are only checked against it.
        return self._ask("hookline_build_model", TransformerModel, **arguments)  # type: ignore[type-abstract]

    def build_containers(self, model: TransformerModel) -> ContainerMap:
        """Which checkpoint prefix belongs to which container of `model`."""
        from hookline.container import ContainerMap

        return self._ask("hookline_build_containers", ContainerMap, model=model)

    def weight_adapter(self, config: ModelConfig, weights_format: str) -> WeightAdapter:
        """The adapter for checkpoints of `weights_format`."""
        from hookline.weight_adapter import WeightAdapter

        return self._ask("hookline_weight_adapter", WeightAdapter, config=config, weights_format=weights_format)

    def memory_planner(self, config: ModelConfig, engine_config: ResolvedConfig) -> MemoryPlanner:
        """The planner of weights, activations and cache."""
        from hookline.memory_planner import MemoryPlanner

        return self._ask("hookline_memory_planner", MemoryPlanner, config=config, engine_config=engine_config)

    def batch_processor(self, config: ModelConfig, engine_config: ResolvedConfig) -> BatchProcessor:
        """The processor that makes tensors of a scheduled batch."""
        from hookline.batch_processor import BatchProcessor

        return self._ask("hookline_batch_processor", BatchProcessor, config=config, engine_config=engine_config)

    def tool_format(self, name: str) -> ToolFormat | None:
        """How the model writes tool calls, by the format's name: the plugin's, or one of the core's; None for "".

        Raises:
            UsageError: if nobody knows the name.
        """
        from hookline.parsers.contract import ToolFormat

        own = self.record.tool_parser
        return self._format("hookline_tool_parser", ToolFormat, name, own, _TOOL_FORMAT)  # type: ignore[type-abstract]

    def reasoning_format(self, name: str) -> ReasoningFormat | None:
        """How the model writes its reasoning; as `tool_format`."""
        from hookline.parsers.contract import ReasoningFormat

        own, hook = self.record.reasoning_parser, "hookline_reasoning_parser"
        return self._format(hook, ReasoningFormat, name, own, _REASONING_FORMAT)  # type: ignore[type-abstract]

    def _format(self, hook: str, answer: type[T], name: str, own: str, general: str) -> T | None:
        """What `name` calls; `own` is the name in the record, `general` the core's."""
        if not name:
            return None
        found = _call(self._manager, self.claim, hook, {"name": name})
        if found is None and name != own:
            known = ", ".join(sorted({own, general} - {""}))
            kind = hook.removeprefix(f"{PROJECT}_").replace("_", " ")
            raise UsageError(
                f"{self.claim.title} has no {kind} called {name!r}",
                hint=f"Known for {self.claim.architecture}: {known}.",
            )
        return _checked(self.claim, hook, answer, found)

    def _ask(self, hook: str, answer: type[T], **arguments: object) -> T:
        return _ask(self._manager, self.claim, hook, answer, arguments)


class _CoreDefaults:
    """The core's own answers, asked after the plugin's."""

    @hookimpl(trylast=True)
    def hookline_weight_adapter(self) -> WeightAdapter:
        from hookline.weight_adapter import WeightAdapter

        return WeightAdapter()

    @hookimpl(trylast=True)
    def hookline_memory_planner(self, config: ModelConfig, engine_config: ResolvedConfig) -> MemoryPlanner:
        from hookline.memory_planner import MemoryPlanner

        return MemoryPlanner(config, engine_config)

    @hookimpl(trylast=True)
    def hookline_batch_processor(self, config: ModelConfig, engine_config: ResolvedConfig) -> BatchProcessor:
        from hookline.batch_processor import BatchProcessor

        return BatchProcessor(config, engine_config)

    @hookimpl(trylast=True)
    def hookline_tool_parser(self, name: str) -> ToolFormat | None:
        from hookline.parsers.hermes import HermesFormat

        return HermesFormat() if name == _TOOL_FORMAT else None

    @hookimpl(trylast=True)
    def hookline_reasoning_parser(self, name: str) -> ReasoningFormat | None:
        from hookline.parsers.think import ThinkFormat

        return ThinkFormat() if name == _REASONING_FORMAT else None


def load_architecture(claim: Claim, claimed: frozenset[str]) -> LoadedArchitecture:
    """Imports the plugin of `claim` into a plugin manager of its own.

    Args:
        claim: the architecture to load.
        claimed: all entry point names that lead to the plugin's module; its records must have just these.

    Raises:
        PluginError: if the plugin cannot be imported, its hooks are not ours, or its records are unsound.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(_CoreDefaults(), name="core")
    _register(manager, _import(claim), claim)
    records = _records(manager, claim, claimed)
    record = next(record for record in records if claim.architecture in _names(record))
    return LoadedArchitecture(claim, record, manager)


def _import(claim: Claim) -> ModuleType:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results, some of them JSON
            return importlib.import_module(claim.module)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{claim.title} cannot be imported: {_describe(error)}",
            hint=f"Reinstall or upgrade it (pip install --upgrade --force-reinstall {claim.distribution}), or leave it "
            f"out: -p no:{claim.plugin}",
        ) from error


def _register(manager: pluggy.PluginManager, module: ModuleType, claim: Claim) -> None:
    known = [name for name in vars(hookspecs) if manager.parse_hookspec_opts(hookspecs, name) is not None]
    marked = [name for name in vars(module) if manager.parse_hookimpl_opts(module, name) is not None]
    try:
        manager.register(module, name=claim.distribution)
        manager.check_pending()
    except Exception as error:
        raise PluginError(
            f"{claim.title} has an unsound hook: {' '.join(str(error).split())}{_nearest_hooks(marked, known)}",
            hint="hookline.hookspecs has all hooks with their arguments; a hook may take fewer, never others.",
        ) from error
    unmarked = [name for name in known if callable(getattr(module, name, None)) and name not in marked]
    if unmarked:
        raise PluginError(
            f"{claim.title} has functions named as hooks but not marked as such: {', '.join(unmarked)}",
            hint="Put @hookline.hookspecs.hookimpl over each.",
        )


def _nearest_hooks(marked: list[str], known: list[str]) -> str:
    """For each marked name that is no hook of ours, the one that may be meant."""
    near = {name: difflib.get_close_matches(name, known, n=1) for name in marked if name not in known}
    return "".join(f"; did you mean {match} by {name}?" for name, matches in near.items() for match in matches)


def _records(manager: pluggy.PluginManager, claim: Claim, claimed: frozenset[str]) -> tuple[Architecture, ...]:
    records: tuple[object, ...] = _ask(manager, claim, "hookline_architectures", tuple, {})
    sound = tuple(record for record in records if isinstance(record, Architecture))
    names = [record.name for record in sound]
    if len(sound) < len(records) or len(set(names)) < len(names):
        raise PluginError(
            f"hookline_architectures of {claim.title} answered {records!r:.200}",
            hint="It must answer a tuple of hookline.hookspecs.Architecture records, each with a name of its own.",
        )
    recorded = frozenset(name for record in sound for name in _names(record))
    if recorded != claimed:
        raise PluginError(
            f"{claim.title} contradicts itself: only in its records: {_listed(recorded - claimed)}; only in its entry "
            f"points: {_listed(claimed - recorded)}",
            hint=f"Give hookline_architectures and the entry points of {ENTRY_POINT_GROUP} the same names "
            f"({GGUF_PREFIX}NAME for a record's gguf_name), then install the plugin again.",
        )
    return sound


def _names(record: Architecture) -> tuple[str, ...]:
    """The entry point names that belong to `record`."""
    return (record.name, f"{GGUF_PREFIX}{record.gguf_name}") if record.gguf_name else (record.name,)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _ask(manager: pluggy.PluginManager, claim: Claim, hook: str, answer: type[T], arguments: Mapping[str, object]) -> T:
    return _checked(claim, hook, answer, _call(manager, claim, hook, arguments))


def _call(manager: pluggy.PluginManager, claim: Claim, hook: str, arguments: Mapping[str, object]) -> object:
    """The answer as it is; None where there is none."""
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    try:
        return caller(**arguments)
    except (HooklineError, MemoryError):
        raise
    except Exception as error:
        if all(implementation.plugin_name != claim.distribution for implementation in caller.get_hookimpls()):
            raise  # the core's own default failed: not the plugin's fault
        raise PluginError(
            f"{hook} of {claim.title} failed: {_describe(error)}",
            hint="Tell the plugin's author, or try another version of the plugin.",
        ) from error


def _checked(claim: Claim, hook: str, answer: type[T], result: object) -> T:
    if result is None:
        raise PluginError(
            f"{claim.title} does not answer {hook} for {claim.architecture}",
            hint=f"The plugin must have a function {hook} that returns a {answer.__name__}.",
        )
    if not isinstance(result, answer):
        raise PluginError(
            f"{hook} of {claim.title} answered with a {type(result).__name__}, expected a {answer.__name__}",
            hint="Tell the plugin's author, or try another version of the plugin.",
        )
    return result


def _describe(error: BaseException) -> str:
    """Kind, text, file and line of `error`, in one line."""
    if isinstance(error, SyntaxError):
        text, place = error.msg, f" ({error.filename}, line {error.lineno})" if error.filename else ""
    else:
        machinery = (__file__, importlib.__file__)
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        frames = [(file, line) for file, line in frames if file not in machinery and not file.startswith("<frozen")]
        text, place = str(error), f" ({frames[-1][0]}, line {frames[-1][1]})" if frames else ""
    return f"{type(error).__name__}: {' '.join(text.split())}{place}"
