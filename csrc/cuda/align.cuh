// Align: the pairs of each adapter slot, grouped by expert and padded to whole blocks, in one launch. Torch-free device code.
//
// The sort of sort.cuh with key = slot * E + expert. The outputs are filled with their sentinels while the first ids are on
// their way; the barrier of the sort stands between that and the pairs, which are written over it. The pair that opens a block
// writes the block's expert.
#pragma once

#include "sort.cuh"

namespace moelora {

struct AlignProblem {
  Pairs pairs;
  Divisor num_experts;
  Divisor block_size;
  int num_blocks;                   // EM / bs, of one slot
  int32_t* sorted_token_ids;        // [L, EM]
  int32_t* expert_ids;              // [L, EM / bs]
  int32_t* num_tokens_post_padded;  // [L]
  SortPlan plan;

  __host__ __device__ int64_t blocks_of_all_slots() const { return static_cast<int64_t>(pairs.max_loras) * num_blocks; }
  __host__ __device__ int64_t rows_of_all_slots() const { return blocks_of_all_slots() * block_size.value; }

  __device__ int key(int expert, int slot) const {
    return expert < 0 || slot < 0 ? -1 : slot * static_cast<int>(num_experts.value) + expert;
  }
  // Writes the pair at a position of its group; first_blocks[key] counts over all slots.
  template <typename Blocks>
  __device__ void put(int pair, int key, int position, const Blocks* first_blocks) const {
    const int slot = num_experts.divide(key), first_key = slot * static_cast<int>(num_experts.value);
    const int block_of_group = block_size.divide(position);
    const int row = position - block_of_group * static_cast<int>(block_size.value);
    const int block_of_slot = static_cast<int>(first_blocks[key]) - static_cast<int>(first_blocks[first_key]) + block_of_group;
    const int64_t block = static_cast<int64_t>(slot) * num_blocks + block_of_slot;
    sorted_token_ids[block * block_size.value + row] = pair;
    if (row == 0) expert_ids[block] = key - first_key;
  }
  // Writes the padded length of a slot.
  template <typename Blocks>
  __device__ void put_length(int slot, const Blocks* first_blocks) const {
    const int experts = static_cast<int>(num_experts.value);
    const int blocks = static_cast<int>(first_blocks[(slot + 1) * experts]) - static_cast<int>(first_blocks[slot * experts]);
    num_tokens_post_padded[slot] = blocks * static_cast<int>(block_size.value);
  }
};

// Index: uint16_t where pairs stay below 2^16, so that more keys find room.
template <typename Index>
struct AlignShared : SortShared {
  Index* first_blocks;  // [keys + 1]
  Index* before;        // [keys]: pairs of the key in earlier CTAs

  __host__ __device__ AlignShared(Carver& carver, const SortPlan& plan)
      : SortShared(carver, plan),
        first_blocks(carver.take<Index>(plan.num_keys + 1)),
        before(plan.ctas > 1 ? carver.take<Index>(plan.num_keys) : nullptr) {}
};

// This CTA's share of setting `count` values, 16 bytes at a time: `values` comes from an allocator, so it is aligned.
__device__ inline void fill(int32_t* values, int64_t count, int32_t value, int ctas) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, threads = ctas * kThreads;
  const int64_t wide = count / 4;
  for (int64_t i = thread; i < wide; i += threads) reinterpret_cast<int4*>(values)[i] = int4{value, value, value, value};
  for (int64_t i = wide * 4 + thread; i < count; i += threads) values[i] = value;
}

template <typename Index>
__device__ void scan_blocks(const AlignProblem& a, const AlignShared<Index>& shared) {
  const int num_keys = a.plan.num_keys, per_thread = (num_keys - 1) / kThreads + 1;
  const int first = min(static_cast<int>(threadIdx.x) * per_thread, num_keys), last = min(first + per_thread, num_keys);
  int blocks = 0;
  for (int key = first; key < last; ++key) {
    const Total total = total_of(a.plan, shared, key);
    if (a.plan.ctas > 1) shared.before[key] = static_cast<Index>(total.before);
    const int blocks_of_key = a.block_size.divide_up(total.all);
    shared.first_blocks[key] = static_cast<Index>(blocks_of_key);  // until the prefix is known
    blocks += blocks_of_key;
  }
  int3 all;
  int block = block_scan(int3{blocks, 0, 0}, &all, shared.scan).x;
  for (int key = first; key < last; ++key) {
    const int blocks_of_key = shared.first_blocks[key];
    shared.first_blocks[key] = static_cast<Index>(block);
    block += blocks_of_key;
  }
  if (threadIdx.x == 0) shared.first_blocks[num_keys] = static_cast<Index>(all.x);
  __syncthreads();
}

// One cluster of plan.ctas CTAs.
template <typename Index>
__global__ void __launch_bounds__(kThreads) align_cluster(const __grid_constant__ AlignProblem a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  Carver carver{shared_memory(), 0};
  const AlignShared<Index> shared(carver, a.plan);
  const PairSorter<AlignProblem> sorter{a, shared};
  sorter.clear();
  if (a.plan.ctas > 1) cluster_arrive();
  wait_for_previous_kernel();
  let_next_kernel_start();

  Ranked ranked;
  sorter.count(ranked, [&] {
    fill(a.sorted_token_ids, a.rows_of_all_slots(), a.pairs.num_pairs, a.plan.ctas);
    fill(a.expert_ids, a.blocks_of_all_slots(), -1, a.plan.ctas);
  });
  combine(a.plan, shared);
  scan_blocks(a, shared);
  sorter.place(ranked, [&](int pair, int key, int position) {
    a.put(pair, key, (a.plan.ctas > 1 ? shared.before[key] : 0) + position, shared.first_blocks);
  });
  for (int slot = blockIdx.x * kThreads + threadIdx.x; slot < a.pairs.max_loras; slot += a.plan.ctas * kThreads) {
    a.put_length(slot, shared.first_blocks);
  }
#endif
}

}  // namespace moelora
