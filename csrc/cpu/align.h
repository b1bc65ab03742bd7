// moe_lora_align_block_size: the padded layout that SGLang's and vLLM's kernels read.
#pragma once

#include "routing.h"

namespace moelora {

struct Align {
  Ids topk_ids;
  Ids token_lora_mapping;
  int64_t num_experts, block_size, max_loras;
  Enabled enabled;
  const Ids* expert_map;  // nullptr: identity
  int64_t capacity;       // EM, a multiple of block_size

  int32_t* sorted_token_ids;        // [L, EM]
  int32_t* expert_ids;              // [L, EM / block_size]
  int32_t* num_tokens_post_padded;  // [L]
};

// A counting sort, linear in P + L * E and the size of the outputs; every output element is written.
void moe_lora_align_block_size(const Align& align);

}  // namespace moelora
