#include "lora.h"

#include <algorithm>

namespace moelora {

std::vector<int64_t> slot_ranks(const Ids* lora_ranks, int64_t max_loras, int64_t max_rank) {
  std::vector<int64_t> ranks(max_loras, max_rank);
  if (lora_ranks == nullptr) return ranks;
  for (int64_t slot = 0; slot < max_loras; ++slot) ranks[slot] = std::clamp<int64_t>(lora_ranks->at(slot), 0, max_rank);
  return ranks;
}

void Shrunk::compute(const Parallel& parallel, DType dtype, const std::vector<Segment>& segments, const InputRows& x,
                     const std::vector<Stacked>& a, const std::vector<int64_t>& ranks) {
  constexpr int64_t kRankBlock = 64;
  struct Task {
    const Segment* segment;
    int64_t begin, end;  // rows
    int64_t first_rank, num_ranks;
  };
  std::vector<Task> tasks;
  for (const Segment& segment : segments) {
    const int64_t rank = segment.slot < 0 ? 0 : ranks[segment.slot];
    for (int64_t begin = segment.begin; begin < segment.end; begin += kRowBlock) {
      for (int64_t r = 0; r < rank; r += kRankBlock) {
        tasks.push_back({&segment, begin, std::min(begin + kRowBlock, segment.end), r, std::min(kRankBlock, rank - r)});
      }
    }
  }
  const Simd& kernels = simd();
  int64_t most_rows = 0;
  for (const Task& task : tasks) most_rows = std::max(most_rows, task.end - task.begin);
  const int64_t scratch_size = packed_size(most_rows, x.depth);
  std::vector<float> scratch(std::min<int64_t>(parallel.num_threads, tasks.size()) * scratch_size);
  parallel.for_each(tasks.size(), [&](int64_t worker, int64_t index) {
    const Task& task = tasks[index];
    float* packed = scratch.data() + worker * scratch_size;
    x.pack(kernels, task.begin, task.end, packed);
    for (size_t s = 0; s < a.size(); ++s) {
      const char* rows = a[s].at(dtype, task.segment->slot, task.segment->expert, task.first_rank);
      float* z = z_.data() + task.begin * row_stride_ + s * slice_stride_ + task.first_rank;
      kernels.gemm[dtype]({packed, rows, a[s].row_stride, task.end - task.begin, task.num_ranks, x.depth, nullptr, z, row_stride_});
    }
  });
}

}  // namespace moelora
