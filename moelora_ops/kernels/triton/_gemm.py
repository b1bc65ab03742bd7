"""What the two base GEMMs of the layer op share: which block a program has, where its rows are, and the loop over K."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(num_blocks, num_tiles, GROUP_M: tl.constexpr):
    """(block of rows, tile of columns) of this program: GROUP_M blocks side by side share each tile of weights in L2."""
    pid = tl.program_id(0)
    per_group = GROUP_M * num_tiles
    first = pid // per_group * GROUP_M
    size = tl.minimum(num_blocks - first, GROUP_M)
    return first + pid % per_group % size, pid % per_group // size


@triton.jit
def load_block(tables_ptr, block, expert_blocks_at, num_experts):
    """(expert, first row, one past the last) of an expert block; expert -1 where there is no such block."""
    there = block < tl.load(tables_ptr + 1)
    block_ptr = tables_ptr + expert_blocks_at + block.to(tl.int64) * 3
    expert = tl.load(block_ptr, mask=there, other=-1)
    first = tl.load(block_ptr + 1, mask=there, other=0)
    last = tl.load(block_ptr + 2, mask=there, other=0)
    return tl.where(expert < num_experts, expert, -1), first, last


@triton.jit
def load_row_tiles(tables_ptr, num_pairs, rows, row_mask, first, last):
    """(first rank tile of each row, one past its last, and the same two of the whole block)."""
    ptr = tables_ptr + 4 + tl.cast(num_pairs, tl.int64)
    begin = tl.load(ptr + 2 * rows.to(tl.int64), mask=row_mask, other=0)
    end = tl.load(ptr + 2 * rows.to(tl.int64) + 1, mask=row_mask, other=0)
    return begin, end, tl.load(ptr + 2 * first.to(tl.int64)), tl.load(ptr + 2 * last.to(tl.int64) - 1)


@triton.jit
def project(
    x,  # [BLOCK_M, BLOCK_K] pointers of the first step
    row_mask,
    w,  # [BLOCK_K, BLOCK_N] pointers into slice 0, or with W_TMA a descriptor of [E, S, N, in] (INTERLEAVED: [E, N, S, in])
    w1,  # pointers into slice 1
    expert,
    tile,
    col_mask,
    in_features,
    NUM_SLICES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    W_TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # None: the kernel's num_stages
):
    """(x W_0^T, x W_1^T), fp32 [BLOCK_M, BLOCK_N]; the second is zero when NUM_SLICES is 1."""
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ks = tl.arange(0, BLOCK_K)
    for k in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        k_mask = ks < in_features - k
        a = tl.load(x, mask=row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :], other=0.0)
        x += BLOCK_K
        w_mask = col_mask[None, :] if EVEN_K else col_mask[None, :] & k_mask[:, None]
        if W_TMA:
            b = load_weight(w, expert, 0, tile * BLOCK_N, k, INTERLEAVED, BLOCK_N, BLOCK_K)
        else:
            b = tl.load(w, mask=w_mask, other=0.0)
            w += BLOCK_K
        acc0 = tl.dot(a, b, acc0, input_precision="ieee")
        if NUM_SLICES == 2:
            if W_TMA:
                b = load_weight(w, expert, 1, tile * BLOCK_N, k, INTERLEAVED, BLOCK_N, BLOCK_K)
            else:
                b = tl.load(w1, mask=w_mask, other=0.0)
                w1 += BLOCK_K
            acc1 = tl.dot(a, b, acc1, input_precision="ieee")
    return acc0, acc1


@triton.jit
def project_merged(
    x, row_mask, w, expert, tile, in_features, INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`project` of two slices as one product of twice the width, to `take_apart`; w is a descriptor with tiles of both."""
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        k_mask = tl.arange(0, BLOCK_K) < in_features - k
        a = tl.load(x, mask=row_mask[:, None] if EVEN_K else row_mask[:, None] & k_mask[None, :], other=0.0)
        x += BLOCK_K
        if INTERLEAVED:
            b = w.load([expert, tile * BLOCK_N, 0, k])
        else:
            b = w.load([expert, 0, tile * BLOCK_N, k])
        acc = tl.dot(a, b.reshape(2 * BLOCK_N, BLOCK_K).T, acc, input_precision="ieee")
    return acc


@triton.jit
def merged_columns(tile, width, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slice, column in it, row of the weight) of each column of a merged product."""
    n = tl.arange(0, 2 * BLOCK_N)
    if INTERLEAVED:
        part, column = n % 2, tile * BLOCK_N + n // 2
        row = column.to(tl.int64) * 2 + part
    else:
        part, column = n // BLOCK_N, tile * BLOCK_N + n % BLOCK_N
        row = part.to(tl.int64) * width + column
    return part, column, row


@triton.jit
def take_apart(acc, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slice 0, slice 1) of a merged product: each thread has registers of both, nothing moves."""
    if INTERLEAVED:
        acc0, acc1 = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
    else:
        acc0, acc1 = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    return acc0, acc1


@triton.jit
def load_weight(
    w, expert, part, column, k, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of one slice, by the copy engine; zero outside the weight."""
    if INTERLEAVED:
        b = w.load([expert, column, part, k])
    else:
        b = w.load([expert, part, column, k])
    return b.reshape(BLOCK_N, BLOCK_K).T
