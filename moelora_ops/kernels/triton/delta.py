"""The delta op: two launches add the adapters' delta to the output of anybody's base GEMM."""

from __future__ import annotations

from typing import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .. import config
from ._common import gdc_launch, gdc_wait, on_device, pdl_options
from ._lora import expand_tile, new_z, shrink_tile, slot_rank

_VARYING = [
    "num_pairs", "max_loras", "num_experts", "block_size", "blocks_per_slot", "tiles_per_block", "capacity", "max_rank",
    "offset",
]  # fmt: skip
_SMALL = ["sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr", "ranks_ptr", "topk_weights_ptr"]


@triton.jit
def locate_block(flat, num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, CHUNK: tl.constexpr):
    """(slot, block within the slot, number of blocks of all slots) of the flat block index; slot -1 past the last block."""
    slot = -1
    block = 0
    total = 0
    for begin in range(0, max_loras, CHUNK):
        slots = begin + tl.arange(0, CHUNK)
        padded = tl.load(num_tokens_post_padded_ptr + slots, mask=slots < max_loras, other=0)
        blocks = tl.minimum(tl.maximum(padded // block_size, 0), blocks_per_slot)
        end = total + tl.cumsum(blocks, 0)
        here = (flat >= end - blocks) & (flat < end)  # true for one slot at most
        slot = tl.maximum(slot, tl.max(tl.where(here, slots, -1)))
        block += tl.sum(tl.where(here, flat - (end - blocks), 0))
        total += tl.sum(blocks)
    return slot, block, total


@triton.jit
def load_pairs(sorted_token_ids_ptr, slot, block, tile, capacity, block_size, num_pairs, BLOCK_M: tl.constexpr):
    """(pairs, mask) of one tile of BLOCK_M rows of a block; padding and ids out of range are masked."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    ids_ptr = sorted_token_ids_ptr + slot.to(tl.int64) * capacity + block.to(tl.int64) * block_size
    pairs = tl.load(ids_ptr + rows, mask=rows < block_size, other=-1)
    return pairs, (pairs >= 0) & (pairs < num_pairs)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SMALL)
def delta_shrink_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,  # None: one slice
    z_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    ranks_ptr,
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    tiles_per_block,
    capacity,
    max_rank,
    in_features,
    stride_xm,
    stride_a0l,
    stride_a0e,
    stride_a0r,
    stride_a1l,
    stride_a1e,
    stride_a1r,
    stride_zm,
    ROWS_PER_INPUT: tl.constexpr,  # top_k: x has one row per token; 1: one per pair
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """z[split, pair, s * R + j] = x[pair] . A_s[slot, expert, j] over one split of K.

    Grid: (tiles of BLOCK_M rows, tile of BLOCK_R ranks in every slice, split of K). The first axis is bounded by pairs: its
    programs find their slot and block on the device, and stride on where a table has more blocks than pairs can fill.
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    rank_begin = tl.program_id(1) * BLOCK_R
    split = tl.program_id(2)
    flat = tl.program_id(0)
    slot, block, total = locate_block(
        flat // tiles_per_block, num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, CHUNK
    )
    while flat < total * tiles_per_block:
        expert = tl.load(expert_ids_ptr + slot.to(tl.int64) * blocks_per_slot + block)
        rank = slot_rank(ranks_ptr, slot, max_rank)
        if (expert >= 0) & (expert < num_experts) & (rank_begin < rank):
            pairs, valid = load_pairs(
                sorted_token_ids_ptr, slot, block, flat % tiles_per_block, capacity, block_size, num_pairs, BLOCK_M
            )
            if tl.max(valid.to(tl.int32), 0) > 0:
                a0 = a0_ptr + slot.to(tl.int64) * stride_a0l + expert.to(tl.int64) * stride_a0e
                a1 = a0
                if a1_ptr is not None:
                    a1 = a1_ptr + slot.to(tl.int64) * stride_a1l + expert.to(tl.int64) * stride_a1e
                shrink_tile(
                    x_ptr, (pairs // ROWS_PER_INPUT).to(tl.int64) * stride_xm, valid, a0, stride_a0r, a1, stride_a1r,
                    z_ptr + split.to(tl.int64) * num_pairs * stride_zm, pairs.to(tl.int64) * stride_zm,
                    rank_begin, rank, max_rank, in_features, split,
                    1 if a1_ptr is None else 2, SPLITS, EVEN_K, BLOCK_M, BLOCK_R, BLOCK_K,
                )  # fmt: skip
        flat += tl.num_programs(0)
        if flat < total * tiles_per_block:
            slot, block, _ = locate_block(
                flat // tiles_per_block, num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, CHUNK
            )


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SMALL)
def delta_expand_kernel(
    output_ptr,
    z_ptr,
    b0_ptr,
    b1_ptr,  # None: one slice
    topk_weights_ptr,  # None: the delta is not weighted
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    ranks_ptr,
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    tiles_per_block,
    capacity,
    max_rank,
    offset,
    out_features,
    stride_ot,
    stride_ok,
    stride_b0l,
    stride_b0e,
    stride_b0n,
    stride_b1l,
    stride_b1e,
    stride_b1n,
    stride_zm,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """output[t, k, offset + s * N + n] += [w] * z[pair, s * R :] . B_s[slot, expert, n], added in fp32, rounded once.

    Grid: (tiles of BLOCK_M rows, BLOCK_N columns of every slice); the first axis as in `delta_shrink_kernel`. Rows of pairs
    without an adapter are not touched.
    """
    gdc_wait(USE_PDL)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < out_features
    flat = tl.program_id(0)
    slot, block, total = locate_block(
        flat // tiles_per_block, num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, CHUNK
    )
    while flat < total * tiles_per_block:
        expert = tl.load(expert_ids_ptr + slot.to(tl.int64) * blocks_per_slot + block)
        rank = slot_rank(ranks_ptr, slot, max_rank)
        if (expert >= 0) & (expert < num_experts) & (rank > 0):
            pairs, valid = load_pairs(
                sorted_token_ids_ptr, slot, block, flat % tiles_per_block, capacity, block_size, num_pairs, BLOCK_M
            )
            if tl.max(valid.to(tl.int32), 0) > 0:
                z_offsets = pairs.to(tl.int64) * stride_zm
                split_stride = tl.cast(num_pairs, tl.int64) * stride_zm
                rows = (pairs // TOP_K).to(tl.int64) * stride_ot + (pairs % TOP_K).to(tl.int64) * stride_ok + offset
                out_ptrs = output_ptr + rows[:, None] + columns[None, :]
                mask = valid[:, None] & col_mask[None, :]
                weight = tl.full((BLOCK_M,), 1.0, tl.float32)
                if topk_weights_ptr is not None:
                    weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
                b_ptr = b0_ptr + slot.to(tl.int64) * stride_b0l + expert.to(tl.int64) * stride_b0e
                delta = expand_tile(
                    z_ptr, z_offsets, split_stride, valid, b_ptr, columns.to(tl.int64) * stride_b0n, col_mask, rank,
                    SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
                )  # fmt: skip
                result = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + weight[:, None] * delta
                tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=mask)
                if b1_ptr is not None:
                    b_ptr = b1_ptr + slot.to(tl.int64) * stride_b1l + expert.to(tl.int64) * stride_b1e
                    delta = expand_tile(
                        z_ptr, z_offsets + max_rank, split_stride, valid, b_ptr, columns.to(tl.int64) * stride_b1n, col_mask,
                        rank, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
                    )  # fmt: skip
                    out_ptrs += out_features
                    result = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + weight[:, None] * delta
                    tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=mask)
        flat += tl.num_programs(0)
        if flat < total * tiles_per_block:
            slot, block, _ = locate_block(
                flat // tiles_per_block, num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, CHUNK
            )


def fused_moe_lora(
    output: Tensor,
    hidden_states: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    lora_ranks: Tensor | None = None,
    mul_routed_weight: bool = False,
    offset: int = 0,
) -> None:
    """The delta op on checked arguments: see `moelora_ops.fused_moe_lora`.

    Slices are served two at a time. Scratch: z [splits, P, 2 R], not filled first.
    """
    num_tokens, top_k, _ = output.shape
    num_pairs = num_tokens * top_k
    max_loras, capacity = sorted_token_ids.shape
    blocks_per_slot = expert_ids.shape[1]
    max_rank, in_features = lora_a_stacked[0].shape[2:]
    out_features = lora_b_stacked[0].shape[2]
    if 0 in (num_pairs, max_loras, capacity, max_rank, out_features):
        return
    block_size = capacity // blocks_per_slot
    num_experts = max(t.shape[1] for t in (*lora_a_stacked, *lora_b_stacked))
    slices = min(len(lora_a_stacked), 2)
    problem = config.Problem(num_pairs, num_experts, in_features, out_features, slices, output.dtype)
    tiles = config.delta(problem, block_size, config.describe(output.device))
    tiles_per_block = triton.cdiv(block_size, tiles.block_m)
    # Blocks hold at least one pair, and but for the last of each (expert, adapter) they are full.
    groups = max_loras * max(blocks_per_slot - num_pairs // block_size, 1)
    num_blocks = min(num_pairs, max_loras * blocks_per_slot, num_pairs // block_size + groups)
    num_tiles = min(num_blocks * tiles_per_block, 2**31 - 1)
    shared_experts = num_experts == 1  # every stacked tensor serves all experts, however many there are
    table = (sorted_token_ids.contiguous(), expert_ids.contiguous(), num_tokens_post_padded.contiguous())
    ranks = None if lora_ranks is None else lora_ranks.contiguous()
    weights = topk_weights.contiguous() if mul_routed_weight else None
    sizes = (
        num_pairs, max_loras, 2**31 if shared_experts else num_experts, block_size, blocks_per_slot, tiles_per_block, capacity,
        max_rank,
    )  # fmt: skip
    rows_per_input = top_k if hidden_states.shape[0] == num_tokens else 1
    block_r = config.block_r(max_rank)
    chunk = min(triton.next_power_of_2(max_loras), 128)

    with on_device(output.device):
        pdl = pdl_options(output.device)
        common = {"BLOCK_M": tiles.block_m, "BLOCK_R": block_r, "SPLITS": tiles.shrink.splits, "CHUNK": chunk}
        common |= {"USE_PDL": bool(pdl), **pdl}
        for begin in range(0, len(lora_a_stacked), 2):
            a, b = lora_a_stacked[begin : begin + 2], lora_b_stacked[begin : begin + 2]
            z = new_z(output, tiles.shrink.splits, num_pairs, len(a) * max_rank)
            delta_shrink_kernel[(num_tiles, triton.cdiv(max_rank, block_r), tiles.shrink.splits)](
                hidden_states, a[0], a[1] if len(a) == 2 else None, z, *table, ranks, *sizes,
                in_features, hidden_states.stride(0), *_strides(a[0]), *_strides(a[-1]), z.stride(1),
                ROWS_PER_INPUT=rows_per_input, EVEN_K=in_features % tiles.shrink.block_k == 0, BLOCK_K=tiles.shrink.block_k,
                num_warps=tiles.shrink.num_warps, num_stages=tiles.shrink.num_stages, **common,
            )  # fmt: skip
            delta_expand_kernel[(num_tiles, triton.cdiv(out_features, tiles.block_n))](
                output, z, b[0], b[1] if len(b) == 2 else None, weights, *table, ranks, *sizes,
                offset + begin * out_features, out_features, output.stride(0), output.stride(1),
                *_strides(b[0]), *_strides(b[-1]), z.stride(1),
                TOP_K=top_k, BLOCK_N=tiles.block_n, num_warps=tiles.num_warps, **common,
            )  # fmt: skip


def _strides(stacked: Tensor) -> tuple[int, int, int]:
    """Strides of (slot, expert, row); an expert dimension of 1 serves all experts."""
    return stacked.stride(0), 0 if stacked.shape[1] == 1 else stacked.stride(1), stacked.stride(2)
