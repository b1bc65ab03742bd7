"""PEFT's adapter_config.json: what of it changes the numbers, and what we refuse."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import AdapterError

# Every other initialisation also changes the base weights (pissa, olora, corda, ...): B A is no change of the plain base.
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
# Settings that do not change what a saved pair of matrices means. Of the rest, a truthy use_* or *_config is a variant of LoRA.
_HARMLESS = ("use_rslora", "loftq_config", "eva_config", "corda_config", "megatron_config", "runtime_config")
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of adapter_config.json that decide ranks, scalings and which tensor is what."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, Any] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Any] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    peft_version: str | None = None
    b_packing: str | None = None  # of the caller, not of the file: "expert_major" for lora_B columns e * r + j

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, b_packing: str | None = None) -> AdapterConfig:
        """Check the fields of an adapter_config.json.

        Raises: AdapterError naming the field, what was expected and what came.
        """
        _refuse_variants(fields)
        return cls(
            r=_rank("r", fields.get("r")),
            lora_alpha=_number("lora_alpha", fields.get("lora_alpha")),
            use_rslora=bool(fields.get("use_rslora")),
            rank_pattern={k: _rank(f"rank_pattern[{k!r}]", v) for k, v in _pattern(fields, "rank_pattern").items()},
            alpha_pattern={k: _number(f"alpha_pattern[{k!r}]", v) for k, v in _pattern(fields, "alpha_pattern").items()},
            target_parameters=_strings(fields, "target_parameters"),
            peft_version=fields.get("peft_version"),
            b_packing=b_packing,
        )

    def rank(self, path: str) -> int:
        """Rank of the module or parameter at `path` of the base model."""
        return int(_first_match(self.rank_pattern, path, self.r))

    def alpha(self, path: str) -> float:
        """lora_alpha of the module or parameter at `path` of the base model."""
        return float(_first_match(self.alpha_pattern, path, self.lora_alpha))

    def scaling(self, path: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank = self.rank(path)
        return self.alpha(path) / (math.sqrt(rank) if self.use_rslora else rank)


def _first_match(pattern: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of the first key, a regular expression, that matches `path` or what follows one of its dots (PEFT's rule)."""
    return next((value for key, value in pattern.items() if re.match(_wrapped(key), path)), default)


def _wrapped(key: str) -> str:
    return rf"(?:.*\.)?(?:{key})$"


def _refuse_variants(fields: Mapping[str, Any]) -> None:
    def refuse(name: str, expected: str) -> None:
        raise AdapterError(f"adapter_config field {name} must be {expected}, got {fields[name]!r}")

    peft_type = fields.get("peft_type")
    if peft_type is not None and peft_type != "LORA":
        refuse("peft_type", "LORA")
    if fields.get("bias") not in (None, "none"):
        refuse("bias", '"none" (trained base biases are not a LoRA delta)')
    if fields.get("init_lora_weights") not in _PLAIN_INITS:
        refuse("init_lora_weights", "an initialisation that leaves the base weights alone (convert the adapter to plain LoRA)")
    if fields.get("alora_invocation_tokens") is not None:
        refuse("alora_invocation_tokens", "null (activated LoRA is no static change of the weights)")
    for name, reason in (
        ("lora_bias", "bias vectors on lora_B"),
        ("fan_in_fan_out", "transposed base weights"),
        ("layer_replication", "layers that are not those of the base"),
    ):
        if fields.get(name):
            refuse(name, f"unset ({reason} are not supported)")
    for name, value in fields.items():
        if value and name not in _HARMLESS and (name.startswith("use_") or name.endswith("_config")):
            refuse(name, "unset (this variant is not plain LoRA)")


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"adapter_config field {name} must be an int >= 1, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _FP32_MAX:  # NaN compares False
        raise AdapterError(f"adapter_config field {name} must be a finite number, got {value!r}")
    return value


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"adapter_config field {name} must be an object, got {value!r}")
    for key in value:
        try:
            re.compile(_wrapped(key))  # as it is used: flags such as (?i) are allowed at the start alone
        except re.error as error:
            raise AdapterError(
                f"adapter_config field {name} must have regular expressions as keys, got {key!r}: {error}"
            ) from error
    return value


def _strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name) or []
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise AdapterError(f"adapter_config field {name} must be a list of strings, got {value!r}")
    return tuple(value)
