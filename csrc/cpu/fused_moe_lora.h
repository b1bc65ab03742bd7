// fused_moe_lora: add the adapters' delta to the output of anybody's base GEMM.
#pragma once

#include "lora.h"

namespace moelora {

struct FusedMoeLora {
  DType dtype;
  char* output;  // [T, K, >= offset + S * N]; strides in elements
  int64_t num_tokens, top_k, token_stride, choice_stride;
  const char* hidden_states;  // [T, in] or [P, in]
  int64_t num_inputs, in_features, input_stride;
  std::vector<Stacked> lora_a, lora_b;  // one per slice
  int64_t num_experts;                  // the smallest expert dimension that is not 1; INT64_MAX: all are shared
  int64_t max_rank, width;              // R, N
  const float* topk_weights;            // nullptr: the delta is not weighted
  int64_t weight_token_stride, weight_choice_stride;
  Ids sorted_token_ids, expert_ids, num_tokens_post_padded;  // [L, EM], [L, blocks], [L]
  const Ids* lora_ranks;
  int64_t offset;
};

void fused_moe_lora(const FusedMoeLora& problem, const Parallel& parallel);

}  // namespace moelora
