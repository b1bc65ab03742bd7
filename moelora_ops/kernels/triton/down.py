"""Second projection of the layer op: base GEMM, adapters' delta, bias and router weight in one pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...routing import Routing
from .. import config
from ._common import gdc_launch, gdc_wait
from ._lora import expand_tile, slot_rank


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank"],
    do_not_specialize_on_alignment=[
        "topk_weights_ptr", "order_ptr", "row_lora_ptr", "segment_end_ptr", "expert_blocks_ptr", "ranks_ptr",
    ],
)  # fmt: skip
def down_kernel(
    act_ptr,
    w2_ptr,
    bias_ptr,
    out_ptr,
    topk_weights_ptr,  # None: the router weight was applied on the input
    z_ptr,  # None: no adapters, and b2_ptr, ranks_ptr, row_lora_ptr, segment_end_ptr are not read
    b2_ptr,
    ranks_ptr,
    order_ptr,
    row_lora_ptr,
    segment_end_ptr,
    expert_blocks_ptr,
    num_pairs,
    num_experts,
    max_loras,
    max_rank,
    hidden_size,
    intermediate_size,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_bl,
    stride_be,
    stride_bn,
    stride_zm,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[pair] = w (W2[e] act[row] + B2[l, e] z[row] + b2[e]): act is in sorted order, out in pair order.

    Grid: one program per (expert block, BLOCK_N columns of out).
    """
    gdc_wait(USE_PDL)
    block_ptr = expert_blocks_ptr + tl.program_id(0).to(tl.int64) * 3
    expert = tl.load(block_ptr)
    if (expert < 0) | (expert >= num_experts):
        return
    first = tl.load(block_ptr + 1)
    last = tl.load(block_ptr + 2)
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < hidden_size

    ks = tl.arange(0, BLOCK_K)
    act_ptrs = act_ptr + rows.to(tl.int64)[:, None] * intermediate_size + ks[None, :]
    w_ptrs = w2_ptr + expert.to(tl.int64) * stride_we + columns.to(tl.int64)[None, :] * stride_wn + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, intermediate_size, BLOCK_K):
        k_mask = ks < intermediate_size - k
        act_mask = row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :]
        w_mask = col_mask[None, :] if EVEN_K else col_mask[None, :] & k_mask[:, None]
        act = tl.load(act_ptrs, mask=act_mask, other=0.0)
        acc = tl.dot(act, tl.load(w_ptrs, mask=w_mask, other=0.0), acc, input_precision="ieee")
        act_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    gdc_launch(USE_PDL)

    if z_ptr is not None:
        split_stride = tl.cast(num_pairs, tl.int64) * stride_zm
        row = first
        while row < last:  # segments of this block; those without an adapter are stepped over
            slot = tl.load(row_lora_ptr + row)
            end = tl.minimum(tl.load(segment_end_ptr + row), last)
            if (slot >= 0) & (slot < max_loras):
                member = (rows >= row) & (rows < end)
                delta = expand_tile(
                    z_ptr, rows.to(tl.int64) * stride_zm, split_stride, member,
                    b2_ptr + slot.to(tl.int64) * stride_bl + expert.to(tl.int64) * stride_be,
                    columns.to(tl.int64) * stride_bn, col_mask, slot_rank(ranks_ptr, slot, max_rank),
                    SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
                )  # fmt: skip
                acc = tl.where(member[:, None], acc + delta, acc)  # a zero in z would not keep out a NaN in B
            row = end

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias_e + columns, mask=col_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + rows, mask=row_mask, other=0)
    if topk_weights_ptr is not None:
        acc *= tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0)[:, None]
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * hidden_size + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


def down(
    act: Tensor,
    w2: Tensor,
    w2_bias: Tensor | None,
    out: Tensor,
    z: Tensor | None,
    lora_b2: Tensor | None,
    lora_ranks: Tensor | None,
    topk_weights: Tensor | None,
    routing: Routing,
    *,
    tiles: config.Gemm,
    pdl: dict[str, Any],
) -> None:
    """Fill the rows of out [P, H] whose pair has an expert; all other rows stay as they are.

    Args:
        act: [P, I] in sorted order.
        z: [splits, P, R] from `shrink`, or None without adapters.
        topk_weights: [T, K] fp32 to multiply the result with, or None.
    """
    num_experts, hidden_size, intermediate_size = w2.shape
    max_loras, _, _, max_rank = (0, 0, 0, 0) if lora_b2 is None else lora_b2.shape
    b_strides = (0, 0, 0)
    if lora_b2 is not None:
        b_strides = (lora_b2.stride(0), 0 if lora_b2.shape[1] == 1 else lora_b2.stride(1), lora_b2.stride(2))
    grid = (routing.expert_blocks.shape[0], triton.cdiv(hidden_size, tiles.block_n))
    down_kernel[grid](
        act, w2, w2_bias, out, topk_weights, z, lora_b2, lora_ranks,
        routing.order, routing.row_lora, routing.segment_end, routing.expert_blocks,
        act.shape[0], num_experts, max_loras, max_rank, hidden_size, intermediate_size,
        w2.stride(0), w2.stride(1), 0 if w2_bias is None else w2_bias.stride(0),
        *b_strides, 0 if z is None else z.stride(1),
        SPLITS=1 if z is None else z.shape[0], EVEN_K=intermediate_size % tiles.block_k == 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, BLOCK_R=config.block_r(max_rank),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, USE_PDL=bool(pdl), **pdl,
    )  # fmt: skip
