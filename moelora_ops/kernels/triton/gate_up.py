"""First projection of the layer op: base GEMM, adapters' delta, bias and activation in one pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...routing import Routing
from .. import config
from ._common import gdc_launch, gdc_wait
from ._lora import expand_tile, slot_rank


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """f(gate) * up, or f(gate) when not gated. Comparisons are written so that NaN stays NaN."""
    if GATED and limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "swigluoai":
        return (up + 1) * gate * tl.sigmoid(alpha * gate)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        gate = gate * tl.sigmoid(1.5957691216057308 * gate * (1 + 0.044715 * gate * gate))
    elif ACTIVATION == "relu2":
        gate = tl.where(gate < 0, 0.0, gate)
        gate = gate * gate
    if GATED:
        gate = gate * up
    return gate


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank"],
    do_not_specialize_on_alignment=[
        "topk_weights_ptr", "order_ptr", "row_lora_ptr", "segment_end_ptr", "expert_blocks_ptr", "ranks_ptr",
    ],
)  # fmt: skip
def gate_up_kernel(
    x_ptr,
    w13_ptr,
    bias_ptr,
    act_ptr,
    topk_weights_ptr,  # not None: the router weight is applied on the input
    z_ptr,  # None: no adapters, and b13_ptr, ranks_ptr, row_lora_ptr, segment_end_ptr are not read
    b13_ptr,
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
    stride_xm,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_bl,
    stride_be,
    stride_bn,
    stride_zm,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """act[row] = f([w] (W13[e] x + B13[l, e] z[row]) + b13[e]), row in sorted order; the [P, 2 I] intermediate never exists.

    Grid: one program per (expert block, BLOCK_N columns of act).
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
    pairs = tl.load(order_ptr + rows, mask=row_mask, other=0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < intermediate_size
    gate_columns = columns.to(tl.int64)
    up_columns = gate_columns + intermediate_size
    if INTERLEAVED:
        gate_columns = gate_columns * 2
        up_columns = gate_columns + 1

    ks = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * stride_xm + ks[None, :]
    w_ptr = w13_ptr + expert.to(tl.int64) * stride_we
    gate_ptrs = w_ptr + gate_columns[None, :] * stride_wn + ks[:, None]
    up_ptrs = w_ptr + up_columns[None, :] * stride_wn + ks[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, hidden_size, BLOCK_K):
        k_mask = ks < hidden_size - k
        x_mask = row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :]
        w_mask = col_mask[None, :] if EVEN_K else col_mask[None, :] & k_mask[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        gate = tl.dot(x, tl.load(gate_ptrs, mask=w_mask, other=0.0), gate, input_precision="ieee")
        if GATED:
            up = tl.dot(x, tl.load(up_ptrs, mask=w_mask, other=0.0), up, input_precision="ieee")
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    gdc_launch(USE_PDL)

    if z_ptr is not None:
        split_stride = tl.cast(num_pairs, tl.int64) * stride_zm
        row = first
        while row < last:  # segments of this block; those without an adapter are stepped over
            slot = tl.load(row_lora_ptr + row)
            end = tl.minimum(tl.load(segment_end_ptr + row), last)
            if (slot >= 0) & (slot < max_loras):
                rank = slot_rank(ranks_ptr, slot, max_rank)
                member = (rows >= row) & (rows < end)
                b_ptr = b13_ptr + slot.to(tl.int64) * stride_bl + expert.to(tl.int64) * stride_be
                z_offsets = rows.to(tl.int64) * stride_zm
                delta = expand_tile(
                    z_ptr, z_offsets, split_stride, member, b_ptr, gate_columns * stride_bn, col_mask, rank,
                    SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
                )  # fmt: skip
                gate = tl.where(member[:, None], gate + delta, gate)  # a zero in z would not keep out a NaN in B
                if GATED:
                    delta = expand_tile(
                        z_ptr, z_offsets + max_rank, split_stride, member, b_ptr, up_columns * stride_bn, col_mask, rank,
                        SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
                    )  # fmt: skip
                    up = tl.where(member[:, None], up + delta, up)
            row = end

    if topk_weights_ptr is not None:
        weight = tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0)[:, None]
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_e
        gate += tl.load(bias_ptr + gate_columns, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + up_columns, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    act = activate(gate, up, alpha, limit, ACTIVATION, GATED)
    act_ptrs = act_ptr + rows.to(tl.int64)[:, None] * intermediate_size + columns[None, :]
    tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


def gate_up(
    x: Tensor,
    w13: Tensor,
    w13_bias: Tensor | None,
    act: Tensor,
    z: Tensor | None,
    lora_b13: Tensor | None,
    lora_ranks: Tensor | None,
    topk_weights: Tensor | None,
    routing: Routing,
    *,
    top_k: int,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    tiles: config.Gemm,
    pdl: dict[str, Any],
) -> None:
    """Fill act [P, I] in sorted order.

    Args:
        z: [splits, P, S * R] from `shrink`, or None without adapters.
        topk_weights: [T, K] fp32 to multiply the input with, or None.
    """
    num_experts, width, hidden_size = w13.shape
    max_loras, _, _, max_rank = (0, 0, 0, 0) if lora_b13 is None else lora_b13.shape
    intermediate_size = act.shape[1]
    grid = (routing.expert_blocks.shape[0], triton.cdiv(intermediate_size, tiles.block_n))
    gate_up_kernel[grid](
        x, w13, w13_bias, act, topk_weights, z, lora_b13, lora_ranks,
        routing.order, routing.row_lora, routing.segment_end, routing.expert_blocks,
        act.shape[0], num_experts, max_loras, max_rank, hidden_size, intermediate_size,
        x.stride(0), w13.stride(0), w13.stride(1), 0 if w13_bias is None else w13_bias.stride(0),
        *((0, 0, 0) if lora_b13 is None else lora_b13.stride()[:3]), 0 if z is None else z.stride(1),
        alpha, limit,
        ACTIVATION=activation, GATED=gated, INTERLEAVED=interleaved, TOP_K=top_k,
        SPLITS=1 if z is None else z.shape[0], EVEN_K=hidden_size % tiles.block_k == 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, BLOCK_R=config.block_r(max_rank),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, USE_PDL=bool(pdl), **pdl,
    )  # fmt: skip
