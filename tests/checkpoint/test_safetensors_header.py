"""Headers of safetensors files: changed in every way, they are refused or read as the reference reader reads them."""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hookline.checkpoint.safetensors import read_tensor
from hookline.checkpoint.safetensors_header import read_header
from hookline.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


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


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(12).reshape(3, 4).remainder(2 if dtype == torch.bool else 12).to(dtype)
    save_file({"x": value}, tmp_path / "x.safetensors")
    (entry,) = read_header(tmp_path / "x.safetensors")
    assert same_bytes(read_tensor(tmp_path / "x.safetensors", entry), value)


def split_file(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_file(header: str | bytes, body: bytes, length: int | None = None) -> bytes:
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + body


ODD_NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1.0,
    1e9,
    True,
    None,
    "4",
    [],
    {},
    [1],
]
ODD_NAMES = ["", "a\u0000b", "\ud800", "x" * 600, "..", "../../etc/passwd", "é", "__metadata__", "a\nb", "日本"]
Mutation = Callable[[random.Random, dict[str, Any], bytes], bytes]


def change_field(rng: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    entry = header[rng.choice(sorted(header))]
    field = rng.choice(["dtype", "shape", "data_offsets"])
    if field == "dtype":
        entry["dtype"] = rng.choice(["F32", "BF16", "F64", "f32", "F8", "F4", "U8", "", None, 1, ["F32"]])
    elif rng.random() < 0.3 or not entry[field]:
        entry[field] = rng.choice(ODD_NUMBERS)
    else:
        entry[field][rng.randrange(len(entry[field]))] = rng.choice([*ODD_NUMBERS, rng.randrange(200)])
    return join_file(json.dumps(header), body)


def change_structure(rng: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    name = rng.choice(sorted(header))
    kind = rng.randrange(6)
    if kind == 0:
        header[rng.choice(ODD_NAMES)] = header.pop(name)
    elif kind == 1:
        del header[name][rng.choice(sorted(header[name]))]
    elif kind == 2:
        header[name]["extra"] = 1
    elif kind == 3:
        header["__metadata__"] = rng.choice([{}, {"a": "b"}, {"a": 1}, [], None, {"a": {"b": "c"}}])
    elif kind == 4:
        header["double"] = copy.deepcopy(header[name])
    else:
        header[name] = rng.choice([None, [], 3, "F32", {}])
    return join_file(json.dumps(header), body)


def change_text(rng: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header)
    name = rng.choice(sorted(header))
    position = rng.randrange(len(text))
    texts = [
        text[:-1] + f', "{name}": {json.dumps(header[name])}}}',
        text[:position] + rng.choice('{}[]",:0-e \\\u00e9\x00') + text[position + 1 :],
        text[:position] + text[position + 1 :],
        " " + text,
        "\ufeff" + text,
        text + " " * rng.randrange(20),
        text + "\x00",
        text + "{}",
        "[" * 100_000,
        '{"a":' * 50_000,
        text.replace("[", "[NaN, ", 1),
        text.replace("4", "4.0", 1),
        text.replace("7", "9" * 5000, 1),
        "[]",
        "{}",
    ]
    return join_file(rng.choice(texts), body)


def change_bytes(rng: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    kind = rng.randrange(5)
    if kind == 0:
        return join_file(text, body, rng.choice([0, 1, 2, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]))
    if kind == 1:
        return join_file(text, body + bytes(rng.randrange(1, 9)))
    if kind == 2:
        return join_file(text, body[: rng.randrange(len(body))])
    if kind == 3:
        data = bytearray(join_file(text, body))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(8 + len(text))] = rng.randrange(256)
        return bytes(data)
    return rng.randbytes(rng.randrange(64))


def reference(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError):
        return None


def test_changed_headers_are_refused_or_read_as_the_reference_does(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(make_tensors(), path)
    header, body = split_file(path.read_bytes())
    header.pop("__metadata__", None)
    rng = random.Random(20)
    mutations: list[Mutation] = [change_field, change_structure, change_text, change_bytes]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, read, slowest = 0, 0, 0.0
    for case in range(1500):
        path.write_bytes(mutations[case % 4](rng, copy.deepcopy(header), body))
        start = time.perf_counter()
        try:
            entries = read_header(path)
            tensors = {entry.name: read_tensor(path, entry) for entry in entries}
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        finally:
            slowest = max(slowest, time.perf_counter() - start)
        expected = reference(path)
        assert expected is not None, path.read_bytes()[:300]
        assert tensors.keys() == expected.keys()
        assert all(same_bytes(tensors[name], expected[name]) for name in tensors)
        read += 1
    assert refused > 900
    assert read > 50
    assert slowest < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "says"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "'b' overlaps"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "'b' leaves a hole"),
        ({"a": entry(4, 12, [2])}, 12, "hole"),
        ({"a": entry(0, 8, [2])}, 12, "4 bytes after its last tensor"),
        ({"a": entry(0, 8, [3])}, 8, "needs 12 bytes for its shape and has 8"),
        ({"a": entry(0, 8, [2**62, 2**62])}, 8, "'a' has shape"),
        ({"a": entry(0, 0, [0, 2**62, 2**62])}, 0, "'a' has shape"),
        ({"a": entry(0, 8, [True, 2])}, 8, "'a' has shape"),
        ({"a": entry(0, 8, [2.0])}, 8, "'a' has shape"),  # type: ignore[list-item]
        ({"a": entry(0, 8, [-2])}, 8, "'a' has shape"),
        ({"a": entry(8, 0, [2])}, 8, "data_offsets"),
        ({"a": entry(0, 8, [2], "Q4")}, 8, "dtype 'Q4'"),
        ({"a": entry(0, 8, [2])}, 4, "ends at"),
        ({"a\x07": entry(0, 8, [2])}, 8, "tensor's name"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    ],
)
def test_faults_are_named(tmp_path: Path, header: dict[str, Any], body: int, says: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(join_file(json.dumps(header), bytes(body)))
    with pytest.raises(CheckpointError, match=says):
        read_header(path)
