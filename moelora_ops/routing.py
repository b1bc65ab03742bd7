"""What is known on the host about a routing: capacities that follow from sizes alone, never from device data.

A *pair* is one (token, choice): pair p = t * top_k + k. Kernels read the true counts on the device; buffers and grids are sized
by the bounds below, so nothing on the hot path waits for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .checks import ID_DTYPES, INT32_MAX, Sizes, check_dtype, check_ids, check_positive, check_tensor, holds

RANK_TILE = 16  # ranks of a rank tile
ORDER_AT = 4  # offset of the section `order` in a routing's buffer, after the counts


def round_up(value: Any, multiple: Any) -> Any:
    return (value + multiple - 1) // multiple * multiple


def align_capacity(num_pairs: Any, num_experts: Any, block_size: Any) -> Any:
    """Columns of `sorted_token_ids`: EM = round_up(min(P * bs, P + E * (bs - 1)), bs).

    Each of the at most min(P, E) groups of a slot is padded by less than a block. Symbolic sizes stay symbolic (no guard).

    >>> align_capacity(6, 4, 4)
    20
    """
    return round_up(torch.sym_min(num_pairs * block_size, num_pairs + num_experts * (block_size - 1)), block_size)


def max_blocks(num_pairs: int, num_groups: int, block_rows: int) -> int:
    """Most blocks of `block_rows` rows that P pairs in at most `num_groups` groups can need.

    >>> max_blocks(num_pairs=8, num_groups=1152, block_rows=16)
    8
    >>> max_blocks(num_pairs=4096, num_groups=128, block_rows=64)
    192
    """
    return min(num_pairs, num_pairs // block_rows + min(num_groups, num_pairs))


@dataclass(frozen=True)
class RoutingSizes:
    """The layout of a routing's one buffer: what follows from sizes alone. Offsets and sizes count int32 elements.

    | section | at | entries | entry |
    |---|---|---|---|
    | counts | 0 | 4 | number of rows, of expert blocks, of segment blocks, of rank tiles |
    | order | 4 | P | pair |
    | row_tiles | row_tiles_at | P | first rank tile of the row's segment, one past its last |
    | expert_blocks | expert_blocks_at | num_expert_blocks | expert, first row, last row + 1 |
    | segment_blocks | segment_blocks_at | num_segment_blocks | expert, slot, first row, last row + 1 |
    | tiles | tiles_at | num_tiles | slot * rank_tiles + j |
    """

    num_pairs: int
    num_experts: int
    max_loras: int  # 0 where no slot can have a rank
    rank_tiles: int  # of a slot of full rank
    block_m: int  # rows of an expert block
    segment_m: int  # rows of a segment block
    num_expert_blocks: int
    num_segment_blocks: int
    num_tiles: int
    row_tiles_at: int
    expert_blocks_at: int
    segment_blocks_at: int
    tiles_at: int
    size: int

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(num_pairs: int, num_experts: int, max_loras: int, max_rank: int, block_m: int, segment_m: int) -> RoutingSizes:
        """
        >>> sizes = RoutingSizes.of(num_pairs=6, num_experts=4, max_loras=2, max_rank=20, block_m=4, segment_m=4)
        >>> sizes.num_expert_blocks, sizes.num_segment_blocks, sizes.num_tiles, sizes.size
        (5, 6, 12, 73)
        """
        max_loras = max_loras if max_rank > 0 else 0
        rank_tiles = -(-max_rank // RANK_TILE)
        num_segments = num_experts * max_loras
        num_expert_blocks = max_blocks(num_pairs, num_experts, block_m)
        num_segment_blocks = max_blocks(num_pairs, num_segments, segment_m) if num_segments else 0
        num_tiles = min(num_pairs, num_segments) * rank_tiles
        row_tiles_at = ORDER_AT + num_pairs
        expert_blocks_at = row_tiles_at + 2 * num_pairs
        segment_blocks_at = expert_blocks_at + 3 * num_expert_blocks
        tiles_at = segment_blocks_at + 4 * num_segment_blocks
        return RoutingSizes(
            num_pairs, num_experts, max_loras, rank_tiles, block_m, segment_m, num_expert_blocks, num_segment_blocks, num_tiles,
            row_tiles_at, expert_blocks_at, segment_blocks_at, tiles_at, tiles_at + num_tiles,
        )  # fmt: skip


@dataclass(frozen=True)
class Routing:
    """One compact sort of the pairs by (expert, adapter), made once per layer and carried to every kernel.

    Rows are positions in the sorted order; pairs of one (expert, slot) are a contiguous *segment*, ascending inside. Within
    an expert the pairs without an adapter come first. Pairs with an expert outside [0, E) have no row. The ranks of a slot are
    cut into *rank tiles* of 16; the tiles of all segments with an adapter stand in a list in the order of the rows, so that
    those of an expert block, whatever its adapters, are a run of the list. Entries past the counts are undefined.

    Worked example: T = 3, K = 2, E = 4, topk_ids [[2, 0], [2, 7], [0, 2]], token_lora_mapping [1, -1, 1], two slots of a pool
    of rank 32, block_m = segment_m = 4:

        row           0       1       2       3       4
        pair          1       4       2       0       5       pair 3 (expert 7) is nowhere
        expert        0       0       2       2       2
        slot          1       1      -1       1       1
        row_tiles     0..2    0..2    2..2    2..4    2..4    a row without an adapter has none
        tiles         2  3  2  3                              slot 1, tiles 0 and 1, for each of the two segments
        expert blocks     (expert 0, rows 0..2)  (expert 2, rows 2..5)
        segment blocks    (expert 0, slot 1, rows 0..2)  (expert 2, slot 1, rows 3..5)
        counts        5 rows, 2 expert blocks, 2 segment blocks, 4 rank tiles
    """

    tables: Tensor  # [sizes.size] int32
    sizes: RoutingSizes


def token_lora_mapping(seg_indptr: Tensor, lora_ids: Tensor, num_tokens: int) -> Tensor:
    """Turn segments of requests into the adapter slot of each token.

        mapping[t] = lora_ids[i]   for seg_indptr[i] <= t < seg_indptr[i + 1],   -1 where no segment holds t

    Plain traceable torch without a host read: sizes may be dynamic, and a replayed graph follows the values.

    >>> token_lora_mapping(torch.tensor([0, 2, 2, 5]), torch.tensor([1, 7, -1]), 6).tolist()
    [1, 1, -1, -1, -1, -1]

    Args:
        seg_indptr: (N + 1,) int32 or int64, first token of each segment and the end of the last; non-decreasing (an empty
            segment holds no token).
        lora_ids: (N,) int32 or int64, adapter slot of each segment; negative: none.
        num_tokens: T; tokens before the first and past the last segment get -1.

    Returns: (T,) int32 on the device of `seg_indptr`.
    Raises: ValueError, TypeError naming the argument, what was expected and what came.
    """
    check_positive("num_tokens", num_tokens, least=0)
    check_tensor("seg_indptr", seg_indptr)
    check_dtype("seg_indptr", seg_indptr, ID_DTYPES)
    if seg_indptr.dim() != 1 or holds(seg_indptr.shape[0] < 1):
        raise ValueError(f"seg_indptr must have shape [N + 1], got {tuple(seg_indptr.shape)}")
    sizes = Sizes()
    sizes.set("N", seg_indptr.shape[0] - 1, "seg_indptr (its length - 1)")
    check_ids(sizes, "lora_ids", lora_ids, ("N",), "seg_indptr", seg_indptr)
    token = torch.arange(num_tokens, dtype=seg_indptr.dtype, device=seg_indptr.device)
    segment = torch.searchsorted(seg_indptr.contiguous(), token, right=True) - 1  # the last one that starts at or before t
    # An id that int32 cannot hold must not wrap into a valid slot. Entry N, one past the last segment, is "none".
    ids = torch.where((lora_ids >= 0) & (lora_ids <= INT32_MAX), lora_ids, -1).to(torch.int32)
    ids = torch.cat([ids, ids.new_full((1,), -1)])
    return torch.where(segment >= 0, ids[segment.clamp(min=0)], -1)
