"""What every reader of weights offers, whatever the files look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hookline.weight_adapter import LazyTensor

JsonObject = Mapping[str, Any]


class Progress(Protocol):
    """Is told how far a long read, write or download has come."""

    def __call__(self, done_bytes: int, total_bytes: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a checkpoint's tokenizer comes from; everything is None where the checkpoint has none.

    Attributes:
        tokenizer_json: the bytes of `tokenizer.json`.
        tokenizer: a tokenizer already built (GGUF); at most one of the two is set. Either one's post-processor puts
            the BOS and EOS tokens that the checkpoint wants.
        chat_template: Jinja source.
        bos_token, eos_token, pad_token, unk_token: the special tokens' text, as templates use it.
        add_bos, add_eos: what the checkpoint says about putting them around a plain prompt; None where it says nothing.
    """

    tokenizer_json: bytes | None = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint has one."""
        return self.tokenizer is not None or self.tokenizer_json is not None


class CheckpointReader(Protocol):
    """A checkpoint whose headers are read and checked, and whose values are not read yet."""

    @property
    def weights_format(self) -> str:
        """`safetensors`, `gguf`, `module`, `snapshot` or `random`: picks the plugin's weight adapter."""
        ...

    @property
    def hf_config(self) -> JsonObject:
        """The fields of `config.json`, or the same made from the file's own metadata."""
        ...

    @property
    def generation_config(self) -> JsonObject:
        """The fields of `generation_config.json`; empty where there is none."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files; empty for weights that are in no file."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        ...

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """The checkpoint's tokenizer and chat template; read on first use."""
        ...

    def tensors(self) -> Iterator[LazyTensor]:
        """Every tensor, always in the same order; may be called again and again."""
        ...
