// A stable counting sort of pairs by key, in one launch of one cluster. Torch-free device code for sm_90 and later.
//
//   count    each warp ranks its chunk of consecutive pairs, 32 at a time, and counts them in a row of counters of its own
//   combine  a column of counters becomes what the CTA's earlier warps counted; its sum goes to every CTA of the cluster
//   scan     each CTA turns the totals of all keys into its tables: first row of each key, ...
//   place    position of a pair in its group = pairs of its key in earlier CTAs + in earlier warps + before it in its warp
//
// Every counter has one writer, so no result depends on an order of execution.
#pragma once

#include "pairs.cuh"
#include "ptx.cuh"

namespace moelora {

constexpr int kThreads = 512;  // 1024 leave 64 registers, and spill
constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 8;      // the largest cluster that every device offers
constexpr int kMaxCtas = 16;  // what Hopper offers
constexpr int kOneCtaPairs = 512;      // one CTA up to here, without the barriers of a cluster
constexpr int kMaxPairsOfCta = 65535;  // counters are 16 bits wide
constexpr int kMaxChunk = 4096;  // pairs of a warp: where keys leave room for few warps, two launches of many CTAs are faster
constexpr int kRounds = 4;       // a lane keeps this many pairs in registers between count and place
constexpr int kGroup = kRounds * 32;

// How one cluster shares the pairs: warp w of CTA c takes pairs from (c * warps + w) * chunk on.
struct SortPlan {
  int ctas;
  int warps;   // of a CTA that count
  int chunk;   // pairs of a warp, a multiple of 32
  int stride;  // of a row of counters: the keys, rounded up to 16 bytes
  int num_keys;
};

// Cuts a CTA's shared memory into arrays; with no memory it adds up their size, on the host.
struct Carver {
  char* memory;
  size_t bytes;

  template <typename T>
  __host__ __device__ T* take(size_t count) {
    T* array = reinterpret_cast<T*>(memory + bytes);
    bytes += (count * sizeof(T) + 15) / 16 * 16;
    return array;
  }
};

struct SortShared {
  uint16_t* counters;  // [warps, stride]
  uint16_t* totals;    // [ctas, stride]: pairs of each key in each CTA
  int* scan;           // [2, kWarps, 3]

  __host__ __device__ SortShared(Carver& carver, const SortPlan& plan)
      : counters(carver.take<uint16_t>(static_cast<size_t>(plan.warps) * plan.stride)),
        totals(carver.take<uint16_t>(static_cast<size_t>(plan.ctas) * plan.stride)),
        scan(carver.take<int>(2 * kWarps * 3)) {}
};

// The pairs of a lane: their keys, -1 for no pair, and their positions among what their warp has counted.
struct Ranked {
  int keys[kRounds];
  int positions[kRounds];
};

// A warp's share of the sort. A problem has `pairs`, `plan` and key(expert, slot), -1 for a pair that is left out.
template <typename Problem>
struct PairSorter {
  const Problem& problem;
  const SortShared& shared;
  const SortPlan& plan = problem.plan;
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;
  int first = (static_cast<int>(blockIdx.x) * plan.warps + warp) * plan.chunk;
  int last = warp < plan.warps ? min(first + plan.chunk, problem.pairs.num_pairs) : first;
  uint16_t* counters = shared.counters + static_cast<size_t>(warp) * plan.stride;

  // Clear this warp's counters. Touches no global memory: it may run while the kernel before this one ends.
  __device__ void clear() const {
    if (warp >= plan.warps) return;
    uint4* const row = reinterpret_cast<uint4*>(counters);
    for (int i = lane; i < plan.stride / 8; i += 32) row[i] = uint4{0, 0, 0, 0};
    __syncwarp();
  }

  __device__ void load(int at, Ranked& ranked) const {
    int experts[kRounds], slots[kRounds];
    problem.pairs.load(at, last, experts, slots);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) ranked.keys[i] = problem.key(experts[i], slots[i]);
  }

  // Positions of the pairs at hand, and this warp's counters past them. The barriers keep a counter's reads before its one
  // write, by the key's last lane, and that before the next reads.
  __device__ void rank(int at, Ranked& ranked) const {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (at + i * 32 >= last) break;
      const int key = ranked.keys[i];
      const unsigned peers = __match_any_sync(kFullWarp, key);
      const int position = (key >= 0 ? counters[key] : 0) + __popc(peers & ((1u << lane) - 1));
      ranked.positions[i] = position;
      __syncwarp();
      if (key >= 0 && (peers >> lane) == 1u) counters[key] = static_cast<uint16_t>(position + 1);
      __syncwarp();
    }
  }

  // `meanwhile` runs while the first loads are in flight.
  template <typename Meanwhile>
  __device__ void count(Ranked& ranked, const Meanwhile& meanwhile) const {
    if (first < last) load(first, ranked);
    meanwhile();
    for (int at = first; at < last; at += kGroup) {
      if (at > first) load(at, ranked);
      rank(at, ranked);
    }
  }

  // Calls put(pair, key, position among the CTA's pairs of the key); after `combine`.
  template <typename Put>
  __device__ void place(Ranked& ranked, const Put& put) const {
    const bool kept = plan.chunk <= kGroup;
    for (int at = first; at < last; at += kGroup) {
      if (!kept) {
        load(at, ranked);
        rank(at, ranked);  // the counters now begin with what earlier warps counted
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int key = ranked.keys[i];
        if (key >= 0) put(at + i * 32 + lane, key, ranked.positions[i] + (kept ? counters[key] : 0));
      }
    }
  }
};

// Counters of a column: from each warp's own count to the sum over earlier warps. The totals reach every CTA; a barrier of all.
// Two keys share a word: their sums stay below 2^16 each.
__device__ inline void combine(const SortPlan& plan, const SortShared& shared) {
  const int words = plan.stride / 2, rank = static_cast<int>(blockIdx.x);
  __syncthreads();
  if (plan.ctas > 1) cluster_wait();  // of the arrival at the kernel's begin: all CTAs have started
  for (int word = threadIdx.x; word < words; word += kThreads) {
    uint32_t* const column = reinterpret_cast<uint32_t*>(shared.counters) + word;
    uint32_t sum = 0;
    for (int begin = 0; begin < plan.warps; begin += 8) {
      uint32_t counts[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) counts[i] = begin + i < plan.warps ? column[(begin + i) * words] : 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (begin + i < plan.warps) column[(begin + i) * words] = sum;
        sum += counts[i];
      }
    }
    uint32_t* const total = reinterpret_cast<uint32_t*>(shared.totals) + rank * words + word;
    for (int cta = 0; cta < plan.ctas; ++cta) *in_cta(total, cta) = sum;
  }
  if (plan.ctas > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// Pairs of a key in the CTAs before this one, and in all.
struct Total {
  int before;
  int all;
};

__device__ inline Total total_of(const SortPlan& plan, const SortShared& shared, int key) {
  Total total{0, 0};
  const auto add = [&](int first) {
#pragma unroll
    for (int cta = first; cta < first + kCtas; ++cta) {  // all loads in flight together
      const int count = cta < plan.ctas ? shared.totals[cta * plan.stride + key] : 0;
      if (cta < static_cast<int>(blockIdx.x)) total.before += count;
      total.all += count;
    }
  };
  add(0);
  if (plan.ctas > kCtas) add(kCtas);
  return total;
}

// Exclusive prefix sums over the CTA of three values a thread; `total` gets the sums. One barrier: `sums` is of one scan only.
__device__ inline int3 block_scan(int3 value, int3* total, int* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto warp_scan = [lane](int3 v) {
    for (int offset = 1; offset < 32; offset *= 2) {
      const int3 below{__shfl_up_sync(kFullWarp, v.x, offset), __shfl_up_sync(kFullWarp, v.y, offset),
                       __shfl_up_sync(kFullWarp, v.z, offset)};
      if (lane >= offset) v = int3{v.x + below.x, v.y + below.y, v.z + below.z};
    }
    return v;
  };
  const int3 inside = warp_scan(value);
  if (lane == 31) sums[warp * 3] = inside.x, sums[warp * 3 + 1] = inside.y, sums[warp * 3 + 2] = inside.z;
  __syncthreads();
  int3 of_warp{0, 0, 0};
  if (lane < kWarps) of_warp = int3{sums[lane * 3], sums[lane * 3 + 1], sums[lane * 3 + 2]};
  const int3 warps = warp_scan(of_warp);
  const auto at = [](int3 v, int source) {
    return int3{__shfl_sync(kFullWarp, v.x, source), __shfl_sync(kFullWarp, v.y, source), __shfl_sync(kFullWarp, v.z, source)};
  };
  *total = at(warps, 31);
  const int3 before = at(int3{warps.x - of_warp.x, warps.y - of_warp.y, warps.z - of_warp.z}, warp);
  return int3{before.x + inside.x - value.x, before.y + inside.y - value.y, before.z + inside.z - value.z};
}

}  // namespace moelora
