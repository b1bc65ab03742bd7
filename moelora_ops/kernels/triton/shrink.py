"""First LoRA product of the layer op: rows of one (expert, adapter) segment into the adapter's rank space."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._expand import slot_rank


@triton.jit
def shrink_block(
    x_ptr, a_ptr, z_ptr, order_ptr, first, last, expert, slot, rank_begin, rank, split,
    num_pairs, max_rank, in_features, stride_xm, stride_al, stride_ae, stride_ar, stride_zm,
    ROWS_PER_INPUT: tl.constexpr, NUM_SLICES: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z of one block of rows, for ranks from rank_begin on. Row r reads row order[r] // ROWS_PER_INPUT of x; no order: r's."""
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    x_rows = rows
    if order_ptr is not None:
        x_rows = tl.load(order_ptr + rows, mask=row_mask, other=0)
    x_rows = x_rows // ROWS_PER_INPUT
    ranks = rank_begin + tl.arange(0, BLOCK_R)
    rank_mask = ranks < rank
    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS)
    ks = split * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * stride_xm + ks[None, :]
    a0_ptrs = a_ptr + slot.to(tl.int64) * stride_al + expert.to(tl.int64) * stride_ae
    a0_ptrs = a0_ptrs + ranks.to(tl.int64)[None, :] * stride_ar + ks[:, None]
    a1_ptrs = a0_ptrs + tl.cast(max_rank, tl.int64) * stride_ar
    z0 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    z1 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for step in range(0, steps):
        k_mask = ks < in_features - step * BLOCK_K
        x_mask = row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :]
        a_mask = rank_mask[None, :] if EVEN_K else rank_mask[None, :] & k_mask[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        z0 = tl.dot(x, tl.load(a0_ptrs, mask=a_mask, other=0.0), z0, input_precision="ieee")
        if NUM_SLICES == 2:
            z1 = tl.dot(x, tl.load(a1_ptrs, mask=a_mask, other=0.0), z1, input_precision="ieee")
        x_ptrs += BLOCK_K
        a0_ptrs += BLOCK_K
        a1_ptrs += BLOCK_K
    z_rows = tl.cast(split, tl.int64) * num_pairs + rows
    z_ptrs = z_ptr + z_rows[:, None] * stride_zm + ranks[None, :]
    z_mask = row_mask[:, None] & (ranks < tl.cdiv(rank, 16) * 16)[None, :]
    tl.store(z_ptrs, z0.to(z_ptr.dtype.element_ty), mask=z_mask)
    if NUM_SLICES == 2:
        tl.store(z_ptrs + tl.cdiv(max_rank, 16) * 16, z1.to(z_ptr.dtype.element_ty), mask=z_mask)


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank", "segment_blocks_at", "rank_blocks"],
    do_not_specialize_on_alignment=["tables_ptr", "ranks_ptr"],
)
def shrink_kernel(
    x_ptr,
    a_ptr,
    z_ptr,
    tables_ptr,
    ranks_ptr,
    num_pairs,
    num_experts,
    max_loras,
    max_rank,
    segment_blocks_at,
    rank_blocks,  # blocks of BLOCK_R ranks in a slot
    in_features,
    stride_xm,
    stride_al,
    stride_ae,
    stride_ar,
    stride_zm,
    ROWS_PER_INPUT: tl.constexpr,  # top_k: x has one row per token; 0: x is in sorted order
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of SPLITS * BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """z[split, row, s, j] = x[row] . A[slot, expert, s * R + j] over one split of K; zero for j past the rank.

    Grid: programs that stride over (segment block, block of BLOCK_R ranks in every slice, split of K), so that a batch without
    adapters costs few programs. z has a multiple of 16 columns a slice: whole rank tiles are written.
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    order_ptr = tables_ptr + 4 if ROWS_PER_INPUT > 0 else None
    rows_per_input: tl.constexpr = ROWS_PER_INPUT if ROWS_PER_INPUT > 0 else 1
    work = tl.load(tables_ptr + 2) * rank_blocks * SPLITS
    for index in range(tl.program_id(0), work, tl.num_programs(0)):
        split = index % SPLITS
        rank_begin = (index // SPLITS) % rank_blocks * BLOCK_R
        block_ptr = tables_ptr + segment_blocks_at + (index // SPLITS // rank_blocks).to(tl.int64) * 4
        expert, slot = tl.load(block_ptr), tl.load(block_ptr + 1)
        first, last = tl.load(block_ptr + 2), tl.load(block_ptr + 3)
        known = (expert >= 0) & (expert < num_experts) & (slot >= 0) & (slot < max_loras)
        rank = slot_rank(ranks_ptr, slot, known, max_rank)
        if rank_begin < rank:
            if BLOCK_R > 16 and rank - rank_begin <= 16:  # the rest of a pool's rank costs a small adapter nothing
                shrink_block(
                    x_ptr, a_ptr, z_ptr, order_ptr, first, last, expert, slot, rank_begin, rank, split,
                    num_pairs, max_rank, in_features, stride_xm, stride_al, stride_ae, stride_ar, stride_zm,
                    rows_per_input, NUM_SLICES, SPLITS, EVEN_K, BLOCK_M, 16, BLOCK_K,
                )  # fmt: skip
            else:
                shrink_block(
                    x_ptr, a_ptr, z_ptr, order_ptr, first, last, expert, slot, rank_begin, rank, split,
                    num_pairs, max_rank, in_features, stride_xm, stride_al, stride_ae, stride_ar, stride_zm,
                    rows_per_input, NUM_SLICES, SPLITS, EVEN_K, BLOCK_M, BLOCK_R, BLOCK_K,
                )  # fmt: skip
