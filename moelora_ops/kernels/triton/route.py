"""The one sort of the layer op: pairs by (expert, adapter), compact, with the block tables of both kinds of kernel.

The counting sort of `_sort` with key = expert * (L + 1) + slot + 1, so that within an expert the pairs without an adapter come
first and every group of keys is a run of rows. The pair that opens a block writes the block's entry in its table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routing import Routing, max_blocks
from . import _sort
from ._common import gdc_launch, gdc_wait, on_device, pdl_options
from ._sort import chunk_bounds, column_sums, pair_experts, pair_slots, take_positions, zero_row

_SIZES = ["num_pairs", "top_k", "num_experts", "num_global_experts", "max_loras", "num_chunks", "chunk_pairs"]
_SIZES += ["block_m", "segment_m", "num_expert_blocks", "num_segment_blocks"]
_INPUTS = ["topk_ids_ptr", "mapping_ptr", "enabled_ptr", "expert_map_ptr"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS)
def _route_count(
    topk_ids_ptr,  # [P]
    mapping_ptr,  # [T]
    enabled_ptr,  # [>= L] or None
    expert_map_ptr,  # [global experts] or None
    keys_ptr,  # [P] out: expert * (L + 1) + slot + 1, -1 for a pair without an expert
    counts_ptr,  # [chunks, stride] out
    expert_blocks_ptr,  # [n, 3] out: filled with (-1, 0, 0)
    segment_blocks_ptr,  # [m, 4] out: filled with (-1, -1, 0, 0)
    num_pairs,
    top_k,
    num_experts,
    num_global_experts,
    max_loras,
    num_chunks,
    chunk_pairs,
    num_expert_blocks,
    num_segment_blocks,
    stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk of pairs, then one per BLOCK_FILL elements of the tables."""
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    chunk = tl.program_id(0)
    if chunk >= num_chunks:
        at = (chunk - num_chunks).to(tl.int64) * BLOCK_FILL + tl.arange(0, BLOCK_FILL)
        expert_rows, segment_rows = num_expert_blocks.to(tl.int64), num_segment_blocks.to(tl.int64)
        tl.store(expert_blocks_ptr + at, tl.where(at % 3 == 0, -1, 0), mask=at < expert_rows * 3)
        tl.store(segment_blocks_ptr + at, tl.where(at % 4 < 2, -1, 0), mask=at < segment_rows * 4)
    else:
        row_ptr = counts_ptr + chunk.to(tl.int64) * stride
        zero_row(row_ptr, num_experts * (max_loras + 1), BLOCK_KEYS)
        first, last = chunk_bounds(chunk, chunk_pairs, num_pairs)
        for start in range(first, last, BLOCK_PAIRS):
            p = start + tl.arange(0, BLOCK_PAIRS)
            slot = pair_slots(p, p < last, mapping_ptr, enabled_ptr, top_k, max_loras)
            expert = pair_experts(p, p < last, topk_ids_ptr, expert_map_ptr, num_experts, num_global_experts)
            key = tl.where(expert >= 0, expert * (max_loras + 1) + slot + 1, -1)
            tl.store(keys_ptr + p, key, mask=p < last)
            tl.atomic_add(row_ptr + key, 1, mask=key >= 0, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def _route_place(
    keys_ptr,  # [P]
    counts_ptr,  # [chunks, stride]
    work_ptr,  # [chunks, 4 * stride] scratch: per key a cursor, first row and first segment block; per expert its first block
    order_ptr,  # [P] out
    row_lora_ptr,  # [P] out
    segment_end_ptr,  # [P] out
    expert_blocks_ptr,  # [n, 3] out
    segment_blocks_ptr,  # [m, 4] out
    num_pairs,
    num_experts,
    max_loras,
    num_chunks,
    chunk_pairs,
    block_m,
    segment_m,
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
    per_expert = max_loras + 1
    num_keys = num_experts * per_expert
    cursor_ptr = work_ptr + chunk.to(tl.int64) * (4 * stride)
    first_row_ptr, first_segment_ptr, first_block_ptr = cursor_ptr + stride, cursor_ptr + 2 * stride, cursor_ptr + 3 * stride
    rows_before = 0
    segments_before = 0
    for start in range(0, num_keys, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        inside = key < num_keys
        before, total = column_sums(counts_ptr, key, inside, chunk, num_chunks, stride, BLOCK_CHUNKS, BLOCK_KEYS)
        segments = tl.where(key % per_expert > 0, tl.cdiv(total, segment_m), 0)
        tl.store(cursor_ptr + key, before, mask=inside)
        tl.store(first_row_ptr + key, rows_before + tl.cumsum(total, axis=0) - total, mask=inside)
        tl.store(first_segment_ptr + key, segments_before + tl.cumsum(segments, axis=0) - segments, mask=inside)
        rows_before += tl.sum(total)
        segments_before += tl.sum(segments)
    tl.store(first_row_ptr + num_keys, rows_before)
    tl.debug_barrier()

    blocks_before = 0
    for start in range(0, num_experts, BLOCK_KEYS):
        expert = start + tl.arange(0, BLOCK_KEYS)
        inside = expert < num_experts
        begin = tl.load(first_row_ptr + expert * per_expert, mask=inside, other=0)
        end = tl.load(first_row_ptr + (expert + 1) * per_expert, mask=inside, other=0)
        blocks = tl.cdiv(end - begin, block_m)
        tl.store(first_block_ptr + expert, blocks_before + tl.cumsum(blocks, axis=0) - blocks, mask=inside)
        blocks_before += tl.sum(blocks)
    tl.debug_barrier()

    first, last = chunk_bounds(chunk, chunk_pairs, num_pairs)
    for start in range(first, last, BLOCK_PAIRS):
        p = start + tl.arange(0, BLOCK_PAIRS)
        key = tl.load(keys_ptr + p, mask=p < last, other=-1)
        routed = key >= 0
        position = take_positions(cursor_ptr, key, BLOCK_PAIRS)
        expert, slot = key // per_expert, key % per_expert - 1
        row = tl.load(first_row_ptr + key, mask=routed, other=0) + position
        segment_end = tl.load(first_row_ptr + key + 1, mask=routed, other=0)
        tl.store(order_ptr + row, p.to(tl.int32), mask=routed)
        tl.store(row_lora_ptr + row, slot, mask=routed)
        tl.store(segment_end_ptr + row, segment_end, mask=routed)

        opens = routed & (slot >= 0) & (position % segment_m == 0)
        segment = tl.load(first_segment_ptr + key, mask=opens, other=0) + position // segment_m
        entry_ptr = segment_blocks_ptr + segment.to(tl.int64) * 4
        tl.store(entry_ptr, expert, mask=opens)
        tl.store(entry_ptr + 1, slot, mask=opens)
        tl.store(entry_ptr + 2, row, mask=opens)
        tl.store(entry_ptr + 3, tl.minimum(row + segment_m, segment_end), mask=opens)

        expert_row = row - tl.load(first_row_ptr + expert * per_expert, mask=routed, other=0)
        opens = routed & (expert_row % block_m == 0)
        expert_end = tl.load(first_row_ptr + (expert + 1) * per_expert, mask=opens, other=0)
        block = tl.load(first_block_ptr + expert, mask=opens, other=0) + expert_row // block_m
        entry_ptr = expert_blocks_ptr + block.to(tl.int64) * 3
        tl.store(entry_ptr, expert, mask=opens)
        tl.store(entry_ptr + 1, row, mask=opens)
        tl.store(entry_ptr + 2, tl.minimum(row + block_m, expert_end), mask=opens)


def route(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    *,
    num_experts: int,
    max_loras: int,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    block_m: int,
    segment_m: int,
) -> Routing:
    """Sort the pairs once for a whole layer; arguments are already checked.

    Args:
        topk_ids: (T, K) int32 or int64; a pair whose expert is outside [0, num_experts) has no row.
        token_lora_mapping: (T,) int32 or int64; -1, outside [0, max_loras) or disabled: no adapter.
        num_experts: local experts. max_loras: slots L; 0 gives no segment blocks.
        adapter_enabled: (>= L,) int32 or bool. expert_map: (global experts,) int32 or int64, -1 not here.
        block_m: rows of an expert block. segment_m: rows of a segment block.

    Returns: `Routing`, its tables sized by `max_blocks` and filled with expert -1 past the last block.
    """
    num_pairs = topk_ids.numel()
    num_expert_blocks = max_blocks(num_pairs, num_experts, block_m)
    num_segment_blocks = max_blocks(num_pairs, num_experts * max_loras, segment_m) if max_loras else 0
    keys, order, row_lora, segment_end = (topk_ids.new_empty(num_pairs, dtype=torch.int32) for _ in range(4))
    expert_blocks = keys.new_empty((num_expert_blocks, 3))
    segment_blocks = keys.new_empty((num_segment_blocks, 4))
    routing = Routing(order, row_lora, segment_end, expert_blocks, segment_blocks, block_m, segment_m)
    if num_pairs == 0:
        return routing
    ids = _sort.Ids.of(topk_ids, token_lora_mapping, adapter_enabled, expert_map)
    chunks = _sort.Chunks.of(num_pairs, num_experts * (max_loras + 1))
    counts, work = chunks.table(keys), chunks.table(keys, columns=4)
    pdl = pdl_options(topk_ids.device)
    with on_device(topk_ids.device):
        fill_programs = triton.cdiv(max(expert_blocks.numel(), segment_blocks.numel()), _sort.BLOCK_FILL)
        _route_count[(chunks.count + fill_programs,)](
            ids.topk_ids,
            ids.token_lora_mapping,
            ids.adapter_enabled,
            ids.expert_map,
            keys,
            counts,
            expert_blocks,
            segment_blocks,
            num_pairs,
            topk_ids.shape[1],
            num_experts,
            num_experts if expert_map is None else expert_map.shape[0],
            max_loras,
            chunks.count,
            chunks.pairs,
            num_expert_blocks,
            num_segment_blocks,
            chunks.stride,
            BLOCK_PAIRS=_sort.BLOCK_PAIRS,
            BLOCK_KEYS=_sort.BLOCK_KEYS,
            BLOCK_FILL=_sort.BLOCK_FILL,
            USE_PDL=bool(pdl),
            num_warps=_sort.NUM_WARPS,
            **pdl,
        )
        _route_place[(chunks.count,)](
            keys,
            counts,
            work,
            order,
            row_lora,
            segment_end,
            expert_blocks,
            segment_blocks,
            num_pairs,
            num_experts,
            max_loras,
            chunks.count,
            chunks.pairs,
            block_m,
            segment_m,
            chunks.stride,
            BLOCK_PAIRS=_sort.BLOCK_PAIRS,
            BLOCK_KEYS=_sort.BLOCK_KEYS,
            BLOCK_CHUNKS=_sort.BLOCK_CHUNKS,
            USE_PDL=bool(pdl),
            num_warps=_sort.NUM_WARPS,
            **pdl,
        )
    return routing
