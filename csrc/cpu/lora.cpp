#include "lora.h"

namespace moelora {

std::vector<int64_t> slot_ranks(const Ids* lora_ranks, int64_t max_loras, int64_t max_rank) {
  std::vector<int64_t> ranks(max_loras, max_rank);
  if (lora_ranks == nullptr) return ranks;
  for (int64_t slot = 0; slot < max_loras; ++slot) ranks[slot] = std::clamp<int64_t>(lora_ranks->at(slot), 0, max_rank);
  return ranks;
}

Stage Shrunk::stage(const Parallel& parallel, DType dtype, const std::vector<Segment>& segments, const InputRows& x,
                    const std::vector<Stacked>& a, const std::vector<int64_t>& ranks) {
  constexpr int64_t kRankBlock = 64;
  struct Task {
    int32_t expert, slot;
    int64_t begin, end;  // rows
    int64_t first_rank, num_ranks;
  };
  std::vector<Task> tasks;
  int64_t most_rows = 0;
  for (const Segment& segment : segments) {
    const int64_t rank = segment.slot < 0 ? 0 : ranks[segment.slot];
    for (int64_t begin = segment.begin; begin < segment.end; begin += kRowBlock) {
      const int64_t end = std::min(begin + kRowBlock, segment.end);
      most_rows = std::max(most_rows, end - begin);
      for (int64_t r = 0; r < rank; r += kRankBlock) {
        tasks.push_back({segment.expert, segment.slot, begin, end, r, std::min(kRankBlock, rank - r)});
      }
    }
  }
  const int64_t num_tasks = tasks.size(), num_workers = parallel.num_threads;
  const int64_t packed_floats = packed_size(most_rows, x.depth);
  const Buffer buffer = allocate(num_workers * packed_floats);
  return {num_tasks, [=, &x, &a, tasks = std::move(tasks)](int64_t worker, int64_t index) {
    const auto rows_of = [&](int64_t i, size_t slice) -> const char* {
      return i < num_tasks ? a[slice].at(dtype, tasks[i].slot, tasks[i].expert, tasks[i].first_rank) : nullptr;
    };
    const Simd& kernels = simd();
    const Task& task = tasks[index];
    float* packed = buffer.get() + worker * packed_floats;
    x.pack(kernels, task.begin, task.end, packed);
    for (size_t s = 0; s < a.size(); ++s) {
      float* z = z_.data() + task.begin * row_stride_ + s * slice_stride_ + task.first_rank;
      const char* next = s + 1 < a.size() ? rows_of(index, s + 1) : rows_of(index + num_workers, 0);
      x.gemm(kernels, dtype)({packed, rows_of(index, s), a[s].row_stride, task.end - task.begin, task.num_ranks, x.depth,
                              nullptr, z, row_stride_, next});
    }
  }};
}

}  // namespace moelora
