"""Device functions of the two LoRA products, shared by the layer op and the delta op.

Both keep one rule: what lies past an adapter's own rank, in another adapter, or in another row is masked where it is loaded or
selected away before it is added. It may be NaN and still never reach a result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def new_z(like: Tensor, splits: int, num_pairs: int, width: int) -> Tensor:
    """Uninitialised z [splits, P, S * R]: fp32 for partial sums, the dtype of `like` where the sum is whole."""
    dtype = torch.float32 if splits > 1 else like.dtype
    return torch.empty((splits, num_pairs, width), dtype=dtype, device=like.device)


@triton.jit
def slot_rank(ranks_ptr, slot, max_rank):
    """Rank of a slot's adapter, clamped to the pool's rank; the pool's rank where no ranks are given."""
    if ranks_ptr is None:
        return max_rank
    else:
        return tl.minimum(tl.maximum(tl.load(ranks_ptr + slot), 0), max_rank)


@triton.jit
def shrink_tile(
    x_ptr,
    x_offsets,  # [BLOCK_M] int64: element offset of each row of x
    row_mask,
    a0_ptr,  # A of this slot and expert, slice 0: [rank, in_features]
    stride_a0r,
    a1_ptr,  # slice 1, unused when NUM_SLICES is 1
    stride_a1r,
    z_ptr,
    z_offsets,  # [BLOCK_M] int64: element offset of each row of this split's z
    rank_begin,
    rank,
    max_rank,
    in_features,
    split,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """z[row, s * R + j] = x[row, k_begin:k_end] . A_s[j, k_begin:k_end] for one tile of ranks, one split of K, all slices.

    z is fp32 when it is a partial sum; a whole sum is rounded to the dtype of x here instead of in `expand_tile`.
    """
    steps_per_split = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS)
    k_begin = split * steps_per_split * BLOCK_K
    k_end = tl.minimum(k_begin + steps_per_split * BLOCK_K, in_features)
    ranks = rank_begin + tl.arange(0, BLOCK_R)
    rank_mask = ranks < rank
    ks = k_begin + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_offsets[:, None] + ks[None, :]
    a0_ptrs = a0_ptr + ranks.to(tl.int64)[None, :] * stride_a0r + ks[:, None]
    a1_ptrs = a1_ptr + ranks.to(tl.int64)[None, :] * stride_a1r + ks[:, None]
    z0 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    z1 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        k_mask = tl.arange(0, BLOCK_K) < k_end - k
        x_mask = row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :]
        a_mask = rank_mask[None, :] if EVEN_K else rank_mask[None, :] & k_mask[:, None]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        z0 = tl.dot(x, tl.load(a0_ptrs, mask=a_mask, other=0.0), z0, input_precision="ieee")
        if NUM_SLICES == 2:
            z1 = tl.dot(x, tl.load(a1_ptrs, mask=a_mask, other=0.0), z1, input_precision="ieee")
        x_ptrs += BLOCK_K
        a0_ptrs += BLOCK_K
        a1_ptrs += BLOCK_K
    z_ptrs = z_ptr + z_offsets[:, None] + ranks[None, :]
    z_mask = row_mask[:, None] & rank_mask[None, :]
    tl.store(z_ptrs, z0.to(z_ptr.dtype.element_ty), mask=z_mask)
    if NUM_SLICES == 2:
        tl.store(z_ptrs + max_rank, z1.to(z_ptr.dtype.element_ty), mask=z_mask)


@triton.jit
def expand_tile(
    z_ptr,
    z_offsets,  # [BLOCK_M] int64: element offset of each row and slice in split 0 of z
    split_stride,  # int64: elements of one split of z
    row_mask,
    b_ptr,  # B of this slot and expert: [out_features, rank]
    b_offsets,  # [BLOCK_N] int64: element offset of each row of B
    col_mask,
    rank,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """sum over j < rank of z[row, j] * B[col, j], fp32. Rows outside `row_mask` may be NaN: select, never add them."""
    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for rank_begin in tl.range(0, rank, BLOCK_R, num_stages=1):  # one or two trips: a pipeline would only cost shared memory
        ranks = rank_begin + tl.arange(0, BLOCK_R)
        rank_mask = ranks < rank
        z_ptrs = z_ptr + z_offsets[:, None] + ranks[None, :]
        z_mask = row_mask[:, None] & rank_mask[None, :]
        z = tl.load(z_ptrs, mask=z_mask, other=0.0)
        for split in tl.static_range(1, SPLITS):  # in fixed order: the same bits every time
            z += tl.load(z_ptrs + split * split_stride, mask=z_mask, other=0.0)
        b_mask = rank_mask[:, None] & col_mask[None, :]
        b = tl.load(b_ptr + b_offsets[None, :] + ranks[:, None], mask=b_mask, other=0.0)
        delta = tl.dot(z.to(b.dtype), b, delta, input_precision="ieee")
    return delta
