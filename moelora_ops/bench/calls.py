"""The calls that are timed, each a function of one batch."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .. import ops
from ..testing.cases import Inputs

BLOCK_SIZE = 16  # of the alignment: the default of MoeRunner


def base(batch: Inputs) -> Tensor:
    """The layer without adapters."""
    args, options = batch.experts(adapters=False)
    return ops.fused_experts_lora(*args, **options)


def lora(batch: Inputs) -> Tensor:
    """The layer with adapters."""
    args, options = batch.experts()
    return ops.fused_experts_lora(*args, **options)


def align(batch: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The alignment in SGLang's and vLLM's layout."""
    args, options = batch.align(BLOCK_SIZE)
    return ops.moe_lora_align_block_size(*args, **options)


class Delta:
    """What the delta op adds to a layer with base GEMMs of its own: an alignment and a delta for each projection."""

    def __init__(self, batch: Inputs) -> None:
        case = batch.case
        self.batch = batch
        self.gate_up_out = batch.w13.new_zeros(case.num_tokens, case.top_k, batch.w13.shape[1])
        self.down_out = batch.w13.new_zeros(case.num_tokens, case.top_k, case.hidden_size)
        self.act = torch.randn(case.num_pairs, case.intermediate_size, device=batch.w13.device, dtype=batch.w13.dtype)

    def __call__(self) -> None:
        batch = self.batch
        routing = align(batch)
        a13, b13 = batch.gate_up_lora()
        ops.fused_moe_lora(
            self.gate_up_out, batch.hidden_states, a13, b13, batch.topk_weights, *routing, lora_ranks=batch.lora_ranks
        )
        a2, b2 = batch.down_lora()
        ops.fused_moe_lora(
            self.down_out, self.act, a2, b2, batch.topk_weights, *routing, lora_ranks=batch.lora_ranks, mul_routed_weight=True
        )


def routing_of(batch: Inputs) -> Callable[[Inputs], Any] | None:
    """The sort inside the layer op alone, or None where it is not a stage of its own (CPU)."""
    if batch.w13.device.type != "cuda":
        return None
    from ..kernels import config
    from ..kernels.triton.route import route

    case = batch.case
    problem = config.Problem(
        case.num_pairs, case.num_experts, case.hidden_size, case.intermediate_size, case.num_slices, case.dtype
    )
    tiles = config.experts(problem, config.describe(batch.w13.device))

    def run(batch: Inputs) -> Any:
        return route(
            batch.topk_ids,
            batch.token_lora_mapping,
            num_experts=case.num_experts,
            max_loras=case.max_loras,
            max_rank=case.max_lora_rank,
            lora_ranks=batch.lora_ranks,
            adapter_enabled=batch.adapter_enabled,
            expert_map=batch.expert_map,
            block_m=tiles.gate_up.block_m,
            segment_m=tiles.segment_m,
        )

    return run


class Batched:
    """The products of a layer as two batched GEMMs, every expert with the same number of rows: no routing, no padding."""

    def __init__(self, batch: Inputs, num_pairs: int) -> None:
        case = batch.case
        rows = max(1, num_pairs // case.num_experts)
        size = (case.num_experts, rows)
        self.x, self.act = (
            torch.randn(*size, width, device=batch.w13.device, dtype=batch.w13.dtype)
            for width in (case.hidden_size, case.intermediate_size)
        )
        self.w13, self.w2 = batch.w13.transpose(1, 2), batch.w2.transpose(1, 2)

    def __call__(self) -> None:
        torch.bmm(self.x, self.w13)
        torch.bmm(self.act, self.w2)
