#include "align.h"

#include <algorithm>

#include "numeric.h"

namespace moelora {

void moe_lora_align_block_size(const Align& a) {
  const std::vector<int32_t> slots = token_slots(a.token_lora_mapping, a.max_loras, a.enabled);
  const std::vector<int32_t> experts = pair_experts(a.topk_ids, a.num_experts, a.expert_map);
  const int64_t num_pairs = static_cast<int64_t>(experts.size()), top_k = a.topk_ids.cols;
  const auto group_of = [&](int64_t pair) {  // -1: no row
    const int64_t slot = slots[pair / top_k], expert = experts[pair];
    return slot < 0 || expert < 0 ? -1 : slot * a.num_experts + expert;
  };

  std::vector<int32_t> count(a.max_loras * a.num_experts, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t group = group_of(pair);
    if (group >= 0) ++count[group];
  }
  std::fill_n(a.sorted_token_ids, a.max_loras * a.capacity, static_cast<int32_t>(num_pairs));
  const int64_t num_blocks = a.capacity / a.block_size;
  for (int64_t slot = 0; slot < a.max_loras; ++slot) {
    int64_t column = 0;
    int32_t* block_experts = a.expert_ids + slot * num_blocks;
    for (int64_t expert = 0; expert < a.num_experts; ++expert) {
      int32_t& group_count = count[slot * a.num_experts + expert];
      const int64_t padded = round_up(group_count, a.block_size);
      std::fill_n(block_experts + column / a.block_size, padded / a.block_size, static_cast<int32_t>(expert));
      group_count = static_cast<int32_t>(column);  // from here on: the group's next free column
      column += padded;
    }
    std::fill(block_experts + column / a.block_size, block_experts + num_blocks, -1);
    a.num_tokens_post_padded[slot] = static_cast<int32_t>(column);
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t group = group_of(pair);
    if (group >= 0) a.sorted_token_ids[group / a.num_experts * a.capacity + count[group]++] = static_cast<int32_t>(pair);
  }
}

}  // namespace moelora
