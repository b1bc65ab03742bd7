"""Schema, shape contract and fake of `moelora::moe_lora_align_block_size`."""

from __future__ import annotations

import torch
from torch import Tensor

from moelora_ops.checks import (
    INT32_MAX,
    Sizes,
    check_dtype,
    check_enabled,
    check_ids,
    check_pairs,
    check_positive,
    check_tensor,
    holds,
    ID_DTYPES,
)
from moelora_ops.routing import align_capacity, round_up

NAME = "moe_lora_align_block_size"
SCHEMA = (
    f"{NAME}(Tensor topk_ids, Tensor token_lora_mapping, SymInt num_experts, SymInt block_size, SymInt max_loras, *, "
    "Tensor? adapter_enabled=None, Tensor? expert_map=None) "
    "-> (Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)"
)

MAX_KEYS = 2**30  # (expert, slot) pairs that the kernels count in 32 bits: tables of them alone would take 12 GB


def check(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError for whatever the op cannot serve; ids out of range are no error."""
    check_positive("num_experts", num_experts)
    check_positive("block_size", block_size)
    check_positive("max_loras", max_loras, least=0)
    for name, value in (("num_experts", num_experts), ("block_size", block_size)):
        if holds(value > INT32_MAX):  # ids are int32, and the capacity is a product of both in 64 bits
            raise ValueError(f"{name} must be at most {INT32_MAX}, got {value}")
    sizes = Sizes()
    check_tensor("topk_ids", topk_ids)
    check_dtype("topk_ids", topk_ids, ID_DTYPES)
    sizes.bind("topk_ids", topk_ids, "T", "K")
    check_ids(sizes, "token_lora_mapping", token_lora_mapping, ("T",), "topk_ids", topk_ids)
    check_pairs(topk_ids, num_experts, "num_experts")
    _check_capacity(topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_size)
    if holds(num_experts * max_loras > MAX_KEYS):
        raise ValueError(f"num_experts * max_loras must be at most {MAX_KEYS}, got {num_experts} * {max_loras}")
    check_enabled(adapter_enabled, max_loras, "topk_ids", topk_ids)
    if expert_map is not None:
        sizes.set("num_experts", num_experts, "the argument num_experts")
        check_ids(sizes, "expert_map", expert_map, ("num_experts",), "topk_ids", topk_ids)


def _check_capacity(num_pairs: int, num_experts: int, block_size: int) -> None:
    """align_capacity fits int32: one of its two bounds does.

    Asked one by one, because a guard on their minimum turns into a guard on which of them is smaller when torch.compile takes
    a graph from its cache: one more compile for the sizes on the other side.
    """
    by_block, by_group = num_pairs * block_size, round_up(num_pairs + num_experts * (block_size - 1), block_size)
    if holds(by_block > INT32_MAX) and holds(by_group > INT32_MAX):
        rows = min(by_block, by_group)
        raise ValueError(f"block_size must keep the padded row count within {INT32_MAX}, got {block_size} for {rows} rows")


def allocate(topk_ids: Tensor, num_experts: int, block_size: int, max_loras: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three outputs, uninitialised: [L, EM], [L, EM / bs], [L], all int32."""
    capacity = align_capacity(topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_size)

    def table(columns: int) -> Tensor:
        if isinstance(columns, int):
            return topk_ids.new_empty((max_loras, columns), dtype=torch.int32)
        # The stride that new_empty gives is max(1, columns): with that, torch 2.14's export asks which of the two it is.
        return topk_ids.new_empty_strided((max_loras, columns), (columns, 1), dtype=torch.int32)

    return table(capacity), table(capacity // block_size), topk_ids.new_empty((max_loras,), dtype=torch.int32)


def fake(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(
        topk_ids, token_lora_mapping, num_experts, block_size, max_loras, adapter_enabled=adapter_enabled, expert_map=expert_map
    )
    return allocate(topk_ids, num_experts, block_size, max_loras)
