"""Second LoRA product of the layer op, added to the accumulators of a base GEMM: four rank tiles in one dot.

An adapter of rank r is cdiv(r, 16) *rank tiles*. The tiles of all segments in a block of rows stand next to each other in the
routing's table, so WIDTH / 16 of them, whoever they belong to, are merged along K: z is masked to the rows of each tile's own
segment, B is gathered from as many adapters. A block of 32 rows and 8 adapters takes 2 dots, not 8 (H200, T = 512).

A zero in z does not keep out a NaN in another adapter's B. So what is not finite in B is left out of the dot, and if there was any,
the rows that own it are set to NaN afterwards: no second accumulator, and no cost but the comparison.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANK_TILE = 16
WIDTH = tl.constexpr(64)


@triton.jit
def slot_rank(ranks_ptr, slot, known, max_rank):
    """Rank of a slot's adapter, clamped to the pool's rank; the pool's rank where no ranks are given."""
    if ranks_ptr is None:
        return tl.where(known, max_rank, 0)
    else:
        return tl.minimum(tl.maximum(tl.load(ranks_ptr + slot, mask=known, other=0), 0), max_rank)


@triton.jit
def load_b(b_ptr, offsets, col_mask, j, rank, bad, VEC: tl.constexpr):
    """B[col, j] with zero past the rank and for what is not finite; `bad` counts the latter per column."""
    # Whole vectors of VEC elements: a mask that changes inside one would make every load a scalar one.
    b = tl.load(b_ptr + offsets, mask=col_mask[:, None] & ((j // VEC) * VEC < rank)[None, :], other=0.0)
    inside = (j < rank)[None, :]
    finite = tl.abs(b.to(tl.float32)) < float("inf")
    bad = tl.maximum(bad, tl.max((inside & (finite == 0)).to(tl.int32), axis=1))
    return tl.where(inside & finite, b, 0.0).to(b.dtype), bad


@triton.jit
def load_z(z_ptr, offsets, mask, split_stride, SPLITS: tl.constexpr):
    """Sum of the splits of z, in fixed order."""
    z = tl.load(z_ptr + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        z += tl.load(z_ptr + split * split_stride + offsets, mask=mask, other=0.0)
    return z


@triton.jit
def expand(
    acc0,
    acc1,  # slice 1; returned as it is when NUM_SLICES is 1
    begin,  # [BLOCK_M] first rank tile of each row's segment
    end,  # [BLOCK_M] one past its last; equal where the row has no adapter
    first_tile,  # rank tiles of this block of rows: [first_tile, end_tile)
    end_tile,
    tiles_ptr,  # slot * tiles_per_slot + tile of each rank tile
    tiles_per_slot,
    z_ptr,
    z_offsets,  # [BLOCK_M] int64: element offset of each row in split 0 of z
    split_stride,  # int64
    b_ptr,  # B of this expert in slot 0
    stride_bl,
    b0_offsets,  # [BLOCK_N] int64: element offset of each column's row of B
    b1_offsets,
    col_mask,
    ranks_ptr,
    max_loras,
    max_rank,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,  # elements that one load of B may take
):
    """acc_s[row, col] += sum over j < rank of z[row, s, j] * B_s[slot(row), col, j], for every row with an adapter."""
    bad = tl.zeros((acc0.shape[1],), tl.int32)
    i = tl.arange(0, WIDTH)
    for t in tl.range(first_tile, end_tile, WIDTH // 16, num_stages=1):
        tile = t + i // 16
        code = tl.max_constancy(tl.load(tiles_ptr + tile, mask=tile < end_tile, other=-1), [16])
        slot = code // tiles_per_slot
        known = (code >= 0) & (slot < max_loras)
        rank = tl.max_constancy(slot_rank(ranks_ptr, slot, known, max_rank), [16])
        j = tl.where(known, code % tiles_per_slot, 0) * 16 + i % 16
        z_mask = (begin[:, None] <= tile[None, :]) & (tile[None, :] < end[:, None])
        b_offsets = tl.where(known, slot, 0).to(tl.int64) * stride_bl + j
        z = load_z(z_ptr, z_offsets[:, None] + j[None, :], z_mask, split_stride, SPLITS)
        b, bad = load_b(b_ptr, b0_offsets[:, None] + b_offsets[None, :], col_mask, j, rank, bad, VEC)
        acc0 = tl.dot(z.to(b.dtype), tl.trans(b), acc0, input_precision="ieee")
        if NUM_SLICES == 2:
            z = load_z(z_ptr + tiles_per_slot * 16, z_offsets[:, None] + j[None, :], z_mask, split_stride, SPLITS)
            b, bad = load_b(b_ptr, b1_offsets[:, None] + b_offsets[None, :], col_mask, j, rank, bad, VEC)
            acc1 = tl.dot(z.to(b.dtype), tl.trans(b), acc1, input_precision="ieee")
    if tl.max(bad, axis=0) > 0:
        acc0 = mark_bad(acc0, begin, end, first_tile, end_tile, tiles_ptr, tiles_per_slot, b_ptr, stride_bl, b0_offsets,
                        col_mask, ranks_ptr, max_loras, max_rank)  # fmt: skip
        if NUM_SLICES == 2:
            acc1 = mark_bad(acc1, begin, end, first_tile, end_tile, tiles_ptr, tiles_per_slot, b_ptr, stride_bl, b1_offsets,
                            col_mask, ranks_ptr, max_loras, max_rank)  # fmt: skip
    return acc0, acc1


@triton.jit
def mark_bad(
    acc, begin, end, first_tile, end_tile, tiles_ptr, tiles_per_slot, b_ptr, stride_bl, b_offsets, col_mask, ranks_ptr,
    max_loras, max_rank,
):  # fmt: skip
    """NaN where a row's own B has something that is not finite in the column's row."""
    for tile in range(first_tile, end_tile):
        code = tl.load(tiles_ptr + tile)
        slot = code // tiles_per_slot
        known = (code >= 0) & (slot < max_loras)
        j = (code % tiles_per_slot) * 16 + tl.arange(0, 16)
        offsets = b_offsets[:, None] + (slot.to(tl.int64) * stride_bl + j)[None, :]
        bad = tl.zeros((acc.shape[1],), tl.int32)
        _, bad = load_b(b_ptr, offsets, col_mask, j, slot_rank(ranks_ptr, slot, known, max_rank), bad, 1)
        owner = (begin <= tile) & (tile < end)
        acc = tl.where(owner[:, None] & (bad > 0)[None, :], float("nan"), acc)
    return acc
