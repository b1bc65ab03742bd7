"""The one sort of the layer op: pairs by (expert, adapter), compact, with the tables of the kernels that read it.

One launch of CUDA C++ where it serves (`native.route`), else two of Triton: the counting sort of `_sort` with
key = expert * (L + 1) + slot + 1, so that within an expert the pairs without an adapter come first and every group of keys is a
run of rows. The pair that opens a block or a segment writes its entry. Both give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routing import ORDER_AT, Routing, RoutingSizes
from .. import native
from . import _sort
from ._common import gdc_launch, gdc_wait, has_pdl, on_device, pdl_options
from ._sort import chunk_bounds, column_sums, pair_experts, pair_slots, take_positions, zero_row

_SIZES = ["num_pairs", "top_k", "num_experts", "num_global_experts", "max_loras", "num_chunks", "chunk_pairs"]
_SIZES += ["block_m", "segment_m", "row_tiles_at", "expert_blocks_at", "segment_blocks_at", "tiles_at", "rank_tiles"]
_INPUTS = ["topk_ids_ptr", "mapping_ptr", "enabled_ptr", "expert_map_ptr", "ranks_ptr"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS)
def _route_count(
    topk_ids_ptr,  # [P]
    mapping_ptr,  # [T]
    enabled_ptr,  # [>= L] or None
    expert_map_ptr,  # [global experts] or None
    keys_ptr,  # [P] out: expert * (L + 1) + slot + 1, -1 for a pair without an expert
    counts_ptr,  # [chunks, stride] out
    num_pairs,
    top_k,
    num_experts,
    num_global_experts,
    max_loras,
    chunk_pairs,
    stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk of pairs."""
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    chunk = tl.program_id(0)
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


@triton.jit
def _tiles_of(slot, inside, ranks_ptr, rank_tiles):
    """Rank tiles of a slot's adapter; none for slot -1."""
    has_slot = inside & (slot >= 0)
    if ranks_ptr is None:
        return tl.where(has_slot, rank_tiles, 0)
    else:
        rank = tl.load(ranks_ptr + slot, mask=has_slot, other=0)
        return tl.minimum((tl.maximum(rank, 0) + 15) // 16, rank_tiles)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_INPUTS)
def _route_place(
    keys_ptr,  # [P]
    counts_ptr,  # [chunks, stride]
    work_ptr,  # [chunks, 5 * stride] scratch: per key a cursor, first row, segment block and tile; per expert its first block
    ranks_ptr,  # [L] or None
    tables_ptr,  # out: see `RoutingSizes`
    num_pairs,
    num_experts,
    max_loras,
    rank_tiles,
    num_chunks,
    chunk_pairs,
    block_m,
    segment_m,
    row_tiles_at,
    expert_blocks_at,
    segment_blocks_at,
    tiles_at,
    stride,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    ORDER_AT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per chunk of pairs."""
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    chunk = tl.program_id(0)
    per_expert = max_loras + 1
    num_keys = num_experts * per_expert
    cursor_ptr = work_ptr + chunk.to(tl.int64) * (5 * stride)
    first_row_ptr, first_segment_ptr, first_tile_ptr = cursor_ptr + stride, cursor_ptr + 2 * stride, cursor_ptr + 3 * stride
    first_block_ptr = cursor_ptr + 4 * stride
    rows_before = 0
    segments_before = 0
    tiles_before = 0
    for start in range(0, num_keys, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        inside = key < num_keys
        before, total = column_sums(counts_ptr, key, inside, chunk, num_chunks, stride, BLOCK_CHUNKS, BLOCK_KEYS)
        tiles = _tiles_of(key % per_expert - 1, total > 0, ranks_ptr, rank_tiles)
        segments = tl.where(tiles > 0, tl.cdiv(total, segment_m), 0)
        tl.store(cursor_ptr + key, before, mask=inside)
        tl.store(first_row_ptr + key, rows_before + tl.cumsum(total, axis=0) - total, mask=inside)
        tl.store(first_segment_ptr + key, segments_before + tl.cumsum(segments, axis=0) - segments, mask=inside)
        tl.store(first_tile_ptr + key, tiles_before + tl.cumsum(tiles, axis=0) - tiles, mask=inside)
        rows_before += tl.sum(total)
        segments_before += tl.sum(segments)
        tiles_before += tl.sum(tiles)
    tl.store(first_row_ptr + num_keys, rows_before)
    tl.store(first_tile_ptr + num_keys, tiles_before)
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
    if chunk == 0:
        tl.store(tables_ptr, rows_before)
        tl.store(tables_ptr + 1, blocks_before)
        tl.store(tables_ptr + 2, segments_before)
        tl.store(tables_ptr + 3, tiles_before)

    first, last = chunk_bounds(chunk, chunk_pairs, num_pairs)
    for start in range(first, last, BLOCK_PAIRS):
        p = start + tl.arange(0, BLOCK_PAIRS)
        key = tl.load(keys_ptr + p, mask=p < last, other=-1)
        routed = key >= 0
        position = take_positions(cursor_ptr, key, BLOCK_PAIRS)
        expert, slot = key // per_expert, key % per_expert - 1
        row = tl.load(first_row_ptr + key, mask=routed, other=0) + position
        segment_end = tl.load(first_row_ptr + key + 1, mask=routed, other=0)
        first_tile = tl.load(first_tile_ptr + key, mask=routed, other=0)
        end_tile = tl.load(first_tile_ptr + key + 1, mask=routed, other=0)
        tl.store(tables_ptr + ORDER_AT + row, p.to(tl.int32), mask=routed)
        row_tiles_ptr = tables_ptr + row_tiles_at + row.to(tl.int64) * 2
        tl.store(row_tiles_ptr, first_tile, mask=routed)
        tl.store(row_tiles_ptr + 1, end_tile, mask=routed)

        has_rank = routed & (end_tile > first_tile)
        for tile in range(rank_tiles):
            opens = has_rank & (position == 0) & (tile < end_tile - first_tile)
            tl.store(tables_ptr + tiles_at + first_tile.to(tl.int64) + tile, slot * rank_tiles + tile, mask=opens)

        opens = has_rank & (position % segment_m == 0)
        segment = tl.load(first_segment_ptr + key, mask=opens, other=0) + position // segment_m
        entry_ptr = tables_ptr + segment_blocks_at + segment.to(tl.int64) * 4
        tl.store(entry_ptr, expert, mask=opens)
        tl.store(entry_ptr + 1, slot, mask=opens)
        tl.store(entry_ptr + 2, row, mask=opens)
        tl.store(entry_ptr + 3, tl.minimum(row + segment_m, segment_end), mask=opens)

        expert_row = row - tl.load(first_row_ptr + expert * per_expert, mask=routed, other=0)
        opens = routed & (expert_row % block_m == 0)
        expert_end = tl.load(first_row_ptr + (expert + 1) * per_expert, mask=opens, other=0)
        block = tl.load(first_block_ptr + expert, mask=opens, other=0) + expert_row // block_m
        entry_ptr = tables_ptr + expert_blocks_at + block.to(tl.int64) * 3
        tl.store(entry_ptr, expert, mask=opens)
        tl.store(entry_ptr + 1, row, mask=opens)
        tl.store(entry_ptr + 2, tl.minimum(row + block_m, expert_end), mask=opens)


def route(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    *,
    num_experts: int,
    max_loras: int,
    max_rank: int,
    lora_ranks: Tensor | None,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    block_m: int,
    segment_m: int,
) -> Routing:
    """Sort the pairs once for a whole layer; arguments are already checked.

    Args:
        topk_ids: (T, K) int32 or int64; a pair whose expert is outside [0, num_experts) has no row.
        token_lora_mapping: (T,) int32 or int64; -1, outside [0, max_loras) or disabled: no adapter.
        num_experts: local experts. max_loras: slots L. max_rank: the pool's rank; 0 for either: no adapters.
        lora_ranks: (L,) int32, clamped to [0, max_rank]; None: all of max_rank. A slot of rank 0 has no segment blocks.
        adapter_enabled: (>= L,) int32 or bool. expert_map: (global experts,) int32 or int64, -1 not here.
        block_m: rows of an expert block. segment_m: rows of a segment block.

    Returns: `Routing`; entries past its counts are undefined.
    """
    sizes = RoutingSizes.of(topk_ids.numel(), num_experts, max_loras, max_rank, block_m, segment_m)
    tables = topk_ids.new_empty(sizes.size, dtype=torch.int32)
    if sizes.num_pairs == 0:
        tables.zero_()
        return Routing(tables, sizes)
    topk_ids, token_lora_mapping = topk_ids.contiguous(), token_lora_mapping.contiguous()
    lora_ranks = None if lora_ranks is None else lora_ranks.contiguous()
    adapter_enabled = None if adapter_enabled is None else adapter_enabled.contiguous()
    expert_map = None if expert_map is None else expert_map.contiguous()
    inputs = (topk_ids, token_lora_mapping, lora_ranks, adapter_enabled, expert_map)
    if not native.route(*inputs, tables, sizes, dependent=has_pdl(topk_ids.device)):
        triton_route(*inputs, tables, sizes)
    return Routing(tables, sizes)


def triton_route(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    lora_ranks: Tensor | None,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    tables: Tensor,
    sizes: RoutingSizes,
) -> None:
    """Fill `tables` by the two Triton kernels."""
    ids = _sort.Ids.of(topk_ids, token_lora_mapping, adapter_enabled, expert_map)
    chunks = _sort.Chunks.of(sizes.num_pairs, sizes.num_experts * (sizes.max_loras + 1))
    keys = tables.new_empty(sizes.num_pairs)
    counts, work = chunks.table(keys), chunks.table(keys, columns=5)
    pdl = pdl_options(topk_ids.device)
    with on_device(topk_ids.device):
        _route_count[(chunks.count,)](
            ids.topk_ids,
            ids.token_lora_mapping,
            ids.adapter_enabled,
            ids.expert_map,
            keys,
            counts,
            sizes.num_pairs,
            topk_ids.shape[1],
            sizes.num_experts,
            sizes.num_experts if expert_map is None else expert_map.shape[0],
            sizes.max_loras,
            chunks.pairs,
            chunks.stride,
            BLOCK_PAIRS=_sort.BLOCK_PAIRS,
            BLOCK_KEYS=_sort.BLOCK_KEYS,
            USE_PDL=bool(pdl),
            num_warps=_sort.NUM_WARPS,
            **pdl,
        )
        _route_place[(chunks.count,)](
            keys,
            counts,
            work,
            lora_ranks,
            tables,
            sizes.num_pairs,
            sizes.num_experts,
            sizes.max_loras,
            sizes.rank_tiles,
            chunks.count,
            chunks.pairs,
            sizes.block_m,
            sizes.segment_m,
            sizes.row_tiles_at,
            sizes.expert_blocks_at,
            sizes.segment_blocks_at,
            sizes.tiles_at,
            chunks.stride,
            BLOCK_PAIRS=_sort.BLOCK_PAIRS,
            BLOCK_KEYS=_sort.BLOCK_KEYS,
            BLOCK_CHUNKS=_sort.BLOCK_CHUNKS,
            ORDER_AT=ORDER_AT,
            USE_PDL=bool(pdl),
            num_warps=_sort.NUM_WARPS,
            **pdl,
        )
