// fused_experts_lora: the whole expert layer with each token's adapter inside.
#pragma once

#include <optional>

#include "lora.h"

namespace moelora {

struct Matrix {  // [rows, cols]; stride in elements
  const char* data;
  int64_t stride;
};

struct ExpertWeight {  // [E, out, in], bias [E, out]; strides in elements
  const char* data;
  int64_t expert_stride, row_stride;
  const char* bias;  // nullptr: none
  int64_t bias_stride;
};

struct LoraPair {  // the adapters of one projection
  std::vector<Stacked> a;  // one per slice
  Stacked b;
  std::vector<int64_t> ranks;  // per slot
  int64_t max_rank;
};

struct FusedExpertsLora {
  DType dtype;
  int64_t num_tokens, top_k, num_experts, hidden_size, intermediate_size;
  Matrix hidden_states;
  char* output;  // [T, H] contiguous
  ExpertWeight w13, w2;
  const float* topk_weights;
  int64_t weight_token_stride, weight_choice_stride;
  Ids topk_ids, token_lora_mapping;
  const Ids* expert_map;
  Enabled enabled;
  int64_t max_loras;
  std::optional<LoraPair> lora13, lora2;
  ActivationSpec activation;
  bool interleaved, apply_router_weight_on_input;
  float routed_scaling_factor;
};

void fused_experts_lora(const FusedExpertsLora& problem, const Parallel& parallel);

}  // namespace moelora
