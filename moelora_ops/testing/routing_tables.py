"""The tables of a routing in plain torch, and the comparison of a `Routing` with them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .. import reference
from ..routing import ORDER_AT, RANK_TILE, Routing


@dataclass(frozen=True)
class Tables:
    """The sections of a routing up to their counts, int64."""

    order: Tensor  # [rows]
    row_tiles: Tensor  # [rows, 2]
    expert_blocks: Tensor  # [n, 3]
    segment_blocks: Tensor  # [m, 4]
    tiles: Tensor  # [tiles]

    @staticmethod
    def of(routing: Routing) -> Tables:
        """What the buffer holds; ValueError where a count exceeds its section."""
        sizes, counts = routing.sizes, routing.tables[:4].tolist()
        capacities = (sizes.num_pairs, sizes.num_expert_blocks, sizes.num_segment_blocks, sizes.num_tiles)
        if any(not 0 <= count <= capacity for count, capacity in zip(counts, capacities)):
            raise ValueError(f"counts {counts} do not fit the capacities {capacities}")

        def section(at: int, count: int, columns: int = 1) -> Tensor:
            return routing.tables[at : at + count * columns].long().view(count, columns)

        rows, expert_blocks, segment_blocks, tiles = counts
        return Tables(
            section(ORDER_AT, rows).view(-1),
            section(sizes.row_tiles_at, rows, 2),
            section(sizes.expert_blocks_at, expert_blocks, 3),
            section(sizes.segment_blocks_at, segment_blocks, 4),
            section(sizes.tiles_at, tiles).view(-1),
        )


def expected_tables(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    *,
    num_experts: int,
    max_loras: int,
    max_rank: int,
    lora_ranks: Tensor | None,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    block_m: int,
    segment_m: int,
) -> Tables:
    """What `route` on the same arguments must hold, by a stable sort and group by group."""
    max_loras = max_loras if max_rank > 0 else 0
    slot = reference.pair_slots(token_lora_mapping, topk_ids.shape[1], max_loras, adapter_enabled)
    expert = reference.pair_experts(topk_ids, num_experts, expert_map)
    key = expert * (max_loras + 1) + slot + 1
    routed = (expert >= 0).nonzero().view(-1)
    order = routed[key[routed].sort(stable=True).indices]

    key, row_segment, rows = key[order].unique_consecutive(return_inverse=True, return_counts=True)
    expert, slot = key // (max_loras + 1), key % (max_loras + 1) - 1
    ranks = lora_ranks.long().clamp(0, max_rank) if lora_ranks is not None else key.new_full((max_loras,), max_rank)
    tiles_of_slot = torch.cat([(ranks[:max_loras] + RANK_TILE - 1) // RANK_TILE, ranks.new_zeros(1)])  # the last: slot -1
    num_tiles = tiles_of_slot[slot]
    end_tile = num_tiles.cumsum(0)
    row_tiles = torch.stack([end_tile - num_tiles, end_tile], 1)[row_segment]
    segment, tile = _spread(num_tiles)
    tiles = slot[segment] * -(-max_rank // RANK_TILE) + tile

    first_row = rows.cumsum(0) - rows
    ranked = num_tiles > 0
    segment_blocks = _blocks(first_row[ranked], rows[ranked], segment_m, expert[ranked], slot[ranked])
    expert, rows = expert[row_segment].unique_consecutive(return_counts=True)
    return Tables(order, row_tiles, _blocks(rows.cumsum(0) - rows, rows, block_m, expert), segment_blocks, tiles)


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(i, 0 .. counts[i] - 1) for every i in turn."""
    group = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return group, torch.arange(len(group), device=counts.device) - (counts.cumsum(0) - counts)[group]


def _blocks(first_row: Tensor, rows: Tensor, block_rows: int, *names: Tensor) -> Tensor:
    """[blocks, names + 2]: the names of each group, first row and end of each of its blocks."""
    group, block = _spread((rows + block_rows - 1) // block_rows)
    begin = first_row[group] + block * block_rows
    end = torch.minimum(begin + block_rows, (first_row + rows)[group])
    return torch.stack([*(name[group] for name in names), begin, end], 1)


def assert_tables(routing: Routing, expected: Tables) -> None:
    """Fail naming the first section that differs."""
    got = Tables.of(routing)
    for field in fields(Tables):
        g, w = getattr(got, field.name), getattr(expected, field.name)
        if g.shape != w.shape:
            raise AssertionError(f"{field.name}: {len(g)} entries, expected {len(w)}")
        if not torch.equal(g, w):
            at = int((g != w).nonzero()[0, 0])
            raise AssertionError(f"{field.name}: {int((g != w).sum())} of {g.numel()} differ; {at}: {g[at]}, expected {w[at]}")
