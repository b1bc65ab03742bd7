"""Device functions of the delta op: find a program's rows, and the two LoRA products on them.

Accesses are as wide as UNIT elements (8 where sizes and strides allow, else 1): masks are constant over a UNIT, and what a
wide load brings in past an adapter's rank is selected away in registers. It may be NaN and still never reach a result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def floor_to(x, UNIT: tl.constexpr):
    """x rounded down to a multiple of UNIT; where it is one already, this is how the compiler learns of it."""
    return x // UNIT * UNIT


@triton.jit
def locate_rows(
    unit,  # index of rows to work on: a block, a part of a block, or the head of a run of blocks
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    ranks_ptr,
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    units_per_block,
    capacity,
    max_rank,
    ROWS: tl.constexpr,  # at most, a power of two
    SPAN: tl.constexpr,  # blocks of one expert within an aligned window of SPAN are one piece of work, done by the first
    CHUNK: tl.constexpr,
):
    """(slot, expert, rank, pointer to the first pair id, rows up to the last pair, number of units of all slots).

    No rows: the unit is past the last block, belongs to the unit before, or has nothing to add.
    """
    flat = unit // units_per_block
    slot = -1
    block = 0
    blocks = 0
    total = 0
    for begin in range(0, max_loras, CHUNK):
        slots = begin + tl.arange(0, CHUNK)
        padded = tl.load(num_tokens_post_padded_ptr + slots, mask=slots < max_loras, other=0)
        counts = tl.minimum(tl.maximum(padded // block_size, 0), blocks_per_slot)
        end = total + tl.cumsum(counts, 0)
        here = (flat >= end - counts) & (flat < end)  # true for one slot at most
        slot = tl.maximum(slot, tl.max(tl.where(here, slots, -1)))
        block += tl.sum(tl.where(here, flat - (end - counts), 0))
        blocks += tl.sum(tl.where(here, counts, 0))
        total += tl.sum(counts)
    rows = tl.arange(0, ROWS)
    part = unit % units_per_block * ROWS  # rows of the block that other units have; 0 where SPAN > 1
    slot64 = tl.cast(slot, tl.int64)
    ids_ptr = sorted_token_ids_ptr + slot64 * capacity + tl.cast(block, tl.int64) * block_size + part
    experts_ptr = expert_ids_ptr + slot64 * blocks_per_slot
    # The three loads depend on slot and block alone: one latency. No slot: no blocks, so no room.
    room = tl.minimum(blocks - block, SPAN) * block_size - part
    pairs = tl.load(ids_ptr + rows, mask=rows < room, other=-1)
    if ranks_ptr is None:
        rank = max_rank
    else:
        rank = tl.minimum(tl.maximum(tl.load(ranks_ptr + slot, mask=slot >= 0, other=0), 0), max_rank)
    if SPAN == 1:
        expert = tl.load(experts_ptr + block, mask=slot >= 0, other=-1)
    else:
        window = block // SPAN * SPAN + tl.arange(0, SPAN)
        experts = tl.load(experts_ptr + window, mask=window < blocks, other=-1)
        expert = tl.sum(tl.where(window == block, experts, 0))
        stop = tl.min(tl.where((window > block) & (experts != expert), window, block // SPAN * SPAN + SPAN))
        room = (stop - block) * block_size
        follows = tl.max(tl.where((window == block - 1) & (experts == expert), 1, 0))
        room = tl.where(follows == 0, room, 0)
    room = tl.where((slot >= 0) & (expert >= 0) & (expert < num_experts) & (rank > 0), room, 0)
    valid = (rows < room) & (pairs >= 0) & (pairs < num_pairs)
    return slot, expert, rank, ids_ptr, tl.max(tl.where(valid, rows + 1, 0)), total * units_per_block


@triton.jit
def shrink_tile(
    x_ptr,
    x_offsets,  # [BLOCK_M] int64: element offset of each row of x
    valid,  # [BLOCK_M]
    a0_ptr,  # A of this slot and expert, slice 0: [rank, in_features]
    stride_a0r,
    a1_ptr,  # slice 1, unused when NUM_SLICES is 1
    stride_a1r,
    rank_begin,
    rank,
    k_begin,
    k_end,
    NUM_SLICES: tl.constexpr,
    EVEN_K: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, NUM_SLICES * BLOCK_R] fp32: x[row, k_begin:k_end] . A_s[rank_begin + j, k_begin:k_end], 0 past the rank."""
    columns = tl.arange(0, NUM_SLICES * BLOCK_R)
    ranks = rank_begin + columns % BLOCK_R
    ks = tl.arange(0, BLOCK_K)
    a_rows = a0_ptr + k_begin + ranks.to(tl.int64) * floor_to(stride_a0r, UNIT)
    if NUM_SLICES == 2:
        a_rows = tl.where(columns < BLOCK_R, a_rows, a1_ptr + k_begin + ranks.to(tl.int64) * floor_to(stride_a1r, UNIT))
    x_ptrs = x_ptr + k_begin + x_offsets[:, None] + ks[None, :]
    a_ptrs = a_rows[None, :] + ks[:, None]
    a_live = (ranks < rank)[None, :]
    z = tl.zeros((BLOCK_M, NUM_SLICES * BLOCK_R), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=valid[:, None], other=0.0)
            a = tl.load(a_ptrs, mask=a_live, other=0.0)
        else:
            inside = floor_to(ks, UNIT) < k_end - k
            x = tl.load(x_ptrs, mask=valid[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=a_live & inside[:, None], other=0.0)
        z = tl.dot(x, a, z, input_precision="ieee")
        x_ptrs += BLOCK_K
        a_ptrs += BLOCK_K
    return tl.where(a_live, z, 0.0)


@triton.jit
def column_tile(
    tile,
    num_tiles,
    out_rows,  # [BLOCK_M] pointers to the first column of each row
    valid,
    out_features,
    NUM_SLICES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(slice, its columns, how many it has, pointers and mask of the output) of a tile; a tile past the last has no columns."""
    out_features = floor_to(out_features, UNIT)
    tiles_per_slice = tl.cdiv(out_features, BLOCK_N)
    part = tile // tiles_per_slice if NUM_SLICES == 2 else 0
    columns = (tile - part * tiles_per_slice) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_columns = tl.where(tile < num_tiles, out_features, 0)
    out_ptrs = out_rows[:, None] + (part * out_features + columns)[None, :]
    return part, columns, num_columns, out_ptrs, valid[:, None] & (floor_to(columns, UNIT) < num_columns)[None, :]


@triton.jit
def load_b(
    part,
    columns,
    num_columns,
    b0_ptr,  # B of this slot and expert, slice 0: [out_features, rank]
    stride_b0n,
    b1_ptr,
    stride_b1n,
    ranks,
    rank,
    NUM_SLICES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """[ranks, columns] of one slice's B. Columns up to the next UNIT past the rank hold anything: select, never add them."""
    b_ptr = b0_ptr
    stride = floor_to(stride_b0n, UNIT)
    if NUM_SLICES == 2:
        b_ptr = tl.where(part == 0, b0_ptr, b1_ptr)
        stride = tl.where(part == 0, stride, floor_to(stride_b1n, UNIT))
    b_ptrs = b_ptr + columns.to(tl.int64)[None, :] * stride + ranks[:, None]
    return tl.load(b_ptrs, mask=(floor_to(ranks, UNIT) < rank)[:, None] & (columns < num_columns)[None, :], other=0.0)


@triton.jit
def load_tile(
    tile,
    num_tiles,
    out_rows,
    valid,
    out_features,
    b0_ptr,
    stride_b0n,
    b1_ptr,
    stride_b1n,
    ranks,
    rank,
    NUM_SLICES: tl.constexpr,
    UNIT_N: tl.constexpr,
    UNIT_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(B's [ranks, columns], output [rows, columns]) of a tile."""
    part, columns, num_columns, out_ptrs, out_mask = column_tile(
        tile, num_tiles, out_rows, valid, out_features, NUM_SLICES, UNIT_N, BLOCK_N
    )
    b = load_b(part, columns, num_columns, b0_ptr, stride_b0n, b1_ptr, stride_b1n, ranks, rank, NUM_SLICES, UNIT_R)
    return b, tl.load(out_ptrs, mask=out_mask, other=0.0)


@triton.jit
def load_z(z_ptr, z_offsets, split_stride, valid, ranks, rank, UNIT: tl.constexpr, SPLITS: tl.constexpr):
    """[rows, ranks] of z, partial sums added in fixed order. Columns up to the next UNIT past the rank are 0 in z."""
    z_ptrs = z_ptr + z_offsets[:, None] + ranks[None, :]
    mask = valid[:, None] & (floor_to(ranks, UNIT) < rank)[None, :]
    z = tl.load(z_ptrs, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        z += tl.load(z_ptrs + split * split_stride, mask=mask, other=0.0)
    return z
