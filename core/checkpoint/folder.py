"""The side files of a Hugging Face style folder: config, generation config, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.checkpoint.files import read_bytes, read_json_object
from hookline.checkpoint.reader import JsonObject, TokenizerSource
from hookline.errors import CheckpointError

_MAX_TOKENIZER_BYTES = 256 * 2**20
_MAX_TEMPLATE_BYTES = 1024 * 1024


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json`, with `architectures` checked. Unknown fields are kept and never acted on.

    Raises:
        CheckpointError: if it is missing or not sound.
    """
    config = read_json_object(folder, "config.json")
    if config is None:
        raise CheckpointError(f"{folder} has no config.json", hint="Give a model's folder.")
    check_architectures(config, str(folder / "config.json"))
    return config


def check_architectures(config: JsonObject, where: str) -> None:
    """Raise CheckpointError unless `config` names its architectures."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(
            f"{where}: architectures is {names!r}, not a list of names", hint='It reads like ["...ForCausalLM"].'
        )


def read_generation_config(folder: Path) -> dict[str, Any]:
    """`generation_config.json`; empty where there is none."""
    return read_json_object(folder, "generation_config.json") or {}


def read_tokenizer_source(folder: Path) -> TokenizerSource:
    """`tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja`."""
    config = read_json_object(folder, "tokenizer_config.json", _MAX_TOKENIZER_BYTES) or {}
    specials = {**(read_json_object(folder, "special_tokens_map.json") or {}), **config}
    return TokenizerSource(
        tokenizer_json=read_bytes(folder, "tokenizer.json", _MAX_TOKENIZER_BYTES),
        chat_template=_chat_template(folder, config),
        bos_token=_token_text(specials.get("bos_token")),
        eos_token=_token_text(specials.get("eos_token")),
        pad_token=_token_text(specials.get("pad_token")),
        unk_token=_token_text(specials.get("unk_token")),
        add_bos=_flag(config.get("add_bos_token")),
        add_eos=_flag(config.get("add_eos_token")),
    )


def _chat_template(folder: Path, tokenizer_config: JsonObject) -> str | None:
    data = read_bytes(folder, "chat_template.jinja", _MAX_TEMPLATE_BYTES)
    if data is not None:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{folder / 'chat_template.jinja'} is not UTF-8") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        return None
    if len(template) > _MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template has {len(template):,} characters")
    return template


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
