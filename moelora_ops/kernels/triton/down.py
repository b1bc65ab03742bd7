"""Second projection of the layer op: base GEMM, adapters' delta, bias and router weight in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import gdc_launch, gdc_wait
from ._expand import expand
from ._gemm import load_block, locate


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "max_loras", "max_rank", "expert_blocks_at", "tiles_at", "num_blocks"],
    do_not_specialize_on_alignment=["topk_weights_ptr", "tables_ptr", "ranks_ptr"],
)
def down_kernel(
    act,  # pointer, or with TMA a descriptor of [P, I]
    w2,  # pointer, or with TMA a descriptor of [E, H, I]
    bias_ptr,
    out_ptr,
    topk_weights_ptr,  # None: the router weight was applied on the input
    z_ptr,  # None: no adapters, and b2_ptr and ranks_ptr are not read
    b2_ptr,
    ranks_ptr,
    tables_ptr,
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
    TMA: tl.constexpr,
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
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
    rows = first + tl.arange(0, BLOCK_M)
    row_mask = rows < last
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = columns < hidden_size

    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TMA:  # rows past the last are other experts' or undefined: each stays in its own row, and is not stored
        for k in range(0, intermediate_size, BLOCK_K):
            w = w2.load([expert, tile * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
            acc = tl.dot(act.load([first, k]), w.T, acc, input_precision="ieee")
    else:
        act_ptrs = act + rows.to(tl.int64)[:, None] * intermediate_size + ks[None, :]
        w_ptrs = w2 + expert.to(tl.int64) * stride_we + columns.to(tl.int64)[None, :] * stride_wn + ks[:, None]
        for k in range(0, intermediate_size, BLOCK_K):
            k_mask = ks < intermediate_size - k
            act_mask = row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :]
            w_mask = col_mask[None, :] if EVEN_K else col_mask[None, :] & k_mask[:, None]
            h = tl.load(act_ptrs, mask=act_mask, other=0.0)
            acc = tl.dot(h, tl.load(w_ptrs, mask=w_mask, other=0.0), acc, input_precision="ieee")
            act_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
    if WAIT_LATE:
        gdc_wait(USE_PDL)
    gdc_launch(USE_PDL)

    if z_ptr is not None:
        row_tiles_ptr = tables_ptr + 4 + tl.cast(num_pairs, tl.int64)
        begin = tl.load(row_tiles_ptr + 2 * rows.to(tl.int64), mask=row_mask, other=0)
        end = tl.load(row_tiles_ptr + 2 * rows.to(tl.int64) + 1, mask=row_mask, other=0)
        b_offsets = columns.to(tl.int64) * stride_bn * VEC
        acc, _ = expand(
            acc, acc, begin, end,
            tl.load(row_tiles_ptr + 2 * first.to(tl.int64)), tl.load(row_tiles_ptr + 2 * last.to(tl.int64) - 1),
            tables_ptr + tiles_at, tl.cdiv(max_rank, 16),
            z_ptr, rows.to(tl.int64) * stride_zm, tl.cast(num_pairs, tl.int64) * stride_zm,
            b2_ptr + expert.to(tl.int64) * stride_be * VEC, tl.cast(stride_bl, tl.int64) * VEC,
            b_offsets, b_offsets, col_mask, ranks_ptr, max_loras, max_rank, 1, SPLITS, VEC,
        )  # fmt: skip

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias_e + columns, mask=col_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    pairs = tl.load(tables_ptr + 4 + rows, mask=row_mask, other=0)
    if topk_weights_ptr is not None:
        acc *= tl.load(topk_weights_ptr + pairs, mask=row_mask, other=0.0)[:, None]
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * hidden_size + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
