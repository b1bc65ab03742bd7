// Route: the pairs by (expert, adapter) and the tables of the kernels that read them, in one launch. Torch-free device code.
//
// The sort of sort.cuh with key = expert * (L + 1) + slot + 1. Everything but `order` follows from the first rows of the keys,
// so threads write it row by row: the key of a row is found by bisection, and the row that opens a block or a segment writes
// its entry. Up to 32 pairs are one warp's work, by comparison of all with all.
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

// Index: uint16_t where rows and tiles stay below 2^16, so that more keys find room.
template <typename Index>
struct RouteShared : SortShared {
  Index* first_row;      // [keys + 1]
  Index* cta_row;        // [keys]: row of this CTA's first pair of the key
  Index* first_segment;  // [keys]: first segment block
  Index* first_tile;     // [keys + 1]
  Index* first_block;    // [experts]: first expert block
  int* tiles_of_slot;    // [L]

  __host__ __device__ RouteShared(Carver& carver, const SortPlan& plan, int num_experts, int max_loras)
      : SortShared(carver, plan),
        first_row(carver.take<Index>(plan.num_keys + 1)),
        cta_row(plan.ctas > 1 ? carver.take<Index>(plan.num_keys) : first_row),
        first_segment(carver.take<Index>(plan.num_keys)),
        first_tile(carver.take<Index>(plan.num_keys + 1)),
        first_block(carver.take<Index>(num_experts)),
        tiles_of_slot(carver.take<int>(max_loras)) {}
};

// The tables of all keys and experts, the same in each CTA. Returns the number of rows.
template <typename Index>
__device__ int scan_keys(const RouteProblem& a, const RouteShared<Index>& shared) {
  const int num_keys = a.plan.num_keys, num_experts = a.pairs.num_experts, max_loras = a.pairs.max_loras;
  const int per_thread = (num_keys - 1) / kThreads + 1;
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, num_keys), last = min(first + per_thread, num_keys);
  const auto tiles_of = [&](int slot, int pairs) { return pairs > 0 && slot >= 0 ? shared.tiles_of_slot[slot] : 0; };
  const auto after = [&](int slot) { return slot + 1 == max_loras ? -1 : slot + 1; };
  const int first_slot = a.per_expert.remainder(first) - 1;
  int3 sum{0, 0, 0}, all;
  for (int key = first, slot = first_slot; key < last; ++key, slot = after(slot)) {
    const Total total = total_of(a.plan, shared, key);
    const int tiles = tiles_of(slot, total.all);
    shared.first_tile[key] = static_cast<Index>(total.before);  // until the tables are written
    shared.first_row[key] = static_cast<Index>(total.all);
    sum.x += total.all;
    sum.y += tiles > 0 ? a.segment_m.divide_up(total.all) : 0;
    sum.z += tiles;
  }
  int3 at = block_scan(sum, &all, shared.scan);
  for (int key = first, slot = first_slot; key < last; ++key, slot = after(slot)) {
    const int before = shared.first_tile[key], pairs = shared.first_row[key], tiles = tiles_of(slot, pairs);
    shared.first_row[key] = static_cast<Index>(at.x);
    if (a.plan.ctas > 1) shared.cta_row[key] = static_cast<Index>(at.x + before);
    shared.first_segment[key] = static_cast<Index>(at.y);
    shared.first_tile[key] = static_cast<Index>(at.z);
    at.x += pairs;
    at.y += tiles > 0 ? a.segment_m.divide_up(pairs) : 0;
    at.z += tiles;
  }
  if (threadIdx.x == 0) {
    shared.first_row[num_keys] = static_cast<Index>(all.x);
    shared.first_tile[num_keys] = static_cast<Index>(all.z);
  }
  __syncthreads();

  const int per_expert = static_cast<int>(a.per_expert.value);
  const int experts_per_thread = (num_experts - 1) / kThreads + 1;
  const int begin = min(static_cast<int>(threadIdx.x) * experts_per_thread, num_experts);
  const int end = min(begin + experts_per_thread, num_experts);
  const auto blocks_of = [&](int expert) {
    return a.block_m.divide_up(shared.first_row[(expert + 1) * per_expert] - shared.first_row[expert * per_expert]);
  };
  int blocks = 0;
  for (int expert = begin; expert < end; ++expert) blocks += blocks_of(expert);
  int3 all_blocks;
  int block = block_scan(int3{blocks, 0, 0}, &all_blocks, shared.scan + kWarps * 3).x;
  for (int expert = begin; expert < end; ++expert) {
    shared.first_block[expert] = static_cast<Index>(block);
    block += blocks_of(expert);
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) a.write_counts(all.x, all_blocks.x, all.y, all.z);
  return all.x;
}

// The last key whose first row is not past `row`: of several such keys all but the last are empty.
template <typename Index>
__device__ int key_of_row(const Index* first_row, int num_keys, int row) {
  int low = 0, high = num_keys;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_row[middle] <= row ? low : high) = middle;
  }
  return low;
}

template <typename Index>
__device__ void write_rows(const RouteProblem& a, const RouteShared<Index>& shared, int num_rows) {
  const int rows_per_cta = (num_rows - 1) / a.plan.ctas + 1;
  const int begin = static_cast<int>(blockIdx.x) * rows_per_cta, end = min(begin + rows_per_cta, num_rows);
  for (int row = begin + threadIdx.x; row < end; row += kThreads) {
    const int key = key_of_row(shared.first_row, a.plan.num_keys, row);
    const int expert = a.per_expert.divide(key), first_key = expert * static_cast<int>(a.per_expert.value);
    const int slot = key - first_key - 1;
    const int first_tile = shared.first_tile[key], end_tile = shared.first_tile[key + 1];
    a.write_row_tiles(row, first_tile, end_tile);

    const int position = row - shared.first_row[key];
    const int segment = a.segment_m.divide(position);
    if (end_tile > first_tile && position == segment * static_cast<int>(a.segment_m.value)) {
      a.write_segment_block(shared.first_segment[key] + segment, expert, slot, row, shared.first_row[key + 1]);
      if (position == 0) a.write_tiles(slot, first_tile, end_tile);
    }
    const int expert_position = row - shared.first_row[first_key];
    const int block = a.block_m.divide(expert_position);
    if (expert_position == block * static_cast<int>(a.block_m.value)) {
      a.write_expert_block(shared.first_block[expert] + block, expert, row, shared.first_row[first_key + a.per_expert.value]);
    }
  }
}

// One cluster of plan.ctas CTAs.
template <typename Index>
__global__ void __launch_bounds__(kThreads) route_cluster(const __grid_constant__ RouteProblem a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  Carver carver{shared_memory(), 0};
  const RouteShared<Index> shared(carver, a.plan, a.pairs.num_experts, a.pairs.max_loras);
  const PairSorter<RouteProblem> sorter{a, shared};
  sorter.clear();
  if (a.plan.ctas > 1) cluster_arrive();
  wait_for_previous_kernel();
  let_next_kernel_start();

  Ranked ranked;
  sorter.count(ranked, [&] {
    for (int slot = threadIdx.x; slot < a.pairs.max_loras; slot += kThreads) shared.tiles_of_slot[slot] = a.tiles_of(slot);
  });
  combine(a.plan, shared);
  const int num_rows = scan_keys(a, shared);
  sorter.place(ranked, [&](int pair, int key, int position) { a.tables.order[shared.cta_row[key] + position] = pair; });
  if (num_rows > 0) write_rows(a, shared, num_rows);
#endif
}

// At most 32 pairs, one warp: first a lane is a pair, then a row.
__global__ void __launch_bounds__(32) route_warp(const __grid_constant__ RouteProblem a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x;
  const unsigned up_to_lane = (2u << lane) - 1;
  const int expert_of_pair = lane < a.pairs.num_pairs ? a.pairs.expert(lane) : -1;
  const int slot_of_pair = lane < a.pairs.num_pairs ? a.pairs.slot(lane) : -1;
  const int tiles_of_pair = slot_of_pair >= 0 ? a.tiles_of(slot_of_pair) : 0;
  const int key_of_pair = expert_of_pair >= 0 ? a.key(expert_of_pair, slot_of_pair) : INT32_MAX;
  int row_of_pair = 0;
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    const int key = __shfl_sync(kFullWarp, key_of_pair, other);
    row_of_pair += key < key_of_pair || (key == key_of_pair && other < lane);
  }
  int* const pair_of_row = reinterpret_cast<int*>(shared_memory());
  pair_of_row[row_of_pair] = lane;
  __syncwarp();

  const int row = lane, pair = pair_of_row[row];
  const int num_rows = __popc(__ballot_sync(kFullWarp, expert_of_pair >= 0));
  const int key = __shfl_sync(kFullWarp, key_of_pair, pair), expert = __shfl_sync(kFullWarp, expert_of_pair, pair);
  const int slot = __shfl_sync(kFullWarp, slot_of_pair, pair), tiles = __shfl_sync(kFullWarp, tiles_of_pair, pair);
  const int key_before = __shfl_up_sync(kFullWarp, key, 1), expert_before = __shfl_up_sync(kFullWarp, expert, 1);
  const bool inside = row < num_rows;
  const unsigned segments = __ballot_sync(kFullWarp, inside && (row == 0 || key != key_before));
  const unsigned experts = __ballot_sync(kFullWarp, inside && (row == 0 || expert != expert_before));
  const auto begin_of = [&](unsigned groups) { return 31 - __clz(groups & up_to_lane); };
  const auto end_of = [&](unsigned groups) {
    const unsigned later = groups & ~up_to_lane;
    return later != 0 ? __ffs(later) - 1 : num_rows;
  };
  const int position = row - begin_of(segments), expert_position = row - begin_of(experts);
  const int segment_end = end_of(segments), expert_end = end_of(experts);
  const bool opens_segment = inside && tiles > 0 && a.segment_m.remainder(max(position, 0)) == 0;
  const bool opens_block = inside && a.block_m.remainder(max(expert_position, 0)) == 0;
  const unsigned segment_blocks = __ballot_sync(kFullWarp, opens_segment);
  const unsigned expert_blocks = __ballot_sync(kFullWarp, opens_block);
  int end_tile = inside && position == 0 ? tiles : 0;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(kFullWarp, end_tile, offset);
    if (lane >= offset) end_tile += below;
  }
  const int first_tile = end_tile - tiles;

  if (inside) {
    a.tables.order[row] = pair;
    a.write_row_tiles(row, first_tile, end_tile);
    if (position == 0) a.write_tiles(slot, first_tile, end_tile);
    const unsigned before = up_to_lane >> 1;
    if (opens_segment) a.write_segment_block(__popc(segment_blocks & before), expert, slot, row, segment_end);
    if (opens_block) a.write_expert_block(__popc(expert_blocks & before), expert, row, expert_end);
  }
  if (row == 31) a.write_counts(num_rows, __popc(expert_blocks), __popc(segment_blocks), end_tile);
#endif
}

}  // namespace moelora
