"""Kernels of the delta op with the activation behind it: the shrink of `_delta`, then one that expands, adds and activates.

Unfused, a row of 2 I columns is read and written by the expand, then read again by the activation, which writes I: 7 I values.
Here it is read once and I values are written. Rows that no block of the alignment holds are activated as well, by programs of
their own in the second launch. Which rows those are, the shrink tells without anything being cleared before: it writes for each
pair that it sees the place in the table where it saw it, and a place is believed only where the table has that pair there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._delta import _SIZES, _TABLES, count_windows, floor_to, load_window, load_z, next_run, row_offsets
from .gate_up import activate

_B_STRIDES = ["stride_b0l", "stride_b0e", "stride_b0n", "stride_b1l", "stride_b1e", "stride_b1n"]


@triton.jit
def is_held(
    pairs, places_ptr, sorted_token_ids_ptr, num_tokens_post_padded_ptr, num_pairs, max_loras, block_size, blocks_per_slot,
    capacity,
):  # fmt: skip
    """Whether a block of the alignment holds each of some pairs; `places` has anything at all for those that none holds."""
    place = tl.load(places_ptr + pairs, mask=pairs < num_pairs, other=-1)
    known = (place >= 0) & (place < tl.cast(max_loras, tl.int64) * capacity)
    place = tl.where(known, place, 0)
    slot = place // capacity
    padded = tl.load(num_tokens_post_padded_ptr + slot, mask=known, other=0)
    blocks = tl.minimum(tl.maximum(padded // block_size, 0), blocks_per_slot)
    known &= place - slot * capacity < blocks * block_size
    return known & (tl.load(sorted_token_ids_ptr + place, mask=known, other=-1) == pairs)


@triton.jit
def load_b(b_ptr, slot, expert, columns, last_column, stride_l, stride_e, stride_n, ranks, rank, UNIT_R: tl.constexpr):
    """[ranks, columns] of one slot's and expert's B, zero past its rank."""
    b_ptrs = b_ptr + row_offsets(slot, expert, columns, stride_l, stride_e, stride_n, UNIT_R)[None, :] + ranks[:, None]
    mask = (columns < last_column)[None, :] & (floor_to(ranks, UNIT_R) < rank)[:, None]
    return tl.where((ranks < rank)[:, None], tl.load(b_ptrs, mask=mask, other=0.0), 0.0)


@triton.jit
def row_pointers(base_ptr, out_ptr, pairs, stride_bt, stride_bk, num_columns, TOP_K: tl.constexpr, UNIT_N: tl.constexpr):
    """Where the rows of some pairs begin, in the base and in the result."""
    base_rows = base_ptr + (pairs // TOP_K).to(tl.int64) * floor_to(stride_bt, UNIT_N)
    base_rows += (pairs % TOP_K).to(tl.int64) * floor_to(stride_bk, UNIT_N)
    return base_rows, out_ptr + pairs.to(tl.int64) * num_columns


@triton.jit
def load_base(rows, columns, num_columns, mask, GATED: tl.constexpr):
    """Some columns of gate and up in fp32; of one slice the same twice."""
    gate = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(rows[:, None] + (columns + num_columns)[None, :], mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit(
    do_not_specialize=[*_SIZES, "window_programs", "out_features", "stride_bt", "stride_bk", "stride_zm", *_B_STRIDES],
    do_not_specialize_on_alignment=[*_TABLES, "topk_weights_ptr", "places_ptr"],
)
def expand_activation_kernel(
    out_ptr,  # [P, I]
    base_ptr,
    z_ptr,
    b0_ptr,
    b1_ptr,  # None: one slice, not gated
    topk_weights_ptr,  # None: the delta is not weighted
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    ranks_ptr,
    places_ptr,
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    parts,
    capacity,
    max_rank,
    window_programs,  # those from there on take the pairs without a block
    out_features,
    stride_bt,
    stride_bk,
    stride_zm,
    stride_b0l,
    stride_b0e,
    stride_b0n,
    stride_b1l,
    stride_b1e,
    stride_b1n,
    ACTIVATION: tl.constexpr,
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
    """out[pair, n] = f(base + [w] z B^T): silu(gate) * up and the like, rounded once; without a delta where there is no block.

    Grid: programs of (a window, a range of columns of the result) that stride over the windows; then programs of (a tile of
    BLOCK_M pairs, such a range) that stride over the tiles, for the pairs that no block holds.
    """
    GATED: tl.constexpr = b1_ptr is not None
    num_columns = floor_to(out_features, UNIT_N)
    groups = tl.cdiv(num_columns, COLUMNS)
    first_column = tl.program_id(0) % groups * COLUMNS
    last_column = tl.minimum(first_column + COLUMNS, num_columns)
    if tl.program_id(0) >= window_programs:
        gdc_wait(USE_PDL)  # the places are the shrink's
        gdc_launch(USE_PDL)
        first, step = (tl.program_id(0) - window_programs) // groups, (tl.num_programs(0) - window_programs) // groups
        for tile in tl.range(first, tl.cdiv(num_pairs, BLOCK_M), step, num_stages=1):
            pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            held = is_held(
                pairs, places_ptr, sorted_token_ids_ptr, num_tokens_post_padded_ptr, num_pairs, max_loras, block_size,
                blocks_per_slot, capacity,
            )  # fmt: skip
            plain = (pairs < num_pairs) & (held == 0)
            base_rows, out_rows = row_pointers(base_ptr, out_ptr, pairs, stride_bt, stride_bk, num_columns, TOP_K, UNIT_N)
            for column in tl.range(first_column, tl.where(tl.max(plain.to(tl.int32)) > 0, last_column, 0), BLOCK_N):
                columns = column + tl.arange(0, BLOCK_N)
                mask = plain[:, None] & (floor_to(columns, UNIT_N) < last_column)[None, :]
                gate, up = load_base(base_rows, columns, num_columns, mask, GATED)
                result = activate(gate, up, 0.0, None, ACTIVATION, GATED)
                tl.store(out_rows[:, None] + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
        return
    ranks = tl.arange(0, BLOCK_R)
    z_stride = floor_to(stride_zm, UNIT_R)
    z1_ptr = z_ptr + floor_to(max_rank, UNIT_R)
    blocks, ends, num_windows = count_windows(
        num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, parts, SPAN, SLOTS
    )
    for window in tl.range(tl.program_id(0) // groups, num_windows, window_programs // groups, num_stages=1):
        slot, slot_rank, num_blocks, experts, _, pairs = load_window(
            window, blocks, ends, sorted_token_ids_ptr, expert_ids_ptr, ranks_ptr, max_loras, block_size, blocks_per_slot,
            parts, capacity, max_rank, BLOCK_M, SPAN, SLOTS,
        )  # fmt: skip
        begin = 0
        while begin < num_blocks:
            expert, begin, valid = next_run(begin, num_blocks, experts, pairs, num_pairs, block_size, parts, BLOCK_M, SPAN)
            # An expert that A and B lack, or a rank of zero: everything is masked away and the rows are activated as they are.
            rank = tl.where((expert >= 0) & (expert < num_experts), slot_rank, 0)
            gdc_wait(USE_PDL)
            gdc_launch(USE_PDL)
            base_rows, out_rows = row_pointers(base_ptr, out_ptr, pairs, stride_bt, stride_bk, num_columns, TOP_K, UNIT_N)
            weight = 1.0
            if topk_weights_ptr is not None:
                weight = tl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)[:, None]
            z0 = load_z(z_ptr, pairs, z_stride, num_pairs, valid, ranks, rank, UNIT_R, SPLITS).to(b0_ptr.dtype.element_ty)
            z1 = z0
            if GATED:
                z1 = load_z(z1_ptr, pairs, z_stride, num_pairs, valid, ranks, rank, UNIT_R, SPLITS).to(z0.dtype)
            for column in tl.range(first_column, last_column, BLOCK_N, num_stages=STAGES):
                columns = column + tl.arange(0, BLOCK_N)
                mask = valid[:, None] & (floor_to(columns, UNIT_N) < last_column)[None, :]
                base_gate, base_up = load_base(base_rows, columns, num_columns, mask, GATED)
                b = load_b(b0_ptr, slot, expert, columns, last_column, stride_b0l, stride_b0e, stride_b0n, ranks, rank, UNIT_R)
                gate = tl.dot(z0, b, input_precision="ieee")
                up = gate
                if GATED:
                    b = load_b(
                        b1_ptr, slot, expert, columns, last_column, stride_b1l, stride_b1e, stride_b1n, ranks, rank, UNIT_R
                    )
                    up = tl.dot(z1, b, input_precision="ieee")
                if MORE_RANKS:
                    for rank_begin in tl.range(BLOCK_R, rank, BLOCK_R):
                        more = rank_begin + ranks
                        z = load_z(z_ptr, pairs, z_stride, num_pairs, valid, more, rank, UNIT_R, SPLITS).to(z0.dtype)
                        b = load_b(
                            b0_ptr, slot, expert, columns, last_column, stride_b0l, stride_b0e, stride_b0n, more, rank, UNIT_R
                        )
                        gate = tl.dot(z, b, gate, input_precision="ieee")
                        if GATED:
                            z = load_z(z1_ptr, pairs, z_stride, num_pairs, valid, more, rank, UNIT_R, SPLITS).to(z0.dtype)
                            b = load_b(
                                b1_ptr, slot, expert, columns, last_column, stride_b1l, stride_b1e, stride_b1n, more, rank,
                                UNIT_R,
                            )  # fmt: skip
                            up = tl.dot(z, b, up, input_precision="ieee")
                gate = gate * weight + base_gate
                up = up * weight + base_up
                result = activate(gate, up, 0.0, None, ACTIVATION, GATED)
                tl.store(out_rows[:, None] + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
    gdc_wait(USE_PDL)  # no program ends before the shrink has: whatever is behind waits for this launch alone
