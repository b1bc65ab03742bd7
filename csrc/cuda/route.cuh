// Route: the pairs by (expert, adapter) and the tables of the kernels that read them, in one launch. Torch-free device code.
//
// The sort of sort.cuh with key = expert * (L + 1) + slot + 1. Everything but `order` follows from the first rows of the keys,
// so threads write it row by row: the key of a row is found by bisection, and the row that opens a block or a segment writes
// its entry. Few pairs are for route_few.cuh.
#pragma once

#include "route_tables.cuh"

namespace moelora {

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

}  // namespace moelora
