// Ids as they come in, and the one compact sort of the pairs by (expert, slot).
#pragma once

#include <cstdint>
#include <vector>

namespace moelora {

// An integer tensor of one or two dimensions, any strides.
struct Ids {
  const void* data;
  bool is_int64;
  int64_t rows, cols;
  int64_t row_stride, col_stride;

  int64_t at(int64_t row, int64_t col = 0) const {
    const int64_t index = row * row_stride + col * col_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[index] : static_cast<const int32_t*>(data)[index];
  }
};

// Per-slot switches, int32 or bool; without data every slot is enabled.
struct Enabled {
  const void* data;
  bool is_bool;
  int64_t stride;

  bool at(int64_t slot) const {
    if (data == nullptr) return true;
    if (is_bool) return static_cast<const uint8_t*>(data)[slot * stride] != 0;
    return static_cast<const int32_t*>(data)[slot * stride] != 0;
  }
};

// Slot of each token, [T]; -1 for none, out of range or disabled.
std::vector<int32_t> token_slots(const Ids& token_lora_mapping, int64_t max_loras, const Enabled& enabled);

// Expert of each pair, [P]; -1 for out of range or, through `expert_map` (nullptr: identity), not here.
std::vector<int32_t> pair_experts(const Ids& topk_ids, int64_t num_experts, const Ids* expert_map);

// A run of rows with one expert and one slot (-1: no adapter).
struct Segment {
  int32_t expert, slot;
  int64_t begin, end;
};

// A block of at most `block_rows` rows with one expert.
struct RowBlock {
  int32_t expert;
  int64_t begin, end;
};

// Rows are positions in `order`: pairs sorted by (expert, slot), ascending inside; pairs without an expert have no row.
struct Routing {
  std::vector<int32_t> order;     // pair of each row
  std::vector<Segment> segments;  // all rows, in order
};

// Linear in P + E + L.
Routing route(const std::vector<int32_t>& expert_of_pair, const std::vector<int32_t>& slot_of_token, int64_t top_k,
              int64_t num_experts, int64_t max_loras);

// Rows of each expert cut into blocks of nearly equal size.
std::vector<RowBlock> expert_blocks(const Routing& routing, int64_t block_rows);

}  // namespace moelora
