#include "fused_moe_lora.h"

#include <algorithm>

namespace moelora {
namespace {

constexpr int64_t kColBlock = 128;

// The aligned blocks without their padding; consecutive blocks of one expert become one segment.
Routing read_alignment(const FusedMoeLora& p) {
  Routing routing;
  const int64_t num_blocks = p.expert_ids.cols, num_pairs = p.num_tokens * p.top_k;
  if (num_blocks == 0) return routing;
  const int64_t block_size = p.sorted_token_ids.cols / num_blocks;
  for (int64_t slot = 0; slot < p.expert_ids.rows; ++slot) {
    const int64_t used = std::clamp<int64_t>(p.num_tokens_post_padded.at(slot) / block_size, 0, num_blocks);
    for (int64_t block = 0; block < used; ++block) {
      const int64_t expert = p.expert_ids.at(slot, block), begin = routing.order.size();
      if (expert < 0 || expert >= p.num_experts) continue;
      for (int64_t i = block * block_size; i < (block + 1) * block_size; ++i) {
        const int64_t pair = p.sorted_token_ids.at(slot, i);
        if (pair >= 0 && pair < num_pairs) routing.order.push_back(static_cast<int32_t>(pair));
      }
      const int64_t end = routing.order.size();
      std::vector<Segment>& segments = routing.segments;
      if (!segments.empty() && segments.back().expert == expert && segments.back().slot == slot) {
        segments.back().end = end;
      } else if (end > begin) {
        segments.push_back({static_cast<int32_t>(expert), static_cast<int32_t>(slot), begin, end});
      }
    }
  }
  return routing;
}

}  // namespace

void fused_moe_lora(const FusedMoeLora& p, const Parallel& parallel) {
  const Routing routing = read_alignment(p);
  const std::vector<int64_t> ranks = slot_ranks(p.lora_ranks, p.expert_ids.rows, p.max_rank);
  InputRows x{p.dtype, p.in_features, {}, {}};
  for (int32_t pair : routing.order) {
    const int64_t row = p.num_inputs == p.num_tokens ? pair / p.top_k : pair;
    x.rows.push_back(p.hidden_states + row * p.input_stride * element_size(p.dtype));
  }
  const int64_t num_slices = p.lora_a.size();
  Shrunk z(routing.order.size(), num_slices, p.max_rank);
  const Stage shrink = z.stage(parallel, p.dtype, routing.segments, x, p.lora_a, ranks);

  struct Task {
    const Segment* segment;
    int64_t begin, end;  // rows
    int64_t slice, first_col, num_cols;
  };
  std::vector<Task> tasks;
  for (const Segment& segment : routing.segments) {
    if (ranks[segment.slot] == 0) continue;
    for (int64_t begin = segment.begin; begin < segment.end; begin += kRowBlock) {
      for (int64_t n = 0; n < num_slices * p.width;) {
        const int64_t slice = n / p.width, col = n % p.width, cols = std::min(kColBlock, p.width - col);
        tasks.push_back({&segment, begin, std::min(begin + kRowBlock, segment.end), slice, col, cols});
        n += cols;
      }
    }
  }
  const Simd& kernels = simd();
  const auto expand = [&](int64_t, int64_t index) {
    const Task& task = tasks[index];
    const int64_t rows = task.end - task.begin;
    RowDelta deltas[kRowBlock];
    float delta[kRowBlock * kColBlock];
    const Stacked& lora_b = p.lora_b[task.slice];
    const char* b = lora_b.at(p.dtype, task.segment->slot, task.segment->expert, task.first_col);
    for (int64_t m = 0; m < rows; ++m) {
      deltas[m] = {z.at(task.begin + m, task.slice), b, lora_b.row_stride, ranks[task.segment->slot]};
    }
    kernels.gemm[p.dtype]({nullptr, nullptr, 0, rows, task.num_cols, 0, deltas, delta, kColBlock});
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t token = routing.order[task.begin + m] / p.top_k, choice = routing.order[task.begin + m] % p.top_k;
      const int64_t column = p.offset + task.slice * p.width + task.first_col;
      char* out = p.output + (token * p.token_stride + choice * p.choice_stride + column) * element_size(p.dtype);
      const float* w = p.topk_weights;
      const float weight = w == nullptr ? 1.0f : w[token * p.weight_token_stride + choice * p.weight_choice_stride];
      kernels.add_scaled[p.dtype](out, delta + m * kColBlock, weight, task.num_cols);
    }
  };
  parallel.run({shrink, {static_cast<int64_t>(tasks.size()), expand}});
}

}  // namespace moelora
