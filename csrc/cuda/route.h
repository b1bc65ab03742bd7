// The C entry of route.
#pragma once

#include <cstdint>

// Sizes and sections are those of RoutingSizes in routing.py. Mirrored by kernels/native.py.
struct RouteArgs {
  const void* topk_ids;            // [P]
  const void* token_lora_mapping;  // [T]
  const void* adapter_enabled;     // [>= L], or null
  const void* expert_map;          // [global experts], or null
  const int32_t* lora_ranks;       // [L], or null
  int32_t* tables;
  int32_t num_pairs;  // at least 1
  int32_t top_k;
  int32_t num_experts;  // at least 1
  int32_t num_global_experts;
  int32_t max_loras;
  int32_t rank_tiles;
  int32_t block_m;
  int32_t segment_m;
  int32_t num_expert_blocks;
  int32_t num_segment_blocks;
  int32_t num_tiles;
  int32_t flags;
};

// Launches on `stream` of the current device. Returns 0, a cudaError_t, or -1 where this device or these sizes are not served.
extern "C" __attribute__((visibility("default"))) int moelora_route(const RouteArgs* args, void* stream);
