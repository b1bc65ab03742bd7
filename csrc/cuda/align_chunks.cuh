// Align in two launches, for devices without clusters and for sizes that do not fit the shared memory of one. Torch-free.
//
// A stable counting sort with key = slot * E + expert, linear in pairs and keys. Pairs are cut into chunks of consecutive
// pairs, one CTA each:
//
//   align_count   keys[p] of each pair, counts[chunk][key]; further CTAs fill the outputs with their sentinels
//   align_place   a pair's position in its group = pairs of that key in earlier chunks (a column sum of counts)
//                                                + pairs of that key before it in its chunk (a cursor per key);
//                 the pair that opens a block writes the block's expert
//
// Chunks share nothing but counts, which is complete before the second launch, so no result depends on the order of CTAs.
// Shared memory does not grow with E, L or T: the tables per key are rows in global memory that one CTA owns.
#pragma once

#include "align.cuh"

namespace moelora {

constexpr int kChunkThreads = 256;
constexpr int kChunkWarps = kChunkThreads / 32;
constexpr int kFillPerThread = 16;

struct ChunkedAlign {
  AlignProblem problem;  // its plan is not used
  int num_keys;
  int num_chunks;   // of pairs
  int chunk_pairs;  // a multiple of kChunkThreads
  int stride;       // of the rows of counts, cursors and first_blocks: at least one more than the keys

  int32_t* keys;          // [P] scratch: slot * E + expert, -1 for a pair that is skipped
  int32_t* counts;        // [chunks, stride] scratch
  int32_t* cursors;       // [chunks, stride] scratch
  int32_t* first_blocks;  // [chunks, stride] scratch

  __device__ int64_t row(int chunk) const { return static_cast<int64_t>(chunk) * stride; }
  __device__ int64_t first_pair(int chunk) const { return static_cast<int64_t>(chunk) * chunk_pairs; }
  __device__ int64_t last_pair(int chunk) const {
    const int64_t end = first_pair(chunk) + chunk_pairs;
    return end < problem.pairs.num_pairs ? end : problem.pairs.num_pairs;
  }
};

// One CTA per chunk of pairs, then one per kChunkThreads * kFillPerThread rows of the outputs.
__global__ void __launch_bounds__(kChunkThreads) align_count(const ChunkedAlign a) {
  if (blockIdx.x >= static_cast<unsigned>(a.num_chunks)) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - a.num_chunks) * (kChunkThreads * kFillPerThread) + threadIdx.x;
    for (int i = 0; i < kFillPerThread; ++i) {
      const int64_t at = first + i * kChunkThreads;
      if (at < a.problem.rows_of_all_slots()) a.problem.sorted_token_ids[at] = a.problem.pairs.num_pairs;
      if (at < a.problem.blocks_of_all_slots()) a.problem.expert_ids[at] = -1;
    }
    return;
  }
  const int chunk = static_cast<int>(blockIdx.x);
  int32_t* const counts = a.counts + a.row(chunk);
  for (int key = threadIdx.x; key < a.num_keys; key += kChunkThreads) counts[key] = 0;
  __syncthreads();
  for (int64_t pair = a.first_pair(chunk) + threadIdx.x; pair < a.last_pair(chunk); pair += kChunkThreads) {
    const int at = static_cast<int>(pair), key = a.problem.key(a.problem.pairs.expert(at), a.problem.pairs.slot(at));
    a.keys[pair] = key;
    if (key >= 0) atomicAdd(&counts[key], 1);  // this CTA's own row: a sum, whatever the order
  }
}

// Exclusive prefix sum over the CTA; `total` gets the sum. Every thread calls it.
__device__ inline int block_scan(int value, int* total) {
  __shared__ int warp_sums[kChunkWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0, sum = 0;
  for (int w = 0; w < kChunkWarps; ++w) {
    if (w < warp) before += warp_sums[w];
    sum += warp_sums[w];
  }
  __syncthreads();  // warp_sums may be written again
  *total = sum;
  return before + inclusive - value;
}

// Pairs of the same key before this thread's pair among the kChunkThreads pairs at hand, and whether any follow.
struct Around {
  int before;
  bool more;
};

__device__ inline Around same_key_around(int key, const int4* keys_of_tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned peers = __match_any_sync(kFullWarp, key);
  Around around{__popc(peers & ((1u << lane) - 1)), (peers >> lane) > 1u};
  for (int w = 0; w < kChunkWarps; ++w) {
    if (w == warp) continue;
    int same = 0;
    for (int i = 0; i < 8; ++i) {  // the whole warp reads one address: a broadcast
      const int4 other = keys_of_tile[w * 8 + i];
      same += (other.x == key) + (other.y == key) + (other.z == key) + (other.w == key);
    }
    if (w < warp) around.before += same;
    if (w > warp) around.more |= same > 0;
  }
  return around;
}

// This chunk's cursor of each key, and the first block of each key over all slots.
__device__ inline void place_groups(const ChunkedAlign& a, int chunk, int32_t* cursors, int32_t* first_blocks) {
  int blocks_before = 0;
  for (int first = 0; first < a.num_keys; first += kChunkThreads) {
    const int key = first + static_cast<int>(threadIdx.x);
    int before = 0, total = 0;
    if (key < a.num_keys) {
#pragma unroll 8
      for (int c = 0; c < a.num_chunks; ++c) {
        const int n = a.counts[a.row(c) + key];
        total += n;
        if (c < chunk) before += n;
      }
    }
    int blocks_here;
    const int block = block_scan(a.problem.block_size.divide_up(total), &blocks_here);
    if (key < a.num_keys) {
      cursors[key] = before;
      first_blocks[key] = blocks_before + block;
    }
    blocks_before += blocks_here;
  }
  if (threadIdx.x == 0) first_blocks[a.num_keys] = blocks_before;
  __syncthreads();
}

// One CTA per chunk of pairs.
__global__ void __launch_bounds__(kChunkThreads) align_place(const ChunkedAlign a) {
  __shared__ int4 keys_of_tile[kChunkThreads / 4];
  const int chunk = static_cast<int>(blockIdx.x);
  int32_t* const cursors = a.cursors + a.row(chunk);
  int32_t* const first_blocks = a.first_blocks + a.row(chunk);
  place_groups(a, chunk, cursors, first_blocks);

  if (chunk == 0) {
    const int max_loras = a.problem.pairs.max_loras;
    for (int slot = threadIdx.x; slot < max_loras; slot += kChunkThreads) a.problem.put_length(slot, first_blocks);
  }

  for (int64_t first = a.first_pair(chunk); first < a.last_pair(chunk); first += kChunkThreads) {
    const int64_t pair = first + threadIdx.x;
    const int key = pair < a.last_pair(chunk) ? a.keys[pair] : -1;
    reinterpret_cast<int*>(keys_of_tile)[threadIdx.x] = key;
    __syncthreads();
    const Around around = same_key_around(key, keys_of_tile);
    const int position = key >= 0 ? cursors[key] + around.before : 0;
    __syncthreads();  // all have read their cursor and the tile
    if (key < 0) continue;  // the next barrier is met by every thread at the top of the loop
    if (!around.more) cursors[key] = position + 1;  // the last pair of the key alone
    a.problem.put(static_cast<int>(pair), key, position, first_blocks);
  }
}

}  // namespace moelora
