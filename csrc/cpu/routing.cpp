#include "routing.h"

#include "numeric.h"

namespace moelora {
namespace {

// Stable counting sort of `items` by key(item) in [0, num_keys).
template <class Key>
std::vector<int32_t> sort_by(const std::vector<int32_t>& items, int64_t num_keys, const Key& key) {
  std::vector<int32_t> begin(num_keys + 1, 0), sorted(items.size());
  for (int32_t item : items) ++begin[key(item) + 1];
  for (int64_t k = 0; k < num_keys; ++k) begin[k + 1] += begin[k];
  for (int32_t item : items) sorted[begin[key(item)]++] = item;
  return sorted;
}

}  // namespace

std::vector<int32_t> token_slots(const Ids& token_lora_mapping, int64_t max_loras, const Enabled& enabled) {
  std::vector<int32_t> slots(token_lora_mapping.rows);
  for (int64_t t = 0; t < token_lora_mapping.rows; ++t) {
    const int64_t slot = token_lora_mapping.at(t);
    slots[t] = slot >= 0 && slot < max_loras && enabled.at(slot) ? static_cast<int32_t>(slot) : -1;
  }
  return slots;
}

std::vector<int32_t> pair_experts(const Ids& topk_ids, int64_t num_experts, const Ids* expert_map) {
  std::vector<int32_t> experts(topk_ids.rows * topk_ids.cols);
  for (int64_t t = 0; t < topk_ids.rows; ++t) {
    for (int64_t k = 0; k < topk_ids.cols; ++k) {
      int64_t expert = topk_ids.at(t, k);
      if (expert_map != nullptr) expert = expert >= 0 && expert < expert_map->rows ? expert_map->at(expert) : -1;
      experts[t * topk_ids.cols + k] = expert >= 0 && expert < num_experts ? static_cast<int32_t>(expert) : -1;
    }
  }
  return experts;
}

Routing route(const std::vector<int32_t>& expert_of_pair, const std::vector<int32_t>& slot_of_token, int64_t top_k,
              int64_t num_experts, int64_t max_loras) {
  Routing routing;
  for (size_t pair = 0; pair < expert_of_pair.size(); ++pair) {
    if (expert_of_pair[pair] >= 0) routing.order.push_back(static_cast<int32_t>(pair));
  }
  const auto slot_of = [&](int32_t pair) { return slot_of_token[pair / top_k]; };
  if (max_loras > 0) routing.order = sort_by(routing.order, max_loras + 1, [&](int32_t pair) { return slot_of(pair) + 1; });
  routing.order = sort_by(routing.order, num_experts, [&](int32_t pair) { return expert_of_pair[pair]; });

  for (size_t row = 0; row < routing.order.size(); ++row) {
    const int32_t pair = routing.order[row], expert = expert_of_pair[pair], slot = slot_of(pair);
    std::vector<Segment>& segments = routing.segments;
    if (segments.empty() || segments.back().expert != expert || segments.back().slot != slot) {
      segments.push_back({expert, slot, static_cast<int64_t>(row), 0});
    }
    segments.back().end = static_cast<int64_t>(row) + 1;
  }
  return routing;
}

std::vector<RowBlock> expert_blocks(const Routing& routing, int64_t block_rows) {
  std::vector<RowBlock> blocks;
  const std::vector<Segment>& segments = routing.segments;
  for (size_t first = 0, last; first < segments.size(); first = last) {
    last = first;
    while (last < segments.size() && segments[last].expert == segments[first].expert) ++last;
    const int64_t begin = segments[first].begin, rows = segments[last - 1].end - begin, parts = divide_up(rows, block_rows);
    for (int64_t part = 0; part < parts; ++part) {
      blocks.push_back({segments[first].expert, begin + rows * part / parts, begin + rows * (part + 1) / parts});
    }
  }
  return blocks;
}

}  // namespace moelora
