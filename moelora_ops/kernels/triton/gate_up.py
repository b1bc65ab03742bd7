"""First projection of the layer op: base GEMM, adapters' delta, bias and activation in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._expand import CHUNK, WIDTH, expand, expand_merged, find_bad, tile_columns
from ._gemm import load_block, load_row_tiles, locate, merged_columns, project, project_merged, take_apart


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


@triton.jit
def gate_up_block(
    x_ptr, w13, bias_ptr, act_ptr, topk_weights_ptr, z_ptr, b13_ptr, ranks_ptr, tables_ptr,
    flag_ptr, expert, first, last, tile,
    num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size,
    stride_xm, stride_we, stride_wn, stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, alpha, limit,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TOP_K: tl.constexpr, W_TMA: tl.constexpr,
    MERGED: tl.constexpr, SPLITS: tl.constexpr, VEC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPAND_STAGES: tl.constexpr, WAIT_LATE: tl.constexpr, SAFE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One tile of act, at most BLOCK_M rows; returns whether it has to be done again with SAFE."""
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    pairs = tl.load(tables_ptr + 4 + rows, mask=row_mask, other=0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < intermediate_size
    gate_columns = columns.to(tl.int64)
    up_columns = gate_columns + intermediate_size
    if INTERLEAVED:
        gate_columns = gate_columns * 2
        up_columns = gate_columns + 1

    x_ptrs = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * stride_xm + tl.arange(0, BLOCK_K)[None, :]
    if W_TMA:
        w, w1 = w13, w13
    else:
        w_ptr = w13 + expert.to(tl.int64) * stride_we + tl.arange(0, BLOCK_K)[:, None]
        w = w_ptr + gate_columns[None, :] * stride_wn
        w1 = w_ptr + up_columns[None, :] * stride_wn
    num_slices: tl.constexpr = 2 if GATED else 1
    if z_ptr is not None:  # what the expand needs to know is on its way during the base product
        width: tl.constexpr = 16 if SAFE else WIDTH
        begin, end, first_tile, end_tile = load_row_tiles(tables_ptr, num_pairs, rows, row_mask, first, last)
        tiles_ptr, tiles_per_slot = tables_ptr + tiles_at, tl.cdiv(max_rank, 16)
        slot, j, rank = tile_columns(first_tile, end_tile, tiles_ptr, tiles_per_slot, ranks_ptr, max_loras, max_rank, width)
    stages: tl.constexpr = 1 if SAFE else None
    if MERGED:
        both = project_merged(
            x_ptrs, row_mask, w, expert, tile, hidden_size, INTERLEAVED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, stages
        )
    else:
        gate, up = project(
            x_ptrs, row_mask, w, w1, expert, tile, col_mask, hidden_size,
            num_slices, INTERLEAVED, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, stages,
        )  # fmt: skip
    if not SAFE:
        if WAIT_LATE:
            gdc_wait(USE_PDL)
        gdc_launch(USE_PDL)

    again = False
    if MERGED:
        if z_ptr is not None and not SAFE:
            part, column, b_rows = merged_columns(tile, intermediate_size, INTERLEAVED, BLOCK_N)
            both = expand_merged(
                both, begin, end, first_tile, end_tile, tiles_ptr, tiles_per_slot, z_ptr, rows.to(tl.int64) * stride_zm,
                tl.cast(num_pairs, tl.int64) * stride_zm, b13_ptr + expert.to(tl.int64) * stride_be * VEC,
                tl.cast(stride_bl, tl.int64) * VEC, b_rows * stride_bn * VEC, part, column < intermediate_size,
                ranks_ptr, max_loras, max_rank, SPLITS, VEC, EXPAND_STAGES,
            )  # fmt: skip
        gate, up = take_apart(both, INTERLEAVED, BLOCK_M, BLOCK_N)
    if z_ptr is not None and (SAFE or not MERGED):
        gate, up = expand(
            gate, up, begin, end, first_tile, end_tile, slot, j, rank, tiles_ptr, tiles_per_slot,
            z_ptr, rows.to(tl.int64) * stride_zm, tl.cast(num_pairs, tl.int64) * stride_zm,
            b13_ptr + expert.to(tl.int64) * stride_be * VEC, tl.cast(stride_bl, tl.int64) * VEC,
            gate_columns * stride_bn * VEC, up_columns * stride_bn * VEC, col_mask, ranks_ptr, max_loras, max_rank,
            num_slices, SPLITS, VEC, 1 if SAFE else EXPAND_STAGES, SAFE,
        )  # fmt: skip
    if z_ptr is not None:
        if not SAFE:
            again = find_bad(gate, up, first_tile < end_tile, flag_ptr, BLOCK_M, num_slices)

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
    return again


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank", "expert_blocks_at", "tiles_at", "num_blocks"],
    do_not_specialize_on_alignment=["topk_weights_ptr", "tables_ptr", "ranks_ptr", "again_ptr"],
)
def gate_up_kernel(
    x_ptr,
    w13,  # pointer, or with W_TMA a descriptor of [E, 2, I, H] (interleaved: [E, I, 2, H])
    bias_ptr,
    act_ptr,
    topk_weights_ptr,  # not None: the router weight is applied on the input
    z_ptr,  # None: no adapters, and b13_ptr and ranks_ptr are not read
    b13_ptr,
    ranks_ptr,
    tables_ptr,
    again_ptr,  # [blocks, tiles] out: which tiles are left to `gate_up_again_kernel`; None: this kernel sees to them
    num_pairs,
    num_experts,
    max_loras,
    max_rank,
    expert_blocks_at,
    tiles_at,
    num_blocks,
    hidden_size,
    intermediate_size,
    stride_xm,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_bl,  # in units of VEC, like the next two: Triton sees the alignment
    stride_be,
    stride_bn,
    stride_zm,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOP_K: tl.constexpr,
    W_TMA: tl.constexpr,
    MERGED: tl.constexpr,  # gate and up in one product; w13 is then a descriptor
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,  # rows up to which a block is done with a smaller tile; 0: none is
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPAND_STAGES: tl.constexpr,
    WAIT_LATE: tl.constexpr,  # the kernel before is the shrink: it vouches for the routing, and only z is waited for
    USE_PDL: tl.constexpr,
):
    """act[row] = f([w] (W13[e] x + B13[l, e] z[row]) + b13[e]), row in sorted order; the [P, 2 I] intermediate never exists.

    Grid: one program per (expert block, BLOCK_N columns of act), in groups of GROUP_M blocks that share a tile of weights.
    """
    if not WAIT_LATE:
        gdc_wait(USE_PDL)
    block, tile = locate(num_blocks, tl.cdiv(intermediate_size, BLOCK_N), GROUP_M)
    expert, first, last = load_block(tables_ptr, block, expert_blocks_at, num_experts)
    if expert < 0:
        if WAIT_LATE:  # a grid that ends without waiting would vouch for a kernel that still runs
            gdc_wait(USE_PDL)
        return
    flag_ptr = None
    if again_ptr is not None:
        flag_ptr = again_ptr + block.to(tl.int64) * tl.cdiv(intermediate_size, BLOCK_N) + tile
    if TAIL_M > 0 and last - first <= TAIL_M:
        again = gate_up_block(
            x_ptr, w13, bias_ptr, act_ptr, topk_weights_ptr, z_ptr, b13_ptr, ranks_ptr, tables_ptr, flag_ptr,
            expert, first, last, tile,
            num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_xm, stride_we, stride_wn,
            stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, alpha, limit, ACTIVATION, GATED, INTERLEAVED, TOP_K,
            W_TMA, MERGED, SPLITS, VEC, EVEN_K, TAIL_M, BLOCK_N, BLOCK_K, EXPAND_STAGES, WAIT_LATE, False, USE_PDL,
        )  # fmt: skip
    else:
        again = gate_up_block(
            x_ptr, w13, bias_ptr, act_ptr, topk_weights_ptr, z_ptr, b13_ptr, ranks_ptr, tables_ptr, flag_ptr,
            expert, first, last, tile,
            num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_xm, stride_we, stride_wn,
            stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, alpha, limit, ACTIVATION, GATED, INTERLEAVED, TOP_K,
            W_TMA, MERGED, SPLITS, VEC, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, EXPAND_STAGES, WAIT_LATE, False, USE_PDL,
        )  # fmt: skip
    if z_ptr is not None and again_ptr is None:  # known when compiled
        if again:
            gate_up_block(
                x_ptr, w13, bias_ptr, act_ptr, topk_weights_ptr, z_ptr, b13_ptr, ranks_ptr, tables_ptr, None,
                expert, first, last, tile,
                num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_xm, stride_we, stride_wn,
                stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, alpha, limit, ACTIVATION, GATED, INTERLEAVED, TOP_K,
                W_TMA, MERGED, SPLITS, VEC, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, EXPAND_STAGES, WAIT_LATE, True, USE_PDL,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank", "expert_blocks_at", "tiles_at", "num_blocks"],
    do_not_specialize_on_alignment=["topk_weights_ptr", "tables_ptr", "ranks_ptr", "again_ptr"],
)
def gate_up_again_kernel(
    x_ptr, w13, bias_ptr, act_ptr, topk_weights_ptr, z_ptr, b13_ptr, ranks_ptr, tables_ptr, again_ptr, num_pairs,
    num_experts, max_loras, max_rank, expert_blocks_at, tiles_at, num_blocks, hidden_size, intermediate_size, stride_xm,
    stride_we, stride_wn, stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, alpha, limit, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, TOP_K: tl.constexpr, W_TMA: tl.constexpr, MERGED: tl.constexpr,
    SPLITS: tl.constexpr, VEC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EXPAND_STAGES: tl.constexpr,
    WAIT_LATE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Do again, with SAFE, the tiles that `gate_up_kernel` left to it: none, but for adapters that are not finite.

    A kernel of its own, because as a branch of the other it cost that one registers (H200, T = 2048: 10 % with adapters).
    Grid: one program per CHUNK tiles.
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    num_tiles = tl.cdiv(intermediate_size, BLOCK_N)
    count = tl.load(tables_ptr + 1) * num_tiles
    begin = tl.program_id(0) * CHUNK
    index = begin + tl.arange(0, CHUNK)
    if tl.max(tl.load(again_ptr + index, mask=index < count, other=0), axis=0) > 0:
        for i in range(begin, tl.minimum(begin + CHUNK, count)):
            if tl.load(again_ptr + i) != 0:
                expert, first, last = load_block(tables_ptr, i // num_tiles, expert_blocks_at, num_experts)
                gate_up_block(
                    x_ptr, w13, bias_ptr, act_ptr, topk_weights_ptr, z_ptr, b13_ptr, ranks_ptr, tables_ptr, None,
                    expert, first, last, i % num_tiles,
                    num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_xm,
                    stride_we, stride_wn, stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, alpha, limit, ACTIVATION,
                    GATED, INTERLEAVED, TOP_K, W_TMA, MERGED, SPLITS, VEC, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
                    EXPAND_STAGES, WAIT_LATE, True, USE_PDL,
                )  # fmt: skip
