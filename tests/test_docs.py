"""The documents' examples work: the plugin of docs/plugins.md is built from that page and compared with transformers.

A fenced block whose first line is a comment with a path is that file. Commands of `engine` must be ones that it takes.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from packaging.requirements import Requirement

from hookline import Engine, EngineConfig, SamplingParams
from hookline.cli.main import engine as command
from hookline.errors import ModelConfigError
from hookline.plugins import PluginRegistry
from tests.conftest import TINY, write_tokenizer
from tests.plugin_fixtures import build_wheel, install_wheel, plugin_site
from tests.source_tree import ROOT, read_modules

GUIDE = "docs/plugins.md"
PLUGIN_READMES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("plugins/*/README.md"))
PACKAGE = "hookline_qwen3"
NEW = 24
PROMPTS = [[7, 8, 9], list(range(20, 90)), [5]]
SHAPES = TINY | {"num_hidden_layers": 3, "head_dim": 24, "rms_norm_eps": 1e-5}


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(document), re.MULTILINE | re.DOTALL)


def example_files() -> dict[str, str]:
    """Path to text of every file that the guide shows."""
    files = {}
    for block in [*blocks(GUIDE, "toml"), *blocks(GUIDE, "python")]:
        match = re.match(r"# (\S+\.(?:py|toml))\n", block)
        if match:
            files[match[1]] = block
    return files


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on `sys.path` with the guide's plugin installed, made from what its pyproject says."""
    folder = tmp_path_factory.mktemp("site")
    files = example_files()
    project = tomllib.loads(files["pyproject.toml"])
    code = {path: text for path, text in files.items() if path.startswith(f"{PACKAGE}/")}
    assert project["tool"]["setuptools"]["packages"] == [PACKAGE]
    wheel = build_wheel(
        folder / "wheels",
        project["project"]["name"],
        project["project"]["version"],
        code | {f"{PACKAGE}/__init__.py": ""},
        project["project"]["entry-points"]["hookline.architectures"],
        project["project"]["dependencies"],
    )
    install_wheel(wheel, folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


plugins = pytest.fixture(plugin_site, name="plugins")


def run(*arguments: str) -> Result:
    """`engine` with these arguments and the plugins that are on `sys.path`."""
    return CliRunner().invoke(command, list(arguments))


def make_model(**fields: Any) -> Any:
    """transformers' own Qwen3, tiny and random, with norms that do something."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SHAPES | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_model().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def expected(model: Any, prompt: list[int]) -> list[int]:
    ids = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    return [int(i) for i in ids[0, len(prompt) :]]


def served(model: Path, **options: Any) -> list[list[int]]:
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", **options))
    greedy = SamplingParams(temperature=0, max_tokens=NEW, min_tokens=NEW)
    return [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, greedy)]


def test_the_guide_shows_a_whole_plugin() -> None:
    modules = {"arch", "config", "container", "model", "weight_adapter"}
    assert set(example_files()) == {"pyproject.toml", "check.py", *(f"{PACKAGE}/{name}.py" for name in modules)}


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_the_guides_plugin_equals_transformers(site: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    model = make_model(**fields)
    model.save_pretrained(tmp_path)
    wanted = [expected(model, prompt) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
    assert served(tmp_path) == wanted
    assert served(tmp_path, max_batch_tokens=16, block_size=4) == wanted


def test_the_guides_norms_of_queries_and_keys_matter(site: Path, tmp_path: Path) -> None:
    model = make_model()
    wanted = [expected(model, prompt) for prompt in PROMPTS]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight.mul_(-1.5)
    model.save_pretrained(tmp_path)
    assert served(tmp_path) != wanted


def test_the_guides_check_passes_and_can_fail(
    site: Path,
    qwen3_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "check.py"
    monkeypatch.setattr(sys, "argv", ["check.py", str(qwen3_folder)])
    script.write_text(example_files()["check.py"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1:] == ["equal"]
    script.write_text(example_files()["check.py"].replace("torch.tensor([prompt])", "torch.tensor([[1, *prompt]])"))
    with pytest.raises(SystemExit, match=r"differs with \{\}"):
        runpy.run_path(str(script), run_name="__main__")


def test_the_guides_plugin_is_listed_and_sound(site: Path, qwen3_folder: Path) -> None:
    listed = run("list-models")
    assert re.search(r"^Qwen3ForCausalLM +qwen3 +0\.1\.0 +ok", listed.stdout, re.MULTILINE), listed.output
    checked = run("plugins", "--check")
    assert checked.exit_code == 0, checked.output
    shown = run("show", str(qwen3_folder))
    assert shown.exit_code == 0, shown.output
    assert "hookline-qwen3" in shown.stdout or "qwen3" in shown.stdout


def test_the_guides_plugin_serves_random_weights(
    site: Path, qwen3_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((qwen3_folder / "config.json").read_text())
    script = tmp_path / "random_weights.py"
    (code,) = [block for block in blocks(GUIDE, "python") if 'load_format="random"' in block]
    script.write_text(code.replace('"MODEL"', repr(str(tmp_path))))
    runpy.run_path(str(script), run_name="__main__")
    assert re.fullmatch(r"\(\d+, \d+, \d+, \d+\)", capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {"num_hidden_layers": "three"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_guides_config_refuses_what_the_model_does_not_compute(site: Path, fields: Mapping[str, Any]) -> None:
    config = make_model().config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]} | fields
    with pytest.raises(ModelConfigError):
        PluginRegistry().load("Qwen3ForCausalLM").read_config(config)


def write_gguf(path: Path, model: Any) -> None:
    """The model as a GGUF file without a tokenizer, its names the adapter's read backwards."""
    adapter = importlib.import_module(f"{PACKAGE}.weight_adapter")
    top = {ours: theirs for theirs, ours in adapter.TOP.items()}
    layer = {ours: theirs for theirs, ours in adapter.LAYER.items()}
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    known = set(gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN3])
    names = {gguf.TENSOR_NAMES[kind] for kind in known}
    for name, tensor in model.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        new = f"blk.{match[1]}.{layer[match[2]]}.weight" if match else top[name]
        assert re.sub(r"blk\.\d+", "blk.{bid}", new).removesuffix(".weight") in names
        writer.add_tensor(new, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_guides_plugin_serves_gguf(site: Path, tmp_path: Path) -> None:
    model = make_model()
    write_gguf(tmp_path / "model.gguf", model)
    assert served(tmp_path / "model.gguf") == [expected(model, prompt) for prompt in PROMPTS]


def test_readmes_first_plugin_is_found(plugins: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (pyproject,), (module,) = blocks("README.md", "toml"), [b for b in blocks("README.md", "python") if "hookimpl" in b]
    about = tomllib.loads(pyproject)
    name = module.splitlines()[0].removeprefix("# ")
    assert about["tool"]["setuptools"]["py-modules"] == [name.removesuffix(".py")]
    entry_points = about["project"]["entry-points"]["hookline.architectures"]
    install_wheel(build_wheel(plugins, about["project"]["name"], "0.1.0", {name: module}, entry_points), plugins)
    listed = run("list-models")
    assert re.search(r"^HelloForCausalLM +hello +0\.1\.0 +ok", listed.stdout, re.MULTILINE), listed.output
    assert run("plugins", "--check").exit_code == 0
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"architectures": ["HelloForCausalLM"]}')
    shown = run("show", str(model), "--load-format", "random")
    assert shown.exit_code == 5
    assert "hookline_read_config" in shown.stderr


def documented_commands() -> list[tuple[str, str]]:
    """Every `engine ...` line of shell blocks, with the document that has it."""
    found = []
    for document in ("README.md", GUIDE, "CONTRIBUTING.md", *PLUGIN_READMES):
        for block in blocks(document, "sh"):
            found += [(document, line) for line in block.splitlines() if re.match(r"(\.venv/bin/)?engine ", line)]
    return found


@pytest.mark.parametrize(("document", "line"), documented_commands())
def test_a_documented_command_is_one(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    context = click.Context(command, info_name="engine", **command.context_settings)
    _, rest, _ = command.make_parser(context).parse_args(list(words))
    name, found, arguments = command.resolve_command(context, rest)
    assert found is not None, f"{document}: {name}"
    found.make_parser(click.Context(found, info_name=name, parent=context)).parse_args(arguments)


@pytest.mark.parametrize("code", [b for b in blocks("README.md", "python") if "Engine(" in b], ids=lambda _: "example")
def test_readmes_python_runs(code: str, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "example.py"
    replaced = code.replace('"smollm2-135m-instruct"', repr(str(tiny_llama)))
    assert replaced != code
    script.write_text(replaced)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


def project(path: str = "pyproject.toml") -> dict[str, Any]:
    return tomllib.loads(read(path))["project"]  # type: ignore[no-any-return]


# A row of a table: a package in backticks, and the cells after it.
ROW = r"^\| `([\w-]+)` \|(.+)\|$"


def required() -> dict[str, str]:
    """Name of every dependency to the kind of it."""
    kinds = {"runtime": project()["dependencies"]} | project()["optional-dependencies"]
    return {Requirement(line).name: kind for kind, lines in kinds.items() for line in lines}


def test_every_dependency_has_its_reason() -> None:
    sections = re.split(r"^## ", read("docs/dependencies.md"), flags=re.MULTILINE)
    listed: dict[str, str] = {}
    for kinds, heading in ((["runtime"], "To run"), (["serve"], "To serve"), (["test", "clients"], "To test")):
        (section,) = [text for text in sections if text.startswith(heading)]
        tables = [re.findall(ROW, part, re.MULTILINE) for part in re.split(r"^\| --- .*$", section, flags=re.MULTILINE)]
        rows = [row for table in tables for row in table]
        assert len(tables) == 1 + len(kinds)
        listed |= {name: kind for kind, table in zip(kinds, tables[1:], strict=True) for name, _ in table}
        assert [name for name, cells in rows if not all(cell.strip() for cell in cells.split("|"))] == []
    assert listed == required()


def test_every_dependency_is_pinned() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.+]+)$", read("constraints.txt"), re.MULTILINE))
    assert set(pins) == set(required())
    lines = [
        *project()["dependencies"],
        *(line for extra in project()["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, lines):
        assert requirement.specifier.contains(pins[requirement.name], prereleases=True), requirement


# Of the engine's dependencies, those that none of its modules imports: docs/dependencies.md says why they are there.
NOT_IMPORTED = {"transformers", "safetensors"}
MAY_BE_IMPORTED = {"uvloop", "httptools"}
# Distributions whose package has another name; what comes with a package of ours and is imported by its own name.
IMPORT_NAMES = {"pyzmq": "zmq", "prometheus-client": "prometheus_client"}
COMES_WITH = {"starlette": "fastapi"}
LATER_STANDARD_LIBRARY = {"annotationlib"}


@cache
def foreign_imports() -> dict[str, set[str]]:
    """Every package of others that modules of ours import, to the names of those modules."""
    known = sys.stdlib_module_names | LATER_STANDARD_LIBRARY
    found: dict[str, set[str]] = {}
    for module in read_modules().values():
        for item in module.imports:
            name = item.target.partition(".")[0]
            if name not in known and not name.startswith("hookline"):
                found.setdefault(COMES_WITH.get(name, name), set()).add(module.name)
    return found


def packages(kind: str) -> set[str]:
    """Import names of the dependencies of a kind."""
    return {IMPORT_NAMES.get(name, name) for name, of in required().items() if of == kind}


def test_what_is_imported_is_declared() -> None:
    declared = packages("runtime") | packages("serve")
    assert foreign_imports().keys() - MAY_BE_IMPORTED == declared - NOT_IMPORTED - MAY_BE_IMPORTED


def test_what_serving_needs_is_imported_there_alone() -> None:
    users = set().union(*(names for package, names in foreign_imports().items() if package in packages("serve")))
    assert {name for name in users if not name.startswith("hookline.serving.")} <= {"hookline.structured_output"}


def test_the_changelog_has_this_version() -> None:
    assert re.search(rf"^## \[{re.escape(project()['version'])}\]", read("CHANGELOG.md"), re.MULTILINE)


def test_plugins_have_the_engines_licence_and_a_page() -> None:
    for path in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        about = project(path.relative_to(ROOT).as_posix())
        assert about["license"] == project()["license"]
        assert (path.parent / about["readme"]).read_text().startswith(f"# {about['name']}\n")
