// What every sort reads: the pairs' ids, and division by sizes that are known when a kernel is launched. Torch-free.
#pragma once

#include <cstdint>

namespace moelora {

constexpr unsigned kFullWarp = 0xffffffffu;

// A contiguous tensor of int32 or int64 ids, read without a branch: two words, which of an int32 are the same one.
struct Ids {
  struct Id {
    int32_t low;
    int32_t high;
  };
  const void* data;
  bool wide;

  __device__ Id load(int64_t i) const {
    const int32_t* const words = static_cast<const int32_t*>(data) + (i << wide);
    return {words[0], words[wide]};
  }
  // The id, or -1 where it is outside [0, limit).
  __device__ int index(Id id, int limit) const {
    return static_cast<uint32_t>(id.low) < static_cast<uint32_t>(limit) && (id.high == 0 || !wide) ? id.low : -1;
  }
};

// Flags as int32 or bool; no data: all are set.
struct Flags {
  const void* data;
  bool wide;

  __device__ int load(int i) const {
    return wide ? static_cast<const int32_t*>(data)[i] : static_cast<const uint8_t*>(data)[i];
  }
};

// Division of 0 <= n < 2^31 by a positive int as a product: m = ceil(2^(31 + s) / d) with 2^(s - 1) < d <= 2^s is exact there.
struct Divisor {
  uint32_t value = 1;
  uint32_t magic = 1u << 31;
  uint32_t shift = 31;

  Divisor() = default;
  explicit Divisor(int divisor) : value(static_cast<uint32_t>(divisor)) {
    while ((1ull << (shift - 31)) < value) ++shift;
    magic = static_cast<uint32_t>(((1ull << shift) + value - 1) / value);
  }
  __device__ int divide(int n) const { return static_cast<int>((static_cast<uint64_t>(n) * magic) >> shift); }
  __device__ int divide_up(int n) const { return n > 0 ? divide(n - 1) + 1 : 0; }
  __device__ int remainder(int n) const { return n - divide(n) * static_cast<int>(value); }
};

// Pair p is choice p % top_k of token p / top_k. Ids outside their range are none, -1.
struct Pairs {
  Ids topk_ids;            // [P]
  Ids token_lora_mapping;  // [T]
  Flags adapter_enabled;   // [>= L]; no data: all are
  Ids expert_map;          // [global experts]; no data: ids are local
  Divisor top_k;
  int num_pairs;
  int num_experts;
  int num_global_experts;  // without a map: the local ones
  int max_loras;

  __device__ int slot(int pair) const {
    int slot[1] = {token_lora_mapping.index(token_lora_mapping.load(top_k.divide(pair)), max_loras)};
    keep_enabled(slot);
    return slot[0];
  }
  __device__ int expert(int pair) const {
    int expert[1] = {topk_ids.index(topk_ids.load(pair), num_global_experts)};
    to_local(expert);
    return expert[0];
  }

  // A warp's next N * 32 pairs, those of a lane 32 apart; none from `last` on. All loads of a kind are in flight together.
  template <int N>
  __device__ void load(int first, int last, int (&experts)[N], int (&slots)[N]) const {
    const int lane = threadIdx.x % 32;
    Ids::Id expert[N], slot[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (first + i * 32 >= last) continue;
      const int pair = min(first + i * 32 + lane, last - 1);
      expert[i] = topk_ids.load(pair);
      slot[i] = token_lora_mapping.load(top_k.divide(pair));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool inside = first + i * 32 + lane < last;
      experts[i] = inside ? topk_ids.index(expert[i], num_global_experts) : -1;
      slots[i] = inside ? token_lora_mapping.index(slot[i], max_loras) : -1;
    }
    to_local(experts);
    keep_enabled(slots);
  }

 private:
  template <int N>
  __device__ void to_local(int (&experts)[N]) const {
    if (expert_map.data == nullptr) return;
    Ids::Id local[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (experts[i] >= 0) local[i] = expert_map.load(experts[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (experts[i] >= 0) experts[i] = expert_map.index(local[i], num_experts);
    }
  }
  template <int N>
  __device__ void keep_enabled(int (&slots)[N]) const {
    if (adapter_enabled.data == nullptr) return;
    int enabled[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (slots[i] >= 0) enabled[i] = adapter_enabled.load(slots[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (slots[i] >= 0 && enabled[i] == 0) slots[i] = -1;
    }
  }
};

}  // namespace moelora
