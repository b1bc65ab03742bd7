"""Align for the GPU: the pairs of each adapter slot, grouped by expert and padded to whole blocks.

The counting sort of `_sort` with key = slot * E + expert. The first launch also fills the outputs with their sentinels; the
second puts each pair in its place, and the pair that opens a block writes the block's expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...meta import moe_lora_align_block_size as contract
from . import _sort
from ._common import gdc_launch, gdc_wait, on_device, pdl_options
from ._sort import chunk_bounds, column_sums, pair_experts, pair_slots, take_positions, zero_row

_SIZES = ["num_pairs", "top_k", "num_experts", "max_loras", "num_chunks", "chunk_pairs", "block_size", "capacity", "num_blocks"]
_INPUTS = ["topk_ids_ptr", "mapping_ptr", "enabled_ptr", "expert_map_ptr"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS)
def _align_count(
    topk_ids_ptr,  # [P]
    mapping_ptr,  # [T]
    enabled_ptr,  # [>= L] or None
    expert_map_ptr,  # [E] or None
    keys_ptr,  # [P] out: slot * E + expert, -1 for a pair that is skipped
    counts_ptr,  # [chunks, stride] out
    sorted_token_ids_ptr,  # [L, EM] out: filled with P
    expert_ids_ptr,  # [L, EM / bs] out: filled with -1
    num_pairs,
    top_k,
    num_experts,
    max_loras,
    num_chunks,
    chunk_pairs,
    capacity,  # EM
    num_blocks,  # EM / bs
    stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk of pairs, then one per BLOCK_FILL elements of the outputs."""
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    chunk = tl.program_id(0)
    if chunk >= num_chunks:
        rows = max_loras.to(tl.int64)
        at = (chunk - num_chunks).to(tl.int64) * BLOCK_FILL + tl.arange(0, BLOCK_FILL)
        tl.store(sorted_token_ids_ptr + at, tl.zeros((BLOCK_FILL,), tl.int32) + num_pairs, mask=at < capacity * rows)
        tl.store(expert_ids_ptr + at, tl.full((BLOCK_FILL,), -1, tl.int32), mask=at < num_blocks * rows)
    else:
        row_ptr = counts_ptr + chunk.to(tl.int64) * stride
        zero_row(row_ptr, max_loras * num_experts, BLOCK_KEYS)
        first, last = chunk_bounds(chunk, chunk_pairs, num_pairs)
        for start in range(first, last, BLOCK_PAIRS):
            p = start + tl.arange(0, BLOCK_PAIRS)
            slot = pair_slots(p, p < last, mapping_ptr, enabled_ptr, top_k, max_loras)
            expert = pair_experts(p, p < last, topk_ids_ptr, expert_map_ptr, num_experts, num_experts)
            key = tl.where((slot >= 0) & (expert >= 0), slot * num_experts + expert, -1)
            tl.store(keys_ptr + p, key, mask=p < last)
            tl.atomic_add(row_ptr + key, 1, mask=key >= 0, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def _align_place(
    keys_ptr,  # [P]
    counts_ptr,  # [chunks, stride]
    work_ptr,  # [chunks, 2 * stride] scratch: per key a cursor and the first block
    sorted_token_ids_ptr,  # [L, EM] out
    expert_ids_ptr,  # [L, EM / bs] out
    num_tokens_post_padded_ptr,  # [L] out
    num_pairs,
    num_experts,
    max_loras,
    num_chunks,
    chunk_pairs,
    block_size,
    num_blocks,  # EM / bs
    stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk of pairs."""
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    chunk = tl.program_id(0)
    num_keys = max_loras * num_experts
    cursor_ptr = work_ptr + chunk.to(tl.int64) * (2 * stride)
    first_block_ptr = cursor_ptr + stride  # over all slots; a slot's own count starts at its first expert
    blocks_before = 0
    for start in range(0, num_keys, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        inside = key < num_keys
        before, total = column_sums(counts_ptr, key, inside, chunk, num_chunks, stride, BLOCK_CHUNKS, BLOCK_KEYS)
        blocks = tl.where(total > 0, (total - 1) // block_size + 1, 0)
        tl.store(cursor_ptr + key, before, mask=inside)
        tl.store(first_block_ptr + key, blocks_before + tl.cumsum(blocks, axis=0) - blocks, mask=inside)
        blocks_before += tl.sum(blocks)
    tl.store(first_block_ptr + num_keys, blocks_before)
    tl.debug_barrier()

    if chunk == 0:
        for start in range(0, max_loras, BLOCK_KEYS):
            slot = start + tl.arange(0, BLOCK_KEYS)
            inside = slot < max_loras
            first = tl.load(first_block_ptr + slot * num_experts, mask=inside, other=0)
            end = tl.load(first_block_ptr + (slot + 1) * num_experts, mask=inside, other=0)
            tl.store(num_tokens_post_padded_ptr + slot, (end - first) * block_size, mask=inside)

    first, last = chunk_bounds(chunk, chunk_pairs, num_pairs)
    for start in range(first, last, BLOCK_PAIRS):
        p = start + tl.arange(0, BLOCK_PAIRS)
        key = tl.load(keys_ptr + p, mask=p < last, other=-1)
        routed = key >= 0
        position = take_positions(cursor_ptr, key, BLOCK_PAIRS)
        slot = key // num_experts
        block = tl.load(first_block_ptr + key, mask=routed, other=0)
        block += position // block_size - tl.load(first_block_ptr + slot * num_experts, mask=routed, other=0)
        block = slot.to(tl.int64) * num_blocks + block  # of all rows
        row = position % block_size
        tl.store(sorted_token_ids_ptr + block * block_size + row, p.to(tl.int32), mask=routed)
        tl.store(expert_ids_ptr + block, key % num_experts, mask=routed & (row == 0))


def moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Align on `topk_ids`' device; arguments are already checked. Args and Returns: `moelora_ops.moe_lora_align_block_size`."""
    outputs: tuple[Tensor, Tensor, Tensor] = contract.allocate(topk_ids, num_experts, block_size, max_loras)
    sorted_token_ids, expert_ids, num_tokens_post_padded = outputs
    num_pairs = topk_ids.numel()
    if num_pairs == 0 or max_loras == 0:
        num_tokens_post_padded.zero_()
        return outputs
    ids = _sort.Ids.of(topk_ids, token_lora_mapping, adapter_enabled, expert_map)
    chunks = _sort.Chunks.of(num_pairs, max_loras * num_experts)
    keys = topk_ids.new_empty(num_pairs, dtype=torch.int32)
    counts, work = chunks.table(keys), chunks.table(keys, columns=2)
    pdl = pdl_options(topk_ids.device)
    with on_device(topk_ids.device):
        fill_programs = triton.cdiv(sorted_token_ids.numel(), _sort.BLOCK_FILL)
        _align_count[(chunks.count + fill_programs,)](
            ids.topk_ids,
            ids.token_lora_mapping,
            ids.adapter_enabled,
            ids.expert_map,
            keys,
            counts,
            sorted_token_ids,
            expert_ids,
            num_pairs,
            topk_ids.shape[1],
            num_experts,
            max_loras,
            chunks.count,
            chunks.pairs,
            sorted_token_ids.shape[1],
            expert_ids.shape[1],
            chunks.stride,
            BLOCK_PAIRS=_sort.BLOCK_PAIRS,
            BLOCK_KEYS=_sort.BLOCK_KEYS,
            BLOCK_FILL=_sort.BLOCK_FILL,
            USE_PDL=bool(pdl),
            num_warps=_sort.NUM_WARPS,
            **pdl,
        )
        _align_place[(chunks.count,)](
            keys,
            counts,
            work,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            num_pairs,
            num_experts,
            max_loras,
            chunks.count,
            chunks.pairs,
            block_size,
            expert_ids.shape[1],
            chunks.stride,
            BLOCK_PAIRS=_sort.BLOCK_PAIRS,
            BLOCK_KEYS=_sort.BLOCK_KEYS,
            BLOCK_CHUNKS=_sort.BLOCK_CHUNKS,
            USE_PDL=bool(pdl),
            num_warps=_sort.NUM_WARPS,
            **pdl,
        )
    return outputs
