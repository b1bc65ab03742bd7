"""The layer op for a handful of pairs: no sort, no shrink, a block of its own for every pair.

With P pairs over many more experts hardly two pairs share one, so sorting saves nothing and costs a launch. A block with a single
pair has a single adapter: A is a few more columns of the base product's tile, z never leaves the registers, and nobody else's
B can reach the row. Three launches a layer (gate_up, down, combine), with and without adapters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._expand import slot_rank
from ._gemm import load_weight
from .gate_up import activate


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
def project_pair(
    x_ptr,  # the pair's row
    w,  # as in `_gemm.project`
    w1,
    expert,
    tile,
    col_mask,
    a_ptr,  # A of the pair's adapter and expert, slice 0; slice 1 is slice_stride further
    stride_ar,
    slice_stride,
    rank_begin,
    rank,
    in_features,
    NUM_SLICES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    W_TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BASE: tl.constexpr,
    LORA: tl.constexpr,
):
    """(x W_0^T, x W_1^T, x A_0^T, x A_1^T) in the first row of each; what BASE or LORA leaves out is zero."""
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    z0 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    z1 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    ks = tl.arange(0, BLOCK_K)
    row_mask = tl.arange(0, BLOCK_M) == 0
    x = x_ptr + tl.zeros((BLOCK_M,), tl.int64)[:, None] + ks[None, :]
    ranks = rank_begin + tl.arange(0, BLOCK_R)
    rank_mask = ranks < rank
    a0 = a_ptr + ranks.to(tl.int64)[None, :] * stride_ar + ks[:, None]
    a1 = a0 + slice_stride
    for k in range(0, in_features, BLOCK_K):
        k_mask = ks < in_features - k
        h = tl.load(x, mask=row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :], other=0.0)
        x += BLOCK_K
        if BASE:
            w_mask = col_mask[None, :] if EVEN_K else col_mask[None, :] & k_mask[:, None]
            if W_TMA:
                b = load_weight(w, expert.to(tl.int32), 0, tile * BLOCK_N, k, INTERLEAVED, BLOCK_N, BLOCK_K)
            else:
                b = tl.load(w, mask=w_mask, other=0.0)
                w += BLOCK_K
            acc0 = tl.dot(h, b, acc0, input_precision="ieee")
            if NUM_SLICES == 2:
                if W_TMA:
                    b = load_weight(w, expert.to(tl.int32), 1, tile * BLOCK_N, k, INTERLEAVED, BLOCK_N, BLOCK_K)
                else:
                    b = tl.load(w1, mask=w_mask, other=0.0)
                    w1 += BLOCK_K
                acc1 = tl.dot(h, b, acc1, input_precision="ieee")
        if LORA:
            a_mask = rank_mask[None, :] if EVEN_K else rank_mask[None, :] & k_mask[:, None]
            z0 = tl.dot(h, tl.load(a0, mask=a_mask, other=0.0), z0, input_precision="ieee")
            a0 += BLOCK_K
            if NUM_SLICES == 2:
                z1 = tl.dot(h, tl.load(a1, mask=a_mask, other=0.0), z1, input_precision="ieee")
                a1 += BLOCK_K
    return acc0, acc1, z0, z1


@triton.jit
def expand_pair(acc, z, b_ptr, b_offsets, col_mask, rank_begin, rank, BLOCK_R: tl.constexpr, VEC: tl.constexpr):
    """acc + z B^T for ranks from rank_begin on; B's columns past the rank are loaded in whole vectors and left out.

    Loading B ahead of the base product cost 2 us of 35 (H200, T = 1): registers.
    """
    j = rank_begin + tl.arange(0, BLOCK_R)
    mask = col_mask[:, None] & ((j // VEC) * VEC < rank)[None, :]
    b = tl.load(b_ptr + b_offsets[:, None] + j[None, :], mask=mask, other=0.0)
    b = tl.where((j < rank)[None, :], b, 0.0).to(b.dtype)
    return tl.dot(z.to(b.dtype), tl.trans(b), acc, input_precision="ieee")


@triton.jit
def product_pair(
    x_ptr, w, w1, expert, tile, col_mask, a_ptr, stride_ar, slice_stride, b_ptr, b0_offsets, b1_offsets, rank, in_features,
    NUM_SLICES: tl.constexpr, INTERLEAVED: tl.constexpr, W_TMA: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, VEC: tl.constexpr, LORA: tl.constexpr,
):  # fmt: skip
    """Both slices of (W + B A) x: A rides along with W, further blocks of ranks take a loop of their own."""
    acc0, acc1, z0, z1 = project_pair(
        x_ptr, w, w1, expert, tile, col_mask, a_ptr, stride_ar, slice_stride, 0, rank, in_features,
        NUM_SLICES, INTERLEAVED, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, True, LORA,
    )  # fmt: skip
    if LORA:
        acc0 = expand_pair(acc0, z0, b_ptr, b0_offsets, col_mask, 0, rank, BLOCK_R, VEC)
        if NUM_SLICES == 2:
            acc1 = expand_pair(acc1, z1, b_ptr, b1_offsets, col_mask, 0, rank, BLOCK_R, VEC)
        for rank_begin in range(BLOCK_R, rank, BLOCK_R):
            _, _, z0, z1 = project_pair(
                x_ptr, w, w1, expert, tile, col_mask, a_ptr, stride_ar, slice_stride, rank_begin, rank, in_features,
                NUM_SLICES, INTERLEAVED, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, False, True,
            )  # fmt: skip
            acc0 = expand_pair(acc0, z0, b_ptr, b0_offsets, col_mask, rank_begin, rank, BLOCK_R, VEC)
            if NUM_SLICES == 2:
                acc1 = expand_pair(acc1, z1, b_ptr, b1_offsets, col_mask, rank_begin, rank, BLOCK_R, VEC)
    return acc0, acc1


_SMALL = ["topk_ids_ptr", "mapping_ptr", "enabled_ptr", "expert_map_ptr", "topk_weights_ptr", "ranks_ptr"]


@triton.jit(
    do_not_specialize=["num_experts", "num_global_experts", "max_loras", "max_rank"], do_not_specialize_on_alignment=_SMALL
)
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
    a13_ptr,  # None: no adapters
    b13_ptr,
    ranks_ptr,
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
    stride_al,
    stride_ae,
    stride_ar,
    stride_bl,  # in units of VEC, like the next two
    stride_be,
    stride_bn,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    W_TMA: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """act[pair] = f([w] (W13[e] + B13[l, e] A13[l, e]) x + b13[e]).

    Grid: one program per (pair, BLOCK_N columns of act).
    """
    gdc_wait(USE_PDL)
    tiles = tl.cdiv(intermediate_size, BLOCK_N)
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, slot, rank = load_pair(
        pair, topk_ids_ptr, mapping_ptr, enabled_ptr, expert_map_ptr, ranks_ptr,
        num_experts, num_global_experts, max_loras, max_rank, TOP_K, a13_ptr is not None,
    )  # fmt: skip
    if expert < 0:
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
    a_ptr, b_ptr = a13_ptr, b13_ptr
    if a13_ptr is not None:
        a_ptr = a13_ptr + slot * stride_al + expert * stride_ae
        b_ptr = b13_ptr + (slot * stride_bl + expert * stride_be) * VEC
    else:
        a_ptr, b_ptr = act_ptr, act_ptr  # not read
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * stride_xm
    slice_stride = tl.cast(max_rank, tl.int64) * stride_ar
    if rank > 0:
        gate, up = product_pair(
            x_row, w, w1, expert, tile, col_mask, a_ptr, stride_ar, slice_stride, b_ptr, gate_columns * stride_bn * VEC,
            up_columns * stride_bn * VEC, rank, hidden_size,
            num_slices, INTERLEAVED, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, VEC, a13_ptr is not None,
        )  # fmt: skip
    else:
        gate, up = product_pair(
            x_row, w, w1, expert, tile, col_mask, a_ptr, stride_ar, slice_stride, b_ptr, gate_columns, up_columns, rank,
            hidden_size, num_slices, INTERLEAVED, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, VEC, False,
        )  # fmt: skip
    gdc_launch(USE_PDL)
    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + pair)
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        bias_ptr += expert * stride_bias_e
        gate += tl.load(bias_ptr + gate_columns, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + up_columns, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    act = activate(gate, up, alpha, limit, ACTIVATION, GATED)
    act_ptrs = act_ptr + pair.to(tl.int64) * intermediate_size + tl.zeros((BLOCK_M,), tl.int32)[:, None] + columns[None, :]
    mask = (tl.arange(0, BLOCK_M) == 0)[:, None] & col_mask[None, :]
    tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_experts", "num_global_experts", "max_loras", "max_rank"], do_not_specialize_on_alignment=_SMALL
)
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
    a2_ptr,  # None: no adapters
    b2_ptr,
    ranks_ptr,
    num_experts,
    num_global_experts,
    max_loras,
    max_rank,
    hidden_size,
    intermediate_size,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_al,
    stride_ae,
    stride_ar,
    stride_bl,  # in units of VEC, like the next two
    stride_be,
    stride_bn,
    TOP_K: tl.constexpr,
    W_TMA: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[pair] = w ((W2[e] + B2[l, e] A2[l, e]) act[pair] + b2[e]).

    Grid: one program per (pair, BLOCK_N columns of out). The kernel before, gate_up, waited: the ids are there.
    """
    tiles = tl.cdiv(hidden_size, BLOCK_N)
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, slot, rank = load_pair(
        pair, topk_ids_ptr, mapping_ptr, enabled_ptr, expert_map_ptr, ranks_ptr,
        num_experts, num_global_experts, max_loras, max_rank, TOP_K, a2_ptr is not None,
    )  # fmt: skip
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < hidden_size
    gdc_wait(USE_PDL)
    if expert < 0:
        return
    if W_TMA:
        w = w2
    else:
        w = w2 + expert * stride_we + tl.arange(0, BLOCK_K)[:, None] + columns.to(tl.int64)[None, :] * stride_wn
    a_ptr, b_ptr = act_ptr, act_ptr  # not read
    if a2_ptr is not None:
        a_ptr = a2_ptr + slot * stride_al + expert * stride_ae
        b_ptr = b2_ptr + (slot * stride_bl + expert * stride_be) * VEC
    b_offsets = columns.to(tl.int64) * stride_bn * VEC
    x_row = act_ptr + pair.to(tl.int64) * intermediate_size
    if rank > 0:
        acc, _ = product_pair(
            x_row, w, w, expert, tile, col_mask, a_ptr, stride_ar, 0, b_ptr, b_offsets, b_offsets, rank, intermediate_size,
            1, False, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, VEC, a2_ptr is not None,
        )  # fmt: skip
    else:
        acc, _ = product_pair(
            x_row, w, w, expert, tile, col_mask, a_ptr, stride_ar, 0, b_ptr, b_offsets, b_offsets, rank, intermediate_size,
            1, False, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, VEC, False,
        )  # fmt: skip
    gdc_launch(USE_PDL)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * stride_bias_e + columns, mask=col_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if topk_weights_ptr is not None:
        acc *= tl.load(topk_weights_ptr + pair)
    out_ptrs = out_ptr + pair.to(tl.int64) * hidden_size + tl.zeros((BLOCK_M,), tl.int32)[:, None] + columns[None, :]
    mask = (tl.arange(0, BLOCK_M) == 0)[:, None] & col_mask[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
