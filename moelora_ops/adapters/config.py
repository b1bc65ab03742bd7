"""adapter_config.json: what of it changes the numbers, and what we refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import AdapterError
from .patterns import Patterns

# Every other initialisation also changes the base weights (pissa, olora, corda, ...): B A is no change of the plain base.
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
# Settings that do not change what a saved pair of matrices means. Of the rest, a truthy use_* or *_config is a variant of LoRA.
_HARMLESS = ("use_rslora", "loftq_config", "eva_config", "corda_config", "megatron_config", "runtime_config")
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Options:
    """What the caller knows and no file shows.

    Raises: ValueError naming the option.
    """

    b_packing: str | None = None  # "expert_major": lora_B columns e * r + j of fused tensors
    orientation: str | None = None  # "natural" or "reversed" fused tensors, where nothing in the file tells

    def __post_init__(self) -> None:
        if self.b_packing not in (None, "expert_major"):
            raise ValueError(f'b_packing must be "expert_major" or None, got {self.b_packing!r}')
        if self.orientation not in (None, "natural", "reversed"):
            raise ValueError(f'orientation must be "natural", "reversed" or None, got {self.orientation!r}')


NO_OPTIONS = Options()


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of adapter_config.json that decide ranks, scalings and which tensor is what, and the caller's options."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Patterns = field(default_factory=lambda: Patterns("rank_pattern", {}))
    alpha_pattern: Patterns = field(default_factory=lambda: Patterns("alpha_pattern", {}))
    target_parameters: tuple[str, ...] = ()
    peft_version: str | None = None
    factor: float | None = None  # the scaling itself (MLX), instead of alpha and r
    options: Options = NO_OPTIONS

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, rank_divisor: int = 1, options: Options = NO_OPTIONS) -> AdapterConfig:
        """Check the fields of an adapter_config.json of PEFT, or of a tool that writes one like it.

        Args:
            rank_divisor: what the expert layers' rank is smaller by than `r` (`moe_rank_scaling` of NeMo Automodel).
            options: of the caller.

        Raises: AdapterError naming the field, what was expected and what came.
        """
        _refuse_variants(fields)
        r = _rank("r", fields.get("r"))
        if r < rank_divisor:
            raise AdapterError(
                f"adapter_config field r must be >= {rank_divisor}, the experts of a token (moe_rank_scaling), got {r}"
            )
        ranks = {key: _rank(f"rank_pattern[{key!r:.80}]", value) for key, value in _object(fields, "rank_pattern").items()}
        alphas = {key: _number(f"alpha_pattern[{key!r:.80}]", value) for key, value in _object(fields, "alpha_pattern").items()}
        return cls(
            r=r // rank_divisor,
            lora_alpha=_number("lora_alpha", fields.get("lora_alpha")),
            use_rslora=_flag(fields, "use_rslora"),
            rank_pattern=Patterns("rank_pattern", ranks),
            alpha_pattern=Patterns("alpha_pattern", alphas),
            target_parameters=_strings(fields, "target_parameters"),
            peft_version=fields.get("peft_version"),
            options=options,
        )

    @classmethod
    def from_mlx(cls, fields: Mapping[str, Any], *, options: Options = NO_OPTIONS) -> AdapterConfig:
        """Check the fields of an adapter_config.json of mlx-lm: `lora_parameters.scale` is the factor itself.

        Raises: AdapterError naming the field, what was expected and what came.
        """
        kind = fields.get("fine_tune_type", "lora")
        if kind != "lora" or fields.get("use_dora"):
            raise AdapterError(f"adapter_config field fine_tune_type must be lora, got {'dora' if kind == 'lora' else kind!r}")
        inner = _object(fields, "lora_parameters")
        if inner.get("alpha") is not None:
            raise AdapterError(
                f"adapter_config field lora_parameters.alpha must be absent, got {inner['alpha']!r:.40}: mlx-lm once "
                "multiplied by scale * alpha / rank, later by scale; remove alpha and write the factor that applies as scale"
            )
        scale = _number("lora_parameters.scale", inner.get("scale"))
        return cls(r=_rank("lora_parameters.rank", inner.get("rank")), lora_alpha=scale, factor=scale, options=options)

    def rank(self, path: str) -> int:
        """Rank of the module or parameter at `path` of the base model."""
        return int(self.rank_pattern.get(path, self.r))

    def alpha(self, path: str) -> float:
        """lora_alpha of the module or parameter at `path` of the base model."""
        return float(self.alpha_pattern.get(path, self.lora_alpha))

    def scaling(self, path: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, or the factor that the file gives."""
        if self.factor is not None:
            return self.factor
        rank = self.rank(path)
        return self.alpha(path) / (math.sqrt(rank) if self.use_rslora else rank)


def is_mlx(fields: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json is mlx-lm's."""
    return "peft_type" not in fields and ("lora_parameters" in fields or "fine_tune_type" in fields)


def _refuse_variants(fields: Mapping[str, Any]) -> None:
    def refuse(name: str, expected: str) -> None:
        raise AdapterError(f"adapter_config field {name} must be {expected}, got {fields[name]!r:.100}")

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
        raise AdapterError(f"adapter_config field {name} must be an int >= 1, got {value!r:.100}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _FP32_MAX:  # NaN compares False
        raise AdapterError(f"adapter_config field {name} must be a finite number, got {value!r:.100}")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"adapter_config field {name} must be true or false, got {value!r:.100}")
    return bool(value)


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"adapter_config field {name} must be an object, got {value!r:.100}")
    return value


def _strings(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name) or []
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise AdapterError(f"adapter_config field {name} must be a list of strings, got {value!r:.100}")
    return tuple(value)
