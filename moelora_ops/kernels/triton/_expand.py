"""Second LoRA product of the layer op, added to the accumulators of a base GEMM: four rank tiles in one dot.

An adapter of rank r is cdiv(r, 16) *rank tiles*. The tiles of all segments in a block of rows stand next to each other in the
routing's table, so WIDTH / 16 of them, whoever they belong to, are merged along K: z is masked to the rows of each tile's own
segment, B is gathered from as many adapters. A block of 32 rows and 8 adapters takes 2 dots, not 8 (H200, T = 512).

A zero in z does not keep out a NaN of another adapter's B, nor of B past a rank. That is let happen, and seen afterwards in the
accumulators (`find_bad`): the tile is then done again with SAFE, which leaves out of the dots what is not finite and sets the
rows that own it to NaN. The look costs 1 %; a check of every tile of B, with or without a branch, cost 10 % (H200, T = 2048).
"""

from __future__ import annotations

import triton
import triton.language as tl

RANK_TILE = 16
WIDTH = tl.constexpr(64)
CHUNK = tl.constexpr(64)  # tiles of a program that looks for those to do again


@triton.jit
def slot_rank(ranks_ptr, slot, known, max_rank):
    """Rank of a slot's adapter, clamped to the pool's rank; the pool's rank where no ranks are given, 0 for no slot."""
    if ranks_ptr is None:
        return tl.where(known, max_rank, 0)
    else:
        return tl.minimum(tl.maximum(tl.load(ranks_ptr + slot, mask=known, other=0), 0), max_rank)


@triton.jit
def tile_columns(first_tile, end_tile, tiles_ptr, tiles_per_slot, ranks_ptr, max_loras, max_rank, WIDTH: tl.constexpr):
    """(slot, column of its B, its rank) for each of WIDTH columns of rank tiles from first_tile on; rank 0 past the end."""
    i = tl.arange(0, WIDTH)
    tile = first_tile + i // 16
    code = tl.max_constancy(tl.load(tiles_ptr + tile, mask=tile < end_tile, other=-1), [16])
    known = (code >= 0) & (code // tiles_per_slot < max_loras)
    slot = tl.where(known, code // tiles_per_slot, 0)
    rank = tl.max_constancy(slot_rank(ranks_ptr, slot, known, max_rank), [16])
    return slot, tl.where(known, code % tiles_per_slot, 0) * 16 + i % 16, rank


@triton.jit
def load_b(b_ptr, b_offsets, slot, j, rank, stride_bl, col_mask, VEC: tl.constexpr):
    """B[slot[k], col, j[k]] as [BLOCK_N, WIDTH]; zero from the first whole vector past the rank on."""
    # Whole vectors of VEC elements: a mask that changes inside one would make every load a scalar one. Triton cannot see it.
    mask = tl.max_constancy(col_mask[:, None] & ((j // VEC) * VEC < rank)[None, :], [1, VEC])
    offsets = b_offsets[:, None] + (slot.to(tl.int64) * stride_bl + j)[None, :]
    return tl.load(b_ptr + tl.multiple_of(tl.max_contiguous(offsets, [1, VEC]), [1, VEC]), mask=mask, other=0.0)


@triton.jit
def load_z(z_ptr, offsets, mask, split_stride, SPLITS: tl.constexpr):
    """Sum of the splits of z, in fixed order."""
    z = tl.load(z_ptr + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        z += tl.load(z_ptr + split * split_stride + offsets, mask=mask, other=0.0)
    return z


@triton.jit
def find_bad(acc0, acc1, adapters, flag_ptr, BLOCK_M: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Whether, with adapters, an accumulator holds NaN or infinity: a product with zero is zero for everything else.

    With a flag_ptr that is written there, and False returned: rows then need not meet in one value, which would stop all warps.
    """
    probe = tl.sum(acc0 * 0.0, axis=1)
    if NUM_SLICES == 2:
        probe += tl.sum(acc1 * 0.0, axis=1)
    if flag_ptr is None:
        return (tl.sum(probe, axis=0) != 0.0) & adapters
    else:
        tl.store(flag_ptr, 0)
        tl.debug_barrier()
        tl.store(flag_ptr + tl.zeros((BLOCK_M,), tl.int32), 1, mask=tl.where(adapters, probe != 0.0, False))
        return False


@triton.jit
def expand(
    acc0,
    acc1,  # slice 1; returned as it is when NUM_SLICES is 1
    begin,  # [BLOCK_M] first rank tile of each row's segment
    end,  # [BLOCK_M] one past its last; equal where the row has no adapter
    first_tile,  # rank tiles of this block of rows: [first_tile, end_tile)
    end_tile,
    slot,  # `tile_columns` of first_tile, loaded while the base product ran
    j,
    rank,
    tiles_ptr,  # slot * tiles_per_slot + tile of each rank tile
    tiles_per_slot,
    z_ptr,
    z_offsets,  # [BLOCK_M] int64: element offset of each row in split 0 of z
    split_stride,  # int64
    b_ptr,  # B of this expert in slot 0
    stride_bl,
    b0_offsets,  # [BLOCK_N] int64: element offset of each column's row of B
    b1_offsets,
    col_mask,
    ranks_ptr,
    max_loras,
    max_rank,
    NUM_SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,  # elements that one load of B may take
    STAGES: tl.constexpr,  # of the loop over rank tiles
    SAFE: tl.constexpr,
):
    """acc_s[row, col] += sum over j < rank of z[row, s, j] * B_s[slot(row), col, j], for every row with an adapter."""
    width: tl.constexpr = 16 if SAFE else WIDTH  # safely is rare, and as a branch costs the rest its registers
    for t in tl.range(first_tile, end_tile, width // 16, num_stages=STAGES):
        if STAGES > 1:  # a pipeline finds the next columns by itself; one stage gets them while its dots run
            slot, j, rank = tile_columns(t, end_tile, tiles_ptr, tiles_per_slot, ranks_ptr, max_loras, max_rank, width)
        tile = (t + tl.arange(0, width) // 16)[None, :]
        mask = (begin[:, None] <= tile) & (tile < end[:, None])
        offsets = z_offsets[:, None] + j[None, :]
        b0 = load_b(b_ptr, b0_offsets, slot, j, rank, stride_bl, col_mask, VEC)
        z0 = load_z(z_ptr, offsets, mask, split_stride, SPLITS)
        if NUM_SLICES == 2:
            b1 = load_b(b_ptr, b1_offsets, slot, j, rank, stride_bl, col_mask, VEC)
            z1 = load_z(z_ptr + tiles_per_slot * 16, offsets, mask, split_stride, SPLITS)
        inside = j < rank
        if STAGES == 1:
            slot, j, rank = tile_columns(
                t + width // 16, end_tile, tiles_ptr, tiles_per_slot, ranks_ptr, max_loras, max_rank, width
            )
        if SAFE:
            acc0 = expand_safely(acc0, z0, b0, inside, begin, end, t)
            if NUM_SLICES == 2:
                acc1 = expand_safely(acc1, z1, b1, inside, begin, end, t)
        else:
            acc0 = tl.dot(z0.to(b0.dtype), tl.trans(b0), acc0, input_precision="ieee")
            if NUM_SLICES == 2:
                acc1 = tl.dot(z1.to(b1.dtype), tl.trans(b1), acc1, input_precision="ieee")
    return acc0, acc1


@triton.jit
def expand_merged(
    acc, begin, end, first_tile, end_tile, tiles_ptr, tiles_per_slot, z_ptr, z_offsets, split_stride, b_ptr, stride_bl,
    b_offsets, part, col_mask, ranks_ptr, max_loras, max_rank, SPLITS: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`expand` of gate and up on their merged product: z of both side by side, B with zeros where they do not meet.

    Args: part: [columns of acc] 0 for gate, 1 for up. b_offsets, col_mask: of the same columns.
    """
    # Two accumulators of one merged product would have to be moved: 6 to 12 % of the layer (H200, T = 8192 and 16384).
    half: tl.constexpr = WIDTH // 2
    i = tl.arange(0, WIDTH)
    for t in tl.range(first_tile, end_tile, half // 16, num_stages=STAGES):
        tile = t + i % half // 16
        code = tl.max_constancy(tl.load(tiles_ptr + tile, mask=tile < end_tile, other=-1), [16])
        known = (code >= 0) & (code // tiles_per_slot < max_loras)
        slot = tl.where(known, code // tiles_per_slot, 0)
        rank = tl.max_constancy(slot_rank(ranks_ptr, slot, known, max_rank), [16])
        j = tl.where(known, code % tiles_per_slot, 0) * 16 + i % 16
        mask = (begin[:, None] <= tile[None, :]) & (tile[None, :] < end[:, None])
        offsets = z_offsets[:, None] + (j + i // half * (tiles_per_slot * 16))[None, :]
        offsets = tl.multiple_of(tl.max_contiguous(offsets, [1, 8]), [1, 8])  # whole rank tiles: Triton cannot see it
        z = load_z(z_ptr, offsets, tl.max_constancy(mask, [1, 8]), split_stride, SPLITS)
        b_mask = tl.max_constancy(col_mask[:, None] & ((j // VEC) * VEC < rank)[None, :], [1, VEC])
        b_mask &= tl.max_constancy(part[:, None] == (i // half)[None, :], [1, VEC])
        offsets = b_offsets[:, None] + (slot.to(tl.int64) * stride_bl + j)[None, :]
        b_ptrs = b_ptr + tl.multiple_of(tl.max_contiguous(offsets, [1, VEC]), [1, VEC])
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        acc = tl.dot(z.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def expand_safely(acc, z, b, inside, begin, end, tile):
    """acc + z B^T of one rank tile, where B may hold what is not finite: NaN in such columns for the rows that own it."""
    ok = tl.abs(b.to(tl.float32)) < float("inf")
    acc = tl.dot(z.to(b.dtype), tl.trans(tl.where(ok, b, 0.0).to(b.dtype)), acc, input_precision="ieee")
    bad = (inside[None, :] & (ok == 0)).to(tl.int32)
    owner = (begin <= tile) & (tile < end)
    return tl.where(owner[:, None] & (tl.max(bad, axis=1) > 0)[None, :], float("nan"), acc)
