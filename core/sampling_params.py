"""How one request wants its tokens chosen. Frozen, validated when made; no torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hookline.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
GREEDY_TEMPERATURE = 1e-5
MIN_REPETITION_PENALTY = 1e-6  # divides logits in fp32: what it makes of them must stay a number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of a request, applied in fp32 in the order in which they stand here.

    Lists are accepted where tuples stand, and one text for a tuple of texts.

    Attributes:
        max_tokens: most new tokens; None for as many as the context leaves.
        min_tokens: end tokens and stop token ids are out of reach until so many tokens are there.
        allowed_token_ids: only these can be chosen; None allows all.
        bad_words: texts that must not appear; each is tokenised with and without a leading space.
        logit_bias: added to the logits of these token ids, -100 to 100.
        repetition_penalty: over 1 discourages tokens of prompt and output (CTRL, Keskar et al. 2019); at least 1e-6.
        presence_penalty, frequency_penalty: -2 to 2, over output tokens only, as OpenAI defines them.
        temperature: 0 is greedy, and so is everything below 1e-5. Applied before top-k, top-p and min-p.
        top_k: keep the k likeliest, and those level with the last of them; 0 keeps all (-1 is read as 0).
        top_p: keep the smallest set whose probability reaches p.
        min_p: keep tokens of at least min_p times the likeliest's probability.
        seed: makes the draw repeatable whatever else runs; None takes one from the engine's seed and the request's
            number.
        n: how many independent continuations.
        stop: texts that end the output; not part of it.
        stop_token_ids: token ids that end the output beside the model's own end tokens.
        ignore_eos: do not stop at the model's end tokens.
        logprobs: how many likeliest tokens to report with each output token; 0 reports the chosen one alone.
        prompt_logprobs: the same for each prompt token after the first.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: naming the field, what it may be, and what it is.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_whole_numbers()
        self._check_numbers()
        self._check_flags()
        self._freeze_texts("stop", MAX_STOP_STRINGS)
        self._freeze_texts("bad_words", MAX_BAD_WORDS)
        self._freeze_ids("stop_token_ids", MAX_STOP_TOKENS)
        if self.allowed_token_ids is not None:
            self._freeze_ids("allowed_token_ids", None)
            if not self.allowed_token_ids:
                raise _invalid("allowed_token_ids", (), "at least one token id", "Leave it out to allow every token.")
        self._freeze_logit_bias()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """`base` (or the defaults) with the fields of `values` in place of its own.

        Raises:
            InvalidRequestError: if a field is not known or its value is not allowed.
        """
        known = [entry.name for entry in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=3)
                hint = f"Did you mean {' or '.join(near)}?" if near else f"The fields are {', '.join(known)}."
                shown = repr(name)[:80]
                raise InvalidRequestError(f"{shown} is no sampling option", field=str(name)[:80], hint=hint)
        return dataclasses.replace(base if base is not None else cls(), **values)

    def check_against(self, vocab_size: int, prompt_len: int, max_model_len: int) -> None:
        """Checks what only the model can bound.

        Args:
            vocab_size: width of the model's logits.
            prompt_len: tokens of the prompt.
            max_model_len: most tokens of prompt and output together.

        Raises:
            InvalidRequestError: if a token id lies outside the logits, or min_tokens does not fit.
        """
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            token_ids: Iterable[int] = getattr(self, name) or ()
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise _invalid(name, token_id, f"token ids from 0 to {vocab_size - 1}, the model's vocabulary")
        for name in ("min_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            room = max_model_len - prompt_len if name == "min_tokens" else vocab_size
            if value is not None and value > max(room, 0):
                what = (
                    f"at most {max(room, 0)}: the prompt has {prompt_len} tokens and the context {max_model_len}"
                    if name == "min_tokens"
                    else f"at most {vocab_size}, the model's vocabulary"
                )
                raise _invalid(name, value, what)

    def _check_whole_numbers(self) -> None:
        if type(self.top_k) is int and self.top_k == -1:
            self._set("top_k", 0)
        limits: tuple[tuple[str, int, int | None], ...] = (
            ("min_tokens", 0, None),
            ("top_k", 0, None),
            ("n", 1, MAX_N),
            ("max_tokens", 1, None),
            ("seed", 0, 2**63 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
                continue
            top = 2**63 - 1 if high is None else high
            if type(value) is not int or not low <= value <= top:
                open_end = high is None and not (type(value) is int and value > top)
                wanted = f"a whole number of at least {low}" if open_end else f"a whole number from {low} to {top}"
                raise _invalid(name, value, wanted)

    def _check_numbers(self) -> None:
        limits = (
            ("temperature", 0.0, 100.0, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0, False),
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
        )
        for name, low, high, above in limits:
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high or (above and value == low):
                start = f"above {low:g}" if above else f"from {low:g}"
                raise _invalid(name, value, f"a number {start} to {high:g}")
            self._set(name, float(value))

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "true or false")

    def _freeze_texts(self, name: str, most: int) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, str):
            value = (value,)
        if value is None:
            value = ()
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
            raise _invalid(name, value, "a text or a list of texts")
        if len(value) > most:
            raise _invalid(name, value, f"at most {most} texts", found=f"a list of {len(value)}")
        for text in value:
            if not text or len(text) > MAX_STOP_CHARS:
                raise _invalid(name, text, f"texts of 1 to {MAX_STOP_CHARS} characters")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise _invalid(name, text, "valid Unicode, without half of a surrogate pair")
        self._set(name, tuple(value))

    def _freeze_ids(self, name: str, most: int | None) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, list | tuple) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
            raise _invalid(name, value, "a list of token ids: whole numbers of at least 0")
        if most is not None and len(value) > most:
            raise _invalid(name, value, f"at most {most} token ids", found=f"a list of {len(value)}")
        self._set(name, tuple(dict.fromkeys(value)))  # each once: the work for them is done for every continuation

    def _freeze_logit_bias(self) -> None:
        value: Any = self.logit_bias
        if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
            found = f"a mapping of {len(value)}" if isinstance(value, Mapping) else ""
            raise _invalid(
                "logit_bias", value, f"a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers", found=found
            )
        frozen: dict[int, float] = {}
        for key, bias in value.items():
            token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
            if type(token_id) is not int or not 0 <= token_id < 2**31:
                raise _invalid("logit_bias", key, "keys that are token ids: whole numbers of at least 0")
            if not _is_number(bias) or not -100 <= bias <= 100:
                raise _invalid("logit_bias", bias, "values from -100 to 100")
            frozen[token_id] = float(bias)
        self._set("logit_bias", MappingProxyType(frozen))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def check_params(params: object) -> SamplingParams:
    """`params`, or the defaults for None.

    Raises:
        InvalidRequestError: if it is anything else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        hint = "Write SamplingParams(max_tokens=...), or SamplingParams.from_dict for a dict."
        raise InvalidRequestError(f"params is a {type(params).__name__}, not SamplingParams", field="params", hint=hint)
    return params


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _invalid(name: str, value: object, wanted: str, hint: str = "", found: str = "") -> InvalidRequestError:
    shown = found or repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; it must be {wanted}", field=name, hint=hint)
