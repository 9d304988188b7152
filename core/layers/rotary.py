"""Rotary position embeddings of every type that checkpoints name, with angles in fp32.

angle[t, i] = position[t] * inv_freq[i], i < rotary_dim / 2; each type below is a way to choose inv_freq, and a factor
on cos and sin. Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023) for `linear`; NTK-aware
scaling for `dynamic`; YaRN (Peng et al. 2023); LongRoPE (Ding et al. 2024); the Llama 3.1 model card for `llama3`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hookline.errors import ModelConfigError

_HOLDERS = ("rope_parameters", "rope_scaling")
_TOP = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
# Far beyond what any checkpoint has, and within what the formulas can compute with.
_LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "rope_theta": (1.001, 1e15),
        "factor": (1e-3, 1e6),
        "original_max_position_embeddings": (1, 2**31),
        "partial_rotary_factor": (1e-3, 1),
        "attention_factor": (1e-6, 1e6),
        "low_freq_factor": (1e-6, 1e6),
        "high_freq_factor": (1e-6, 1e6),
        "beta_fast": (0, 1e6),
        "beta_slow": (0, 1e6),
        "mscale": (0, 1e6),
        "mscale_all_dim": (0, 1e6),
    }
)
_UNSOUND = "The rotary settings in the checkpoint's config.json are not sound."

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """What a checkpoint says about its rotary embedding, old and new spellings made one."""

    rope_type: str
    theta: float
    rotary_dim: int
    original_max_positions: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles change once a request is longer than the original context."""
        return self.rope_type in ("dynamic", "longrope")

    def longest_context(self, max_positions: int) -> int:
        """Most tokens for which the angles make sense, of a model made for `max_positions`."""
        return int(max_positions * max(1.0, self.factor)) if self.rope_type == "dynamic" else max_positions

    def prefix_salt(self, prompt_length: int) -> bytes:
        """What cached keys depend on beside their tokens (`TransformerModel.prefix_salt`)."""
        if not self.depends_on_length or prompt_length <= self.original_max_positions:
            return b""
        return b"long" if self.rope_type == "longrope" else str(prompt_length).encode()


def _check_fields(hf_config: Mapping[str, Any]) -> None:
    """Checks the numbers among the rotary settings, in either spelling, before anything computes with them.

    Raises:
        ModelConfigError: naming the field and what it holds.
    """
    places: list[tuple[str, object]] = [(f"{holder}.", hf_config.get(holder)) for holder in _HOLDERS]
    places.append(("", {name: hf_config[name] for name in _TOP if name in hf_config}))
    for prefix, fields in places:
        if not isinstance(fields, Mapping | None):
            raise ModelConfigError(f"{prefix[:-1]} is {str(fields)[:80]}; expected an object or null", hint=_UNSOUND)
        for name in _LIMITS.keys() & (fields or {}):
            value, (low, high) = (fields or {})[name], _LIMITS[name]
            if value is None and name != "partial_rotary_factor":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ModelConfigError(
                    f"{prefix}{name} is {str(value)[:80]}; expected a number from {low:g} to {high:g}", hint=_UNSOUND
                )


def read_rope(hf_config: Mapping[str, Any], head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """The rotary settings of a `config.json`, whether under `rope_parameters` or `rope_theta` and `rope_scaling`.

    Raises:
        ModelConfigError: naming the field that is missing, unsound, or of a type that is not known.
    """
    _check_fields(hf_config)
    params: dict[str, Any] = dict(hf_config.get("rope_scaling") or {}) | dict(hf_config.get("rope_parameters") or {})
    rope_type = params.get("rope_type", params.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelConfigError(
            f"rope_parameters.rope_type is {rope_type!r}; known are {', '.join(ROPE_TYPES)}",
            hint="The model would give wrong text with another type, so it is refused. A newer plugin may know it.",
        )
    max_positions = _number(hf_config, "max_position_embeddings")
    partial = params.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    original = params.get("original_max_position_embeddings", hf_config.get("original_max_position_embeddings"))
    original = int(max_positions if rope_type == "dynamic" or original is None else original)
    theta = params.get("rope_theta", hf_config.get("rope_theta", default_theta))
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelConfigError(
            f"partial_rotary_factor {partial} of head size {head_dim} leaves {rotary_dim} rotary channels",
            hint="The number of rotary channels must be even and at most the head size.",
        )
    return RopeConfig(
        rope_type=rope_type,
        theta=_number({"rope_theta": theta}, "rope_theta"),
        rotary_dim=rotary_dim,
        original_max_positions=original,
        **_scaling(rope_type, params, rotary_dim, original, max_positions / original),
    )


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelConfigError(f"{name} is {value!r}", hint=f"{name} must be a positive number in config.json.")
    return float(value)


def _factors(params: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    values = params.get(name)
    if not isinstance(values, list | tuple) or len(values) != length:
        found = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)
        raise ModelConfigError(
            f"rope_parameters.{name} is {found}; expected a list of {length} numbers",
            hint="LongRoPE needs one factor for each pair of rotary channels.",
        )
    return tuple(_number({name: value}, name) for value in values)


def _scaling(
    rope_type: str, params: Mapping[str, Any], rotary_dim: int, original: int, growth: float
) -> dict[str, Any]:
    """The fields of `RopeConfig` that only some types have. `growth` is the context's length over the original's."""
    if rope_type == "default":
        return {}
    if rope_type in ("linear", "dynamic"):
        return {"factor": _number(params, "factor")}
    if rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {name: _number(params, name) for name in names}
    factor = growth if params.get("factor") is None else _number(params, "factor")
    given = params.get("attention_factor")
    if rope_type == "longrope":
        long_enough = factor > 1 and original > 1
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if long_enough else 1.0
        return {
            "factor": factor,
            "attention_factor": default if given is None else float(given),
            "short_factor": _factors(params, "short_factor", rotary_dim // 2),
            "long_factor": _factors(params, "long_factor", rotary_dim // 2),
        }
    mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
    default = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)
    return {
        "factor": factor,
        "attention_factor": default if given is None else float(given),
        "beta_fast": float(params.get("beta_fast") or 32),
        "beta_slow": float(params.get("beta_slow") or 1),
        "truncate": bool(params.get("truncate", True)),
    }


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention's temperature."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Rotary:
    """cos and sin for the tokens of a batch; computed once a step, used by every layer.

    Args:
        rope: the checkpoint's settings.
        device: where batches live.
    """

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self.rope = rope
        exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        self.exponent = exponent.to(device)
        short = _inverse_frequencies(rope, exponent)
        self.inv_freq = short.to(device)
        self.long_inv_freq = self.inv_freq
        if rope.rope_type == "longrope":
            long = torch.tensor(rope.long_factor, dtype=torch.float32)
            self.long_inv_freq = (1.0 / (long * rope.theta**exponent)).to(device)

    def __call__(self, positions: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, rotary_dim / 2] fp32, of `positions` [T].

        `lengths` [T] (see `ForwardBatch.rope_lengths`) is needed by the types whose angles depend on it. Keys keep the
        angle that they had when they were written, as in the reference implementation of these types.
        """
        angles = positions.to(torch.float32)[:, None] * self._frequencies(lengths)
        cos, sin = angles.cos(), angles.sin()
        if self.rope.attention_factor != 1.0:
            cos, sin = cos * self.rope.attention_factor, sin * self.rope.attention_factor
        return cos, sin

    def _frequencies(self, lengths: torch.Tensor | None) -> torch.Tensor:
        rope = self.rope
        if not rope.depends_on_length:
            return self.inv_freq
        if lengths is None:
            raise ValueError(
                f"rope type {rope.rope_type!r} needs each token's length: build the batch processor with "
                "rope_lengths=True and pass batch.rope_lengths"
            )
        beyond = (lengths > rope.original_max_positions)[:, None]
        if rope.rope_type == "longrope":
            return torch.where(beyond, self.long_inv_freq, self.inv_freq)
        stretch = rope.factor * lengths.to(torch.float32) / rope.original_max_positions - (rope.factor - 1)
        base = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return torch.where(beyond, 1.0 / base[:, None] ** self.exponent, self.inv_freq)


def _inverse_frequencies(rope: RopeConfig, exponent: torch.Tensor) -> torch.Tensor:
    """inv_freq [rotary_dim / 2] within the original context."""
    inv_freq: torch.Tensor = 1.0 / rope.theta**exponent
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32) * rope.theta**exponent)
    if rope.rope_type == "llama3":
        # Long wavelengths are stretched, short ones kept, and those between blended.
        turns = rope.original_max_positions * inv_freq / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * inv_freq / rope.factor + keep * inv_freq
    if rope.rope_type == "yarn":
        keep = 1 - _yarn_ramp(rope, len(exponent))
        return inv_freq / rope.factor * (1 - keep) + inv_freq * keep
    return inv_freq


def _yarn_ramp(rope: RopeConfig, pairs: int) -> torch.Tensor:
    """0 where a channel pair turns often enough to be kept, 1 where it is interpolated, [pairs]."""

    def channel(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
