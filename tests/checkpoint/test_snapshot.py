"""Snapshots: what is written comes back the same, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from hookline.checkpoint import TokenizerSource, open_checkpoint
from hookline.checkpoint.snapshot import MANIFEST_FILE, SnapshotOrigin, SnapshotReader
from hookline.checkpoint.snapshot_writer import write_snapshot
from hookline.errors import CheckpointError

ORIGIN = SnapshotOrigin("0.1.0", "hookline-toy", "0.2.0", "ToyForCausalLM", "float32", "cpu")
CONFIG = {"architectures": ["ToyForCausalLM"], "hidden_size": 8}
Parameters = Mapping[str, torch.Tensor | None]


def make_containers() -> list[tuple[str, Parameters]]:
    generator = torch.Generator().manual_seed(0)
    column_major = torch.randn(6, 5, generator=generator).t()
    shared = torch.randn(3, 7, generator=generator)
    return [
        (
            "layer.0",
            {
                "query": column_major,
                "bias": None,
                "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
                "fp8": torch.randn(4, 6, generator=generator).to(torch.float8_e4m3fn).t(),
                "half": torch.randn(5, generator=generator).to(torch.bfloat16),
            },
        ),
        ("ends", {"embedding": shared, "empty": torch.empty(0, 4), "head": shared, "scale": torch.tensor(3.0)}),
    ]


def write(folder: Path, containers: Any = None, origin: SnapshotOrigin = ORIGIN, **more: Any) -> Path:
    tokenizer = more.pop("tokenizer", TokenizerSource())
    write_snapshot(folder, containers or make_containers(), origin, CONFIG, {"eos_token_id": 2}, tokenizer, **more)
    return folder


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_everything_comes_back_with_its_strides(tmp_path: Path) -> None:
    reader = open_checkpoint(write(tmp_path / "s"))
    assert isinstance(reader, SnapshotReader)
    assert reader.origin == ORIGIN
    assert (dict(reader.hf_config), dict(reader.generation_config)) == (CONFIG, {"eos_token_id": 2})
    expected = [(name, key, value) for name, parameters in make_containers() for key, value in parameters.items()]
    found = list(reader.entries())
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    for (_, name, value), (_, _, wanted) in zip(found, expected, strict=True):
        assert (value is None) == (wanted is None), name
        if value is not None and wanted is not None:
            assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), name
            assert value.stride() == wanted.stride() or value.numel() == 0, name
            assert torch.equal(as_bytes(value), as_bytes(wanted)), name
    assert {tensor.name for tensor in reader.tensors()} == {f"{c}.{p}" for c, p, v in expected if v is not None}
    for tensor in reader.tensors():
        assert tuple(tensor.load().shape) == tensor.shape


def test_values_are_aligned_views_of_one_buffer_and_equal_ones_are_stored_once(tmp_path: Path) -> None:
    reader = SnapshotReader(write(tmp_path / "s"))
    values = {name: value for _, name, value in reader.entries() if value is not None}
    assert len({value.untyped_storage().data_ptr() for value in values.values()}) == 1
    assert all(value.storage_offset() * value.element_size() % 256 == 0 for value in values.values())
    assert values["embedding"].data_ptr() == values["head"].data_ptr()
    (buffer,) = load_file(reader.files[0]).values()
    assert (buffer.dtype, buffer.nbytes) == (torch.uint8, reader.nbytes)


@pytest.mark.parametrize("view", [torch.zeros(4, 6)[:, ::2], torch.ones(3, 1).expand(3, 4), torch.ones(8)[2:5]])
def test_views_with_gaps_are_closed(tmp_path: Path, view: torch.Tensor) -> None:
    ((_, _, value),) = SnapshotReader(write(tmp_path / "s", [("c", {"p": view})])).entries()
    assert value is not None
    assert torch.equal(value, view)
    assert value.is_contiguous()


def test_progress_tells_bytes(tmp_path: Path) -> None:
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    folder = write(tmp_path / "s", progress=lambda *step: written.append(step), total_bytes=99)
    reader = SnapshotReader(folder)
    list(reader.entries(progress=lambda *step: read.append(step)))
    assert written[-1] == (reader.nbytes, 99)
    assert read[-1] == (reader.nbytes, reader.nbytes)


def test_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    source = TokenizerSource(tokenizer=tokenizer, chat_template="{{ 'é' }}", bos_token="<s>", add_bos=True)
    back = SnapshotReader(write(tmp_path / "s", tokenizer=source)).tokenizer_source
    assert back.tokenizer_json is not None
    assert Tokenizer.from_str(back.tokenizer_json.decode()).get_vocab() == tokenizer.get_vocab()
    assert (back.chat_template, back.bos_token, back.eos_token, back.add_bos) == ("{{ 'é' }}", "<s>", None, True)
    raw = TokenizerSource(tokenizer_json=b'{"x": 1}')
    assert SnapshotReader(write(tmp_path / "t", tokenizer=raw)).tokenizer_source == raw


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SnapshotOrigin)])
def test_another_origin_is_refused_with_both_values(tmp_path: Path, field: str) -> None:
    other: Any = 7 if field in ("rank", "ranks") else "other"
    reader = SnapshotReader(write(tmp_path / "s"))
    reader.check_origin(ORIGIN)
    with pytest.raises(CheckpointError) as caught:
        reader.check_origin(dataclasses.replace(ORIGIN, **{field: other}))
    assert field in caught.value.message
    assert repr(other) in caught.value.message
    assert repr(getattr(ORIGIN, field)) in caught.value.message


def test_damaged_values_are_found_by_their_checksum(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    path = folder / ORIGIN.file_name
    data = bytearray(path.read_bytes())
    data[256] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"layer\.0\.query has the SHA-256"):
        next(SnapshotReader(folder).entries())
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="ends at"):
        SnapshotReader(folder)


def change(folder: Path, *path: Any, value: Any) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("format_version",), 2, "format version 2; this Hookline reads 1"),
        (("origin",), {}, "origin does not have"),
        (("origin", "rank"), "0", "origin does not have"),
        (("origin", "ranks"), 2, "is missing"),
        (("hf_config",), [], "hf_config is not an object"),
        (("hf_config", "architectures"), None, "architectures"),
        (("entries",), {}, "entries is no list"),
        (("entries", 0), {}, "an entry does not have"),
        (("entries", 0, "dtype"), "float31", "has dtype 'float31'"),
        (("entries", 0, "shape"), [4, 6], "do not fill the shape"),
        (("entries", 0, "shape"), [5, -6], "no whole numbers"),
        (("entries", 0, "strides"), [1, 6], "do not fill the shape"),
        (("entries", 0, "strides"), [0, 0], "do not fill the shape"),
        (("entries", 0, "offset"), 1, "do not lie in the buffer"),
        (("entries", 0, "offset"), 256 * 10**6, "do not lie in the buffer"),
        (("entries", 0, "offset"), True, "no whole numbers"),
        (("entries", 2, "offset"), 0, "overlaps"),
        (("entries", 2, "parameter"), "query", "stands twice"),
        (("entries", 0, "sha256"), "00", "has the SHA-256"),
    ],
)
def test_unsound_manifests_are_refused(tmp_path: Path, path: tuple[Any, ...], value: Any, says: str) -> None:
    folder = write(tmp_path / "s")
    change(folder, *path, value=value)
    with pytest.raises(CheckpointError, match=says):
        list(SnapshotReader(folder).entries())


def test_only_snapshots_and_empty_folders_are_overwritten(tmp_path: Path) -> None:
    folder = write(tmp_path / "s")
    write(folder, [("c", {"p": torch.ones(2)})])
    assert [entry[:2] for entry in SnapshotReader(folder).entries()] == [("c", "p")]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is no snapshot"):
            write(path)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "mine", "s"]


def test_a_failed_write_leaves_the_old_snapshot_and_nothing_else(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Parameters]]:
        yield "c", {"p": torch.ones(2)}
        raise KeyboardInterrupt

    folder = write(tmp_path / "s")
    for target in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            write(target, failing())
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert len(list(SnapshotReader(folder).entries())) == 9
    with pytest.raises(CheckpointError, match="complex64"):
        write(tmp_path / "new", [("c", {"p": torch.ones(2, dtype=torch.complex64)})])
