"""Second projection of the layer op: base GEMM, adapters' delta, bias and router weight in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._expand import CHUNK, WIDTH, expand, find_bad, tile_columns
from ._gemm import load_block, load_row_tiles, locate, project


@triton.jit
def load_pairs(tables_ptr, topk_weights_ptr, rows, row_mask):
    """(pair of each row, its router weight; without any, the pair again)."""
    pairs = tl.load(tables_ptr + 4 + rows, mask=row_mask, other=0)
    if topk_weights_ptr is None:
        return pairs, pairs
    else:
        return pairs, tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0)


@triton.jit
def down_block(
    act_ptr, w2, bias_ptr, out_ptr, topk_weights_ptr, z_ptr, b2_ptr, ranks_ptr, tables_ptr,
    flag_ptr, expert, first, last, tile,
    num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size,
    stride_we, stride_wn, stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm,
    W_TMA: tl.constexpr, SPLITS: tl.constexpr, VEC: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPAND_STAGES: tl.constexpr, WAIT_LATE: tl.constexpr, SAFE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One tile of out, at most BLOCK_M rows; returns whether it has to be done again with SAFE."""
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < hidden_size
    act_ptrs = act_ptr + rows.to(tl.int64)[:, None] * intermediate_size + tl.arange(0, BLOCK_K)[None, :]
    if W_TMA:
        w = w2
    else:
        w = w2 + expert.to(tl.int64) * stride_we + tl.arange(0, BLOCK_K)[:, None] + columns.to(tl.int64)[None, :] * stride_wn
    # What is needed afterwards is on its way during the base product; the pairs only where a program has its multiprocessor
    # for itself, and nothing else hides that latency: of tiles of 64 rows it costs registers, and with them a third program.
    early: tl.constexpr = BLOCK_M > 64
    if early:
        pairs, weights = load_pairs(tables_ptr, topk_weights_ptr, rows, row_mask)
    if z_ptr is not None:
        width: tl.constexpr = 16 if SAFE else WIDTH
        begin, end, first_tile, end_tile = load_row_tiles(tables_ptr, num_pairs, rows, row_mask, first, last)
        tiles_ptr, tiles_per_slot = tables_ptr + tiles_at, tl.cdiv(max_rank, 16)
        slot, j, rank = tile_columns(first_tile, end_tile, tiles_ptr, tiles_per_slot, ranks_ptr, max_loras, max_rank, width)
    acc, _ = project(
        act_ptrs, row_mask, w, w, expert, tile, col_mask, intermediate_size,
        1, False, W_TMA, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, 1 if SAFE else None,
    )  # fmt: skip
    if not SAFE:
        if WAIT_LATE:
            gdc_wait(USE_PDL)
        gdc_launch(USE_PDL)

    again = False
    if z_ptr is not None:
        b_offsets = columns.to(tl.int64) * stride_bn * VEC
        acc, _ = expand(
            acc, acc, begin, end, first_tile, end_tile, slot, j, rank, tiles_ptr, tiles_per_slot,
            z_ptr, rows.to(tl.int64) * stride_zm, tl.cast(num_pairs, tl.int64) * stride_zm,
            b2_ptr + expert.to(tl.int64) * stride_be * VEC, tl.cast(stride_bl, tl.int64) * VEC,
            b_offsets, b_offsets, col_mask, ranks_ptr, max_loras, max_rank, 1, SPLITS, VEC,
            1 if SAFE else EXPAND_STAGES, SAFE,
        )  # fmt: skip
        if not SAFE:
            again = find_bad(acc, acc, first_tile < end_tile, flag_ptr, BLOCK_M, 1)

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias_e + columns, mask=col_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if not early:
        pairs, weights = load_pairs(tables_ptr, topk_weights_ptr, rows, row_mask)
    if topk_weights_ptr is not None:
        acc *= weights[:, None]
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * hidden_size + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
    return again


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank", "expert_blocks_at", "tiles_at", "num_blocks"],
    do_not_specialize_on_alignment=["topk_weights_ptr", "tables_ptr", "ranks_ptr", "again_ptr"],
)
def down_kernel(
    act_ptr,
    w2,  # pointer, or with W_TMA a descriptor of [E, 1, H, I]
    bias_ptr,
    out_ptr,
    topk_weights_ptr,  # None: the router weight was applied on the input
    z_ptr,  # None: no adapters, and b2_ptr and ranks_ptr are not read
    b2_ptr,
    ranks_ptr,
    tables_ptr,
    again_ptr,  # [blocks, tiles] out: which tiles are left to `down_again_kernel`; None: this kernel sees to them
    num_pairs,
    num_experts,
    max_loras,
    max_rank,
    expert_blocks_at,
    tiles_at,
    num_blocks,
    hidden_size,
    intermediate_size,
    stride_we,
    stride_wn,
    stride_bias_e,
    stride_bl,  # in units of VEC, like the next two: Triton sees the alignment
    stride_be,
    stride_bn,
    stride_zm,
    W_TMA: tl.constexpr,
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,  # rows up to which a block is done with a smaller tile; 0: none is
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPAND_STAGES: tl.constexpr,
    WAIT_LATE: tl.constexpr,  # the kernel before is the shrink: it vouches for act, and only z is waited for
    USE_PDL: tl.constexpr,
):
    """out[pair] = w (W2[e] act[row] + B2[l, e] z[row] + b2[e]): act is in sorted order, out in pair order.

    Grid: one program per (expert block, BLOCK_N columns of out), in groups of GROUP_M blocks that share a tile of weights.
    """
    if not WAIT_LATE:
        gdc_wait(USE_PDL)
    block, tile = locate(num_blocks, tl.cdiv(hidden_size, BLOCK_N), GROUP_M)
    expert, first, last = load_block(tables_ptr, block, expert_blocks_at, num_experts)
    if expert < 0:
        if WAIT_LATE:  # a grid that ends without waiting would vouch for a kernel that still runs
            gdc_wait(USE_PDL)
        return
    flag_ptr = None
    if again_ptr is not None:
        flag_ptr = again_ptr + block.to(tl.int64) * tl.cdiv(hidden_size, BLOCK_N) + tile
    if TAIL_M > 0 and last - first <= TAIL_M:
        again = down_block(
            act_ptr, w2, bias_ptr, out_ptr, topk_weights_ptr, z_ptr, b2_ptr, ranks_ptr, tables_ptr, flag_ptr,
            expert, first, last, tile,
            num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_we, stride_wn, stride_bias_e,
            stride_bl, stride_be, stride_bn, stride_zm, W_TMA, SPLITS, VEC, EVEN_K, TAIL_M, BLOCK_N, BLOCK_K,
            EXPAND_STAGES, WAIT_LATE, False, USE_PDL,
        )  # fmt: skip
    else:
        again = down_block(
            act_ptr, w2, bias_ptr, out_ptr, topk_weights_ptr, z_ptr, b2_ptr, ranks_ptr, tables_ptr, flag_ptr,
            expert, first, last, tile,
            num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_we, stride_wn, stride_bias_e,
            stride_bl, stride_be, stride_bn, stride_zm, W_TMA, SPLITS, VEC, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            EXPAND_STAGES, WAIT_LATE, False, USE_PDL,
        )  # fmt: skip
    if z_ptr is not None and again_ptr is None:  # known when compiled
        if again:
            down_block(
                act_ptr, w2, bias_ptr, out_ptr, topk_weights_ptr, z_ptr, b2_ptr, ranks_ptr, tables_ptr, None,
                expert, first, last, tile,
                num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_we, stride_wn,
                stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, W_TMA, SPLITS, VEC, EVEN_K, BLOCK_M, BLOCK_N,
                BLOCK_K, EXPAND_STAGES, WAIT_LATE, True, USE_PDL,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank", "expert_blocks_at", "tiles_at", "num_blocks"],
    do_not_specialize_on_alignment=["topk_weights_ptr", "tables_ptr", "ranks_ptr", "again_ptr"],
)
def down_again_kernel(
    act_ptr, w2, bias_ptr, out_ptr, topk_weights_ptr, z_ptr, b2_ptr, ranks_ptr, tables_ptr, again_ptr, num_pairs,
    num_experts, max_loras, max_rank, expert_blocks_at, tiles_at, num_blocks, hidden_size, intermediate_size, stride_we,
    stride_wn, stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, W_TMA: tl.constexpr, SPLITS: tl.constexpr, VEC:
    tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K:
    tl.constexpr, GROUP_M: tl.constexpr, EXPAND_STAGES: tl.constexpr, WAIT_LATE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Do again, with SAFE, the tiles that `down_kernel` left to it: none, but for adapters that are not finite.

    A kernel of its own, because as a branch of the other it cost that one registers (H200, T = 2048: 10 % with adapters).
    Grid: one program per CHUNK tiles.
    """
    gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)
    num_tiles = tl.cdiv(hidden_size, BLOCK_N)
    count = tl.load(tables_ptr + 1) * num_tiles
    begin = tl.program_id(0) * CHUNK
    index = begin + tl.arange(0, CHUNK)
    if tl.max(tl.load(again_ptr + index, mask=index < count, other=0), axis=0) > 0:
        for i in range(begin, tl.minimum(begin + CHUNK, count)):
            if tl.load(again_ptr + i) != 0:
                expert, first, last = load_block(tables_ptr, i // num_tiles, expert_blocks_at, num_experts)
                down_block(
                    act_ptr, w2, bias_ptr, out_ptr, topk_weights_ptr, z_ptr, b2_ptr, ranks_ptr, tables_ptr, None,
                    expert, first, last, i % num_tiles,
                    num_pairs, max_loras, max_rank, tiles_at, hidden_size, intermediate_size, stride_we,
                    stride_wn, stride_bias_e, stride_bl, stride_be, stride_bn, stride_zm, W_TMA, SPLITS, VEC, EVEN_K, BLOCK_M,
                    BLOCK_N, BLOCK_K, EXPAND_STAGES, WAIT_LATE, True, USE_PDL,
                )  # fmt: skip
