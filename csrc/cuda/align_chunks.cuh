// Align: the pairs of each adapter slot, grouped by expert and padded to whole blocks. Torch-free device code.
//
// A stable counting sort with key = slot * E + expert, linear in pairs and keys, two launches. Pairs are cut into chunks of
// consecutive pairs, one CTA each:
//
//   align_count   keys[p] of each pair, counts[chunk][key]; further CTAs fill the outputs with their sentinels
//   align_place   a pair's position in its group = pairs of that key in earlier chunks (a column sum of counts)
//                                                + pairs of that key before it in its chunk (a cursor per key);
//                 the pair that opens a block writes the block's expert
//
// Chunks share nothing but counts, which is complete before the second launch, so no result depends on the order of CTAs.
// Shared memory does not grow with E, L or T: the tables per key are rows in global memory that one CTA owns.
#pragma once

#include <cstdint>

namespace moelora {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kFillPerThread = 16;
constexpr unsigned kFullWarp = 0xffffffffu;

// A contiguous tensor of int32 or int64 ids. The branch is uniform, and one kernel serves all combinations.
struct Ids {
  const void* data;
  bool wide;

  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Flags as int32 or bool; no data: all are set.
struct Flags {
  const void* data;
  bool wide;

  __device__ bool operator[](int64_t i) const {
    if (data == nullptr) return true;
    return wide ? static_cast<const int32_t*>(data)[i] != 0 : static_cast<const uint8_t*>(data)[i] != 0;
  }
};

struct AlignProblem {
  Ids topk_ids;            // [P]
  Ids token_lora_mapping;  // [T]
  Flags adapter_enabled;   // [>= L]
  Ids expert_map;          // [E]; no data: ids are local
  int num_pairs;
  int top_k;
  int num_experts;
  int max_loras;
  int block_size;
  int num_blocks;   // EM / bs, of one slot
  int num_chunks;   // of pairs
  int chunk_pairs;  // a multiple of kThreads
  int stride;       // of the rows of counts, cursors and first_blocks: at least one more than the keys

  int32_t* keys;          // [P] scratch: slot * E + expert, -1 for a pair that is skipped
  int32_t* counts;        // [chunks, stride] scratch
  int32_t* cursors;       // [chunks, stride] scratch
  int32_t* first_blocks;  // [chunks, stride] scratch

  int32_t* sorted_token_ids;        // [L, EM]
  int32_t* expert_ids;              // [L, EM / bs]
  int32_t* num_tokens_post_padded;  // [L]

  __host__ __device__ int num_keys() const { return max_loras * num_experts; }
  __host__ __device__ int64_t blocks_of_all_slots() const { return static_cast<int64_t>(max_loras) * num_blocks; }
  __device__ int64_t row(int chunk) const { return static_cast<int64_t>(chunk) * stride; }
  __device__ int64_t first_pair(int chunk) const { return static_cast<int64_t>(chunk) * chunk_pairs; }
  __device__ int64_t last_pair(int chunk) const {
    const int64_t end = first_pair(chunk) + chunk_pairs;
    return end < num_pairs ? end : num_pairs;
  }
};

__device__ inline int pair_key(const AlignProblem& a, int64_t pair) {
  const int64_t slot = a.token_lora_mapping[static_cast<int>(pair) / a.top_k];
  if (slot < 0 || slot >= a.max_loras || !a.adapter_enabled[slot]) return -1;
  int64_t expert = a.topk_ids[pair];
  if (expert < 0 || expert >= a.num_experts) return -1;
  if (a.expert_map.data != nullptr) {
    expert = a.expert_map[expert];
    if (expert < 0 || expert >= a.num_experts) return -1;
  }
  return static_cast<int>(slot) * a.num_experts + static_cast<int>(expert);
}

// One CTA per chunk of pairs, then one per kThreads * kFillPerThread rows of the outputs.
__global__ void __launch_bounds__(kThreads) align_count(const AlignProblem a) {
  if (blockIdx.x >= static_cast<unsigned>(a.num_chunks)) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - a.num_chunks) * (kThreads * kFillPerThread) + threadIdx.x;
    const int64_t blocks = a.blocks_of_all_slots();
    for (int i = 0; i < kFillPerThread; ++i) {
      const int64_t at = first + i * kThreads;
      if (at < blocks * a.block_size) a.sorted_token_ids[at] = a.num_pairs;
      if (at < blocks) a.expert_ids[at] = -1;
    }
    return;
  }
  const int chunk = static_cast<int>(blockIdx.x);
  int32_t* const counts = a.counts + a.row(chunk);
  for (int key = threadIdx.x; key < a.num_keys(); key += kThreads) counts[key] = 0;
  __syncthreads();
  for (int64_t pair = a.first_pair(chunk) + threadIdx.x; pair < a.last_pair(chunk); pair += kThreads) {
    const int key = pair_key(a, pair);
    a.keys[pair] = key;
    if (key >= 0) atomicAdd(&counts[key], 1);  // this CTA's own row: a sum, whatever the order
  }
}

// Exclusive prefix sum over the CTA; `total` gets the sum. Every thread calls it.
__device__ inline int block_scan(int value, int* total) {
  __shared__ int warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0, sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_sums[w];
    sum += warp_sums[w];
  }
  __syncthreads();  // warp_sums may be written again
  *total = sum;
  return before + inclusive - value;
}

// Pairs of the same key before this thread's pair among the kThreads pairs at hand, and whether any follow.
struct Around {
  int before;
  bool more;
};

__device__ inline Around same_key_around(int key, const int4* keys_of_tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned peers = __match_any_sync(kFullWarp, key);
  Around around{__popc(peers & ((1u << lane) - 1)), (peers >> lane) > 1u};
  for (int w = 0; w < kWarps; ++w) {
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
__device__ inline void place_groups(const AlignProblem& a, int chunk, int32_t* cursors, int32_t* first_blocks) {
  int blocks_before = 0;
  for (int first = 0; first < a.num_keys(); first += kThreads) {
    const int key = first + static_cast<int>(threadIdx.x);
    int before = 0, total = 0;
    if (key < a.num_keys()) {
#pragma unroll 8
      for (int c = 0; c < a.num_chunks; ++c) {
        const int n = a.counts[a.row(c) + key];
        total += n;
        if (c < chunk) before += n;
      }
    }
    int blocks_here;
    const int block = block_scan(total > 0 ? (total - 1) / a.block_size + 1 : 0, &blocks_here);
    if (key < a.num_keys()) {
      cursors[key] = before;
      first_blocks[key] = blocks_before + block;
    }
    blocks_before += blocks_here;
  }
  if (threadIdx.x == 0) first_blocks[a.num_keys()] = blocks_before;
  __syncthreads();
}

// One CTA per chunk of pairs.
__global__ void __launch_bounds__(kThreads) align_place(const AlignProblem a) {
  __shared__ int4 keys_of_tile[kThreads / 4];
  const int chunk = static_cast<int>(blockIdx.x);
  int32_t* const cursors = a.cursors + a.row(chunk);
  int32_t* const first_blocks = a.first_blocks + a.row(chunk);
  place_groups(a, chunk, cursors, first_blocks);

  if (chunk == 0) {
    for (int slot = threadIdx.x; slot < a.max_loras; slot += kThreads) {
      const int first = slot * a.num_experts;
      a.num_tokens_post_padded[slot] = (first_blocks[first + a.num_experts] - first_blocks[first]) * a.block_size;
    }
  }

  for (int64_t first = a.first_pair(chunk); first < a.last_pair(chunk); first += kThreads) {
    const int64_t pair = first + threadIdx.x;
    const int key = pair < a.last_pair(chunk) ? a.keys[pair] : -1;
    reinterpret_cast<int*>(keys_of_tile)[threadIdx.x] = key;
    __syncthreads();
    const Around around = same_key_around(key, keys_of_tile);
    const int position = key >= 0 ? cursors[key] + around.before : 0;
    __syncthreads();  // all have read their cursor and the tile
    if (key < 0) continue;  // the next barrier is met by every thread at the top of the loop
    if (!around.more) cursors[key] = position + 1;  // the last pair of the key alone
    const int slot = key / a.num_experts;
    const int block_of_slot = first_blocks[key] - first_blocks[slot * a.num_experts] + position / a.block_size;
    const int64_t block = static_cast<int64_t>(slot) * a.num_blocks + block_of_slot;
    const int row = position % a.block_size;
    a.sorted_token_ids[block * a.block_size + row] = static_cast<int32_t>(pair);
    if (row == 0) a.expert_ids[block] = key % a.num_experts;
  }
}

}  // namespace moelora
