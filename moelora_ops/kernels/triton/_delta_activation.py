"""Kernels of the delta op with the activation behind it: the second one expands, adds the base and activates in one pass.

Unfused, a row of 2 I columns is read and written by the expand, then read again by the activation, which writes I: 7 I values.
Here it is read once and I values are written. Rows that no block of the alignment holds are activated as well: the shrink marks
the pairs it sees, and the programs of the second launch take the unmarked ones when they are done with their windows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._delta import _SIZES, _TABLES, count_windows, delta_shrink_kernel, floor_to, load_window, load_z, next_run, row_offsets
from .gate_up import activate

_A_STRIDES = ["stride_a0l", "stride_a0e", "stride_a0r", "stride_a1l", "stride_a1e", "stride_a1r"]
_B_STRIDES = ["stride_b0l", "stride_b0e", "stride_b0n", "stride_b1l", "stride_b1e", "stride_b1n"]


@triton.jit(
    do_not_specialize=[*_SIZES, "in_features", "rank_blocks", "stride_xm", *_A_STRIDES, "stride_zm"],
    do_not_specialize_on_alignment=[*_TABLES, "marks_ptr"],
)
def shrink_and_mark_kernel(
    x_ptr, z_ptr, a0_ptr, a1_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr, ranks_ptr,
    marks_ptr,  # [P] int8, zeros; 1 afterwards for pairs that a block holds
    num_pairs, max_loras, num_experts, block_size, blocks_per_slot, parts, capacity, max_rank, in_features, rank_blocks,
    stride_xm, stride_a0l, stride_a0e, stride_a0r, stride_a1l, stride_a1e, stride_a1r, stride_zm,
    ROWS_PER_INPUT: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, UNIT_K: tl.constexpr, UNIT_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr, SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """`delta_shrink_kernel`, on its grid; whoever has the first block of ranks and the first split marks the rows."""
    delta_shrink_kernel(
        x_ptr, z_ptr, a0_ptr, a1_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr, ranks_ptr,
        num_pairs, max_loras, num_experts, block_size, blocks_per_slot, parts, capacity, max_rank, in_features, rank_blocks,
        stride_xm, stride_a0l, stride_a0e, stride_a0r, stride_a1l, stride_a1e, stride_a1r, stride_zm,
        ROWS_PER_INPUT, SPLITS, EVEN_K, UNIT_K, UNIT_R, BLOCK_M, BLOCK_R, BLOCK_K, SPAN, SLOTS, USE_PDL,
    )  # fmt: skip
    programs = SPLITS * rank_blocks
    if tl.program_id(0) % programs == 0:
        blocks, ends, num_windows = count_windows(
            num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, parts, SPAN, SLOTS
        )
        for window in tl.range(tl.program_id(0) // programs, num_windows, tl.num_programs(0) // programs, num_stages=1):
            slot, rank, num_blocks, experts, pairs = load_window(
                window, blocks, ends, sorted_token_ids_ptr, expert_ids_ptr, ranks_ptr, max_loras, block_size,
                blocks_per_slot, parts, capacity, max_rank, BLOCK_M, SPAN, SLOTS,
            )  # fmt: skip
            tl.store(marks_ptr + pairs, 1, mask=(pairs >= 0) & (pairs < num_pairs))


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


@triton.jit(
    do_not_specialize=[*_SIZES, "out_features", "stride_bt", "stride_bk", "stride_zm", *_B_STRIDES],
    do_not_specialize_on_alignment=[*_TABLES, "topk_weights_ptr", "marks_ptr"],
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
    marks_ptr,
    num_pairs,
    max_loras,
    num_experts,
    block_size,
    blocks_per_slot,
    parts,
    capacity,
    max_rank,
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

    Grid: programs of (a window, a range of columns of the result) that stride over the windows, then over the tiles of
    BLOCK_M pairs for those without a mark.
    """
    GATED: tl.constexpr = b1_ptr is not None
    num_columns = floor_to(out_features, UNIT_N)
    groups = tl.cdiv(num_columns, COLUMNS)
    first_column = tl.program_id(0) % groups * COLUMNS
    last_column = tl.minimum(first_column + COLUMNS, num_columns)
    first, step = tl.program_id(0) // groups, tl.num_programs(0) // groups
    ranks = tl.arange(0, BLOCK_R)
    z_stride = floor_to(stride_zm, UNIT_R)
    z1_ptr = z_ptr + floor_to(max_rank, UNIT_R)
    blocks, ends, num_windows = count_windows(
        num_tokens_post_padded_ptr, max_loras, block_size, blocks_per_slot, parts, SPAN, SLOTS
    )
    for window in tl.range(first, num_windows, step, num_stages=1):
        slot, slot_rank, num_blocks, experts, pairs = load_window(
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
                base = base_rows[:, None] + columns[None, :]
                gate = gate * weight + tl.load(base, mask=mask, other=0.0).to(tl.float32)
                if GATED:
                    up = up * weight + tl.load(base + num_columns, mask=mask, other=0.0).to(tl.float32)
                result = activate(gate, up, 0.0, None, ACTIVATION, GATED)
                tl.store(out_rows[:, None] + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
    gdc_wait(USE_PDL)  # the marks are the shrink's
    gdc_launch(USE_PDL)
    for tile in tl.range(first, tl.cdiv(num_pairs, BLOCK_M), step, num_stages=1):
        pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        plain = tl.load(marks_ptr + pairs, mask=pairs < num_pairs, other=1) == 0
        if tl.max(plain.to(tl.int32)) > 0:
            base_rows, out_rows = row_pointers(base_ptr, out_ptr, pairs, stride_bt, stride_bk, num_columns, TOP_K, UNIT_N)
            for column in tl.range(first_column, last_column, BLOCK_N, num_stages=1):
                columns = column + tl.arange(0, BLOCK_N)
                mask = plain[:, None] & (floor_to(columns, UNIT_N) < last_column)[None, :]
                base = base_rows[:, None] + columns[None, :]
                gate = tl.load(base, mask=mask, other=0.0).to(tl.float32)
                up = gate
                if GATED:
                    up = tl.load(base + num_columns, mask=mask, other=0.0).to(tl.float32)
                result = activate(gate, up, 0.0, None, ACTIVATION, GATED)
                tl.store(out_rows[:, None] + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
