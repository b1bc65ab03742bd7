"""Launcher of the layer op: route, shrink, gate_up, shrink, down, combine."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import config
from ._common import on_device, pdl_options
from ._lora import new_z
from .combine import combine
from .down import down
from .gate_up import gate_up
from .route import route
from .shrink import shrink


def fused_experts_lora(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_a13: Tensor | None,
    lora_b13: Tensor | None,
    lora_a2: Tensor | None,
    lora_b2: Tensor | None,
    *,
    lora_ranks: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """The layer op on checked arguments: see `moelora_ops.fused_experts_lora`.

    Scratch: act [P, I] and rows [P, H] in the dtype of the inputs, z [splits, P, S * R] of one projection at a time. None of
    it is filled first: each stage reads only what the one before it wrote.
    """
    (num_tokens, top_k), num_experts = topk_ids.shape, w13.shape[0]
    num_pairs = num_tokens * top_k
    hidden_size, intermediate_size = w2.shape[1:]
    if num_pairs == 0 or hidden_size == 0 or num_experts == 0:
        return torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)
    lora_a13, lora_b13 = _unless_empty(lora_a13, lora_b13)
    lora_a2, lora_b2 = _unless_empty(lora_a2, lora_b2)
    max_loras = next((a.shape[0] for a in (lora_a13, lora_a2) if a is not None), 0)
    num_slices = 2 if gated else 1
    problem = config.Problem(num_pairs, num_experts, hidden_size, intermediate_size, num_slices, hidden_states.dtype)
    tiles = config.experts(problem, config.describe(hidden_states.device))
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    expert_map = None if expert_map is None else expert_map.contiguous()
    lora_ranks = None if lora_ranks is None else lora_ranks.contiguous()
    weights_in, weights_out = (topk_weights, None) if apply_router_weight_on_input else (None, topk_weights)

    with on_device(hidden_states.device):
        pdl = pdl_options(hidden_states.device)
        routing = route(
            topk_ids, token_lora_mapping, num_experts=num_experts, max_loras=max_loras, adapter_enabled=adapter_enabled,
            expert_map=expert_map, block_m=tiles.gate_up.block_m, segment_m=tiles.segment_m,
        )  # fmt: skip
        z = None
        if lora_a13 is not None:
            z = new_z(hidden_states, tiles.shrink13.splits, num_pairs, lora_a13.shape[2])
            shrink(
                hidden_states, lora_a13, z, routing, lora_ranks, rows_per_input=top_k, num_experts=num_experts,
                num_slices=num_slices, tiles=tiles.shrink13, pdl=pdl,
            )  # fmt: skip
        act = hidden_states.new_empty(num_pairs, intermediate_size)
        gate_up(
            hidden_states, w13, w13_bias, act, z, lora_b13, lora_ranks, weights_in, routing, top_k=top_k, activation=activation,
            gated=gated, interleaved=interleaved, alpha=swiglu_alpha, limit=swiglu_limit, tiles=tiles.gate_up, pdl=pdl,
        )  # fmt: skip

        z = None
        if lora_a2 is not None:
            z = new_z(hidden_states, tiles.shrink2.splits, num_pairs, lora_a2.shape[2])
            shrink(
                act, lora_a2, z, routing, lora_ranks, rows_per_input=0, num_experts=num_experts, num_slices=1,
                tiles=tiles.shrink2, pdl=pdl,
            )  # fmt: skip
        rows = hidden_states.new_empty(num_pairs, hidden_size)
        down(act, w2, w2_bias, rows, z, lora_b2, lora_ranks, weights_out, routing, tiles=tiles.down, pdl=pdl)

        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        combine(
            rows, topk_ids, expert_map, out, num_experts=num_experts, scale=routed_scaling_factor, block_n=tiles.combine_n,
            pdl=pdl,
        )  # fmt: skip
    return out


def _unless_empty(lora_a: Tensor | None, lora_b: Tensor | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The pair, or (None, None) where it has no slots or no ranks: then nothing of LoRA is launched."""
    if lora_a is None or lora_b is None or lora_a.shape[0] == 0 or lora_b.shape[3] == 0:
        return None, None
    return lora_a, lora_b
