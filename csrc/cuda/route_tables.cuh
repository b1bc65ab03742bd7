// What route reads and writes: its problem, and an entry of each table. Torch-free device code.
#pragma once

#include "sort.cuh"

namespace moelora {

// The sections of the buffer: see RoutingSizes in routing.py.
struct RouteTables {
  int32_t* counts;
  int32_t* order;
  int32_t* row_tiles;
  int32_t* expert_blocks;
  int32_t* segment_blocks;
  int32_t* tiles;
};

struct RouteProblem {
  Pairs pairs;
  const int32_t* lora_ranks;  // [L]; none: full rank
  int rank_tiles;             // of a slot of full rank
  Divisor per_expert;         // L + 1 keys
  Divisor block_m;
  Divisor segment_m;
  RouteTables tables;
  SortPlan plan;

  __device__ int key(int expert, int slot) const {
    return expert < 0 ? -1 : expert * static_cast<int>(per_expert.value) + slot + 1;
  }
  __device__ int tiles_of(int slot) const {
    if (lora_ranks == nullptr) return rank_tiles;
    const int rank = max(lora_ranks[slot], 0);
    return min(rank / 16 + (rank % 16 > 0), rank_tiles);
  }
  __device__ void write_counts(int rows, int expert_blocks, int segment_blocks, int num_tiles) const {
    tables.counts[0] = rows;
    tables.counts[1] = expert_blocks;
    tables.counts[2] = segment_blocks;
    tables.counts[3] = num_tiles;
  }
  __device__ void write_expert_block(int block, int expert, int row, int expert_end) const {
    int32_t* const entry = tables.expert_blocks + static_cast<int64_t>(block) * 3;
    entry[0] = expert;
    entry[1] = row;
    entry[2] = min(static_cast<int64_t>(row) + block_m.value, static_cast<int64_t>(expert_end));
  }
  __device__ void write_segment_block(int block, int expert, int slot, int row, int segment_end) const {
    int32_t* const entry = tables.segment_blocks + static_cast<int64_t>(block) * 4;
    entry[0] = expert;
    entry[1] = slot;
    entry[2] = row;
    entry[3] = min(static_cast<int64_t>(row) + segment_m.value, static_cast<int64_t>(segment_end));
  }
  __device__ void write_row_tiles(int row, int first_tile, int end_tile) const {
    tables.row_tiles[static_cast<int64_t>(row) * 2] = first_tile;
    tables.row_tiles[static_cast<int64_t>(row) * 2 + 1] = end_tile;
  }
  __device__ void write_tiles(int slot, int first_tile, int end_tile) const {
    for (int tile = first_tile; tile < end_tile; ++tile) tables.tiles[tile] = slot * rank_tiles + tile - first_tile;
  }
};

}  // namespace moelora
