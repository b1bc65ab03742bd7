"""Schema, shape contract and fake of `moelora::fused_moe_lora_activation`, an op that `moelora_ops.compile` emits."""

from __future__ import annotations

from typing import Any, Sequence

from torch import Tensor

from moelora_ops.checks import check_tensor, holds

from . import fused_moe_lora
from .fused_experts_lora import check_activation

NAME = "fused_moe_lora_activation"
SCHEMA = (
    f"{NAME}(Tensor base_output, Tensor hidden_states, Tensor[] lora_a_stacked, Tensor[] lora_b_stacked, Tensor topk_weights, "
    "Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, *, "
    'Tensor? lora_ranks=None, bool mul_routed_weight=False, str activation="silu") -> Tensor'
)


def check(base_output: Tensor, *args: Any, activation: str = "silu", **kwargs: Any) -> None:
    """Raise ValueError or TypeError for whatever the op cannot serve: as `fused_moe_lora`, on the whole width of the base."""
    check_tensor("base_output", base_output)
    fused_moe_lora.check(base_output, *args, **kwargs)
    lora_b: Sequence[Tensor] = args[2] if len(args) > 2 else kwargs["lora_b_stacked"]
    if len(lora_b) > 2:
        raise ValueError(f"lora_b_stacked must hold 2 slices (gated) or 1 (not gated), got {len(lora_b)}")
    check_activation(activation, len(lora_b) == 2, False, None)
    if activation == "swigluoai":
        raise ValueError("activation must be one without parameters, got 'swigluoai'")
    width = len(lora_b) * lora_b[0].shape[2]
    if holds(base_output.shape[2] != width):
        raise ValueError(f"base_output dim 2 must be S * N = {width}, got {base_output.shape[2]}")


def fake(base_output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    check(base_output, *args, **kwargs)
    lora_b: Sequence[Tensor] = args[2] if len(args) > 2 else kwargs["lora_b_stacked"]
    return base_output.new_empty((base_output.shape[0], base_output.shape[1], lora_b[0].shape[2]))
