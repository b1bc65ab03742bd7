// Route of few pairs, in one CTA: rows by comparison of all keys with all, groups by the bits of the rows that open them. No
// counters, whose clearing and sums over all keys take longer than such a batch. Torch-free device code.
#pragma once

#include <climits>

#include "route_tables.cuh"

namespace moelora {

constexpr int kFewPairs = 128;  // H200: 3.2 us for 64, where the sort takes 5.0; 6.2 for 256, where it takes 5.2
constexpr int kFewThreads = 512;
constexpr int kFewWords = kFewThreads / 32;  // a bit per row; a thread is a row, and the rows are fewer

// Which rows open a group.
struct RowBits {
  uint32_t* words;  // [kFewWords]

  __device__ void set(bool opens) const {
    const unsigned bits = __ballot_sync(kFullWarp, opens);
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = bits;
  }
  // The last such row up to `row`; row 0 is one.
  __device__ int last_up_to(int row) const {
    int word = row / 32;
    uint32_t bits = words[word] & ((2u << (row % 32)) - 1);
    while (bits == 0) bits = words[--word];
    return word * 32 + 31 - __clz(bits);
  }
  // The first such row after `row`, or `end`.
  __device__ int first_after(int row, int end) const {
    int word = row / 32;
    uint32_t bits = words[word] & ~((2u << (row % 32)) - 1);
    while (bits == 0 && ++word < kFewPairs / 32) bits = words[word];
    return bits != 0 ? word * 32 + __ffs(bits) - 1 : end;
  }
  // How many rows before `row` do.
  __device__ int before(int row) const {
    int count = __popc(words[row / 32] & ((1u << (row % 32)) - 1));
    for (int word = 0; word < row / 32; ++word) count += __popc(words[word]);
    return count;
  }
};

// One CTA. `lanes`, a power of two, of a warp compare a pair's key with the others'.
__global__ void __launch_bounds__(kFewThreads) route_few(const __grid_constant__ RouteProblem a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ int4 keys4[kFewPairs / 4];  // of the pairs; past the last, and where there is no expert, a key above all others
  __shared__ int tiles_of_pair[kFewPairs], pair_of_row[kFewPairs], key_of_row[kFewPairs];
  __shared__ uint32_t bits[4][kFewWords];
  __shared__ int tile_sums[kFewWords];
  int* const keys = reinterpret_cast<int*>(keys4);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  constexpr int kNoKey = INT_MAX - 1;
  wait_for_previous_kernel();
  let_next_kernel_start();

  int key = -1;
  if (thread < kFewPairs) {
    const bool is_pair = thread < a.pairs.num_pairs;
    const int expert = is_pair ? a.pairs.expert(thread) : -1, slot = is_pair ? a.pairs.slot(thread) : -1;
    key = a.key(expert, slot);
    keys[thread] = key >= 0 ? key : kNoKey;
    tiles_of_pair[thread] = key >= 0 && slot >= 0 ? a.tiles_of(slot) : 0;
  }
  const int num_rows = __syncthreads_count(key >= 0);

  int padded = 32;
  while (padded < a.pairs.num_pairs) padded *= 2;
  const int lanes = min(kFewThreads / padded, 32), pair = thread / lanes, chunks = padded / 4;
  if (pair < padded) {  // whole warps
    const int mine = keys[pair];
    int row = 0;
    for (int chunk = thread % lanes; chunk < chunks; chunk += lanes) {
      const int4 others = keys4[chunk];
      const int first = chunk * 4;  // an equal key counts where its pair is earlier
      row += (others.x < mine + (first < pair)) + (others.y < mine + (first + 1 < pair));
      row += (others.z < mine + (first + 2 < pair)) + (others.w < mine + (first + 3 < pair));
    }
    for (int offset = 1; offset < lanes; offset *= 2) row += __shfl_xor_sync(kFullWarp, row, offset);
    if (mine != kNoKey && thread % lanes == 0) {
      pair_of_row[row] = pair;
      key_of_row[row] = mine;
    }
  }
  __syncthreads();

  const RowBits segments{bits[0]}, experts{bits[1]}, segment_blocks{bits[2]}, expert_blocks{bits[3]};
  const int row = thread;
  const bool inside = row < num_rows;
  int pair_of_this = 0, expert = -1, slot = -1, tiles = 0;
  bool opens_key = false, opens_expert = false;
  if (inside) {
    key = key_of_row[row];
    pair_of_this = pair_of_row[row];
    tiles = tiles_of_pair[pair_of_this];
    expert = a.per_expert.divide(key);
    slot = key - expert * static_cast<int>(a.per_expert.value) - 1;
    const int before = row > 0 ? key_of_row[row - 1] : -1;
    opens_key = before != key;
    opens_expert = before < 0 || a.per_expert.divide(before) != expert;
  }
  segments.set(opens_key);
  experts.set(opens_expert);
  int end_tile = opens_key ? tiles : 0;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(kFullWarp, end_tile, offset);
    if (lane >= offset) end_tile += below;
  }
  if (lane == 31) tile_sums[warp] = end_tile;
  __syncthreads();

  int position = 0, expert_position = 0;
  if (inside) {
    position = row - segments.last_up_to(row);
    expert_position = row - experts.last_up_to(row);
  }
  const bool opens_segment = inside && tiles > 0 && a.segment_m.remainder(position) == 0;
  const bool opens_block = inside && a.block_m.remainder(expert_position) == 0;
  segment_blocks.set(opens_segment);
  expert_blocks.set(opens_block);
  __syncthreads();

  if (inside) {
    for (int w = 0; w < warp; ++w) end_tile += tile_sums[w];
    const int first_tile = end_tile - tiles;
    a.tables.order[row] = pair_of_this;
    a.write_row_tiles(row, first_tile, end_tile);
    if (position == 0) a.write_tiles(slot, first_tile, end_tile);
    if (opens_segment) {
      a.write_segment_block(segment_blocks.before(row), expert, slot, row, segments.first_after(row, num_rows));
    }
    if (opens_block) a.write_expert_block(expert_blocks.before(row), expert, row, experts.first_after(row, num_rows));
  }
  if (thread == kFewThreads - 1) {  // past all rows: what is before it is everything
    int num_tiles = 0;
    for (int w = 0; w < kFewWords; ++w) num_tiles += tile_sums[w];
    a.write_counts(num_rows, expert_blocks.before(thread), segment_blocks.before(thread), num_tiles);
  }
#endif
}

}  // namespace moelora
