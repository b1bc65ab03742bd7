"""Kernels of the delta op: shrink every row into its adapter's rank space, then expand it onto the output.

Both read the table of the alignment as *windows*: consecutive blocks of one slot that fill a tile of BLOCK_M rows, or a part of
one block that has more. Programs find the windows on the device and stride over them, so that there is none for blocks that do
not exist; a window is walked run by run of equal experts.

Accesses are as wide as UNIT elements (8 where sizes and strides allow, else 1): masks are constant over a UNIT, and what a
wide load brings in past an adapter's rank is selected away in registers. It may be NaN and still never reach a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait

_TABLES = ["sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr", "ranks_ptr"]
_SIZES = ["num_pairs", "max_loras", "num_experts", "block_size", "blocks_per_slot", "parts", "capacity", "max_rank"]


@triton.jit
def floor_to(x, UNIT: tl.constexpr):
    """x rounded down to a multiple of UNIT; where it is one already, this is how the compiler learns of it."""
    return x // UNIT * UNIT


@triton.jit
def row_offsets(slot, expert, rows, stride_l, stride_e, stride_row, UNIT: tl.constexpr):
    """Element offsets of some rows of one slot's and expert's matrix."""
    offset = slot.to(tl.int64) * floor_to(stride_l, UNIT) + expert.to(tl.int64) * floor_to(stride_e, UNIT)
    return offset + rows.to(tl.int64) * floor_to(stride_row, UNIT)


@triton.jit
def count_windows(
    num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, parts, SPAN: tl.constexpr, SLOTS: tl.constexpr
):
    """(blocks of each slot, windows up to its end, windows of all slots)."""
    slots = tl.arange(0, SLOTS)
    padded = tl.load(num_tokens_post_padded_ptr + slots, mask=slots < max_loras, other=0)
    blocks = tl.minimum(tl.maximum(padded // block_size, 0), blocks_per_slot)
    windows = tl.cdiv(blocks, SPAN) * parts
    return blocks, tl.cumsum(windows, 0), tl.sum(windows)


@triton.jit
def load_window(
    window,
    blocks,
    ends,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    ranks_ptr,
    max_loras,
    block_size,
    blocks_per_slot,
    parts,  # windows of a block; 1 where SPAN > 1
    capacity,
    max_rank,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,  # blocks of a window
    SLOTS: tl.constexpr,
):
    """(slot, its rank, number of blocks, their experts [SPAN], where the rows lie in the table, their pair ids [BLOCK_M]).

    No blocks past the last window. The three loads depend on the window alone: one latency.
    """
    before = ends <= window
    slot = tl.sum(before.to(tl.int32))
    index = window - tl.max(tl.where(before, ends, 0))
    block = index // parts * SPAN
    part = index % parts * BLOCK_M
    num_blocks = tl.sum(tl.where(tl.arange(0, SLOTS) == slot, blocks, 0)) - block
    num_blocks = tl.minimum(tl.maximum(num_blocks, 0), SPAN)  # past the last slot: 0
    slot = tl.minimum(slot, max_loras - 1)
    rows = part + tl.arange(0, BLOCK_M)
    places = slot.to(tl.int64) * capacity + block.to(tl.int64) * block_size + rows
    pairs = tl.load(sorted_token_ids_ptr + places, mask=rows < num_blocks * block_size, other=-1)
    i = tl.arange(0, SPAN)
    experts = tl.load(expert_ids_ptr + slot.to(tl.int64) * blocks_per_slot + block + i, mask=i < num_blocks, other=-1)
    rank = max_rank
    if ranks_ptr is not None:
        rank = tl.minimum(tl.maximum(tl.load(ranks_ptr + slot), 0), max_rank)
    return slot, rank, num_blocks, experts, places, pairs


@triton.jit
def next_run(begin, num_blocks, experts, pairs, num_pairs, block_size, parts, BLOCK_M: tl.constexpr, SPAN: tl.constexpr):
    """(expert of block `begin` of a window, first block after it with another, [BLOCK_M] which rows are pairs of this run)."""
    if SPAN == 1:
        return tl.sum(experts), begin + 1, (pairs >= 0) & (pairs < num_pairs)
    else:
        i = tl.arange(0, SPAN)
        expert = tl.sum(tl.where(i == begin, experts, 0))
        end = tl.min(tl.where((i > begin) & (experts != expert), i, num_blocks))
        rows = tl.arange(0, BLOCK_M)
        inside = (rows >= begin * block_size) & (rows < end * block_size)
        return expert, end, inside & (pairs >= 0) & (pairs < num_pairs)


@triton.jit(
    do_not_specialize=[
        *_SIZES, "in_features", "rank_blocks", "stride_xm", "stride_a0l", "stride_a0e", "stride_a0r",
        "stride_a1l", "stride_a1e", "stride_a1r", "stride_zm",
    ],
    do_not_specialize_on_alignment=[*_TABLES, "places_ptr"],
)  # fmt: skip
def delta_shrink_kernel(
    x_ptr,
    z_ptr,  # [SPLITS, P, NUM_SLICES * R]
    a0_ptr,
    a1_ptr,  # None: one slice
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    ranks_ptr,
    places_ptr,  # [P] out: where the table holds each pair that it holds, for `is_held`; None: nobody asks
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    parts,
    capacity,
    max_rank,
    in_features,
    rank_blocks,  # blocks of BLOCK_R ranks in a slot
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
    UNIT_K: tl.constexpr,
    UNIT_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """z[split, pair, s * R + j] = x[pair] . A_s[slot, expert, j] over one split of K; 0 from the rank to the next UNIT_R.

    Grid: programs of (a window, a block of ranks, a split of K) that stride over the windows.
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    NUM_SLICES: tl.constexpr = 1 if a1_ptr is None else 2
    split = tl.program_id(0) % SPLITS
    rank_begin = tl.program_id(0) // SPLITS % rank_blocks * BLOCK_R
    programs = SPLITS * rank_blocks
    k_steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS)
    k_begin = split * k_steps * BLOCK_K
    k_end = tl.minimum(k_begin + k_steps * BLOCK_K, in_features)
    z_stride = floor_to(stride_zm, UNIT_R)
    ranks = rank_begin + tl.arange(0, BLOCK_R)
    ks = tl.arange(0, BLOCK_K)
    blocks, ends, num_windows = count_windows(
        num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, parts, SPAN, SLOTS
    )
    for window in tl.range(tl.program_id(0) // programs, num_windows, tl.num_programs(0) // programs, num_stages=1):
        slot, rank, num_blocks, experts, places, pairs = load_window(
            window, blocks, ends, sorted_token_ids_ptr, expert_ids_ptr, ranks_ptr, max_loras, block_size, blocks_per_slot,
            parts, capacity, max_rank, BLOCK_M, SPAN, SLOTS,
        )  # fmt: skip
        if places_ptr is not None and tl.program_id(0) % programs == 0:
            tl.store(places_ptr + pairs, places, mask=(pairs >= 0) & (pairs < num_pairs))
        begin = 0
        while begin < num_blocks:
            expert, begin, valid = next_run(begin, num_blocks, experts, pairs, num_pairs, block_size, parts, BLOCK_M, SPAN)
            if (expert >= 0) & (expert < num_experts) & (rank_begin < rank):
                x_rows = (pairs // ROWS_PER_INPUT).to(tl.int64) * floor_to(stride_xm, UNIT_K)
                x_ptrs = x_ptr + k_begin + x_rows[:, None] + ks[None, :]
                a_rows = row_offsets(slot, expert, ranks, stride_a0l, stride_a0e, stride_a0r, UNIT_K)
                a0_ptrs = a0_ptr + k_begin + a_rows[None, :] + ks[:, None]
                a1_ptrs = a0_ptrs
                if NUM_SLICES == 2:
                    a_rows = row_offsets(slot, expert, ranks, stride_a1l, stride_a1e, stride_a1r, UNIT_K)
                    a1_ptrs = a1_ptr + k_begin + a_rows[None, :] + ks[:, None]
                live = (ranks < rank)[None, :]
                z0 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                z1 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for k in range(k_begin, k_end, BLOCK_K):
                    x_mask, a_mask = valid[:, None], live
                    if not EVEN_K:
                        inside = floor_to(ks, UNIT_K) < k_end - k
                        x_mask &= inside[None, :]
                        a_mask &= inside[:, None]
                    x = tl.load(x_ptrs, mask=x_mask, other=0.0)
                    z0 = tl.dot(x, tl.load(a0_ptrs, mask=a_mask, other=0.0), z0, input_precision="ieee")
                    if NUM_SLICES == 2:
                        z1 = tl.dot(x, tl.load(a1_ptrs, mask=a_mask, other=0.0), z1, input_precision="ieee")
                    x_ptrs += BLOCK_K
                    a0_ptrs += BLOCK_K
                    a1_ptrs += BLOCK_K
                z_rows = (split.to(tl.int64) * num_pairs + pairs) * z_stride
                z_ptrs = z_ptr + z_rows[:, None] + ranks[None, :]
                z_mask = valid[:, None] & (floor_to(ranks, UNIT_R) < rank)[None, :]
                tl.store(z_ptrs, tl.where(live, z0, 0.0).to(z_ptr.dtype.element_ty), mask=z_mask)
                if NUM_SLICES == 2:
                    z_ptrs += floor_to(max_rank, UNIT_R)
                    tl.store(z_ptrs, tl.where(live, z1, 0.0).to(z_ptr.dtype.element_ty), mask=z_mask)


@triton.jit(
    do_not_specialize=[
        *_SIZES, "out_features", "offset", "stride_ot", "stride_ok", "stride_zm", "stride_b0l", "stride_b0e", "stride_b0n",
        "stride_b1l", "stride_b1e", "stride_b1n",
    ],
    do_not_specialize_on_alignment=[*_TABLES, "topk_weights_ptr"],
)  # fmt: skip
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
    parts,
    capacity,
    max_rank,
    out_features,
    offset,
    stride_ot,
    stride_ok,
    stride_zm,
    stride_b0l,
    stride_b0e,
    stride_b0n,
    stride_b1l,
    stride_b1e,
    stride_b1n,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    MORE_RANKS: tl.constexpr,  # than BLOCK_R
    UNIT_R: tl.constexpr,
    UNIT_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,  # that one program walks
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
    SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """output[t, k, offset + s * N + n] += [w] * sum over j of z[pair, s * R + j] * B_s[slot, expert, n, j], rounded once.

    Grid: programs of (a window, a tile of columns of one slice) that stride over the windows: neighbours share rows and B.

    The shrink waited before it let this launch start, so all that is older (table, B, output) is complete and may be read
    before the wait; only z may not.
    """
    NUM_SLICES: tl.constexpr = 1 if b1_ptr is None else 2
    num_columns = floor_to(out_features, UNIT_N)
    groups = tl.cdiv(num_columns, COLUMNS)
    programs = NUM_SLICES * groups
    part = tl.program_id(0) % programs // groups
    first_column = tl.program_id(0) % groups * COLUMNS
    last_column = tl.minimum(first_column + COLUMNS, num_columns)
    ranks = tl.arange(0, BLOCK_R)
    b_ptr, stride_bl, stride_be, stride_bn = b0_ptr, stride_b0l, stride_b0e, stride_b0n
    if NUM_SLICES == 2:
        b_ptr = tl.where(part == 0, b0_ptr, b1_ptr)
        stride_bl = tl.where(part == 0, stride_b0l, stride_b1l)
        stride_be = tl.where(part == 0, stride_b0e, stride_b1e)
        stride_bn = tl.where(part == 0, stride_b0n, stride_b1n)
    out_ptr = output_ptr + floor_to(offset, UNIT_N) + part * num_columns
    z_stride = floor_to(stride_zm, UNIT_R)
    z_ptr += part * floor_to(max_rank, UNIT_R)
    blocks, ends, num_windows = count_windows(
        num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, parts, SPAN, SLOTS
    )
    for window in tl.range(tl.program_id(0) // programs, num_windows, tl.num_programs(0) // programs, num_stages=1):
        slot, rank, num_blocks, experts, _, pairs = load_window(
            window, blocks, ends, sorted_token_ids_ptr, expert_ids_ptr, ranks_ptr, max_loras, block_size, blocks_per_slot,
            parts, capacity, max_rank, BLOCK_M, SPAN, SLOTS,
        )  # fmt: skip
        begin = 0
        while begin < num_blocks:
            expert, begin, valid = next_run(begin, num_blocks, experts, pairs, num_pairs, block_size, parts, BLOCK_M, SPAN)
            if (expert >= 0) & (expert < num_experts) & (rank > 0):
                gdc_wait(USE_PDL)
                gdc_launch(USE_PDL)
                out_rows = out_ptr + (pairs // TOP_K).to(tl.int64) * floor_to(stride_ot, UNIT_N)
                out_rows += (pairs % TOP_K).to(tl.int64) * floor_to(stride_ok, UNIT_N)
                weight = 1.0
                if topk_weights_ptr is not None:
                    weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)[:, None]
                z = load_z(z_ptr, pairs, z_stride, num_pairs, valid, ranks, rank, UNIT_R, SPLITS).to(b_ptr.dtype.element_ty)
                for column in tl.range(first_column, last_column, BLOCK_N, num_stages=STAGES):
                    columns = column + tl.arange(0, BLOCK_N)
                    b_ptrs = b_ptr + row_offsets(slot, expert, columns, stride_bl, stride_be, stride_bn, UNIT_R)[None, :]
                    b_ptrs += ranks[:, None]
                    b_mask = (columns < last_column)[None, :]
                    b = tl.load(b_ptrs, mask=b_mask & (floor_to(ranks, UNIT_R) < rank)[:, None], other=0.0)
                    out_mask = valid[:, None] & (floor_to(columns, UNIT_N) < last_column)[None, :]
                    base = tl.load(out_rows[:, None] + columns[None, :], mask=out_mask, other=0.0)
                    delta = tl.dot(z, tl.where((ranks < rank)[:, None], b, 0.0), input_precision="ieee")
                    if MORE_RANKS:
                        for first in tl.range(BLOCK_R, rank, BLOCK_R):
                            more = first + ranks
                            b = tl.load(b_ptrs + first, mask=b_mask & (floor_to(more, UNIT_R) < rank)[:, None], other=0.0)
                            more_z = load_z(z_ptr, pairs, z_stride, num_pairs, valid, more, rank, UNIT_R, SPLITS)
                            b = tl.where((more < rank)[:, None], b, 0.0)
                            delta = tl.dot(more_z.to(b.dtype), b, delta, input_precision="ieee")
                    result = base.to(tl.float32) + delta * weight
                    tl.store(out_rows[:, None] + columns[None, :], result.to(output_ptr.dtype.element_ty), mask=out_mask)
    gdc_wait(USE_PDL)  # no program ends before the shrink has: whatever is behind waits for this launch alone


@triton.jit
def load_z(z_ptr, pairs, z_stride, num_pairs, valid, ranks, rank, UNIT: tl.constexpr, SPLITS: tl.constexpr):
    """[rows, ranks] of z, partial sums added in fixed order."""
    z_ptrs = z_ptr + pairs.to(tl.int64)[:, None] * z_stride + ranks[None, :]
    mask = valid[:, None] & (floor_to(ranks, UNIT) < rank)[None, :]
    z = tl.load(z_ptrs, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        z += tl.load(z_ptrs + split * tl.cast(num_pairs, tl.int64) * z_stride, mask=mask, other=0.0)
    return z
