"""Safetensors folders: sound ones equal the reference reader, everything else is refused cleanly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline.checkpoint import open_checkpoint
from hookline.checkpoint.safetensors import SafetensorsReader
from hookline.errors import CheckpointError, ModelNotFoundError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(7, 4, generator=generator),
        "model.norm.weight": torch.randn(4, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "experts.fp8": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "mask": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }


def write_folder(folder: Path, shards: dict[str, dict[str, torch.Tensor]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if shards is None:
        save_file(make_tensors(), folder / "model.safetensors")
        return folder
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    write_index(folder, {tensor: name for name, tensors in shards.items() for tensor in tensors})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def split_shards() -> dict[str, dict[str, torch.Tensor]]:
    names = list(make_tensors())
    tensors = make_tensors()
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:3]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[3:]},
    }


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).contiguous().view(torch.uint8))


@pytest.mark.parametrize("sharded", [False, True])
def test_values_equal_the_reference_reader(tmp_path: Path, sharded: bool) -> None:
    folder = write_folder(tmp_path / "m", split_shards() if sharded else None)
    reader = open_checkpoint(folder)
    assert reader.weights_format == "safetensors"
    assert dict(reader.hf_config) == CONFIG
    assert dict(reader.generation_config) == {}
    expected = {name: tensor for file in reader.files for name, tensor in load_file(file).items()}
    found = {tensor.name: tensor for tensor in reader.tensors()}
    assert found.keys() == expected.keys()
    for name, lazy in found.items():
        assert lazy.shape == tuple(expected[name].shape)
        assert same_bytes(lazy.load(), expected[name]), name
    assert [t.name for t in reader.tensors()] == [t.name for t in reader.tensors()]
    assert reader.nbytes == sum(tensor.nbytes for tensor in expected.values())


def test_loaded_memory_is_the_callers(tmp_path: Path) -> None:
    reader = SafetensorsReader(write_folder(tmp_path / "m"))
    first = next(t for t in reader.tensors() if t.name == "model.embed.weight")
    first.load().zero_()
    assert first.load().abs().sum() > 0


def test_side_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "eos_token": "old"}')
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true, '
        '"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    reader = SafetensorsReader(folder)
    source = reader.tokenizer_source
    assert reader.generation_config["eos_token_id"] == [1, 2]
    assert (source.bos_token, source.eos_token, source.unk_token) == ("<s>", "</s>", "<unk>")
    assert (source.tokenizer_json, source.chat_template, source.add_bos, source.add_eos) == (b"{}", "d", True, None)
    (folder / "chat_template.jinja").write_text("file")
    assert SafetensorsReader(folder).tokenizer_source.chat_template == "file"


def test_cut_files_are_refused_at_every_place(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsReader(folder)


def test_file_cut_after_opening_names_file_and_tensor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    tensors = list(SafetensorsReader(folder).tensors())
    path.write_bytes(path.read_bytes()[:-20])
    failed = 0
    for tensor in tensors:
        try:
            tensor.load()
        except CheckpointError as error:
            assert tensor.name in str(error)
            assert str(path) in str(error)
            failed += 1
    assert failed


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../x.safetensors",
            "/etc/x.safetensors",
            "a/b.safetensors",
            "x.bin",
            "",
            ".safetensors/..",
            "x.safetensors\n",
        ),
        *("é.safetensors", "model.safetensors.pt", 3, None, ["x.safetensors"]),
    ],
)
def test_shard_names_that_are_none(tmp_path: Path, name: Any) -> None:
    folder = write_folder(tmp_path / "m", split_shards())
    write_index(folder, {"scale": name})
    with pytest.raises(CheckpointError, match="cannot be a shard's name"):
        SafetensorsReader(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_weight_map_that_is_none(tmp_path: Path, weight_map: Any) -> None:
    folder = write_folder(tmp_path / "m", split_shards())
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        SafetensorsReader(folder)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", split_shards())
    weight_map = {name: shard for shard, tensors in split_shards().items() for name in tensors}
    write_index(folder, {**weight_map, "ghost": FIRST})
    with pytest.raises(CheckpointError, match=f"not in {FIRST}: ghost"):
        SafetensorsReader(folder)
    write_index(folder, {name: shard for name, shard in weight_map.items() if name != "mask"})
    with pytest.raises(CheckpointError, match="not in the index: mask"):
        SafetensorsReader(folder)
    write_index(folder, {**weight_map, "mask": "model-3.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-3\.safetensors is missing"):
        SafetensorsReader(folder)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = split_shards()
    shards[SECOND]["scale"] = torch.tensor(1.0)
    folder = write_folder(tmp_path / "m", shards)
    with pytest.raises(CheckpointError, match="'scale' is in both"):
        SafetensorsReader(folder)


def test_one_million_entries(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", split_shards())
    write_index(folder, dict.fromkeys(map(str, range(1_000_000)), FIRST))
    with pytest.raises(CheckpointError, match="bytes; at most"):
        SafetensorsReader(folder)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("put", "says"),
    [
        (lambda path: path.symlink_to("../outside.safetensors"), "leads out of the folder"),
        (lambda path: path.symlink_to("/dev/zero"), "leads out of the folder"),
        (lambda path: path.symlink_to(path.name), "cannot be opened"),
        (lambda path: path.symlink_to("nowhere"), "is missing"),
        (make_fifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
    ],
    ids=["link out", "device", "loop", "dangling", "fifo", "folder"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_files_that_are_not_plain_files_of_the_folder(
    tmp_path: Path, put: Callable[[Path], None], says: str, sharded: bool
) -> None:
    folder = write_folder(tmp_path / "m", split_shards() if sharded else None)
    path = folder / (SECOND if sharded else "model.safetensors")
    path.rename(tmp_path / "outside.safetensors")
    put(path)
    with pytest.raises(CheckpointError, match=says):
        SafetensorsReader(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_side_files_may_not_lead_out(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "m")
    (tmp_path / "secret").write_text(json.dumps(CONFIG))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        _ = SafetensorsReader(folder).tokenizer_source


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("verb", ["read_bytes", "is_symlink"])
def test_side_files_that_cannot_be_read(tmp_path: Path, name: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, or the folder that it is in."""
    folder = write_folder(tmp_path / "m")
    (folder / name).write_text(json.dumps(CONFIG))
    does = getattr(Path, verb)

    def refuse(path: Path) -> Any:  # a mode would not keep root from reading
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return does(path)

    monkeypatch.setattr(Path, verb, refuse)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*Permission denied"):
        _ = SafetensorsReader(folder).tokenizer_source


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "plain")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(plain.iterdir()):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(list(open_checkpoint(snapshot).tensors())) == len(make_tensors())
    (snapshot / "generation_config.json").symlink_to("../../../models--org--other/blobs/x")
    (tmp_path / "models--org--other" / "blobs").mkdir(parents=True)
    (tmp_path / "models--org--other" / "blobs" / "x").write_text("{}")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "3", '"x"', "{", "{}", '{"architectures": null}', '{"architectures": "Llama"}'),
        *('{"architectures": []}', '{"architectures": [1]}', '{"architectures": [""]}', '{"architectures": {"a": 1}}'),
        *('{"architectures": ["A"], "a": NaN}', '{"architectures": ["A"], "a": Infinity}'),
        *('{"architectures": ["A"], "a": 1e999}', '{"architectures": ["A"], "architectures": ["B"]}'),
        '{"architectures": ["A"], "a": ' + "9" * 5000 + "}",
        '{"architectures": ["A"], "a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda text: text[:40],
)
def test_config_that_is_none(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SafetensorsReader(folder)


def test_config_in_other_bytes_or_too_large(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(b'{"architectures": ["\xff"]}')
    with pytest.raises(CheckpointError, match="not sound JSON"):
        SafetensorsReader(folder)
    with (folder / "config.json").open("wb") as file:
        file.truncate(50 * 2**20)
    with pytest.raises(CheckpointError, match="bytes; at most"):
        SafetensorsReader(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        SafetensorsReader(folder)


def test_names_of_code_in_the_config_are_kept_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "canary_module.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(str(folder))
    config = {**CONFIG, "auto_map": {"AutoModel": "canary_module.X"}, "hidden_act": "canary_module.f"}
    (folder / "config.json").write_text(json.dumps(config))
    assert dict(SafetensorsReader(folder).hf_config) == config


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.npz", "x.pkl", "X.PT"])
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_bytes(b"x")
    for path in (folder, folder / name):
        with pytest.raises(CheckpointError, match="can run code") as caught:
            open_checkpoint(path)
        assert name in caught.value.message
        assert "safetensors" in caught.value.hint


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelNotFoundError, match="is empty"):
        open_checkpoint(tmp_path)
    folder = write_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match="one file of a model"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="in the format safetensors, not gguf"):
        open_checkpoint(folder, "gguf")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"has other\.safetensors, but neither"):
        open_checkpoint(folder)
    (folder / "other.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(folder)
