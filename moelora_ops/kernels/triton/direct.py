"""The layer op for a handful of pairs: no sort, a block of its own for every pair.

With P pairs over many more experts hardly two pairs share one, so sorting saves nothing and costs a launch. A block with a
single pair has a single adapter: nothing is merged, and nobody else's B can reach the row. Everything is in pair order.

A beside W in the base product, without a launch for the shrink, was slower: gate_up 15.6 -> 23.7 us (H200, T = 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._expand import slot_rank
from ._gemm import project
from .gate_up import activate
from .shrink import shrink_block


@triton.jit
def load_pair(
    pair, topk_ids_ptr, mapping_ptr, enabled_ptr, expert_map_ptr, ranks_ptr,
    num_experts, num_global_experts, max_loras, max_rank, TOP_K: tl.constexpr, LORA: tl.constexpr,
):  # fmt: skip
    """(local expert or -1, adapter slot, its rank: 0 for none) of a pair."""
    expert = tl.load(topk_ids_ptr + pair).to(tl.int64)
    if expert_map_ptr is not None:
        known = (expert >= 0) & (expert < num_global_experts)
        expert = tl.load(expert_map_ptr + expert, mask=known, other=-1).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1)
    slot = tl.cast(0, tl.int64)
    rank = 0
    if LORA:
        slot = tl.load(mapping_ptr + pair // TOP_K).to(tl.int64)
        known = (slot >= 0) & (slot < max_loras) & (expert >= 0)
        if enabled_ptr is not None:
            known = known & (tl.load(enabled_ptr + slot, mask=known, other=0) != 0)
        slot = tl.where(known, slot, 0)
        rank = slot_rank(ranks_ptr, slot, known, max_rank)
    return expert, slot, rank


@triton.jit
def load_z_row(z_ptr, j, rank, split_stride, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Sum of the splits of one row of z, all of them on their way at once, as the first of BLOCK_M rows."""
    splits = tl.arange(0, triton.next_power_of_2(SPLITS))
    mask = (splits < SPLITS)[:, None] & (j < tl.cdiv(rank, 16) * 16)[None, :]
    z = tl.sum(tl.load(z_ptr + splits[:, None] * split_stride + j[None, :], mask=mask, other=0.0), axis=0)
    return tl.where((tl.arange(0, BLOCK_M) == 0)[:, None], z[None, :], 0.0)


@triton.jit
def load_pair_a(a_ptr, columns, rank_begin, rank, stride_ar, col_mask, BLOCK_R: tl.constexpr):
    """A[rank_begin + i, columns] as [BLOCK_R, BLOCK_N]; zero from the rank on."""
    j = rank_begin + tl.arange(0, BLOCK_R)
    mask = (j < rank)[:, None] & col_mask[None, :]
    return tl.load(a_ptr + j.to(tl.int64)[:, None] * stride_ar + columns[None, :], mask=mask, other=0.0)


@triton.jit
def expand_pair(
    acc0, acc1, z_ptr, z_offset, slice_offset, split_stride, b_ptr, b0_offsets, b1_offsets, col_mask, rank,
    NUM_SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """acc_s + z_s B_s^T in the first row, both slices' loads on their way at once; acc1 as it is when NUM_SLICES is 1."""
    for begin in tl.range(0, rank, BLOCK_R, num_stages=2):  # hardly ever a second step
        j = begin + tl.arange(0, BLOCK_R)
        z0 = load_z_row(z_ptr + z_offset, j, rank, split_stride, SPLITS, BLOCK_M)
        b0 = load_pair_b(b_ptr, b0_offsets, j, rank, col_mask, VEC)
        if NUM_SLICES == 2:
            z1 = load_z_row(z_ptr + z_offset + slice_offset, j, rank, split_stride, SPLITS, BLOCK_M)
            b1 = load_pair_b(b_ptr, b1_offsets, j, rank, col_mask, VEC)
        acc0 = tl.dot(z0.to(b0.dtype), tl.trans(b0), acc0, input_precision="ieee")
        if NUM_SLICES == 2:
            acc1 = tl.dot(z1.to(b1.dtype), tl.trans(b1), acc1, input_precision="ieee")
    return acc0, acc1


@triton.jit
def load_pair_b(b_ptr, b_offsets, j, rank, col_mask, VEC: tl.constexpr):
    """B[columns, j] in whole vectors; zero from the rank on."""
    mask = tl.max_constancy(col_mask[:, None] & ((j // VEC) * VEC < rank)[None, :], [1, VEC])
    offsets = tl.multiple_of(tl.max_contiguous(b_offsets[:, None] + j[None, :], [1, VEC]), [1, VEC])
    b = tl.load(b_ptr + offsets, mask=mask, other=0.0)
    return tl.where((j < rank)[None, :], b, 0.0).to(b.dtype)


_SMALL = ["topk_ids_ptr", "mapping_ptr", "enabled_ptr", "expert_map_ptr", "topk_weights_ptr", "ranks_ptr"]


_SIZES = ["num_pairs", "num_experts", "num_global_experts", "max_loras", "max_rank"]


@triton.jit(do_not_specialize=[*_SIZES, "rank_blocks"], do_not_specialize_on_alignment=_SMALL)
def direct_shrink_kernel(
    x_ptr,
    a_ptr,
    z_ptr,
    topk_ids_ptr,
    mapping_ptr,
    enabled_ptr,
    expert_map_ptr,
    ranks_ptr,
    num_pairs,
    num_experts,
    num_global_experts,
    max_loras,
    max_rank,
    rank_blocks,  # blocks of BLOCK_R ranks in a slot
    in_features,
    stride_xm,
    stride_al,
    stride_ae,
    stride_ar,
    stride_zm,
    ROWS_PER_INPUT: tl.constexpr,  # top_k: x has one row per token; 1: one per pair
    TOP_K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """z[split, pair, s, j] = x . A[slot, expert, s * R + j] over one split of K, as `shrink_kernel` has it.

    Grid: one program per (pair, block of BLOCK_R ranks in every slice, split of K).
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    index = tl.program_id(0)
    pair, split = index // SPLITS // rank_blocks, index % SPLITS
    rank_begin = (index // SPLITS) % rank_blocks * BLOCK_R
    expert, slot, rank = load_pair(
        pair, topk_ids_ptr, mapping_ptr, enabled_ptr, expert_map_ptr, ranks_ptr,
        num_experts, num_global_experts, max_loras, max_rank, TOP_K, True,
    )  # fmt: skip
    if rank_begin < rank:
        shrink_block(
            x_ptr, a_ptr, z_ptr, None, pair, pair + 1, expert, slot, rank_begin, rank, split, num_pairs, max_rank, in_features,
            stride_xm, stride_al, stride_ae, stride_ar, stride_zm,
            ROWS_PER_INPUT, NUM_SLICES, SPLITS, EVEN_K, BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SMALL)
def direct_gate_up_kernel(
    x_ptr,
    w13,  # as in gate_up_kernel
    bias_ptr,
    act_ptr,
    topk_weights_ptr,  # not None: the router weight is applied on the input
    topk_ids_ptr,
    mapping_ptr,
    enabled_ptr,
    expert_map_ptr,
    z_ptr,  # None: no adapters
    b13_ptr,
    a2_ptr,  # None: the second shrink is a kernel of its own
    z2_ptr,  # [tiles, pairs, R] fp32 out: its sums over BLOCK_N columns of act
    ranks_ptr,
    num_pairs,
    num_experts,
    num_global_experts,
    max_loras,
    max_rank,
    hidden_size,
    intermediate_size,
    stride_xm,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_bl,  # in units of VEC, like the next two
    stride_be,
    stride_bn,
    stride_zm,
    stride_al,
    stride_ae,
    stride_ar,
    stride_z2m,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    W_TMA: tl.constexpr,
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """act[pair] = f([w] (W13[e] x + B13[l, e] z[pair]) + b13[e]); with a2_ptr also the second shrink, as `gate_up_kernel`.

    Grid: one program per (pair, BLOCK_N columns of act). With adapters the kernel before is the shrink, which waited: only z is
    waited for, after the base product.
    """
    if z_ptr is None:
        gdc_wait(USE_PDL)
    tiles = tl.cdiv(intermediate_size, BLOCK_N)
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, slot, rank = load_pair(
        pair, topk_ids_ptr, mapping_ptr, enabled_ptr, expert_map_ptr, ranks_ptr,
        num_experts, num_global_experts, max_loras, max_rank, TOP_K, z_ptr is not None or a2_ptr is not None,
    )  # fmt: skip
    if expert < 0:
        if z_ptr is not None:
            gdc_wait(USE_PDL)
        return
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < intermediate_size
    gate_columns = columns.to(tl.int64)
    up_columns = gate_columns + intermediate_size
    if INTERLEAVED:
        gate_columns = gate_columns * 2
        up_columns = gate_columns + 1
    if W_TMA:
        w, w1 = w13, w13
    else:
        w_ptr = w13 + expert * stride_we + tl.arange(0, BLOCK_K)[:, None]
        w = w_ptr + gate_columns[None, :] * stride_wn
        w1 = w_ptr + up_columns[None, :] * stride_wn
    num_slices: tl.constexpr = 2 if GATED else 1
    row_mask = tl.arange(0, BLOCK_M) == 0
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * stride_xm
    x_ptrs = x_row + tl.zeros((BLOCK_M,), tl.int64)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    gate, up = project(
        x_ptrs, row_mask, w, w1, expert.to(tl.int32), tile, col_mask, hidden_size,
        num_slices, INTERLEAVED, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, None,
    )  # fmt: skip
    if z_ptr is not None:
        gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    if a2_ptr is not None:
        a2_ptr += slot * stride_al + expert * stride_ae
        a2 = load_pair_a(a2_ptr, columns, 0, rank, stride_ar, col_mask, BLOCK_R)
    if z_ptr is not None:
        z_row, split_stride = pair.to(tl.int64) * stride_zm, tl.cast(num_pairs, tl.int64) * stride_zm
        b_ptr = b13_ptr + (slot * stride_bl + expert * stride_be) * VEC
        gate, up = expand_pair(
            gate, up, z_ptr, z_row, tl.cdiv(max_rank, 16) * 16, split_stride, b_ptr, gate_columns * stride_bn * VEC,
            up_columns * stride_bn * VEC, col_mask, rank, num_slices, BLOCK_M, BLOCK_R, SPLITS, VEC,
        )  # fmt: skip
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + pair)
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        bias_ptr += expert * stride_bias_e
        gate += tl.load(bias_ptr + gate_columns, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + up_columns, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    act = activate(gate, up, alpha, limit, ACTIVATION, GATED).to(act_ptr.dtype.element_ty)
    act_ptrs = act_ptr + pair.to(tl.int64) * intermediate_size + tl.zeros((BLOCK_M,), tl.int32)[:, None] + columns[None, :]
    tl.store(act_ptrs, act, mask=row_mask[:, None] & col_mask[None, :])
    if a2_ptr is not None:
        z2_ptr += (tile.to(tl.int64) * num_pairs + pair) * stride_z2m
        for begin in tl.range(0, rank, BLOCK_R, num_stages=1):
            j = begin + tl.arange(0, BLOCK_R)
            z2 = tl.dot(act, tl.trans(a2), input_precision="ieee")
            z2_ptrs = z2_ptr + tl.zeros((BLOCK_M,), tl.int32)[:, None] + j[None, :]
            tl.store(z2_ptrs, z2, mask=row_mask[:, None] & (j < tl.cdiv(rank, 16) * 16)[None, :])
            a2 = load_pair_a(a2_ptr, columns, begin + BLOCK_R, rank, stride_ar, col_mask, BLOCK_R)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SMALL)
def direct_down_kernel(
    act_ptr,
    w2,  # as in down_kernel
    bias_ptr,
    out_ptr,
    topk_weights_ptr,  # None: the router weight was applied on the input
    topk_ids_ptr,
    mapping_ptr,
    enabled_ptr,
    expert_map_ptr,
    z_ptr,  # None: no adapters
    b2_ptr,
    ranks_ptr,
    num_pairs,
    num_experts,
    num_global_experts,
    max_loras,
    max_rank,
    hidden_size,
    intermediate_size,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_bl,  # in units of VEC, like the next two
    stride_be,
    stride_bn,
    stride_zm,
    TOP_K: tl.constexpr,
    W_TMA: tl.constexpr,
    SPLITS: tl.constexpr,
    FUSED: tl.constexpr,  # z was summed by gate_up, over a tile of its columns in each split
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[pair] = w (W2[e] act[pair] + B2[l, e] z[pair] + b2[e]).

    Grid: one program per (pair, BLOCK_N columns of out). Waits as `direct_gate_up_kernel` does; the ids are older than both.
    """
    tiles = tl.cdiv(hidden_size, BLOCK_N)
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, slot, rank = load_pair(
        pair, topk_ids_ptr, mapping_ptr, enabled_ptr, expert_map_ptr, ranks_ptr,
        num_experts, num_global_experts, max_loras, max_rank, TOP_K, z_ptr is not None,
    )  # fmt: skip
    if z_ptr is None or FUSED:
        gdc_wait(USE_PDL)
    if expert < 0:
        if z_ptr is not None and not FUSED:
            gdc_wait(USE_PDL)
        return
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < hidden_size
    if W_TMA:
        w = w2
    else:
        w = w2 + expert * stride_we + tl.arange(0, BLOCK_K)[:, None] + columns.to(tl.int64)[None, :] * stride_wn
    row_mask = tl.arange(0, BLOCK_M) == 0
    x_row = act_ptr + pair.to(tl.int64) * intermediate_size
    x_ptrs = x_row + tl.zeros((BLOCK_M,), tl.int64)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    acc, _ = project(
        x_ptrs, row_mask, w, w, expert.to(tl.int32), tile, col_mask, intermediate_size,
        1, False, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, None,
    )  # fmt: skip
    if z_ptr is not None and not FUSED:
        gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    if z_ptr is not None:
        b_offsets = columns.to(tl.int64) * stride_bn * VEC
        acc, _ = expand_pair(
            acc, acc, z_ptr, pair.to(tl.int64) * stride_zm, 0, tl.cast(num_pairs, tl.int64) * stride_zm,
            b2_ptr + (slot * stride_bl + expert * stride_be) * VEC, b_offsets, b_offsets, col_mask, rank,
            1, BLOCK_M, BLOCK_R, SPLITS, VEC,
        )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * stride_bias_e + columns, mask=col_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if topk_weights_ptr is not None:
        acc *= tl.load(topk_weights_ptr + pair)
    out_ptrs = out_ptr + pair.to(tl.int64) * hidden_size + tl.zeros((BLOCK_M,), tl.int32)[:, None] + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
