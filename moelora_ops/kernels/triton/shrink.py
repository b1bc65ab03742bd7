"""First LoRA product of the layer op: rows of one (expert, adapter) segment into the adapter's rank space."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...routing import Routing
from .. import config
from ._common import gdc_launch, gdc_wait
from ._lora import shrink_tile, slot_rank


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank"],
    do_not_specialize_on_alignment=["order_ptr", "segment_blocks_ptr", "ranks_ptr"],
)
def shrink_kernel(
    x_ptr,
    a_ptr,
    z_ptr,
    order_ptr,
    segment_blocks_ptr,
    ranks_ptr,
    num_pairs,
    num_experts,
    max_loras,
    max_rank,
    in_features,
    stride_xm,
    stride_al,
    stride_ae,
    stride_ar,
    stride_zm,
    ROWS_PER_INPUT: tl.constexpr,  # top_k: x has one row per token; 0: x is in sorted order
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """z[split, row, s * R + j] = x[row] . A[slot, expert, s * R + j] over one split of K.

    Grid: one program per (segment block, tile of BLOCK_R ranks in every slice, split of K). Tiles past the adapter's rank exit.
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    block_ptr = segment_blocks_ptr + tl.program_id(0).to(tl.int64) * 4
    rank_begin = tl.program_id(1) * BLOCK_R
    split = tl.program_id(2)
    expert = tl.load(block_ptr)
    if (expert < 0) | (expert >= num_experts):
        return
    slot = tl.load(block_ptr + 1)
    if (slot < 0) | (slot >= max_loras):
        return
    rank = slot_rank(ranks_ptr, slot, max_rank)
    if rank_begin >= rank:
        return
    rows = tl.load(block_ptr + 2) + tl.arange(0, BLOCK_M)
    row_mask = rows < tl.load(block_ptr + 3)
    x_rows = rows
    if ROWS_PER_INPUT > 0:
        x_rows = tl.load(order_ptr + rows, mask=row_mask, other=0) // ROWS_PER_INPUT
    a0_ptr = a_ptr + slot.to(tl.int64) * stride_al + expert.to(tl.int64) * stride_ae
    a1_ptr = a0_ptr
    if NUM_SLICES == 2:
        a1_ptr = a0_ptr + tl.cast(max_rank, tl.int64) * stride_ar
    shrink_tile(
        x_ptr, x_rows.to(tl.int64) * stride_xm, row_mask, a0_ptr, stride_ar, a1_ptr, stride_ar,
        z_ptr + split.to(tl.int64) * num_pairs * stride_zm, rows.to(tl.int64) * stride_zm,
        rank_begin, rank, max_rank, in_features, split,
        NUM_SLICES, SPLITS, EVEN_K, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip


def shrink(
    x: Tensor,
    lora_a: Tensor,
    z: Tensor,
    routing: Routing,
    lora_ranks: Tensor | None,
    *,
    rows_per_input: int,
    num_experts: int,
    num_slices: int,
    tiles: config.Shrink,
    pdl: dict[str, Any],
) -> None:
    """Fill z [splits, P, S * R] (of `new_z`) for the rows that have an adapter; all other rows stay as they are.

    Args:
        x: [T, in] with rows_per_input = top_k, or [P, in] in sorted order with rows_per_input = 0.
        lora_a: [L, E or 1, S * R, in].
        pdl: options of `pdl_options` for this device.
    """
    max_loras, _, total_rank, in_features = lora_a.shape
    max_rank = total_rank // num_slices
    block_r = config.block_r(max_rank)
    grid = (routing.segment_blocks.shape[0], triton.cdiv(max_rank, block_r), tiles.splits)
    shrink_kernel[grid](
        x, lora_a, z, routing.order, routing.segment_blocks, lora_ranks,
        z.shape[1], num_experts, max_loras, max_rank, in_features,
        x.stride(0), lora_a.stride(0), 0 if lora_a.shape[1] == 1 else lora_a.stride(1), lora_a.stride(2), z.stride(1),
        ROWS_PER_INPUT=rows_per_input, NUM_SLICES=num_slices, SPLITS=tiles.splits,
        EVEN_K=in_features % tiles.block_k == 0,
        BLOCK_M=routing.segment_m, BLOCK_R=block_r, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, USE_PDL=bool(pdl), **pdl,
    )  # fmt: skip
